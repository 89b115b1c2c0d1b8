"""One generation as one worker lives it: meet, build, take over the state, step, leave with the state in hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from elastic.data.loader import Loader, collate
from elastic.data.order import sample_ids
from elastic.errors import StateLost
from elastic.mesh import first_replica, replica_key
from elastic.program import Program
from elastic.reshard.shards import owned_boxes, state_specs
from elastic.reshard.transfers import plan_transfers
from elastic.storage import Storage
from elastic.types import (
    CopyStored,
    DigestPart,
    Evaluated,
    Event,
    ModelProfile,
    Plan,
    PlanEntered,
    ShardStored,
    StepDone,
    Transfer,
    WorkerId,
)
from elastic.worker import durable
from elastic.worker.copies import PeerCopies
from elastic.worker.groups import Groups
from elastic.worker.step import Commit, Stepper, Words
from elastic.worker.train_state import Held, Tensors, TrainState, digest, region
from elastic.worker.transfer import carry_out

SETTLE_S = 5.0


@dataclass(frozen=True)
class EnterOrder:
    """What a worker needs to enter a generation. `participants`: the plan's ranks, then workers that only send;
    `me`: this worker's index there; `store`: host and port of a TCPStore that listens already."""

    plan: Plan
    participants: tuple[WorkerId, ...]
    me: int
    store: tuple[str, int]
    timeout_s: float = 60.0


@dataclass
class Workplace:
    """What outlives a generation in a worker process."""

    me: WorkerId
    program: Program
    profile: ModelProfile
    job: dict[str, Any]
    dataset: Any
    validation: Any
    storage: Storage
    device: torch.device
    report: Callable[[Event], None]
    at_phase: Callable[[str, int], None]  # phase, step: tells the outside that this worker gets on
    background: Callable[..., Future[Any]]  # runs a function behind the steps
    held: list[Held] = field(default_factory=list)
    saving: Future[Any] | None = None
    saved: tuple[Plan, int, int] | None = None  # plan, step and rank of the durable copy that `saving` writes
    left_at_s: float | None = None  # when the last step of the generation before was finished

    def find(self, generation: int, rank: int, step: int) -> Held:
        """Boxes held here for that rank. Raises StateLost when there are none."""
        for held in self.held:
            if held.serves(generation, rank, step):
                return held
        have = [(h.kind, h.generation, h.rank, h.step) for h in self.held]
        raise StateLost(f"{self.me} should hold rank {rank} of generation {generation} at step {step}; it holds {have}")


class Generation:
    """Enter, run and leave one generation."""

    def __init__(self, place: Workplace, order: EnterOrder, words: Callable[[], tuple[bool, bool]]) -> None:
        self.place, self.order, self.plan = place, order, order.plan
        self.words = words  # asked before each commit: (stop at this boundary?, save at this boundary?)
        self.groups = Groups(order.plan.generation, order.plan.layout, place.device)
        self.rank = order.me if order.me < len(order.plan.ranks) else None
        self.state: TrainState | None = None
        self.copies: PeerCopies | None = None
        self.loader: Loader | None = None
        self.stored_digest: int | None = None  # of the durable copy that was read, known to rank 0
        self.phases_s: dict[str, float] = {}
        self._mark = time.monotonic()

    @property
    def number(self) -> int:
        return self.plan.generation

    # ------------------------------------------------------------------------------------------ enter

    def enter(self) -> None:
        """Returns when every participant has what it needs. Raises what the groups raise when a participant goes away."""
        place, order = self.place, self.order
        place.at_phase("waiting", 0)
        self.groups.join(order.store, order.me, len(order.participants), order.timeout_s)
        self._lap("groups")
        if self.rank is not None:
            place.at_phase("building", 0)
            plan = self.plan
            self.state = TrainState(place.program, place.profile, self.groups, (plan.layout, plan.layers, self.rank))
        self._lap("build")
        place.at_phase("loading", 0)
        before, moved = self._fill()
        if self.state is not None:
            self.state.step = int(self.state.rng[1])
        self._barrier()
        self._lap("transfer")
        self._start(before, moved)

    def _lap(self, phase: str) -> None:
        now = time.monotonic()
        self.phases_s[phase] = round(now - self._mark, 4)
        self._mark = now

    def _barrier(self) -> None:
        if len(self.order.participants) > 1:
            dist.all_reduce(torch.zeros(1), group=self.groups.world)

    def _fill(self) -> tuple[list[Held], int]:
        """Fills the new state from where it is. Returns what this worker answers for in the digest, and the bytes moved."""
        source = self.plan.resume.source
        if source == "fresh":
            if self.state is not None:
                self.state.fill_fresh(int(self.place.job["seed"]))
            return [], 0
        if source == "durable":
            return [], self._fill_from_storage()
        return self._fill_from_memory()

    def _fill_from_storage(self) -> int:
        assert self.state is not None
        checkpoint = durable.open_checkpoint(self.plan.resume.uri)
        checkpoint.check(state_specs(self.place.profile))
        self.stored_digest = int(checkpoint.meta["digest"]) if self.rank == 0 and "digest" in checkpoint.meta else None
        n_bytes = 0
        for box, tensor in self.state.tensors.values():
            checkpoint.read_into(box, tensor)
            n_bytes += box.n_bytes
        return n_bytes

    def _fill_from_memory(self) -> tuple[list[Held], int]:
        plan, resume, place = self.plan, self.plan.resume, self.place
        assert resume.layout is not None
        index = {worker: i for i, worker in enumerate(self.order.participants)}
        step = self._agree_on_step() if resume.source == "live" else resume.step
        keys: dict[tuple[int, int, int, int], tuple[int, ...]] = {}
        for holding in resume.holdings:
            key, who = replica_key(resume.layout, holding.rank), index[holding.worker]
            if who not in keys.setdefault(key, ()):
                keys[key] += (who,)
        ranks = range(resume.layout.world_size)
        holders = {r: keys.get(replica_key(resume.layout, r), ()) for r in ranks}
        old, new = (resume.layout, resume.layers), (plan.layout, plan.layers)
        nodes = [worker.node_id for worker in self.order.participants]
        transfers = plan_transfers(place.profile, old, new, holders, nodes)
        found: dict[int, Held] = {}

        def read(transfer: Transfer) -> torch.Tensor:
            if transfer.holding not in found:
                found[transfer.holding] = place.find(resume.generation, transfer.holding, step)
            return region(found[transfer.holding].tensors, transfer)

        def write(transfer: Transfer) -> torch.Tensor:
            assert self.state is not None
            return region(self.state.tensors, transfer)

        carry_out(transfers, self.order.me, read, write, self.groups.world)
        answers = [r for r in ranks if first_replica(resume.layout, r) == r and holders[r][:1] == (self.order.me,)]
        before = [place.find(resume.generation, r, step) for r in answers]
        return before, sum(t.n_bytes for t in transfers if t.source != t.destination)

    def _agree_on_step(self) -> int:
        """The boundary at which the old generation stopped: all its ranks must have stopped at the same one."""
        live = [h.step for h in self.place.held if h.kind == "live" and h.generation == self.plan.resume.generation]
        mine = live[0] if live else -1
        seen = torch.tensor([mine, -mine if mine >= 0 else -(1 << 60)], dtype=torch.int64)
        if len(self.order.participants) > 1:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self.groups.world)
        newest, oldest = int(seen[0]), -int(seen[1])
        if newest != oldest or newest < 0:
            raise StateLost(f"the ranks of generation {self.plan.resume.generation} stopped at steps {oldest} to {newest}")
        return newest

    def _start(self, before: list[Held], moved: int) -> None:
        """Everyone has its state: tell the driver, take the first peer copy, check digests behind the next steps."""
        place, plan, state = self.place, self.plan, self.state
        shapes = {spec.fqn: spec.shape for spec in state_specs(place.profile)}
        after: Tensors | None = None
        if state is not None:
            assert self.rank is not None
            if self.rank == 0:
                place.report(PlanEntered(plan.generation, state.step, self.phases_s, moved, 0, place.left_at_s))
            self.copies = PeerCopies(place.profile, plan, self.rank, self.groups.copies)
            if self.copies.on and state.step < int(place.job["steps"]):
                after = self.copies.start(state.step, state.tensors)
            else:
                after = state.snapshot()
                if not self.copies.on:
                    place.held = [h for h in place.held if h.generation == plan.generation]
        if plan.resume.source != "fresh":
            check = place.background(self._check_digest, before, after, shapes)
            if state is None:
                check.result()  # this worker may be gone soon

    def _check_digest(self, before: list[Held], after: Tensors | None, shapes: Mapping[str, tuple[int, ...]]) -> None:
        profile = self.place.profile
        old = self.stored_digest
        for held in before:
            first = first_replica(held.layout, held.rank)
            names = [b.fqn for b in owned_boxes(profile, held.layout, held.layers, first)]
            old = ((old or 0) + digest(held.tensors, shapes, names)) % (1 << 64)
        new, n_bytes = None, 0
        if after is not None and self.rank is not None:
            mine = owned_boxes(profile, self.plan.layout, self.plan.layers, self.rank)
            new = digest(after, shapes, [b.fqn for b in mine])
            n_bytes = sum(b.n_bytes for b in mine)
        n = len(self.order.participants)
        self.place.report(DigestPart(self.number, self.order.me, n, old, new, n_bytes))

    # ------------------------------------------------------------------------------------------ run

    def run(self) -> None:
        """Steps until the job's last one or a stop word; returns at a boundary with all copies settled."""
        place, plan, state, job = self.place, self.plan, self.state, self.place.job
        assert state is not None
        stepper = Stepper(place.program, job, plan, state, self.groups)

        def ids_of_step(step: int) -> list[int]:
            return sample_ids(int(job["n_samples"]), int(job["global_batch"]), int(job["seed"]), step)[stepper.share]

        last = int(job["steps"])
        self.loader = Loader(place.dataset, ids_of_step, state.step)
        stop = False
        while state.step < last and not stop:
            place.at_phase("stepping", state.step)
            began = time.monotonic()
            batch, data_s = self.loader.take(state.step)
            wants_stop, wants_save = self.words()
            words = Words(wants_stop, wants_save, self.copies is not None and self.copies.stored)
            commit = stepper.run(batch, words)
            place.left_at_s = time.time()
            stop = commit.stop
            copy_s = self._copies_after(commit, state)
            if self.rank == 0:
                self._report_step(commit, state, (time.monotonic() - began, data_s, copy_s))
            every = int(job.get("eval_every") or 0)
            if state.step == last or (every and state.step % every == 0):
                self._evaluate(stepper, state)
            if state.step == last:
                self._save(state)  # last of all: once it is stored the run is done
        self._settle()

    def _report_step(self, commit: Commit, state: TrainState, times: tuple[float, float, float]) -> None:
        tokens = int(commit.tokens)
        norm = commit.square_norm**0.5 / max(1, tokens)
        loss = commit.loss_sum / max(1, tokens)
        self.place.report(StepDone(self.number, state.step, loss, tokens, *times, norm, commit.digest))

    def _copies_after(self, commit: Commit, state: TrainState) -> float:
        """Peer and durable copies that are due at this boundary. Returns the seconds that the step waited for them."""
        began = time.monotonic()
        place, plan = self.place, self.plan
        last = state.step == int(place.job["steps"])
        assert self.copies is not None
        if self.copies.flight is not None and commit.copies_done:
            step = self.copies.acknowledge()
            place.held = [*self.copies.acknowledged]
            if self.rank == 0:
                place.report(CopyStored(self.copies.copy(step)))
        if self.copies.due(state.step) and not last and not commit.stop:
            self.copies.start(state.step, state.tensors)
        if not last and (commit.save or (plan.durable_every and state.step % plan.durable_every == 0)):
            self._save(state)
        return time.monotonic() - began

    def _save(self, state: TrainState) -> None:
        """Starts a durable copy of this boundary from a host copy; waits first for the one before it."""
        began = time.monotonic()
        place = self.place
        place.at_phase("saving", state.step)
        if place.saving is not None:
            place.saving.result()
        mine = {b.fqn for b in owned_boxes(place.profile, self.plan.layout, self.plan.layers, state.rank)}
        tensors = {k: v for k, v in state.snapshot().items() if k in mine}
        stall_s = time.monotonic() - began
        place.saved = (self.plan, state.step, state.rank)
        place.saving = place.background(self._write, state.step, state.rank, tensors, stall_s)

    def _write(self, step: int, rank: int, tensors: Tensors, stall_s: float) -> None:
        began = time.monotonic()
        n_bytes = durable.write_shard(self.place.storage, step, self.number, rank, list(tensors.values()))
        shapes = {spec.fqn: spec.shape for spec in state_specs(self.place.profile)}
        content = digest(tensors, shapes, tensors)
        self.place.report(ShardStored(self.number, step, rank, n_bytes, time.monotonic() - began, stall_s, content))

    def _evaluate(self, stepper: Stepper, state: TrainState) -> None:
        place = self.place
        if place.validation is None:
            return
        metrics = stepper.evaluate(place.validation, collate, int(place.job.get("eval_samples") or 0))
        if self.rank == 0:
            place.report(Evaluated(self.number, state.step, metrics))

    # ------------------------------------------------------------------------------------------ leave

    def _settle(self) -> None:
        if self.copies is not None:
            self.copies.settle(SETTLE_S)

    def take_along(self) -> None:
        """Puts the live state into the workplace, if it is that of a whole step."""
        state = self.state
        if state is not None and not state.dirty and self.copies is not None:
            self.place.held = [h for h in self.place.held if not (h.kind == "live" and h.generation == self.number)]
            self.place.held.insert(0, state.held(self.number))

    def close(self) -> None:
        if self.loader is not None:
            self.loader.close()
        self.groups.close()


def live_step(held: list[Held], generation: int) -> int:
    """Step of the live boxes of that generation, -1 when there are none."""
    return next((h.step for h in held if h.kind == "live" and h.generation == generation), -1)
