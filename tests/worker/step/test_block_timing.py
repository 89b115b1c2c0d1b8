"""What a rank computes by itself is timed apart from what it waits for, and a drill makes it slow,
wrong or stall."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from support.places import PROGRAMS
from support.waiting import is_waiting, until
from support.worker.chain import job_of
from support.worker.plans import plan
from support.worker.worker_pool import Pool

from elastic.program import load_program
from elastic.types import Layout, RanksTimed, StepDone
from elastic.types.orders import InjectFault
from elastic.worker.process.fault_injection import DeviceFaults, Slowness
from elastic.worker.step.block_timing import BlockTiming

PROGRAM = load_program(str(PROGRAMS / "tiny.py"))


def one_pass(faults: DeviceFaults) -> tuple[float, float, torch.Tensor, torch.Tensor]:
    """Seconds of the forward passes as timed, of both passes on the wall, the output, a
    gradient."""
    torch.manual_seed(0)
    model = PROGRAM.model()
    PROGRAM.init(model)
    spans = BlockTiming([model], PROGRAM, torch.device("cpu"), faults=faults)
    assert spans.n_blocks == 4
    spans.next_step()
    began = time.perf_counter()
    output = model(torch.arange(32).reshape(2, 16))
    output.sum().backward()
    return (
        spans.taken_s(),
        time.perf_counter() - began,
        output.detach(),
        next(model.parameters()).grad.clone(),
    )


def test_a_slow_device_takes_its_time_forward_and_backward_and_computes_the_same() -> None:
    plain = one_pass(DeviceFaults())
    slow = DeviceFaults()
    slow.inject_fault("slow", factor=2.0, unit_s=0.006)
    passes = [one_pass(slow) for _ in range(5)]
    for timed_s, wall_s, output, gradient in passes:
        assert torch.equal(output, plain[2]) and torch.equal(gradient, plain[3])
        assert wall_s >= 2 * 4 * 0.006 * 2  # rows x blocks x unit_s x factor
        assert timed_s >= 2 * 4 * 0.006 * 2 / 3 * 0.5
    # In one of them at least, on a machine that stalls at times.
    assert min(timed_s / wall_s for timed_s, wall_s, *_ in passes) < 0.5, (
        "a third of it is the forward pass"
    )
    assert plain[0] > 0


def test_a_slow_device_without_a_unit_takes_a_multiple() -> None:
    assert Slowness(3.0).missing_s(0.5, 7, 1 / 3) == pytest.approx(1.0)
    assert Slowness(2.0, unit_s=0.1).missing_s(0.1, 3, 0.5) == pytest.approx(0.2)
    assert Slowness(2.0, unit_s=0.1).missing_s(9.0, 3, 0.5) == 0
    assert not Slowness().on and Slowness(1.0, unit_s=0.1).on


def test_jitter_is_drawn_for_each_step() -> None:
    faults = DeviceFaults()
    faults.inject_fault("slow", factor=2.0, jitter=0.1)
    drawn = []
    for _ in range(50):
        faults.next_step()
        drawn.append(faults.slow.factor)
    assert 1.8 <= min(drawn) < 1.9 and 2.1 < max(drawn) <= 2.2


def test_a_corrupt_device_computes_wrong_numbers() -> None:
    wrong = DeviceFaults()
    wrong.inject_fault("corrupt")
    assert not torch.allclose(one_pass(DeviceFaults())[2], one_pass(wrong)[2], rtol=1e-3)


def test_a_stalled_device_stands_still() -> None:
    stalled = DeviceFaults()
    stalled.inject_fault("stall")
    thread = threading.Thread(target=one_pass, args=(stalled,), daemon=True)
    thread.start()
    until(lambda: is_waiting(thread) or not thread.is_alive(), "its stalling")
    assert thread.is_alive()
    with pytest.raises(ValueError, match="not 'tired'"):
        stalled.inject_fault("tired")


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=4), Layout(dp_replicate=2, dp_shard=2), Layout(pp=2, dp_shard=2)]
)
def test_the_slow_rank_is_told_apart_from_those_that_wait_for_it(
    pool: Pool, tmp_path: Path, layout: Layout
) -> None:
    """A sample takes 30 ms through a block on rank 2 and 6 ms on the others; all of them take the
    same time for a step."""
    job = job_of("tiny.py", steps=12)
    workers = pool.open(job, tmp_path)
    for i, worker in enumerate(workers):
        pool.order(worker, InjectFault("slow", 5.0 if i == 2 else 1.0, 0.006))
    pool.enter(plan(1, layout, workers, 12))
    pool.wait(lambda: any(e.step >= 8 for e in pool.events(StepDone)), "8 steps")
    # the least of each: a machine that others use only adds to it
    unit_s = [min(of_rank) for of_rank in zip(*(e.unit_s for e in pool.events(RanksTimed)))]
    slow_s = unit_s.pop(2)
    assert slow_s > 2.5 * max(unit_s)
    assert slow_s >= 0.99 * 0.030 / 3 and min(unit_s) >= 0.99 * 0.006 / 3
