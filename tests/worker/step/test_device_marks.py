"""How far a GPU has come, with made-up events: counted when they are passed, from any thread, and
used again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.places import PROGRAMS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from elastic.program import load_program
from elastic.types import Job, Layout, WorkerId
from elastic.types.grid import Coordinates
from elastic.worker.hosting.absent_ranks import RankSite, absent_ranks
from elastic.worker.parallel.model_options import ModelOptions
from elastic.worker.parallel.parallelize import parallelize
from elastic.worker.process.doing import DEVICE
from elastic.worker.process.fault_injection import DeviceFaults
from elastic.worker.session.generation import Generation
from elastic.worker.step import device_marks
from elastic.worker.step.block_timing import BlockTiming
from elastic.worker.step.device_marks import DeviceMarks
from elastic.worker.step.loss_scale import profile_of

PROGRAM = load_program(str(PROGRAMS / "tiny.py"))
A, B, C = (WorkerId(f"n{i}", 0) for i in range(3))


def tiny() -> nn.Module:
    torch.manual_seed(0)
    model = PROGRAM.model()
    PROGRAM.init(model)
    return model


class Device:
    """A GPU that has passed `n` of the events recorded on it; `made` events exist."""

    n = made = recorded = 0
    lost = False


class Event:
    def __init__(self) -> None:
        Device.made += 1
        self.number = 0

    def record(self) -> None:
        Device.recorded += 1
        self.number = Device.recorded

    def query(self) -> bool:
        if Device.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.number <= Device.n


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> DeviceMarks:
    for name, value in (("n", 0), ("made", 0), ("recorded", 0), ("lost", False)):
        monkeypatch.setattr(Device, name, value)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return DeviceMarks(torch.device("cuda", 0))


def test_what_is_enqueued_is_not_yet_passed(marks: DeviceMarks) -> None:
    for _ in range(5):
        marks.mark("own")
    assert marks.passed() == (0, "own")
    Device.n = 3
    assert marks.passed() == (3, "own")
    marks.mark("own")
    assert Device.made == 5, "an event that was passed is used again"
    Device.n = 6
    assert marks.passed() == (6, "done")


def test_a_lost_device_stays_where_it_was(marks: DeviceMarks) -> None:
    marks.mark("own")
    Device.n = 1
    assert marks.passed() == (1, "done")
    marks.mark("own")
    Device.lost = True
    assert marks.passed() == (1, "own")


def test_events_are_bounded_where_nobody_asks(
    marks: DeviceMarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_marks, "AHEAD", 4)
    for n in range(50):
        marks.mark("own")
        Device.n = n
    assert Device.made <= 5
    assert marks.passed() == (49, "own")


def test_a_cpu_has_none_and_its_tensors_are_left_alone() -> None:
    marks, x = DeviceMarks(torch.device("cpu")), torch.ones(2, requires_grad=True)
    marks.mark("own")
    assert marks.entering((x,))[0] is x
    marks.leaving(made := x * 2)
    made.sum().backward()
    assert marks.passed() == (0, "done")


def test_a_beat_tells_it_beside_the_collectives() -> None:
    """Among the ranks that compute the same samples."""
    generation: Any = Generation.__new__(Generation)
    at = Coordinates(pp=1, dp_replicate=0, dp_shard=1, cp=0, tp=1)
    marks = SimpleNamespace(passed=lambda: (7, "own"))
    generation.plan = SimpleNamespace(layout=Layout(pp=2, dp_shard=2, tp=2))
    generation.groups = SimpleNamespace(
        device=torch.device("cuda", 0), arrived=lambda: (("pp", 0, 4),)
    )
    generation._built = None
    assert generation.arrived() == (("pp", 0, 4),)
    generation._built = SimpleNamespace(at=at, spans=SimpleNamespace(marks=marks))
    assert generation.arrived() == (("pp", 0, 4), ("device:own", 6, 7))


# --------------------------------------------------------------------------------- a model's passes


def trained(model: nn.Module, n_microbatches: int = 1) -> DeviceMarks:
    """The marks of a step, with nothing passed yet."""
    Device.n = Device.recorded = 0
    spans = BlockTiming([model], PROGRAM, torch.device("cuda", 0), faults=DeviceFaults())
    spans.timing = False
    for i in range(n_microbatches):
        model(torch.arange(32).reshape(2, 16) + i).sum().backward()
    spans.marks.mark("others")  # behind the sums of gradients
    return spans.marks


def kinds(marks: DeviceMarks) -> list[str]:
    return [kind for _, kind in marks._ahead]


def stands(marks: DeviceMarks, n: int, dp: int) -> RankSite:
    """A rank whose GPU has passed `n` of them."""
    Device.n = n
    passed, part = marks.passed()
    return RankSite((("dp_shard", 0, 9), (DEVICE + part, dp, passed)), "device")


@pytest.mark.usefixtures("marks")
def test_each_block_has_marks_before_and_behind_it_there_and_back() -> None:
    assert kinds(trained(tiny())) == ["others", "own"] * 8 + ["others"]
    with torch.no_grad():
        marks = BlockTiming(
            [model := tiny()], PROGRAM, torch.device("cuda", 0), faults=DeviceFaults()
        ).marks
        model(torch.arange(32).reshape(2, 16))
    assert kinds(marks) == ["others", "own"] * 4


@pytest.mark.usefixtures("marks")
def test_marks_change_no_number() -> None:
    plain, marked = tiny(), tiny()
    BlockTiming([marked], PROGRAM, torch.device("cuda", 0), faults=DeviceFaults()).timing = False
    tokens = torch.arange(32).reshape(2, 16)
    for model in (plain, marked):
        model(tokens).square().sum().backward()
    for one, other in zip(plain.parameters(), marked.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.usefixtures("marks")
def test_a_gpu_that_hangs_there_or_back_is_named_by_those_that_wait_before_the_next_block(
    block: int, back: bool
) -> None:
    before = 2 * (block + 4 * back) + 1  # marks up to that block
    hangs = stands(trained(tiny()), before, 0)
    others = [stands(trained(tiny()), before + 1, dp) for dp in (1, 2)]
    assert list(absent_ranks({A: hangs, B: others[0], C: others[1]}, staged=False)) == [A]


@pytest.mark.usefixtures("marks")
def test_whoever_has_fewer_micro_batches_is_not_named() -> None:
    """All have computed what they had, and wait for a sum that does not come."""
    n = [stands(trained(tiny(), n), 16 * n, n) for n in (1, 2)]
    assert absent_ranks({A: n[0], B: n[1]}, staged=False) == {}
    hangs = stands(trained(tiny(), 2), 16 + 9, 2)
    assert list(absent_ranks({A: n[0], B: hangs}, staged=False)) == [B], (
        "though it has done more than A"
    )


@pytest.mark.usefixtures("marks")
def test_gathers_are_before_others_and_sums_behind_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 lets the stream wait in its hooks; ours must lie within those."""
    seen: list[str] = []
    waits, reduces, mark = (
        FSDPParamGroup.wait_for_unshard,
        FSDPParamGroup.post_backward,
        DeviceMarks.mark,
    )

    def noting(what: Any, how: Any) -> Any:
        return lambda self, *given: (seen.append(what or given[0]), how(self, *given))[1]

    for owner, name, how in [
        (FSDPParamGroup, "wait_for_unshard", waits),
        (FSDPParamGroup, "post_backward", reduces),
    ]:
        monkeypatch.setattr(owner, name, noting(name, how))
    monkeypatch.setattr(DeviceMarks, "mark", noting("", mark))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = tiny()
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        options = ModelOptions(compute=torch.bfloat16, reduce=torch.float32)
        groups: Any = SimpleNamespace(mesh=mesh, ep=None)
        parallelize(model, PROGRAM, profile_of(PROGRAM, Job()), groups=groups, options=options)
        trained(model)
    finally:
        dist.destroy_process_group()
    text = " ".join(seen)
    assert text.count("wait_for_unshard others own") == 8, (
        "nothing of the gather is behind its mark"
    )
    assert text.count("own post_backward") >= 3 and "post_backward own" not in text
