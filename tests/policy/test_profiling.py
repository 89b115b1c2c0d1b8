"""Profiles of a live run: when the order goes out, how they end, and that traced steps decide
nothing."""

from __future__ import annotations

from typing import Any

import pytest
from support.policy.story import Story, orders

from elastic.ledger.journal import built, plain
from elastic.policy.profiling import KEPT, RANKS_MOST, STALE_S, ranks_of
from elastic.policy.state.state import State
from elastic.types import (
    DriverStarted,
    Layout,
    NodeLost,
    Plan,
    ProfileAsked,
    RankProfiled,
    StartProfile,
    StepDone,
    StopAsked,
    WorkerId,
)
from elastic.types.replacing import replace


def story(steps: int = 10, **changes: Any) -> Story:
    made = Story(steps=1000, peer_every=0, durable_every=500, **changes)
    made.running("a", "b", steps=steps)
    return made


def started(told: Story, *, profile_id: str = "p", ranks: str = "all") -> StartProfile:
    (order,) = orders(told.tick(ProfileAsked(profile_id, 3, ranks)), StartProfile)
    assert isinstance(order, StartProfile)
    return order


def written(order: StartProfile, *ranks: int, error: str = "") -> tuple[RankProfiled, ...]:
    return tuple(
        RankProfiled(order.generation, order.profile_id, rank, order.from_step, 3, error=error)
        for rank in ranks or order.ranks
    )


def test_the_order_names_ranks_and_steps_that_are_still_to_come() -> None:
    told = story()
    order = started(told)
    assert (order.generation, order.ranks, order.steps) == (1, (0, 1), 3)
    # half a second of steps of 0.1 s, and two more
    assert order.from_step == 10 + 5 + 2
    assert "profile p: steps 18 to 20 are traced on ranks 0, 1" in told.decisions[-1].reason
    told.tick(*written(order, 0))
    assert told.state.profiling is not None, "one of two ranks has not reported"
    told.tick(*written(order, 1))
    assert (told.state.profiling, told.state.profiles) == (None, {"p": ""})


def test_it_waits_until_a_generation_has_made_its_first_steps() -> None:
    told = Story(steps=1000)
    told.tick(ProfileAsked("p", 3))
    told.running("a", "b", steps=1)
    assert not any(orders(decision, StartProfile) for decision in told.decisions)
    told.steps(1)
    assert any(orders(decision, StartProfile) for decision in told.decisions)


def test_each_id_counts_once() -> None:
    told = story()
    order = started(told)
    assert not orders(told.tick(ProfileAsked("p", 3, "all")), StartProfile)
    told.tick(*written(order))
    assert not orders(told.tick(ProfileAsked("p", 3, "all")), StartProfile)
    assert told.state.profiles == {"p": ""}


def test_a_second_one_is_refused_while_the_first_is_under_way() -> None:
    told = story()
    order = started(told)
    assert not orders(told.tick(ProfileAsked("q", 3, "0")), StartProfile)
    assert told.state.profiles["q"] == "profile p is under way; ask again when it has ended"
    told.tick(*written(order))
    assert started(told, profile_id="r")


def test_one_whose_ranks_never_report_makes_room_for_another() -> None:
    told = story()
    started(told)
    told.now_s += STALE_S
    assert started(told, profile_id="q").profile_id == "q"
    assert "have not reported within 600 s" in told.state.profiles["p"]


def test_what_a_rank_could_not_do_is_how_it_ended() -> None:
    told = story()
    told.tick(*written(started(told), error="torch.profiler does not start: no"))
    assert told.state.profiles == {"p": "rank 0: torch.profiler does not start: no"}


def test_a_loss_ends_it_and_says_so() -> None:
    told = story()
    order = started(told)
    told.tick(NodeLost("b", "gone"))
    assert told.state.profiling is None
    assert "generation 1 is aborted: node b is gone" in told.state.profiles["p"]
    before = told.state.profiles
    told.tick(*written(order))
    assert told.state.profiles == before, "what comes late changes nothing"


def test_a_growth_ends_it_and_one_that_has_not_begun_waits_for_it() -> None:
    told = story()
    started(told)
    told.nodes("c")
    told.tick(after_s=20)
    assert told.state.target is not None and told.state.target.generation == 2
    assert "generation 2 follows" in told.state.profiles["p"]
    told.tick(ProfileAsked("q", 3, "all"))
    assert told.state.profiling is not None and told.state.profiling.order is None
    told.entered()
    told.steps(2)
    assert told.state.profiling.order is not None
    assert told.state.profiling.order.ranks == (0, 1, 2)


def test_a_stop_ends_it() -> None:
    told = story()
    started(told)
    told.tick(StopAsked("enough"))
    told.tick(after_s=1e6)
    assert told.state.phase == "stopped"
    assert told.state.profiles["p"].startswith("the run has ended: enough")


def test_a_driver_that_attaches_gives_the_order_again_and_a_new_one_does_not() -> None:
    told = story()
    order = started(told)
    again = replace(told.start, epoch=2, attached=True)
    told.tick(again)
    told.steps(1)
    assert [o for d in told.decisions[-2:] for o in orders(d, StartProfile)] == [order], "once"
    assert "the driver has restarted: profile p is ordered again" in told.decisions[-1].reason
    told.tick(*written(order, 0))
    assert told.state.profiling is not None and told.state.profiling.written == {0}
    told.tick(DriverStarted("story", 3, again.job, again.pools, again.model))
    assert told.state.profiling is None
    assert "the driver has ended" in told.state.profiles["p"]


def test_traced_steps_decide_nothing() -> None:
    told = story()
    before = told.state
    order = started(told)
    told.steps(order.from_step - told.state.step)
    told.steps(4, step_time_s=9.0)
    told.tick(*written(order))
    told.steps(1, step_time_s=9.0)
    for name in ("step_time_s", "worker_step_s"):
        assert getattr(told.state, name) == pytest.approx(getattr(before, name)), name
    assert max(told.state.measured[-1].seconds) == pytest.approx(0.1)
    told.steps(1, step_time_s=9.0)
    assert told.state.step_time_s > 1.0, "the steps behind it count again"
    assert told.state.step == order.from_step + 6, "and all of them were made"


def test_too_few_steps_or_ranks_end_it_with_a_line() -> None:
    told = story()
    told.tick(ProfileAsked("p", 3, "0,7"))
    assert told.state.profiles == {"p": "there is no rank 7: they are 0 to 1"}
    late = Story(steps=12, peer_every=0, durable_every=500)
    late.running("a", "b", steps=10)
    late.tick(ProfileAsked("p", 3, "all"))
    assert "only 0 steps are left to be traced, not 3" in late.state.profiles["p"]


def test_which_ranks() -> None:
    workers = tuple(WorkerId(node, k) for node in ("a", "b") for k in (0, 1))
    plan = Plan(1, Layout(dp_shard=4), workers, (1,) * 4, ())
    assert ranks_of("all", plan) == ((0, 1, 2, 3), "")
    assert ranks_of("node", plan) == ((0, 2), "")
    assert ranks_of("3,0,3", plan) == ((0, 3), "")
    many = tuple(WorkerId(f"n{k}", 0) for k in range(RANKS_MOST + 1))
    big = Plan(1, Layout(dp_shard=len(many)), many, (1,) * len(many), ())
    assert ranks_of("node", big)[0] == () and "65 ranks at once" in ranks_of("node", big)[1]


def test_the_state_is_stored_and_read_with_it() -> None:
    told = story()
    started(told)
    assert built(State, plain(told.state)) == told.state
    assert isinstance(told.state.last_step, StepDone)


def test_only_the_newest_outcomes_are_kept() -> None:
    told = story()
    started(told)
    told.tick(*(ProfileAsked(f"q{n}", 3) for n in range(40)))
    assert list(told.state.profiles) == [f"q{n}" for n in range(40 - KEPT, 40)]
