"""A run with phases over the workers of a pool, its faults where a test wants them, and the same
training as a plain loop that changes length and batch at the same steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.reference import Reference, build, collate, train_step
from support.worker.chain import check_stored, job_of
from support.worker.faulty_pool import FaultyPool
from support.worker.plans import plan
from support.worker.policy_driver import Driver

from elastic.data.open_datasets import dataset_of
from elastic.data.order import permuted, seed_of
from elastic.policy.decide import decide
from elastic.policy.state.fold import State
from elastic.program import load_program
from elastic.types import (
    Decision,
    DriverStarted,
    EnterPlan,
    Job,
    Layout,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    Plan,
    StepDone,
)
from elastic.types.replacing import replace

CORPUS = Path(json.__file__).parent  # real text that is everywhere
LENGTHS, BATCHES = (16, 32, 64), (12, 8, 4)
SEQ = "seq"


def phased_job(run: Path, begin: tuple[int, ...], steps: int, **more: Any) -> dict[str, Any]:
    """Phases at `begin`, each with its own length, batch and learning rate; `more`: layouts as
    lists, one for each phase."""
    train = {"folder": str(CORPUS), "pattern": "*.py", "tokenizer": "bytes", SEQ: LENGTHS[0]}
    layouts = more.get("layouts", [])
    phases = [
        {
            "from_step": at,
            "global_batch": BATCHES[k],
            "lr_factor": 0.5**k,
            "data": {"train": {SEQ: LENGTHS[k]}},
        }
        | ({"layout": layouts[k]} if layouts else {})
        for k, at in enumerate(begin, 1)
    ]
    return job_of("tiny_text.py", steps, BATCHES[0]) | {
        "folder": str(run), "data": {"train": train}, "phases": phases,
    }  # fmt: skip


def alone(job: Mapping[str, Any]) -> Reference:
    """The plain loop. It reads each phase's samples from its own beginning."""
    program = load_program(job["program"])
    model = build(program, job["seed"])
    (optimizer,) = optimizers = [program.optimizer(list(model.named_parameters()))]  # type: ignore[misc]
    run, base = Reference(model, optimizers), [g["lr"] for g in optimizer.param_groups]
    begins = [0, *(phase["from_step"] for phase in job["phases"]), job["steps"]]
    for k, phase in enumerate([{}, *job["phases"]]):
        train = job["data"]["train"] | phase.get("data", {}).get("train", {})
        of = {"folder": job["folder"], "seed": job["seed"], "data": {"train": train}}
        dataset = dataset_of(program, Job.from_plain(of))
        batch, seed = phase.get("global_batch", job["global_batch"]), seed_of(job["seed"], k)
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * phase.get("lr_factor", 1.0)
        for step in range(begins[k + 1] - begins[k]):
            places = range(step * batch, (step + 1) * batch)
            ids = [permuted(len(dataset), seed, *divmod(p, len(dataset))) for p in places]
            train_step(run, program, collate(dataset, ids), job["clip_grad_norm"])
    return run


class PhasedDriver(Driver):
    """`at`: what happens once so many steps are done. `copy_every`: steps between checkpoints.
    `spare`: the last worker of the pool is not there before it `joins`."""

    def __init__(
        self, pool: FaultyPool, job: dict[str, Any], run: Path, layout: Layout,
        at: Mapping[int, Callable[[PhasedDriver], None]] | None = None, *, copy_every: int = 0,
        spare: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(pool, job, run, Layout(dp_shard=pool.n), 2)
        self.at, self.run_folder = dict(at or {}), run
        self.plans: list[Plan] = []
        self.begun_at = 0  # steps that were done before
        of = replace(self.state.job, durable_every=copy_every)
        self.state = replace(self.state, job=of)
        if spare:
            self.fold(NodeLost(self.workers[-1].node_id, "released"))
        self.first = plan(
            1, layout, self.workers, job["global_batch"], peer_every=2, durable_every=copy_every
        )

    def listen(self) -> None:
        super().listen()
        for step in [step for step in self.at if self.state.step >= step]:
            self.at.pop(step)(self)

    def carry_out(self, decision: Decision) -> None:
        super().carry_out(decision)
        for action in decision.actions:
            self.plans += [action.plan] if isinstance(action, EnterPlan) else []

    def notice(self, worker: int) -> None:
        self.fold(Notice(self.workers[worker].node_id, time.monotonic()))

    def joins(self) -> None:
        name = self.workers[-1].node_id
        self.fold(NodeReady(Node(name, "p")), NodePrepared(name))

    def run_to_copy(self) -> None:
        """Until the first checkpoint is stored; then everybody stops."""
        self.carry_out(Decision((EnterPlan(self.first),), "the test's plan"))
        until = time.monotonic() + 300
        while not self.state.saved_step:
            self.listen()
            decision = decide(self.state, time.monotonic())
            self.carry_out(decision)
            assert time.monotonic() < until, decision.reason
        self.pool.rest()

    def again(self) -> PhasedDriver:
        """Another run of the same name, by workers that know nothing, from that checkpoint."""
        found = PhasedDriver(self.pool, self.job, self.run_folder, self.first.layout)
        (*_, copy) = self.state.durable
        start = DriverStarted(
            "run", 2, found.state.job.plain(), found.state.pools, found.profile(), durable=(copy,)
        )
        nodes = list(found.state.nodes.values())
        found.state = State()
        found.fold(start)
        for node in nodes:
            found.fold(NodeReady(node), NodePrepared(node.node_id))
        decision = decide(found.state, time.monotonic())
        (found.first,) = [a.plan for a in decision.actions if isinstance(a, EnterPlan)]
        found.begun_at = copy.step
        return found

    def check(self, tolerance: float = 1e-5) -> None:
        """Losses, tokens and the stored state are those of the plain loop."""
        want, begun = alone(self.job), self.begun_at
        last = {e.step: e for e in sorted(self.told(StepDone), key=lambda e: e.generation)}
        assert sorted(last) == list(range(begun + 1, self.job["steps"] + 1)), "a step is missing"
        got = [last[step].train_loss for step in sorted(last)]
        assert got == pytest.approx(want.losses[begun:], abs=tolerance)
        assert [last[step].tokens for step in sorted(last)] == want.tokens[begun:]
        check_stored(self.state.durable[0].uri, want)
        job = Job.from_plain(self.job)
        assert all(sum(p.samples) == job.in_phase(p.phase).global_batch for p in self.plans)
