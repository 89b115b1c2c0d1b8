"""What is measured of one GPU, each number set in a process of its own: `python -m
elastic.certify.gpu.one_gpu NAME [dry]`.

Prints the figures as one JSON object. `dry`: the same code at tiny sizes without a GPU; its numbers
mean nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from elastic.certify.gpu.one_rank_steps import Ours, Plain, Syncs, in_turn
from elastic.certify.gpu.real_faults import RealFaultSession
from elastic.certify.gpu.solo import Solo, device_of, memory_mib, open_fds, plan_for, sized, slope
from elastic.certify.harness.layouts_tried import live
from elastic.types import Abort, Box, Quiesced, WorkerFailed
from elastic.types.orders import InjectFault, WorkerOrder
from elastic.worker.process import environment
from elastic.worker.process.allocator import settle_cuda_allocator
from elastic.worker.state.host_copy import HostCopies, HostMemory, Tensors

GB = 10**9
GENERATIONS, DRY_GENERATIONS = 50, 5
FIRST = 5  # the first of so many generations are warm-up: caches fill
SYNCED = 4  # steps whose synchronizations are counted
Figures = dict[str, Any]


def step(dry: bool) -> Figures:
    """A Llama of 1.2 B parameters in bfloat16: plain FSDP2 beside elastic's step."""
    rows, blocks = (4, 2) if dry else (8, 3)
    program, job = sized("tiny" if dry else "1b", rows)
    device = device_of(dry)
    ours = Ours(program, job, device, rows=rows)
    ours.cut(1)
    plain = Plain(program, job, device, rows=rows)
    losses = [each.steps(1)[1][0] for each in (ours, plain)]
    step_s, bare_s = map(median, in_turn(ours, plain, blocks=blocks))
    with Syncs(dry) as seen:
        ours.steps(SYNCED)
    del plain
    ours.close()
    return {
        "step_time_ratio": step_s / bare_s, "step_s": step_s, "bare_s": bare_s,
        "syncs_per_step": seen.places.total() / SYNCED,
        "loss_difference": abs(losses[0] - losses[1]),
    }  # fmt: skip


def copies(dry: bool) -> Figures:
    """A rank's state of 14 GB to pinned and to pageable host memory."""
    device = device_of(dry)
    tensors = boxed(1 << 20 if dry else 14 * GB, 4 if dry else 200, device)
    return copied(tensors, HostMemory(pinned=not dry), device)


def generations(dry: bool) -> Figures:
    """Live generations in one process: what memory and descriptors grow by."""
    found = lived("tiny", DRY_GENERATIONS, dry) if dry else lived("300m", GENERATIONS, dry)
    return {
        "n": found["n"],
        "pause_s": found["pause_s"],
        **{f"{key}_growth": slope(v) for key, v in found["seen"].items()},
    }


def error(dry: bool) -> Figures:
    """A CUDA error that stays: it is the device's, nothing on that GPU is offered, and the process
    answers."""
    _, job = sized("tiny", 8)
    solo = Solo(job, RealFaultSession)
    assert solo.session.place is not None
    solo.enter(plan_for(solo.me, 1, solo.session.place.profile.n_blocks, cut=(8, 1)))
    solo.stepped(1, 2)
    began = time.monotonic()
    solo.session.order(WorkerOrder(InjectFault("illegal")))
    solo.until(lambda: solo.of(WorkerFailed), "the error is reported", fails=True)
    reported_s, failed = time.monotonic() - began, solo.of(WorkerFailed)[0]
    solo.session.order(WorkerOrder(Abort(1)))
    solo.until(lambda: solo.of(Quiesced, 1), "out of the generation", fails=True)
    offered = [holding for event in solo.of(Quiesced) for holding in event.holdings]
    return {
        "kind_is_device": int(failed.kind == "device"), "reported_s": reported_s,
        "kind": failed.kind, "live_offered": sum(holding.kind == "live" for holding in offered),
    }  # fmt: skip


def memory(dry: bool) -> Figures:
    """A batch that no GPU has the memory for; then, in the same process, the same one in small
    parts."""
    return out_of_memory(*(("tiny", 8) if dry else ("300m", 256)))


# ------------------------------------------------------------------------- parts, for tests/gpu too


def boxed(n_bytes: int, n: int, device: torch.device) -> Tensors:
    """`n` boxes of float32 with drawn numbers, so many bytes together, as a rank holds them."""
    columns = 1024
    rows = max(1, n_bytes // (4 * n * columns))
    return {
        f"model.part{i}": (
            Box(f"model.part{i}", (0, 0), (rows, columns), "float32"),
            torch.randn(rows, columns, device=device),
        )
        for i in range(n)
    }


def copied(tensors: Tensors, memory: HostMemory, device: torch.device) -> Figures:
    """Two host copies of the boxes, the first with its buffer; then some boxes to pageable
    memory."""
    n_bytes = sum(box.n_bytes for box, _ in tensors.values())
    host = HostCopies(memory, tensors, frozenset(), limit=2, device=device)
    took_s, equal = [], False
    for number in (1, 2):
        began = time.perf_counter()
        copy = host.take(number)
        assert copy is not None
        there = copy.wait()
        took_s.append(time.perf_counter() - began)
        equal = all(
            torch.equal(there[fqn][1], tensor.cpu())
            for fqn, (_, tensor) in list(tensors.items())[:3]
        )
        copy.release()
    host.close()
    some = [tensor for _, tensor in tensors.values()][: max(4, len(tensors) // 5)]
    began = time.perf_counter()
    pageable = [tensor.to("cpu", copy=True) for tensor in some]
    pageable_s = time.perf_counter() - began
    return {
        "first_s": took_s[0], "pinned_gb_per_s": n_bytes / GB / took_s[1], "equal": int(equal),
        "pageable_gb_per_s": sum(t.nbytes for t in pageable) / GB / pageable_s, "gb": n_bytes / GB,
    }  # fmt: skip


def lived(size: str, n: int, dry: bool, *, most_s: float = 600.0) -> Figures:
    """`n` live generations, or as many as fit: `seen` has what memory and descriptors were after
    each, but the first ones."""
    ends_s, rows = time.monotonic() + most_s, 8
    _, job = sized(size, rows)
    solo = Solo(job)
    assert solo.session.place is not None
    n_blocks = solo.session.place.profile.n_blocks
    seen: dict[str, list[float]] = {}
    plan, pauses = None, []
    for number in range(1, n + 1):
        more: dict[str, Any] = {"resume": live(plan)} if plan is not None else {}
        began = time.monotonic()
        plan = plan_for(solo.me, number, n_blocks, cut=(rows, 1 if dry else rows), **more)
        solo.enter(plan)
        solo.stepped(number, 1)
        pauses.append(time.monotonic() - began)
        solo.stepped(number, 2)
        if number > min(FIRST, n // 4):
            for key, value in (memory_mib(dry) | {"fds": open_fds()}).items():
                seen.setdefault(key, []).append(value)
        if time.monotonic() > ends_s:
            break
    assert plan is not None
    solo.leave(plan.generation)
    return {"n": plan.generation, "pause_s": median(pauses[1:]), "seen": seen}


def out_of_memory(size: str, rows: int) -> Figures:
    _, job = sized(size, rows)
    solo = Solo(job)
    assert solo.session.place is not None
    n_blocks = solo.session.place.profile.n_blocks
    first = plan_for(solo.me, 1, n_blocks, cut=(rows, 1))
    solo.enter(first)
    solo.until(lambda: solo.of(Quiesced, 1), "out of memory", fails=True)
    failed = solo.of(WorkerFailed)
    solo.events = [(at, e) for at, e in solo.events if not isinstance(e, WorkerFailed)]
    solo.enter(replace(plan_for(solo.me, 2, n_blocks, cut=(rows, rows // 2)), resume=live(first)))
    steps = len(solo.stepped(2, 1))
    held_gb = torch.cuda.memory_allocated() / GB if torch.cuda.is_available() else 0.0
    solo.leave(2)
    kind = failed[0].kind if failed else "none"
    return {
        "kind_is_out_of_memory": int(kind == "out_of_memory"),
        "kind": kind,
        "smaller_steps": steps,
        "held_gb": held_gb,
    }


MEASURES: dict[str, Callable[[bool], Figures]] = {
    "step": step, "copies": copies, "generations": generations, "error": error, "memory": memory,
}  # fmt: skip


def main(words: list[str]) -> None:
    environment.settle()
    settle_cuda_allocator()
    dry = words[1:] == ["dry"]
    if not dry:
        torch.cuda.set_device(device_of(dry))
    print(json.dumps(MEASURES[words[0]](dry)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
