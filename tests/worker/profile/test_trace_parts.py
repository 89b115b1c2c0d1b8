"""Where the time of steps went, by traces that are made up and whose answer is known."""

from __future__ import annotations

import random
from typing import Any

import pytest

from elastic.worker.profile.trace_parts import common, length, parts_of, union, without

MS = 1000.0  # of the trace's microseconds


def event(name: str, begin: float, end: float, cat: str = "cpu_op", **more: Any) -> dict[str, Any]:
    """Milliseconds."""
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 7, "ts": begin * MS,
        "dur": (end - begin) * MS, **more,
    }  # fmt: skip


def said(name: str, begin: float, end: float, **more: Any) -> dict[str, Any]:
    return event(name, begin, end, "user_annotation", **more)


def kernel(name: str, begin: float, end: float, group: str = "") -> dict[str, Any]:
    args = {"args": {"Process Group Name": group}} if group else {}
    return event(name, begin, end, "kernel", tid=42, **args)


def milliseconds(found: Any) -> dict[str, float]:
    return {part: round(seconds * 1000, 6) for part, seconds in found.parts.items()}


def test_on_a_cpu_the_innermost_event_of_the_training_thread_counts() -> None:
    found = parts_of(
        [
            said("elastic.step 5", 0, 100),
            said("elastic.data", 0, 5),
            said("elastic.passes", 5, 80),
            said("FSDP::pre_forward (0)", 5, 20),
            said("FSDP::all_gather (0)", 6, 18),
            event("c10d::_allgather_base_", 7, 16),
            event("aten::copy_", 16, 17),
            event("aten::linear", 20, 40),
            event("aten::addmm", 21, 39),
            event("_c10d_functional::all_reduce", 40, 42),
            event("_c10d_functional::wait_tensor", 42, 47),
            event("autograd::engine::evaluate_function: AddmmBackward0", 50, 70),
            event("aten::mm", 51, 69),
            said("FSDP::post_backward_reduce (0)", 70, 78),
            event("c10d::_reduce_scatter_base_", 71, 74),
            event("c10d::allreduce_", 74, 77),
            said("elastic.commit", 80, 88),
            said("elastic.optimizer", 88, 94),
            event("aten::_fused_adamw_", 89, 93),
            said("elastic.copies", 94, 96),
            # another thread's work hides nothing: the training thread waits all the same
            event("aten::mm", 6, 18, tid=8),
        ]
    )
    assert milliseconds(found) == {
        "compute": 1 + 20 + 20, "fsdp": 11 + 5, "dp_replicate": 3.0, "tp": 7.0, "commit": 8.0,
        "optimizer": 6.0, "data": 5.0, "copies": 2.0, "idle": 3 + 3 + 2 + 4,
    }  # fmt: skip
    assert sum(milliseconds(found).values()) == 100
    assert (found.steps, found.step_s, found.on_device) == ((5,), pytest.approx(0.1), False)


def test_the_shortest_wait_between_stages_is_the_transfer_and_the_rest_the_bubble() -> None:
    found = parts_of(
        [
            said("elastic.step 1", 0, 60),
            said("elastic.pp schedule", 0, 60),
            said("elastic.stage 1 forward", 20, 30),
            event("aten::mm", 20, 30),
            event("c10d::recv_", 30, 30.5),
            event("aten::empty", 31, 31.02),  # it does not make two waits of one
            said("elastic.stage 1 backward", 32.02, 50),
            event("aten::mm", 32.02, 50),
        ]
    )
    # waits of 20, 2 and 10 ms
    assert milliseconds(found) == pytest.approx(
        {"compute": 28.0, "pp": 6.0, "bubble": 26.0}, abs=0.1
    )


def test_an_operation_in_a_stage_waits_for_nobody_and_tp_in_it_does() -> None:
    found = parts_of(
        [
            said("elastic.step 1", 0, 10),
            said("elastic.pp schedule", 0, 10),
            said("elastic.stage 0 forward", 0, 10),
            event("aten::mm", 1, 6),
            event("_c10d_functional::wait_tensor", 6, 8),
        ]
    )
    assert milliseconds(found) == {"compute": 5.0, "tp": 2.0, "idle": 3.0}


def test_collectives_that_say_nothing_are_of_the_axis_that_is_given() -> None:
    events = [said("elastic.step 1", 0, 10), event("c10d::_allgather_base_", 2, 6)]
    assert milliseconds(parts_of(events, otherwise="cp")) == {"cp": 4.0, "idle": 6.0}
    assert milliseconds(parts_of(events)) == {"other ranks": 4.0, "idle": 6.0}


def test_on_a_gpu_a_collective_counts_where_no_kernel_hides_it() -> None:
    found = parts_of(
        [
            said("elastic.step 1", 0, 100),
            said("elastic.data", 0, 12),
            said("elastic.commit", 90, 96),
            event("aten::mm", 0, 90),  # that the host was busy says nothing
            kernel("gemm", 10, 40),
            kernel("gemm", 35, 50),
            kernel("ncclDevKernel_AllGather", 30, 60, "g1"),
            kernel("ncclDevKernel_AllReduce", 55, 65, "g2"),
            kernel("gemm", 65, 80),
            kernel("ncclDevKernel_ReduceScatter", 66, 70, "g1"),
            kernel("adam", 80, 88),
            event("elastic.optimizer", 79, 88, "gpu_user_annotation", tid=42),
            kernel("outside", 200, 300),
        ],
        {"g1": "fsdp", "g2": "tp"},
    )
    assert milliseconds(found) == {
        "compute": 54.0, "optimizer": 9.0, "fsdp": 10.0, "tp": 5.0, "data": 10.0, "commit": 6.0,
        "idle": 6.0,
    }  # fmt: skip
    hidden = {axis: round(1000 * seconds) for axis, seconds in found.collectives.items()}
    assert (hidden, found.on_device) == ({"fsdp": 34, "tp": 10}, True)


def test_several_steps_give_a_mean_and_what_lies_between_them_is_left_out() -> None:
    found = parts_of(
        [
            said("elastic.step 8", 20, 30),
            said("elastic.step 7", 0, 10),
            event("aten::mm", 5, 8),
            event("aten::mm", 12, 18),
            event("aten::mm", 28, 29),
        ]
    )
    assert (found.steps, milliseconds(found)) == ((7, 8), {"compute": 2.0, "idle": 8.0})


def test_without_a_step_there_is_nothing_to_say() -> None:
    with pytest.raises(ValueError, match="no whole step"):
        parts_of([event("aten::mm", 0, 1), {"ph": "M", "name": "process_name"}])


def test_intervals_are_what_moments_are() -> None:
    """Against sets of whole moments."""
    chance = random.Random(4)

    def some() -> list[tuple[float, float]]:
        each = [(chance.randrange(60), chance.randrange(60)) for _ in range(chance.randrange(9))]
        return union(each)

    def moments(intervals: list[tuple[float, float]]) -> set[int]:
        return {moment for begin, end in intervals for moment in range(int(begin), int(end))}

    for _ in range(300):
        one, other = some(), some()
        assert moments(common(one, other)) == moments(one) & moments(other)
        assert moments(without(one, other)) == moments(one) - moments(other)
        assert length(union([*one, *other])) == len(moments(one) | moments(other))
