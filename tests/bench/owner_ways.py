"""What one rank does in `owners.py`: the step of tensors that an optimizer steps whole, each way of
doing it in turn."""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import median
from typing import Any

import torch
from support.worker.load_peak import begin, peak_bytes
from support.worker.owner_steps import SEED, gradients, stepping
from torch import nn
from torch.distributed.tensor import DTensor

from elastic.models.llama import Llama, LlamaConfig, init_weights, loss_sum
from elastic.program import Program
from elastic.types import Job, Layout
from elastic.worker.process.allocator import M_MMAP_THRESHOLD, trim
from elastic.worker.program.weights import cut
from elastic.worker.state import owner_update
from elastic.worker.state.owner_update import Flight, Ways
from elastic.worker.state.train_state import TrainState

MUON = {"path": "muon+adamw", "lr": 2e-2, "weight_decay": 0.1}
OWNERS, ONE_BUCKET, EVERYWHERE, IN_TURN = "owners", "one_bucket", "everywhere", "in_turn"
MEASURED = 3  # steps, of each way's memory
WAYS = (OWNERS, ONE_BUCKET, EVERYWHERE, IN_TURN)
Gradients = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Size:
    """`bucket_bytes`: a few buckets for each owner, as a large model has them."""

    hidden: int
    n_layers: int
    bucket_bytes: int

    def program(self) -> Program:
        config = LlamaConfig(hidden=self.hidden, n_layers=self.n_layers)
        return Program(
            model=lambda: Llama(config), init=init_weights, dataset=None, loss=loss_sum,
            optimizer=None,
        )  # fmt: skip


@dataclass
class Took:
    """One way on one rank; lists: of each repeat. `optimizer_s`: in the optimizer's own step.
    `came_bytes`: from other ranks in a step. `kept_bytes`: of the optimizer's state between
    steps."""

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    came_bytes: int = 0
    kept_bytes: int = 0
    n_buckets: int = 0
    values: str = ""  # a digest


class Everywhere:
    """Plain: each rank gathers values and gradients of every tensor, steps all of them and keeps
    its part. `in_turn`: one tensor after the other, else all of them at once."""

    def __init__(self, state: TrainState, in_turn: bool) -> None:
        self.state, self.in_turn = state, in_turn
        self.names = [one.spec.fqn for one in state.owner_update.stepped]
        self.wholes = {fqn: nn.Parameter(torch.empty(0)) for fqn in self.names}
        settings = next(
            group for group in state.optimizers.each["muon"].param_groups if group["params"]
        )
        taken = {k: v for k, v in settings.items() if k not in ("params", "param_names")}
        self.optimizer = torch.optim.Muon(
            [nn.Parameter(torch.empty(1, 1)) for _ in self.names], **taken
        )
        self.optimizer.param_groups[0]["params"] = list(self.wholes.values())

    @torch.no_grad()
    def gather(self, fqn: str, gradient: torch.Tensor) -> None:
        parameter, whole = self.state.parameters[fqn], self.wholes[fqn]
        assert isinstance(parameter, DTensor)
        whole.data = parameter.full_tensor()
        whole.grad = DTensor.from_local(
            gradient, parameter.device_mesh, parameter.placements, shape=parameter.shape,
            stride=parameter.stride(),
        ).full_tensor()  # fmt: skip

    @torch.no_grad()
    def give_up(self, fqn: str) -> None:
        whole = self.wholes[fqn]
        box, _ = self.state.tensors[f"model.{fqn}"]
        self.state.local[fqn].copy_(cut(whole, box))
        whole.grad, whole.data = None, torch.empty(0)

    def __call__(self, given: Gradients) -> float:
        spent_s = 0.0
        for some in [[fqn] for fqn in self.names] if self.in_turn else [self.names]:
            for fqn in some:
                self.gather(fqn, given[fqn])
            began_s = time.perf_counter()
            self.optimizer.step()
            spent_s += time.perf_counter() - began_s
            for fqn in some:
                self.give_up(fqn)
        return spent_s

    @property
    def kept_bytes(self) -> int:
        states = self.optimizer.state.values()
        return sum(v.nbytes for s in states for v in s.values() if isinstance(v, torch.Tensor))

    @property
    def came_bytes(self) -> int:
        own = sum(self.state.local[fqn].nbytes for fqn in self.names)
        return 2 * (sum(self.state.parameters[fqn].numel() * 4 for fqn in self.names) - own)


class ByOwners:
    """What elastic does, with buckets of a size."""

    def __init__(self, state: TrainState, bucket_bytes: int) -> None:
        self.state, self.bucket_bytes = state, bucket_bytes
        self.came_bytes = 0
        self.spent_s = 0.0

    def __call__(self, given: Gradients) -> float:
        update = self.state.owner_update
        if self.bucket_bytes != owner_update.BUCKET_BYTES:
            owner_update.BUCKET_BYTES = self.bucket_bytes
            update.__dict__.pop("buckets", None)
        plain, stepped = update._begun, self.state.optimizers.step_whole
        self.came_bytes, self.spent_s = 0, 0.0

        def begun(send: torch.Tensor, ways: Ways) -> Flight:
            self.came_bytes += sum(w.n_bytes for k, w in enumerate(ways.got) if k != update.me)
            return plain(send, ways)

        def step_whole(*args: Any) -> None:
            began_s = time.perf_counter()
            stepped(*args)
            self.spent_s += time.perf_counter() - began_s

        update._begun = begun  # type: ignore[method-assign]
        self.state.optimizers.step_whole = step_whole  # type: ignore[method-assign]
        try:
            update.gather(given)
            update.step(given, self.state.optimizers)
        finally:
            del update._begun, self.state.optimizers.step_whole
        return self.spent_s

    @property
    def kept_bytes(self) -> int:
        return sum(v.nbytes for s in self.state.owner_update.kept.values() for v in s.values())


def values_of(state: TrainState) -> str:
    digest = blake2b(digest_size=16)
    for one in state.owner_update.stepped:
        digest.update(state.local[one.spec.fqn].detach().contiguous().numpy())
    return digest.hexdigest()


def each_memory() -> None:
    """From now on what is freed is given back at once, so that resident memory is what is used."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 14)


def ways(
    rank: int, n: int, store: tuple[str, int], size: Size, repeats: int
) -> dict[str, dict[str, Any]]:
    """All ways in turn, `repeats` times; then once more, for their memory."""
    torch.set_num_threads(1)
    found: defaultdict[str, Took] = defaultdict(Took)
    job = Job(steps=100, global_batch=n, optimizer=MUON)
    with stepping(size.program(), job, Layout(dp_shard=n), rank, store) as state:
        made: dict[str, Callable[[Gradients], float]] = {
            OWNERS: ByOwners(state, size.bucket_bytes),
            ONE_BUCKET: ByOwners(state, 1 << 40),
            EVERYWHERE: Everywhere(state, in_turn=False),
            IN_TURN: Everywhere(state, in_turn=True),
        }
        for name, way in made.items():  # from the same beginning: the same end
            state.fill_fresh(SEED)
            for step in range(2):
                way(gradients(state, step))
            found[name].values = values_of(state)
            found[name].n_buckets = len(state.owner_update.buckets)
        given = gradients(state, 3)
        for _ in range(repeats):
            for name, way in made.items():
                state.owner_update.groups.commit.barrier()
                began_s, cpu_s = time.perf_counter(), time.process_time()
                found[name].optimizer_s.append(way(given))
                found[name].step_s.append(time.perf_counter() - began_s)
                found[name].cpu_s.append(time.process_time() - cpu_s)
        each_memory()
        for name, way in made.items():
            way(given)
            peaks = []
            for _ in range(MEASURED):
                trim()
                before_bytes = begin()
                way(given)
                peaks.append(peak_bytes() - before_bytes)
            # the highest come where gloo's threads are late to give up what has been sent
            found[name].peak_bytes = int(median(peaks))
            found[name].came_bytes, found[name].kept_bytes = way.came_bytes, way.kept_bytes
    return {name: vars(took) for name, took in found.items()}
