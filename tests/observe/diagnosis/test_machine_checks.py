"""Each check of a machine: what is wrong is named with its mend, what is right is not."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from elastic.observe.diagnosis import machine_checks
from elastic.observe.diagnosis.doctor_check import (
    DoctorCheck,
    HostView,
    ProgramHangs,
    answer,
    installed,
)
from elastic.observe.diagnosis.gpu_setup import COLUMNS, SLOWING, cuda_of_torch, gpu_checks
from elastic.storage import LocalStorage

GPU = {
    "index": "0", "name": "NVIDIA H100 80GB HBM3", "driver_version": "570.86.15",
    "memory.total": "81559", "temperature.gpu": "41", "power.limit": "700.00",
    "power.default_limit": "700.00", "clocks.applications.graphics": "1980",
    "clocks.max.graphics": "1980", "pcie.link.width.current": "16", "pcie.link.width.max": "16",
    "ecc.errors.uncorrected.volatile.total": "0", "persistence_mode": "Enabled",
}  # fmt: skip
VERSIONS = {"torch": "2.13.0+cu128", "nvidia-nccl-cu12": "2.27.5"}


def box(
    root: Path,
    gpu: Mapping[str, str] | None = None,
    versions: Mapping[str, str] = VERSIONS,
    **environment: str,
) -> HostView:
    """A machine with one GPU, or with none (`gpu` None)."""

    def ask(words: Sequence[str]) -> str | None:
        return None if gpu is None else ", ".join(gpu[name] for name in COLUMNS) + "\n"

    return HostView(environment, root, ask, lambda name: versions.get(name, ""))


def found(machine: HostView, name: str) -> list[DoctorCheck]:
    return [check for check in gpu_checks(machine) if check.name == name]


def test_a_machine_in_order_has_no_complaint(tmp_path: Path) -> None:
    checks = gpu_checks(box(tmp_path, GPU))
    assert {check.verdict for check in checks} == {"ok"}
    assert [check.name for check in checks] == ["gpus", "driver and CUDA", "NCCL", "gpu clocks"]
    assert "torch 2.13.0+cu128 with CUDA 12.8" in checks[1].found


@pytest.mark.parametrize(
    ("changed", "what", "hint"),
    [
        ({"temperature.gpu": "88"}, "88 °C", "cooling"),
        ({"power.limit": "450.00"}, "450 of 700 W", "nvidia-smi -i 0 -pl 700"),
        ({"clocks.applications.graphics": "1200"}, "1200 of 1980 MHz", "-rac"),
        ({"pcie.link.width.current": "4"}, "4 of 16 lanes", "another machine"),
        ({"ecc.errors.uncorrected.volatile.total": "3"}, "3 uncorrected", "another machine"),
        ({"persistence_mode": "Disabled"}, "persistence mode is off", "nvidia-smi -pm 1"),
    ],
)
def test_a_gpu_that_is_slower_than_its_kind(
    tmp_path: Path, changed: dict[str, str], what: str, hint: str
) -> None:
    (check,) = found(box(tmp_path, GPU | changed), "gpu 0")
    assert check.verdict == "look" and what in check.found and hint in check.hint
    assert not found(box(tmp_path, GPU | changed), "gpu clocks")


def test_what_a_gpu_does_not_tell_is_no_complaint(tmp_path: Path) -> None:
    silent = GPU | dict.fromkeys(COLUMNS[4:], "[N/A]")
    assert {check.verdict for check in gpu_checks(box(tmp_path, silent))} == {"ok"}


@pytest.mark.parametrize(
    ("versions", "driver", "verdict", "said"),
    [
        ({"torch": "2.13.0+cpu"}, "570.86", "bad", "is built for CPUs"),
        ({"torch": "2.13.0+cu130"}, "570.86", "bad", "with CUDA 13.0"),
        ({"torch": "2.13.0+cu130"}, "580.65", "ok", "with CUDA 13.0"),
        ({"torch": "2.13.0", "nvidia-cuda-runtime-cu12": "12.8.90"}, "520.61", "bad", "CUDA 12.8"),
        ({"torch": "2.13.0"}, "470.1", "ok", "CUDA unknown"),
    ],
)
def test_driver_and_cuda_go_together(
    tmp_path: Path, versions: dict[str, str], driver: str, verdict: str, said: str
) -> None:
    (check,) = found(box(tmp_path, GPU | {"driver_version": driver}, versions), "driver and CUDA")
    assert check.verdict == verdict and said in check.found
    assert bool(check.hint) == (verdict != "ok")


def test_the_cuda_of_torch(tmp_path: Path) -> None:
    assert cuda_of_torch(box(tmp_path, versions={"torch": "2.11.0+cu118"})) == "11.8"
    assert cuda_of_torch(box(tmp_path, versions={})) == ""


def test_another_nccl_before_that_of_torch(tmp_path: Path) -> None:
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "libnccl.so.2").touch()
    (check,) = found(box(tmp_path, GPU, LD_LIBRARY_PATH="/nowhere:/opt"), "NCCL")
    assert check.verdict == "look" and "opt/libnccl.so.2 is loaded in its place" in check.found
    (check,) = found(box(tmp_path, GPU, LD_PRELOAD="/x/libnccl.so.2"), "NCCL")
    assert check.verdict == "look" and "2.27.5" in check.found


@pytest.mark.parametrize("name", SLOWING)
def test_settings_that_slow_a_run_down(tmp_path: Path, name: str) -> None:
    (value, *_), what = SLOWING[name]
    (check,) = found(box(tmp_path, **{name: value}), "settings")
    assert check.found == f"{name}={value}: {what}" and check.hint == f"unset {name}"
    assert not found(box(tmp_path, **{name: "something-else"}), "settings")


def test_an_interface_that_is_not_there(tmp_path: Path) -> None:
    for name in ("lo", "ens5"):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
    (check,) = found(box(tmp_path, NCCL_SOCKET_IFNAME="eth0,ib"), "settings")
    assert check.verdict == "bad" and "the interfaces are ens5, lo" in check.found
    for fine in ("ens", "=ens5", "^docker0", "eth0,ens"):
        assert not found(box(tmp_path, NCCL_SOCKET_IFNAME=fine), "settings")
    assert found(box(tmp_path, GLOO_SOCKET_IFNAME="=ens"), "settings")


def efa_machine(root: Path) -> None:
    folder = root / "sys/class/infiniband/rdmap0/device"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x1d0f\n")


def test_efa_without_a_plugin_or_with_another_provider(tmp_path: Path) -> None:
    efa_machine(tmp_path)
    (check,) = found(box(tmp_path, GPU), "EFA")
    assert check.verdict == "look" and "NCCL has no plugin" in check.found
    (tmp_path / "opt/amazon/ofi-nccl/lib").mkdir(parents=True)
    (tmp_path / "opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so").touch()
    assert [check.verdict for check in found(box(tmp_path, GPU), "EFA")] == ["ok"]
    (check,) = found(box(tmp_path, GPU, FI_PROVIDER="tcp"), "EFA")
    assert check.verdict == "look" and check.hint.startswith("unset FI_PROVIDER")


def test_an_instance_that_should_have_efa(tmp_path: Path) -> None:
    place = tmp_path / "sys/devices/virtual/dmi/id"
    place.mkdir(parents=True)
    (place / "product_name").write_text("p5.48xlarge\n")
    (check,) = found(box(tmp_path, GPU), "EFA")
    assert "p5.48xlarge has 32: the network runs over TCP" in check.found
    (place / "product_name").write_text("g5.xlarge\n")
    assert not found(box(tmp_path, GPU), "EFA")


def test_gpus_that_are_there_and_do_not_answer(tmp_path: Path) -> None:
    def hangs(words: Sequence[str]) -> str | None:
        raise ProgramHangs(words[0])

    (check,) = gpu_checks(HostView({}, tmp_path, hangs, lambda name: ""))
    assert check.verdict == "bad" and "restart the machine" in check.hint
    assert gpu_checks(box(tmp_path))[0].found.startswith("none;")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert gpu_checks(box(tmp_path))[0].verdict == "bad"


def test_gpus_that_are_hidden(tmp_path: Path) -> None:
    (check,) = found(box(tmp_path, GPU, CUDA_VISIBLE_DEVICES=""), "gpus")
    assert check.verdict == "look" and "hides them all" in check.found
    assert found(box(tmp_path, GPU, CUDA_VISIBLE_DEVICES="0"), "gpus")[0].verdict == "ok"


def test_programs_and_packages_that_are_not_there() -> None:
    assert answer(["no-such-program-of-anybody"]) is None
    assert answer(["false"]) is None and answer(["echo", "so"]) == "so\n"
    assert installed("no-such-package-of-anybody") == ""


def test_packages_that_clash() -> None:
    fine = machine_checks.requirements(HostView())
    assert fine.verdict == "ok"
    old = HostView(version=lambda name: "1.0" if name == "numpy" else installed(name))
    check = machine_checks.requirements(old, ("elastic-ray",))
    assert check.found == "elastic-ray needs numpy>=1.26, not 1.0" and check.verdict == "look"
    gone = HostView(version=lambda name: "" if name == "rich" else installed(name))
    assert "needs rich>=13, which is not installed" in machine_checks.requirements(gone).found


def test_memory_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\nMemAvailable: 100000000 kB\n")
    assert machine_checks.memory(box(tmp_path)).found == "102.4 GB"
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{3 << 30}\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(f"{1 << 30}\n")
    check = machine_checks.memory(box(tmp_path))
    assert (check.name, check.verdict) == ("memory left to this container", "look")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert machine_checks.memory(box(tmp_path)).verdict == "ok"


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soft = {
        resource.RLIMIT_NOFILE: 1024,
        resource.RLIMIT_NPROC: 100,
        resource.RLIMIT_MEMLOCK: 65536,
    }
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft[which], -1))
    assert [c.name for c in machine_checks.limits(box(tmp_path))] == [
        "open files",
        "processes and threads",
    ], "without a GPU nothing is pinned"
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    checks = machine_checks.limits(box(tmp_path))
    assert [check.verdict for check in checks] == ["look"] * 3
    assert [check.hint.split(":")[0] for check in checks] == [
        "ulimit -n 4096", "ulimit -u 4096", "ulimit -l unlimited (docker",
    ]  # fmt: skip
    soft.update(dict.fromkeys(soft, resource.RLIM_INFINITY))
    assert {c.verdict for c in machine_checks.limits(box(tmp_path))} == {"ok"}


def test_clocks_of_the_processor(tmp_path: Path) -> None:
    place = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq"
    place.mkdir(parents=True)
    (place / "scaling_governor").write_text("powersave\n")
    assert machine_checks.cpus(box(tmp_path))[-1].name == "cpu clocks"
    (place / "scaling_governor").write_text("performance\n")
    assert len(machine_checks.cpus(box(tmp_path))) == 1


@pytest.mark.parametrize(("kept", "verdict"), [(5, "look"), (0, "ok"), (-1, "ok")])
def test_the_time_of_day(monkeypatch: pytest.MonkeyPatch, kept: int, verdict: str) -> None:
    class Library:
        @staticmethod
        def adjtimex(buffer: object) -> int:
            return kept

    monkeypatch.setattr(machine_checks.ctypes, "CDLL", lambda name: Library)
    assert machine_checks.clock().verdict == verdict


def test_storage_is_tried_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, speed = machine_checks.storage(str(tmp_path / "runs"))
    assert speed.name == f"speed of {tmp_path}/runs" and "/s written" in speed.found
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(machine_checks, "SLOW_BYTES_PER_S", 1e15)
    slow = machine_checks.storage(str(tmp_path))[1]
    assert slow.verdict == "look" and "checkpoint_every" in slow.hint
    monkeypatch.setattr(LocalStorage, "get", lambda self, key: b"another")
    assert machine_checks.storage(str(tmp_path))[1].verdict == "bad"


def test_storage_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: LocalStorage, key: str, data: bytes, if_absent: bool = False) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalStorage, "put", refused)
    check = machine_checks.storage(str(tmp_path))[1]
    assert check.verdict == "bad" and "a folder that you may write" in check.hint
