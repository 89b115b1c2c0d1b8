"""A run of any length on any number of nodes as journal lines, made without a driver: plans as they
are entered, notices, losses, copies, prices, steps.

python tests/support/observe/long_run.py FOLDER NODES STEPS    # writes a run folder
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import exp
from pathlib import Path

from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.policy.state.fold import changes
from elastic.storage import LocalStorage
from elastic.types import (
    Copy,
    CopyStored,
    Decision,
    DriverStarted,
    EnterPlan,
    Event,
    Holding,
    Layout,
    ModelProfile,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    Plan,
    PlanEntered,
    Pool,
    PriceSeen,
    RequestNodes,
    Resume,
    StepDone,
    Stop,
    WorkerId,
)

T0 = 1.7e9
STEP_S = 4.0
GPUS = 8
TOKENS = 4_194_304


class LongRun:
    """Two thirds of the nodes are spot; every now and then one of them goes, and another comes."""

    def __init__(self, n_nodes: int, n_steps: int, n_changes: int = 60, seed: int = 1) -> None:
        self.n_nodes, self.n_steps = n_nodes, n_steps
        self.every = max(4, n_steps // (n_changes + 1))
        self.chance = random.Random(seed)
        self.at_s, self.number, self.plan = T0, 0, Plan(0, Layout(), (), (), ())
        n_spot = max(1, n_nodes * 2 // 3)
        self.pools = (
            Pool("p5-spot", "H100", GPUS, "spot", 38.2, 0, n_spot, 120.0),
            Pool("p5-on-demand", "H100", GPUS, "on-demand", 98.3, 0, max(1, n_nodes - n_spot)),
        )
        self.nodes = [f"spot-{k}" for k in range(1, n_spot + 1)]
        self.nodes += [f"on-demand-{k}" for k in range(1, n_nodes - n_spot + 1)]
        self.n_named = n_spot

    def lines(self) -> Iterator[Line]:
        job = {
            "name": "llama-8b", "folder": "/jobs/llama", "steps": self.n_steps,
            "global_batch": 4096, "replica_every": 10, "checkpoint_every": 500,
            "budget_usd": 25.0 * self.n_nodes * self.n_steps * STEP_S / 1000,
        }  # fmt: skip
        model = ModelProfile(32, 8_030_000_000, ())
        start = DriverStarted("long", 1, job, self.pools, model)
        spot = [name for name in self.nodes if name.startswith("spot")]
        asked = (
            RequestNodes("p5-spot", len(spot), "r1"),
            RequestNodes("p5-on-demand", self.n_nodes - len(spot), "r2"),
        )
        yield self._tick(0, start, actions=asked, reason=f"{self.n_nodes * GPUS} workers wanted")
        yield self._tick(95, *(NodeReady(self._node(name)) for name in self.nodes))
        prepared = tuple(NodePrepared(name) for name in self.nodes)
        yield self._tick(
            38, *prepared, actions=self._next("start"), reason="all nodes are prepared"
        )
        yield self._tick(21, PlanEntered(self.plan.generation, 0, {"groups": 6.2, "build": 12.1}))
        step = 0
        while step < self.n_steps:
            step += 1
            yield self._step(step)
            if step % 500 == 0:
                yield self._tick(0.1, CopyStored(self._copy(step), 11.0, 0.2))
            if step % self.every == 0 and step < self.n_steps:
                step = yield from self._change(step)
        stop = Stop("succeeded", f"all {step} steps finished")
        yield self._tick(5, CopyStored(self._copy(step), 9.0), actions=(stop,), reason=stop.reason)

    def _tick(
        self, after_s: float, *events: Event, actions: tuple[object, ...] = (), reason: str = ""
    ) -> Line:
        self.at_s += after_s
        decision = Decision(actions, reason) if actions else None  # type: ignore[arg-type]
        return Line(self.at_s, 1, tuple((self.at_s, event) for event in events), decision)

    def _node(self, name: str) -> Node:
        return Node(name, "p5-spot" if name.startswith("spot") else "p5-on-demand", GPUS)

    def _layout(self, n_ranks: int) -> Layout:
        shard = max(1, n_ranks // 32)
        return Layout(pp=4, dp_shard=shard, tp=8) if n_ranks >= 32 else Layout(dp_shard=n_ranks)

    def _next(self, cause: str) -> tuple[EnterPlan, ...]:
        """The plan on the nodes that there are, state from where it is."""
        before, n_ranks = self.plan, len(self.nodes) * GPUS
        layout = self._layout(n_ranks)
        ranks = [WorkerId(name, k) for name in self.nodes for k in range(GPUS)][: layout.world_size]
        source = {"start": "fresh", "loss": "peer"}.get(cause, "live")
        held = tuple(
            Holding(worker, before.generation, rank, -1, "live")
            for rank, worker in enumerate(before.ranks)
        )
        resume = Resume(source, 0, before.generation, before.layout, before.layers, held)  # type: ignore[arg-type]
        shares = [4096 // layout.dp] * layout.dp
        for k in range(4096 - sum(shares)):
            shares[k] += 1
        n = len(ranks)
        self.plan = Plan(
            before.generation + 1, layout, tuple(ranks), tuple(shares), (8,) * layout.pp, 8,
            resume if cause != "start" else Resume(), cause, 10,  # type: ignore[arg-type]
            tuple(((k + GPUS) % n,) for k in range(n)), durable_every=500,
            predicted_step_time_s=STEP_S * 1.02,
        )  # fmt: skip
        return (EnterPlan(self.plan),)

    def _step(self, step: int) -> Line:
        loss = 1.9 + 9.0 * exp(-step / (0.05 * self.n_steps)) + self.chance.gauss(0, 0.02)
        seconds = STEP_S * self.chance.uniform(0.97, 1.06) * self.n_nodes / max(1, len(self.nodes))
        done = StepDone(self.plan.generation, step, loss, TOKENS, seconds, 0.02, 0.01, 0.4)
        return self._tick(seconds, replace(done, digest=f"{self.chance.getrandbits(64):016x}"))

    def _copy(self, step: int) -> Copy:
        return Copy(step, "durable", self.plan.generation, self.plan.layout,
                    uri=f"s3://runs/long/checkpoints/step-{step:08d}", n_bytes=96_000_000_000)  # fmt: skip

    def _change(self, step: int) -> Iterator[Line]:
        """A node goes, or one comes: the generator's value is the step to continue from."""
        if len(self.nodes) < self.n_nodes:
            self.n_named += 1
            name = f"spot-{self.n_named}"
            yield self._tick(1, actions=(RequestNodes("p5-spot", 1, f"r{self.n_named}"),),
                             reason="1 more node of p5-spot at $38.2/h")  # fmt: skip
            yield self._tick(3, NodeReady(self._node(name)))
            self.nodes.append(name)
            yield self._tick(
                2, NodePrepared(name), actions=self._next("growth"), reason=f"{name} is prepared"
            )
            return (yield from self._enter(step, 0))
        name = self.chance.choice([one for one in self.nodes if one.startswith("spot")])
        self.nodes.remove(name)
        if self.chance.random() < 0.6:
            notice = Notice(name, self.at_s + 120)
            yield self._tick(
                0.5, notice, actions=self._next("notice"), reason=f"{name} leaves in 120 s"
            )
            found = yield from self._enter(step, 0)
            yield self._tick(
                3, NodeLost(name, "released"), PriceSeen("p5-spot", self.chance.uniform(34, 44))
            )
            return found
        yield self._tick(
            0.8,
            NodeLost(name, "its raylet is unreachable"),
            actions=self._next("loss"),
            reason=f"{name} is lost",
        )
        return (yield from self._enter(step, min(step, self.chance.randrange(1, 9))))

    def _enter(self, step: int, lost: int) -> Iterator[Line]:
        phases = {
            name: self.chance.uniform(0.2, 2.5) for name in ("groups", "build", "transfer", "probe")
        }
        yield self._tick(
            sum(phases.values()),
            PlanEntered(self.plan.generation, step - lost, phases, 12_000_000_000),
        )
        return step - lost


def write(folder: Path, n_nodes: int, n_steps: int, n_changes: int = 60) -> None:
    """As a driver writes it, closed parts included."""
    place = RunFolder(LocalStorage(folder), folder)
    journal = place.open_journal(1, place.take_over()[1])
    run, state = LongRun(n_nodes, n_steps, n_changes), None
    for line in run.lines():
        journal.append(line.at_s, line.events, line.decision)
        if journal._file.end > journal.parts.most_bytes:  # type: ignore[union-attr]
            while not journal.parts.free:  # type: ignore[union-attr]
                pass
        for change in changes((line,), *([state] if state is not None else [])):
            state = change.after
        journal.close_part(state)
    journal.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
