"""Steps of one rank: elastic's own called one by one, the same in plain FSDP2, and where the host
waits for the device."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from elastic.certify.gpu.solo import plan_for
from elastic.data.collate import collate
from elastic.data.order import sample_ids
from elastic.reshard.rank_boxes import RNG
from elastic.types import Job, Layout, WorkerId
from elastic.types.orders import Rendezvous
from elastic.worker.parallel.model_options import needs_fsdp
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.rendezvous import host_store
from elastic.worker.program.calls import cut_rows
from elastic.worker.state.host_copy import HostCopies, HostMemory
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.batch_shares import BatchShares
from elastic.worker.step.commit_vector import CommitFields
from elastic.worker.step.loss_scale import profile_of
from elastic.worker.step.optimizer_step import Stepper

A_TURN = 4  # steps of one before those of the other


class Syncs:
    """Where the host waits for the device, as torch.cuda.set_sync_debug_mode sees it."""

    def __init__(self, cpu: bool) -> None:
        self.cpu, self.places = cpu, Counter[str]()
        self._catch = warnings.catch_warnings()

    def __enter__(self) -> Syncs:
        self._catch.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note  # type: ignore[assignment]
        self._mode("warn")
        return self

    def __exit__(self, *exc: object) -> None:
        self._mode("default")
        self._catch.__exit__(None, None, None)

    def _mode(self, mode: str) -> None:
        if not self.cpu:
            torch.cuda.set_sync_debug_mode(mode)

    def _note(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if "called a synchronizing" in str(message):
            self.places[f"{filename.rpartition('/')[2]}:{lineno}"] += 1


class Ours:
    """elastic's state and steps of one rank on one GPU, called one by one."""

    def __init__(self, program: Any, job: dict[str, Any], device: Any, *, rows: int) -> None:
        self.program, self.job, self.device, self.rows = program, Job.from_plain(job), device, rows
        profile = profile_of(program, self.job)
        self.n_blocks, self.me = profile.n_blocks, WorkerId("node0", 0)
        self.store = host_store("127.0.0.1", 30.0)
        self.groups = Groups(1, Layout(), device, fsdp=needs_fsdp(self.job, Layout()))
        self.groups.join(Rendezvous((self.me,), ("127.0.0.1", self.store.port)), 0)
        self.state = TrainState(
            program,
            profile,
            self.groups,
            layout=Layout(),
            layers=(self.n_blocks,),
            rank=0,
            job=self.job,
        )
        self.state.fill_fresh(self.job.seed)
        memory = HostMemory(pinned=device.type == "cuda")
        self.host = HostCopies(memory, self.state.tensors, frozenset({RNG}), limit=2)
        self.dataset = program.dataset()
        self.stepper: Any = None

    def cut(self, n_microbatches: int) -> None:
        """Steps have so many micro-batches from now on. (One stepper: each has hooks on the
        blocks.)"""
        plan = plan_for(self.me, 1, self.n_blocks, cut=(self.rows, n_microbatches))
        self.stepper = self.stepper or Stepper(
            self.program, self.job, plan, state=self.state, groups=self.groups
        )
        self.stepper.plan, self.stepper.shares = plan, BatchShares(self.job, plan)

    def steps(self, n: int, copy: bool = False) -> tuple[list[float], list[float]]:
        """Seconds and loss of each; with a host copy of each boundary."""
        self.state.before_change = self.host.settle if copy else (lambda: None)
        taken, times, losses, stepper = None, [], [], self.stepper
        for _ in range(n):
            batch = collate([self.dataset[i] for i in stepper.shares.ids(self.state.step)])
            began = time.perf_counter()
            commit = stepper.run([batch], CommitFields()).commit
            if copy:
                if taken is not None:
                    taken.wait()
                    taken.release()
                taken = self.host.take(self.state.step)
            times.append(time.perf_counter() - began)
            losses.append(commit.train_loss)
        if taken is not None:
            taken.wait()
            taken.release()
        return times, losses

    def close(self) -> None:
        self.host.close()
        self.groups.close()


class Plain:
    """The same model, batches, micro-batches and precision in a loop of plain FSDP2, in the process
    and on the world of `Ours`."""

    def __init__(self, program: Any, job: dict[str, Any], device: Any, *, rows: int) -> None:
        self.program, self.job, self.device, self.rows = program, job, device, rows
        torch.manual_seed(job["seed"])
        self.model = program.model()
        torch.manual_seed(job["seed"])
        program.init(self.model)
        self.model.to(device)
        world = dist.group.WORLD
        assert world is not None
        mesh = DeviceMesh.from_group(world, device.type)
        half, full = torch.bfloat16, torch.float32
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(half, full))
        fully_shard(self.model, mesh=mesh, mp_policy=MixedPrecisionPolicy(half, full, full))
        self.optimizer = program.optimizer(list(self.model.named_parameters()))
        self.dataset, self.step, self.n_microbatches = program.dataset(), 0, 1

    def cut(self, n_microbatches: int) -> None:
        """Steps have so many micro-batches from now on. Gradients are sharded in each, as in
        elastic's."""
        self.n_microbatches = n_microbatches

    def steps(self, n: int) -> tuple[list[float], list[float]]:
        """Seconds and loss of each."""
        times, losses, parameters = [], [], list(self.model.parameters())
        for _ in range(n):
            ids = sample_ids(len(self.dataset), self.rows, self.job["seed"], step=self.step)
            batch = collate([self.dataset[i] for i in ids])
            began = time.perf_counter()
            there = {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
            total = torch.zeros((), device=self.device)
            for rows in cut_rows(self.rows, self.n_microbatches):
                part = {key: value[rows.start : rows.stop] for key, value in there.items()}
                loss = self.program.loss(self.model(part["input"]), part)
                loss = loss / batch["target"].numel()
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(parameters, self.job["clip_grad_norm"])
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(total))
            times.append(time.perf_counter() - began)
            self.step += 1
        return times, losses


def in_turn(
    ours: Ours, plain: Plain, *, n_microbatches: int = 1, copy: bool = False, blocks: int = 3
) -> tuple[list[float], list[float]]:
    """Seconds of steps of both, in turn: a few of one, then of the other, so that what the machine
    does meanwhile falls on both. The first ones are warm-up, like the first of each turn."""
    ours.cut(n_microbatches)
    plain.cut(n_microbatches)
    mine: list[float] = []
    beside: list[float] = []
    for block in range(blocks):
        taken, _ = ours.steps(A_TURN, copy)
        own, _ = plain.steps(A_TURN)
        if block:
            mine += taken[1:]
            beside += own[1:]
    return mine, beside
