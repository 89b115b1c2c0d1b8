"""What `elastic profile` measures: that calls do what they count, and that no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.child import child
from support.places import PROGRAMS
from support.waiting import until
from torch.utils.flop_counter import FlopCounterMode

from elastic.errors import InternalError
from elastic.program import load_program
from elastic.types import Attention, HardwareProfile, Job, Matmul
from elastic.worker.equivalence.job_numbers import model_profile_of, samples_of
from elastic.worker.profile import measure as measuring_side
from elastic.worker.profile.measure import MeasureRequest, hardware_of, measure
from elastic.worker.profile.measured_ops import (
    CallLimits,
    attended,
    fitting,
    mixed,
    ordinary,
    product,
    product_flop,
    stored,
)

CPU = torch.device("cpu")
LIMITS = CallLimits(64, 1e7, 1 << 20, 1 << 16)
PLACE = PROGRAMS / "tiny.py"
TINY = load_program(PLACE)
JOB: dict[str, Any] = {"program": "tiny.py", "steps": 4, "global_batch": 4}


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_products_do_the_work_that_is_counted() -> None:
    one, other = Matmul(32, 16, 24, count=2.0), Matmul(32, 24, 16, count=1.0)
    assert counted(product(one, torch.float32, CPU)) == product_flop(one)
    call, flop = mixed([one, other], torch.float32, CPU)
    assert counted(call) == flop == 3 * product_flop(one)


def test_products_that_are_too_large_lose_rows_and_hopeless_ones_are_left_out() -> None:
    small, wide, hopeless = (
        Matmul(8, 16, 16),
        Matmul(1 << 20, 64, 64, 2.0),
        Matmul(8, 1 << 12, 1 << 12),
    )
    found = fitting([small, small, wide, hopeless, Matmul(8, 600, 600)], 4, LIMITS)
    assert found == [
        Matmul(int(1e7 / (2 * 64 * 64)), 64, 64, count=2.0),
        Matmul(32, 16, 16, count=2.0),
    ]
    assert fitting([Matmul(64, 16, 16, experts=4)], 1, LIMITS) == [Matmul(16, 16, 16, count=4.0)]


def test_attention_is_measured_whole_or_in_part() -> None:
    one = Attention(16, 16, 4, 2, 8)
    _, flop = attended(one, 2, torch.float32, device=CPU, limits=LIMITS)
    assert flop == 3 * 2 * (4 * 16 * 16 * 4 * 8) / 2
    call, part = attended(
        replace(one, queries=1 << 14, keys=1 << 14), 2, torch.float32, device=CPU, limits=LIMITS
    )
    assert 0 < part <= 3 * LIMITS.flop
    call()


def test_bytes_of_ordinary_operations_are_those_that_a_trace_counts() -> None:
    call, n_bytes = ordinary(32, 64, torch.float32, device=CPU)
    size = 32 * 64 * 4
    assert 20 * size < n_bytes < 30 * size  # about ten operations, two or three tensors each
    assert (
        ordinary(64, 64, torch.float32, device=CPU)[1]
        == 2 * n_bytes
        == 2 * 2 * ordinary(32, 64, torch.bfloat16, device=CPU)[1]
    )
    call()


def test_storage_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name, left in (("there", ["there"]), ("fresh", ["there"])):
        ways, clean, n_bytes = stored(str(tmp_path / name), LIMITS)
        ways["write"]()
        assert ways["read"]() == n_bytes == 1 << 16
        assert len(list((tmp_path / name).iterdir())) == 1
        clean()
        assert [path.name for path in tmp_path.rglob("*")] == left


FOUND: dict[str, Any] = {
    "flop_per_s": {"float32": 4e10, "bfloat16": 9e10}, "products": [{"rows": 4, "k": 8, "n": 16,
    "flop_per_s": 3e10}], "op_bytes_per_s": 6e9, "launch_s": 4e-6, "memory_bytes_per_s": 1e10,
    "copy_bytes_per_s": {"to_device": 7e9, "to_host": 5e9}, "crowded": [
        {"processes": 1, "flop_per_s": 3e10, "bytes_per_s": 6e9}, {"processes": 2,
        "flop_per_s": 2e10, "bytes_per_s": 3e9},
    ],
    "collectives": [
        {"op": "all_gather", "ranks": 4, "alpha_s": 9.0, "beta_s_per_byte": 9.0},
        {"op": "all_gather", "ranks": 2, "alpha_s": 1e-4, "beta_s_per_byte": 5e-10},
        {"op": "reduce_scatter", "ranks": 2, "alpha_s": 3e-4, "beta_s_per_byte": 2.5e-10},
        {"op": "send", "ranks": 2, "alpha_s": 7.0, "beta_s_per_byte": 7.0},
    ],
}  # fmt: skip


def test_numbers_by_the_names_that_the_planner_knows() -> None:
    found = hardware_of(FOUND, "CPU")
    assert (
        found.flop_per_s == (("float32", 4e10), ("bfloat16", 9e10))
        and found.peak("float32") == 4e10
    )
    assert (found.peak_flop_per_s, found.reached, found.host_bytes_per_s, found.launch_s) == (
        9e10,
        1.0,
        5e9,
        4e-6,
    )
    assert found.crowded == ((1, 3e10), (2, 2e10)) and found.crowded_bytes == ((1, 6e9), (2, 3e9))
    assert found.collectives[1] == ("all_gather", 2, 1e-4, 5e-10) and found.products == (
        (4, 8, 16, 3e10),
    )
    # a half of the bytes, at 1 and 2 GB/s
    assert found.node_bytes_per_s == found.link_bytes_per_s == pytest.approx(1.5e9)
    assert found.node_hop_s == found.link_hop_s == pytest.approx(2e-4)
    assert {"reached", "node_hop_s", "link_hop_s", "products"} <= set(found.measured)


def test_of_gpus_the_links_between_nodes_are_not_known_from_one_node() -> None:
    found = hardware_of(FOUND | {"units": 132, "memory_bytes": 80 << 30, "arch": "sm_90"}, "H100")
    plain = HardwareProfile()
    assert (found.link_bytes_per_s, found.link_hop_s) == (plain.link_bytes_per_s, plain.link_hop_s)
    assert (found.units, found.memory_bytes, found.arch, found.accelerator_type) == (
        132,
        80 << 30,
        "sm_90",
        "H100",
    )
    assert not {"link_hop_s", "link_bytes_per_s", "units", "arch"} & set(found.measured)


# ---------------------------------------------------------------------------------------- processes


def wanted(sizes: tuple[int, ...], storage: str = "", program: Path = PLACE) -> MeasureRequest:
    job = JOB | {"program": str(program)}
    some = samples_of(TINY, Job.from_plain(JOB), 3)
    return MeasureRequest(
        model_profile_of(TINY, Job.from_plain(JOB)),
        samples=8,
        seconds=1.0,
        storage=storage,
        sizes=sizes,
        job=Job.from_plain(job),
        some=some,
    )


def test_passes_are_run_where_they_are_small() -> None:
    given = wanted((1, 2))
    assert measuring_side._asked(given)["program"] == given.job.plain()
    sample = given.model.sample
    assert sample is not None
    for large in (
        replace(given.model, n_params=1 << 40),
        replace(given.model, sample=replace(sample, flop=1e13)),
    ):
        assert measuring_side._asked(replace(given, model=large))["program"] is None
    assert measuring_side._asked(replace(given, some=()))["program"] is None


@pytest.mark.whole
def test_it_measures_this_machine_and_leaves_nothing(tmp_path: Path) -> None:
    found = measure(wanted((1, 2), str(tmp_path / "runs")))
    made = hardware_of(found, "CPU")
    assert [n for n, _ in made.crowded] == [n for n, _ in made.crowded_bytes] == [1, 2]
    assert {(op, n) for op, n, *_ in made.collectives} == {
        (op, 2) for op in ("all_gather", "reduce_scatter", "all_reduce", "send")
    }
    assert all(
        rate > 0
        for rate in (
            *dict(made.crowded).values(),
            made.node_bytes_per_s,
            made.storage_write_bytes_per_s,
        )
    )
    assert 1e8 < made.peak_flop_per_s < 1e13 and 1e-7 < made.launch_s < 1e-3
    assert made.attention_flop_per_s > 0 and len(made.products) == len(found["products"]) > 0
    assert [n for n, rate in made.crowded_passes if 1e6 < rate < made.peak_flop_per_s] == [1, 2]
    assert 0.01 < found["cpu_share"] < 1.5
    assert list(tmp_path.iterdir()) == [] and processes_of(os.getpid()) == []


@pytest.mark.gpu
def test_it_measures_the_gpus_of_this_machine(tmp_path: Path) -> None:
    found = measure(replace(wanted((), str(tmp_path / "runs")), precision="bfloat16"))
    made = hardware_of(found, measuring_side.accelerator_here())
    assert [n for n, _ in made.crowded] == found["processes"] and found["processes"][
        -1
    ] == torch.cuda.device_count()
    assert {name for name, _ in made.flop_per_s} == {
        "bfloat16",
        "float32",
    } and made.peak_flop_per_s > 1e12
    assert (
        made.units
        and made.arch
        and made.memory_bytes
        and made.host_bytes_per_s > 1e9
        and made.attention_flop_per_s > 0
    )
    assert (
        set(found["copy_bytes_per_s"]) == {"to_device", "to_host"}
        and processes_of(os.getpid()) == []
    )


@pytest.mark.whole
def test_a_program_that_does_not_run_here_takes_only_its_passes_away(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise ImportError('elsewhere')")
    made = hardware_of(measure(wanted((1,), program=tmp_path / "program.py")), "CPU")
    assert made.crowded_passes == () and made.crowded[0][1] > 0 and made.collectives == ()


@pytest.mark.e2e
def test_a_process_that_ends_early_is_named_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = measuring_side._asked
    monkeypatch.setattr(
        measuring_side, "_asked", lambda given: asked(given) | {"dtypes": ["float33"]}
    )
    with pytest.raises(
        InternalError, match=r"measuring process [01] ended with 1: .*no attribute 'float33'"
    ):
        measure(wanted((1, 2)))
    assert processes_of(os.getpid()) == []


def processes_of(parent: int) -> list[int]:
    """Measuring processes whose parent this is, or was."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            if b"elastic.worker.profile.measure_process" in (place / "cmdline").read_bytes().split(
                b"\0"
            ):
                status = (place / "status").read_text()
                found += [int(place.name)] if f"\nPPid:\t{parent}\n" in status else []
        except OSError:
            continue
    return found


STARTER = """
from elastic.types import ModelProfile
from elastic.worker.profile.measure import MeasureRequest, measure
measure(MeasureRequest(ModelProfile(1, 1, ()), seconds=60.0, sizes=(1, 2)))
"""


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_they_end_with_who_started_them(how: signal.Signals, tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", STARTER]
    with child(words, stderr=subprocess.DEVNULL, env=environment) as starter:
        until(
            lambda: (
                list(tmp_path.glob("elastic-profile-*/store"))
                and len(processes_of(starter.pid)) == 2
            ),
            "the meeting of those that measure",
        )
        children = processes_of(starter.pid)
        starter.send_signal(how)
        starter.wait(120)
        until(lambda: not any(map(is_alive, children)), "the end of those that it started")
        assert not list(tmp_path.iterdir())


def is_alive(pid: int) -> bool:
    try:
        return (
            b"elastic.worker.profile.measure_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except OSError:
        return False


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "pydantic"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
from elastic.worker.profile import measure, measured_groups, measured_ops, measure_process
"""


@pytest.mark.whole  # what imports what: the import contracts
def test_measuring_needs_neither_ray_nor_pydantic() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
