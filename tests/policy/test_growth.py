"""What the policy does grows with the cluster and no faster; what a look has computed the next one
does not compute again."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from support.counting import calls, growth, operations
from support.policy.story import MODEL, job

from elastic.observe.accounting.accounts import Books
from elastic.planner.choice import Choice
from elastic.policy import transition_cost
from elastic.policy.copies import recovery, replica_placement
from elastic.policy.decide import decide
from elastic.policy.faults import corruption
from elastic.policy.pools import drain
from elastic.policy.speed import share_rebalance, speeds
from elastic.policy.state.fold import State, fold
from elastic.policy.state.state import Window
from elastic.reshard.transfer_forecast import Room
from elastic.types import (
    HardwareProfile,
    Holding,
    Job,
    Layout,
    Node,
    Plan,
    Pool,
    Quiesced,
    Resume,
    StepDone,
    WorkerId,
)

GPUS = 8
POOL = Pool("spot", "CPU", GPUS, "spot", 1.0, 0, 1000, host_memory_bytes=1 << 40)
WORK = 1.3  # of `growth`, at most
Work = Callable[[], object]


def plan(n_nodes: int) -> Plan:
    ranks = tuple(WorkerId(f"n{i}", k) for i in range(n_nodes) for k in range(GPUS))
    n = len(ranks)
    return Plan(
        1, Layout(dp_shard=n), ranks, (1,) * n, (MODEL.n_blocks,), predicted_step_time_s=1.0
    )


def running(n_nodes: int) -> State:
    """With a notice for the first node."""
    made = plan(n_nodes)
    nodes = {name: Node(name, "spot", GPUS, "prepared") for name in made.nodes}
    nodes["n0"] = replace(nodes["n0"], status="draining", deadline_s=120.0)
    windows = {worker: (Window(0.0, 5.0, 1.0, 10),) for worker in made.ranks}
    settings = Job.from_plain(job(steps=10_000, global_batch=len(made.ranks), max_nodes=n_nodes))
    return State(
        phase="running", run="story", job=settings, pools=(POOL,), model=MODEL, nodes=nodes,
        prepared=frozenset(nodes), generation=1, plan=made, plans={1: made}, step=5,
        step_time_s=1.0, speeds=windows, timed_at_s=5.0,
    )  # fmt: skip


def choice(n_nodes: int) -> Choice:
    made = plan(n_nodes)
    return Choice(made.layout, made.ranks, made.samples, made.layers, 1, 0, 0)


# --------------------------------------------------------------------------------------- each piece


def a_lead(n: int) -> Work:
    state = running(n)
    return lambda: drain.lead_of(state)


def who_is_blamed(n: int) -> Work:
    state = running(n)
    return lambda: corruption._blamed(state, plan(n), [WorkerId("n1", 0)])


def who_is_slow(n: int) -> Work:
    state = running(n)
    return lambda: (
        share_rebalance.slow_ones(state, plan(n), 10.0),
        speeds.rates(state, state.available),
    )


def who_keeps_copies(n: int) -> Work:
    state, chosen = running(n), choice(n)
    nodes = list(state.nodes.values())
    return lambda: replica_placement.copies(state, chosen, nodes)


def the_bill(n: int) -> Work:
    made, state = plan(n), running(n)
    entering = replace(made, resume=Resume("live", holdings=made.live))
    here = Books(prepared=set(made.nodes), at_s=0.0)

    def booked() -> None:
        here.state = replace(state, plan=replace(made))
        here.advance(1.0)
        here.state = replace(state, plan=None, target=entering)
        here.advance(2.0)

    return booked


def answers_at_a_boundary(n: int) -> Work:
    return folded(replace(running(n), quiescing=(1, 0.0)), n)


def folded(state: State, n: int) -> Work:
    told = [
        Quiesced(w, 1, 5, (Holding(w, 1, rank, 5, "live"),), (1.0,))
        for rank, w in enumerate(plan(n).ranks)
    ]

    def fold_all() -> None:
        after = state
        for event in told:
            after = fold(after, event, 1.0)
        assert len(after.holdings) == len(told)

    return fold_all


PIECES = [a_lead, who_is_blamed, who_is_slow, the_bill]


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.__name__)
def test_the_work_grows_with_the_cluster(piece: Callable[[int], Work]) -> None:
    piece(4)()  # what is made at the first use is no work of this size
    assert growth(piece, 8, 32) < WORK


@pytest.mark.parametrize(
    "piece", [who_keeps_copies, answers_at_a_boundary], ids=lambda piece: piece.__name__
)
def test_so_do_the_calls(piece: Callable[[int], Work]) -> None:
    assert growth(piece, 8, 32, calls) < WORK


# -------------------------------------------------------------------------------------------- looks


def test_a_look_with_a_notice_pending_grows_with_the_cluster_and_forecasts_the_move_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between `near` and the moment of the transition each step is looked at, and the move is the
    same."""
    forecasts: list[object] = []
    forecast = transition_cost.forecast
    monkeypatch.setattr(
        transition_cost,
        "forecast",
        lambda *asked, **more: forecasts.append(asked) or forecast(*asked, **more),
    )
    looked = {}
    for n in (4, 16):
        forecasts.clear()
        state = running(n)
        near_s = 120.0 - 2 * drain.lead_of(state).seconds
        for k in range(4):
            now_s = near_s + 0.1 * k
            state = fold(state, StepDone(1, state.step + 1, 1.0, 10, 0.1), now_s)
            assert k == 3 or not decide(state, now_s).actions
        looked[n] = operations(partial(decide, state, now_s))
        assert len(forecasts) == 1
        moved = decide(state, 118.0)
        assert any(hasattr(action, "plan") for action in moved.actions) and len(forecasts) == 1, (
            "nor does the order itself"
        )
    assert looked[16] / looked[4] / 4 < WORK


def test_another_move_is_forecast_anew() -> None:
    state = running(8)
    left = replace(choice(7), layout=Layout(dp_shard=7 * GPUS))
    first = transition_cost.predicted(state, left, recovery.live(state))
    assert (
        first is not None
        and transition_cost.predicted(
            replace(state, step=9), left, recovery.live(replace(state, step=9))
        )
        is first
    )
    slower = transition_cost.predicted(replace(state, move_pace=3.0), left, recovery.live(state))
    assert slower is not None and slower.seconds > first.seconds
    fewer = transition_cost.predicted(
        state, replace(choice(6), layout=Layout(dp_shard=6 * GPUS)), recovery.live(state)
    )
    assert fewer is not None and fewer.links != first.links


# ------------------------------------------------------------------------- what follows from a plan


def test_what_follows_from_a_plan_is_made_once_and_travels_with_none_of_its_copies() -> None:
    made = plan(2)
    bare, text = pickle.dumps(made), repr(made)
    assert made.nodes == ("n0", "n1") and made.workers_per_node == {"n0": GPUS, "n1": GPUS}
    assert (
        made.workers == frozenset(made.ranks)
        and not made.senders
        and len(made.live) == len(made.ranks)
    )
    assert made.nodes is made.nodes and made.workers is made.workers
    assert (
        pickle.dumps(made) == bare and repr(made) == text and pickle.loads(bare) == made == plan(2)
    )
    assert hash(made) == hash(plan(2))
    other = replace(made, ranks=made.ranks[:GPUS], resume=Resume("live", holdings=made.live))
    assert (
        other.nodes == ("n0",)
        and other.senders == set(made.ranks[GPUS:])
        and other.nodes_taking_part == {"n0", "n1"}
    )


def test_members_are_all_that_run_or_enter_or_send() -> None:
    old = plan(2)
    entering = replace(plan(1), generation=2, resume=Resume("live", holdings=old.live))
    outside = WorkerId("n9", 0)
    for state in (
        State(),
        State(plan=old),
        State(target=entering),
        State(plan=plan(1), target=entering),
    ):
        plans = [one for one in (state.plan, state.target) if one]
        wanted = {w for one in plans for w in one.ranks} | {
            h.worker for one in plans[-1:] for h in one.resume.holdings
        }
        assert state.members == wanted and state.member_nodes == {
            worker.node_id for worker in wanted
        }
        assert {w for w in (*old.ranks, outside) if state.takes_part(w)} == wanted


def test_a_forecast_knows_what_steps_need_and_how_host_memory_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Activations of the first step too; a tenth of the rate where a node of the move has no pinned
    memory."""
    rooms: list[Room] = []
    forecast = transition_cost.forecast
    monkeypatch.setattr(
        transition_cost,
        "forecast",
        lambda *asked, **more: rooms.append(more["room"]) or forecast(*asked, **more),
    )
    state = running(2)
    pool = replace(POOL, accelerator_type="H100", memory_bytes_per_gpu=80 << 30)
    state = replace(
        state, pools=(pool,), hardware=(HardwareProfile("H100", host_bytes_per_s=5e10),)
    )
    asked = replace(choice(1), layout=Layout(dp_shard=GPUS), memory_bytes=5, activation_bytes=7)
    for unpinned in ({}, {"n0": "no"}):
        transition_cost.predicted(replace(state, unpinned=unpinned), asked, recovery.live(state))
    assert rooms == [Room(80 << 30, 12, "cuda", 5e10), Room(80 << 30, 12, "cuda", 5e9)]
