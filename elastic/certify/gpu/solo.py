"""A rank alone in this process: a session that is driven as the backend drives one, and the program
that it trains."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from elastic.certify.harness.layouts_tried import job_of
from elastic.program import load_program
from elastic.scenarios.one_process import program_file
from elastic.types import (
    EnterPlan,
    Layout,
    NodePrepared,
    Plan,
    Prepare,
    Quiesce,
    Quiesced,
    StepDone,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import WorkerOrder
from elastic.worker.process.free_memory import resident_bytes
from elastic.worker.session.session import Session
from elastic.worker.session.workplace import host_rendezvous

MANY = 1_000_000  # steps: until it is told to stop


def sized(size: str, global_batch: int) -> tuple[Any, dict[str, Any]]:
    """The program in that size, and a job that trains it in bfloat16."""
    os.environ["CERTIFY_SIZE"] = size
    file = program_file("sized")
    program = load_program(file)
    job = job_of("one-gpu", file, MANY) | {"global_batch": global_batch, "n_samples": 4096}
    return program, job | {"precision": "bfloat16", "reduce_dtype": "float32"}


def device_of(cpu: bool) -> torch.device:
    return torch.device("cpu") if cpu else torch.device("cuda", 0)


class Solo:
    """A session in this process, as its only rank."""

    def __init__(self, job: dict[str, Any], of: type[Session] = Session) -> None:
        self.me = WorkerId("node0", 0)
        self.session = of(self.me, job, tempfile.mkdtemp(prefix="elastic-one-gpu-"))
        self.events: list[tuple[float, Any]] = []
        self._ack = 0
        self._stores: list[Any] = []
        self.session.order(WorkerOrder(Prepare(self.me.node_id)))
        self.until(lambda: self.of(NodePrepared), "prepared")

    def of(self, kind: Any, generation: int | None = None) -> list[Any]:
        found = [event for _, event in self.events if isinstance(event, kind)]
        return [e for e in found if generation in (None, getattr(e, "generation", None))]

    def drain(self, wait_s: float = 0.05) -> None:
        for number, event in self.session.poll(self._ack, wait_s).messages:
            self._ack = number
            self.events.append((time.monotonic(), event))

    def until(
        self, holds: Callable[[], Any], what: str, most_s: float = 60.0, *, fails: bool = False
    ) -> None:
        ends_s = time.monotonic() + most_s
        while not holds():
            self.drain()
            failed = self.of(WorkerFailed)
            if failed and not fails:
                raise RuntimeError(
                    f"while waiting for '{what}': {failed[0].kind}: {failed[0].error}"
                )
            if time.monotonic() > ends_s:
                raise RuntimeError(f"not within {most_s:g} s: {what}")

    def enter(self, plan: Any) -> None:
        rendezvous, store = host_rendezvous(plan, "127.0.0.1", 60.0, store_s=30.0)
        self._stores = [*self._stores[-1:], store]
        self.session.order(WorkerOrder(EnterPlan(plan), rendezvous))

    def stepped(self, generation: int, n: int, most_s: float = 60.0) -> list[Any]:
        self.until(
            lambda: len(self.of(StepDone, generation)) >= n,
            f"{n} steps of generation {generation}",
            most_s,
        )
        return self.of(StepDone, generation)

    def leave(self, generation: int) -> None:
        self.session.order(WorkerOrder(Quiesce(generation, save=False)))
        self.until(lambda: self.of(Quiesced, generation), "out of the generation", fails=True)
        self.session.close(10.0)


def plan_for(me: Any, number: int, n_blocks: int, *, cut: tuple[int, int], **more: Any) -> Any:
    """One rank. `cut`: samples, micro-batches."""
    return Plan(number, Layout(), (me,), (cut[0],), (n_blocks,), cut[1], **more)


def memory_mib(cpu: bool) -> dict[str, float]:
    """Of this process, and of the whole GPU."""
    found = {"rss_mib": rss_mib()}
    if not cpu:
        free, whole = torch.cuda.mem_get_info()
        found |= {
            "allocated_mib": torch.cuda.memory_allocated() / 2**20,
            "used_mib": (whole - free) / 2**20,
        }
        found["reserved_mib"] = torch.cuda.memory_reserved() / 2**20
    return found


def rss_mib() -> float:
    return resident_bytes() / 2**20


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def slope(values: list[float]) -> float:
    """Per step, by least squares."""
    n = len(values)
    middle, mean = (n - 1) / 2, sum(values) / max(1, n)
    below = sum((i - middle) ** 2 for i in range(n))
    return (
        sum((i - middle) * (value - mean) for i, value in enumerate(values)) / below
        if below
        else 0.0
    )
