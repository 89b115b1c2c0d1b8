"""How what the driver does grows with the cluster: CPU seconds of one process, at sizes up to 8,192
GPUs; nothing is trained.

`moves`: the forecast of a transition, and the transfers of one rank, of an 8B model when a node of
eight GPUs goes. `decisions`: the real driver loop, policy and state over simulated nodes of eight
GPUs, with two losses and two notices; `decision_ms` of all looks but those that order a new plan,
`change_ms` of these; `noticed_ms` while a notice is pending. `looks`: the same policy over a state
made directly, a step between two looks: nothing pending (`look_ms`), a notice for one node
(`notice_ms`), the same when the move is near (`near_ms`); the first of these plans the move
(`near_first_ms`); `loss_ms` orders a plan from peer replicas, a node being gone. `answers`: what all workers of a generation say when it is over, folded into the
state one by one. `gather`: the parts of one checkpoint on their way to a commit. `orders`: what a
worker is sent to enter a generation. `groups`, `meshes`: what a generation's groups cost each rank,
as they are and as full meshes (scale_groups.py). `cluster`: a whole run with one notice on made-up
workers, under the real driver loop, backend and journal (scale_cluster.py).

`exponent`: of the growth over all sizes, by least squares (1 = as the cluster).
"""

from __future__ import annotations

import cProfile
import io
import pickle
import pstats
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import log
from statistics import linear_regression, median
from time import process_time
from typing import Any

import report
import scale_cluster
import scale_groups
from trial import Clock

from elastic.driver import drive, seldom_collected
from elastic.ledger.journal import MemoryJournal
from elastic.planner.published import known_decoders
from elastic.policy.copies.replica_placement import replica_holders
from elastic.policy.decide import decide
from elastic.policy.pools.drain import NEAR, lead_of
from elastic.policy.state.fold import Aborting, Failure, State, fold
from elastic.reshard.transfer_forecast import Room, TransferRates, forecast
from elastic.reshard.transfer_plan import plan_transfers
from elastic.sim.scripted_faults import Delays, Fault
from elastic.sim.sim_backend import SimBackend
from elastic.types import (
    Decision,
    DriverStarted,
    EnterPlan,
    Holding,
    Job,
    Layout,
    ModelProfile,
    Node,
    Plan,
    Pool,
    Quiesced,
    ShardStored,
    StepDone,
    WorkerId,
)
from elastic.types.orders import Rendezvous, WorkerOrder
from elastic.worker.hosting.aggregate import Gather

PER_NODE = 8
PARTS = (
    "moves",
    "decisions",
    "looks",
    "answers",
    "gather",
    "orders",
    "cluster",
    "groups",
    "meshes",
)
ALL = (64, 512, 4096, 8192)
RANKS = {"groups": (8, 16, 32, 64, 128), "meshes": (8, 16, 32, 64)}
SIZES = dict.fromkeys(PARTS, ALL) | {"decisions": (64, 256, 1024), "cluster": (8, *ALL)} | RANKS
SMOKE_SIZES = dict.fromkeys(PARTS, (16, 64)) | {"groups": (8, 24), "meshes": (4, 8)}
UNITS_S = {"s": 1.0, "ms": 1e-3, "n": 1.0}  # n: of anything
LEAST_S = 1e-4  # times below that count as that
MOST_S = 1800.0
STEPS = 40
TOLD = 10  # lines of a profile


def model() -> ModelProfile:
    return known_decoders.find("llama3-8b,seq=4096").decoder.profile()


def workers(n: int) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(f"spot-{rank // PER_NODE}", rank % PER_NODE) for rank in range(n))


def seconds(work: Callable[[], object]) -> float:
    began_s = process_time()
    work()
    return process_time() - began_s


def exponent(points: Mapping[int, float]) -> float:
    """p of seconds ~ size ** p, fitted to all sizes; what becomes less counts as 0."""
    logs = [(log(n), log(max(took_s, LEAST_S))) for n, took_s in points.items()]
    return max(0.0, round(linear_regression(*zip(*logs, strict=True)).slope, 2))


def moves(n: int, profile: ModelProfile) -> dict[str, float]:
    """The slowest of three kinds of layouts."""
    left = n // PER_NODE - 1
    cuts = [
        (Layout(dp_shard=n), Layout(dp_shard=PER_NODE * left)),
        (Layout(dp_shard=n // PER_NODE, tp=PER_NODE), Layout(dp_shard=left, tp=PER_NODE)),
        (Layout(dp_shard=n // PER_NODE, tp=PER_NODE), Layout(pp=4, dp_shard=n // 16, tp=4)),
    ]
    nodes, holders = [worker.node_id for worker in workers(n)], {rank: (rank,) for rank in range(n)}
    found = []
    for old, new in cuts:
        blocks = profile.n_blocks // 4
        sides = (old, ()), (new, (blocks,) * 4 if new.pp > 1 else ())
        told_s = seconds(
            lambda s=sides: (
                forecast(
                    profile, *s, holders=holders, nodes=nodes, room=Room(), pace=TransferRates()
                ).move
            )
        )  # type: ignore[misc]
        found.append(
            (told_s, seconds(lambda s=sides: plan_transfers(profile, *s, holders, nodes, me=0)))
        )  # type: ignore[misc]
    return {
        "forecast_s": round(max(told for told, _ in found), 3),
        "transfers_s": round(max(own for _, own in found), 3),
    }


@dataclass
class Looks:
    """Decides, and keeps what each look took. `profiled`: all are, which costs as much again; that
    of the slowest is kept."""

    profiled: bool = False
    plain: list[float] = field(default_factory=list)
    noticed: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    slowest_s: float = 0.0
    profile: cProfile.Profile | None = None

    def __call__(self, state: State, now_s: float) -> Decision:
        profile = cProfile.Profile() if self.profiled else None
        began_s = process_time()
        found = profile.runcall(decide, state, now_s) if profile else decide(state, now_s)
        took_s = process_time() - began_s
        changed = any(isinstance(action, EnterPlan) for action in found.actions)
        (self.changes if changed else self.plain).append(took_s)
        pending = state.phase == "running" and any(
            n.status == "draining" and n.deadline_s for n in state.nodes.values()
        )
        if pending and not changed:
            self.noticed.append(took_s)
        if took_s > self.slowest_s:
            self.slowest_s, self.profile = took_s, profile
        return found

    def told(self) -> str:
        text = io.StringIO()
        if self.profile is not None:
            pstats.Stats(self.profile, stream=text).sort_stats("cumulative").print_stats(TOLD)
        return text.getvalue()


def decisions(n: int, profile: ModelProfile, profiled: bool = False) -> dict[str, float]:
    n_nodes, seen = n // PER_NODE, Looks(profiled)
    pools = (Pool("spot", "H100", PER_NODE, "spot", 0.0, 0, n_nodes),)
    job = {
        "name": "scale", "steps": STEPS, "global_batch": 2 * n, "microbatch_size": 1, "seed": 0,
        "layout": "auto", "min_workers": PER_NODE, "peer_every": 5, "durable_every": 20,
    }  # fmt: skip
    faults = [Fault(100.0 + 60 * i, "notice" if i % 2 else "loss", 3 * i, 30.0) for i in range(4)]
    backend = SimBackend(pools, Job.from_plain(job), faults, delays=Delays(work_s=10.0 * n))
    state = drive(
        backend, MemoryJournal(), DriverStarted("scale", 1, job, pools, profile), decide=seen
    )
    if state.phase != "succeeded" or len(seen.changes) < 3 or not seen.noticed:
        raise AssertionError(
            f"{n} GPUs: {state.phase} after {len(seen.changes)} changes: {state.outcome_reason}"
        )
    if profiled:
        print(
            f"the slowest of {len(seen.plain) + len(seen.changes)} looks at {n} "
            f"GPUs\n{seen.told()}",
            file=sys.stderr,
        )
    numbers = {
        "decision": median(seen.plain), "decision_worst": max(seen.plain),
        "noticed": median(seen.noticed), "noticed_worst": max(seen.noticed),
        "change": median(seen.changes), "change_worst": max(seen.changes),
    }  # fmt: skip
    return {f"{name}_ms": round(1000 * value, 2) for name, value in numbers.items()}


def looks(n: int, profile: ModelProfile) -> dict[str, float]:
    """Medians of four looks after the first of its kind, which searches or forecasts."""
    plan, deadline_s = plan_of(n), 1000.0
    nodes = {name: Node(name, "spot", PER_NODE, "prepared") for name in plan.nodes}
    pool = Pool("spot", "H100", PER_NODE, "spot", 0.0, 0, len(nodes))
    job = {
        "name": "scale",
        "steps": 10_000,
        "global_batch": 2 * n,
        "microbatch_size": 1,
        "layout": "auto",
        "max_nodes": len(nodes),
    }
    state = State(
        phase="running", run="scale", job=Job.from_plain(job), pools=(pool,), model=profile,
        nodes=nodes, prepared=frozenset(nodes), considered=plan.nodes, generation=1, plan=plan,
        plans={1: plan}, step=5, step_time_s=10.0,
    )  # fmt: skip
    noticed = {
        **nodes,
        "spot-0": replace(nodes["spot-0"], status="draining", deadline_s=deadline_s),
    }
    lead_s = lead_of(state).seconds
    found = {}
    for kind, at_s, there in (
        ("look", 0.0, nodes),
        ("notice", 10.0, noticed),
        ("near", deadline_s - (1 + NEAR) / 2 * lead_s, noticed),
    ):
        took = []
        state = replace(state, nodes=there)
        for k in range(5):
            state = fold(state, StepDone(1, state.step + 1, 1.0, 10, 10.0), at_s + 0.01 * k)
            began_s = process_time()
            decision = decide(state, at_s + 0.01 * k)
            took.append(process_time() - began_s)
            if decision.actions and kind != "look":
                raise AssertionError(f"{n} GPUs, {kind}: {decision.reason}")
        found[f"{kind}_ms"] = round(1000 * median(took[1:]), 2)
        found[f"{kind}_first_ms"] = round(1000 * took[0], 2)
    lost = after_a_loss(state, nodes)
    found["loss_ms"] = round(1000 * seconds(lambda: decide(lost, deadline_s)), 2)
    return found


def after_a_loss(state: State, nodes: Mapping[str, Node]) -> State:
    """A node is gone, and the others hold their own boxes and those of a neighbor of a step."""
    assert state.plan is not None
    to = replica_holders(state.plan.layout, state.plan.ranks, dict.fromkeys(nodes, ""), n=1)
    there: dict[WorkerId, tuple[Holding, ...]] = {}
    for rank, keepers in enumerate(to):
        for worker in (state.plan.ranks[k] for k in (rank, *keepers)):
            if worker.node_id != "spot-0":
                kept = Holding(worker, 1, rank, state.step, "peer")
                there[worker] = (*there.get(worker, ()), kept)
    gone = Failure("loss", "spot-0 is gone", 0.0)
    return replace(
        state, plan=None, plans={1: replace(state.plan, copies_to=to)}, phase="waiting",
        nodes={**nodes, "spot-0": replace(nodes["spot-0"], status="lost")}, holdings=there,
        prepared=state.prepared - {"spot-0"}, aborting=Aborting(1, 0.0, frozenset(), gone),
    )  # fmt: skip


def plan_of(n: int) -> Plan:
    return Plan(1, Layout(dp_shard=n), workers(n), (1,) * n, (32,))


def answers(n: int, profile: ModelProfile) -> dict[str, float]:
    """The slower of two ends: a generation is aborted, or stops at a boundary for the next one."""
    plan = plan_of(n)
    nodes = {name: Node(name, "spot", PER_NODE, "prepared") for name in plan.nodes}
    known = State(
        run="scale", job=Job(steps=STEPS), nodes=nodes, plans={1: plan}, generation=1, step=5
    )
    lost = Aborting(1, 0.0, frozenset(plan.ranks), Failure("loss", "a node is gone", 0.0))
    broken = replace(known, phase="waiting", aborting=lost)
    stopped = replace(known, phase="running", plan=plan, quiescing=(1, 0.0))
    told = [
        Quiesced(
            worker, 1, 5, (Holding(worker, 1, rank, 5, "live"),), commit=(1.0, 2.0), pending_step=6
        )
        for rank, worker in enumerate(plan.ranks)
    ]
    took = []
    for state in (broken, stopped):
        began_s = process_time()
        for event in told:
            state = fold(state, event, 0.0)
        took.append(process_time() - began_s)
        if len(state.holdings) != n or (
            state.aborting.owing if state.aborting else len(state.quiesced) < n
        ):
            raise AssertionError(f"{n} workers have answered, and the state does not know it")
    return {"answers_s": round(max(took), 4)}


def gather(n: int, profile: ModelProfile) -> dict[str, float]:
    plan, complete = plan_of(n), []
    found = Gather(complete.append, lambda node_id: PER_NODE)
    found.expect(plan)
    told = [
        (worker, ShardStored(1, 5, rank, 8, 0.1, 0.0, rank))
        for rank, worker in enumerate(plan.ranks)
    ]

    def add() -> None:
        for worker, event in told:
            found.add(worker, event)

    took_s = seconds(add)
    if len(complete) != 1:
        raise AssertionError(f"{n} parts did not become one copy")
    return {"gather_s": round(took_s, 4)}


def orders(n: int, profile: ModelProfile) -> dict[str, float]:
    plan = plan_of(n)
    order = WorkerOrder(
        EnterPlan(plan), Rendezvous(plan.ranks, ("127.0.0.1", 29500), 60.0, "secret")
    )
    return {"order_kb": round(len(pickle.dumps(order)) / 1e3, 1)}


def cluster(n: int, profile: ModelProfile, step_s: float = 1.0) -> dict[str, float]:
    return scale_cluster.run(n, max(1, min(PER_NODE, n // 4)), profile, step_s)


MEASURES = {
    "moves": moves, "decisions": decisions, "looks": looks, "answers": answers, "gather": gather,
    "orders": orders, "cluster": cluster, "groups": scale_groups.groups,
    "meshes": scale_groups.meshes,
}  # fmt: skip


def measure(clock: Clock, parts: list[str], smoke: bool, profiled: bool = False) -> dict[str, Any]:
    with seldom_collected():  # as a driver does, so that no look takes what a collection does
        return _measure(clock, parts, smoke, profiled)


def _measure(clock: Clock, parts: list[str], smoke: bool, profiled: bool) -> dict[str, Any]:
    profile, found = model(), {}
    measures = MEASURES | {
        "decisions": partial(decisions, profiled=profiled),
        "cluster": partial(cluster, step_s=0.1 if smoke else 1.0),
    }
    for part in parts:
        by_size = {}
        for n in (SMOKE_SIZES if smoke else SIZES)[part]:
            clock.look(f"{part} {n}")
            by_size[n] = measures[part](n, profile)
        found[part] = {str(n): numbers for n, numbers in by_size.items()}
        for name in by_size[max(by_size)]:
            quantity, _, unit = name.rpartition("_")
            if unit in UNITS_S:
                found[f"{quantity}_exponent"] = exponent(
                    {n: row[name] * UNITS_S[unit] for n, row in by_size.items()}
                )
                found[f"{quantity}_most_{unit}"] = max(row[name] for row in by_size.values())
    return found


def main() -> int:
    given = report.options(
        __doc__,
        MOST_S,
        repeats=1,
        parts=PARTS,
        flags={"profile": f"print {TOLD} lines of the profile of the slowest decision"},
    )
    return report.finish(
        "scale", given, lambda clock: measure(clock, given.parts, given.smoke, given.profile)
    )


if __name__ == "__main__":
    sys.exit(main())
