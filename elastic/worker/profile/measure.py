"""Measures this machine for a job: starts processes of its own, waits for what they find, and
leaves none behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from elastic.data.collate import collate
from elastic.errors import InternalError, SpecError
from elastic.text import gib
from elastic.types import HardwareProfile, Job, ModelProfile
from elastic.version import python_path
from elastic.worker.process.free_memory import free_gpu_bytes, free_host_bytes
from elastic.worker.profile import measure_process

SIZES = (1, 2, 4, 6)  # processes at once on a CPU
PROCESS_BYTES = 600 << 20  # of host memory, of one of them
LOOK_S = 0.05
PASS_FLOP, PASS_FLOP_GPU = 3e10, 3e14  # of a forward and backward pass: about a second
LAST_LINES = 3


@dataclass(frozen=True)
class MeasureRequest:
    """`job`, `some`: with a few samples of its dataset; its passes are run too, where they are not
    too large. `samples`: of a step, on all ranks; `seconds`: of measuring, once the processes are
    there; `storage`: URI, '' = is not measured; `sizes`: () = as many processes as this machine
    bears."""

    model: ModelProfile
    precision: str = "float32"
    samples: int = 1
    seconds: float = 45.0
    storage: str = ""
    sizes: tuple[int, ...] = ()
    job: Job | None = None
    some: Sequence[Mapping[str, Any]] = ()


def measure(wanted: MeasureRequest) -> dict[str, Any]:
    """What the processes have found, as plain data with units in its names. Raises SpecError where
    the machine is too small, InternalError where one of the processes ends early."""
    asked = _asked(wanted)
    limit_s = 60 + 4 * wanted.seconds
    with tempfile.TemporaryDirectory(prefix="elastic-profile-") as folder:
        (Path(folder) / "asked.json").write_text(json.dumps(asked))
        if asked["program"]:
            rows = [dict(wanted.some[i % len(wanted.some)]) for i in range(asked["times"])]
            torch.save(collate(rows), Path(folder) / "batch.pt")
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(max(asked["sizes"])):
                processes.append(_started(Path(folder), rank))
            return _found(Path(folder), processes, limit_s) | {
                "processes": asked["sizes"],
                "dtypes": asked["dtypes"],
            }
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.communicate()


def accelerator_here() -> str:
    """What this machine computes with, named as Ray names accelerators: CPU, or as in H100 for an
    "NVIDIA H100 80GB HBM3"."""
    if not torch.cuda.is_available():
        return "CPU"
    words = torch.cuda.get_device_name(0).replace("-", " ").split()
    return words[1] if len(words) > 1 else words[0]


def _asked(wanted: MeasureRequest) -> dict[str, Any]:
    sample = wanted.model.sample
    on_gpu = torch.cuda.is_available()
    matmuls = (*sample.matmuls, *sample.ends_matmuls) if sample is not None else ()
    hidden = sample.hidden_bytes if sample is not None else 1 << 20
    sizes = wanted.sizes or _sizes(torch.cuda.device_count() if on_gpu else 0)
    item = getattr(torch, wanted.precision).itemsize
    runs = bool(wanted.job and wanted.some) and _runs_here(wanted, sizes)
    return {
        "device": "cuda" if on_gpu else "cpu",
        "sizes": list(sizes),
        "dtypes": list(dict.fromkeys([wanted.precision, *(["bfloat16"] * on_gpu), "float32"])),
        "matmuls": [asdict(one) for one in matmuls],
        "attentions": [asdict(one) for one in sample.attentions] if sample is not None else [],
        "hidden_elements": hidden // item,
        "width": max((one.k for one in matmuls if not one.experts), default=1024),
        "times": max(1, -(-wanted.samples // max(sizes))),
        "seconds": wanted.seconds,
        "storage": wanted.storage,
        "program": wanted.job.plain() if wanted.job and runs else None,
        "sample_flop": sample.flop if sample is not None else 0.0,
    }


def _runs_here(wanted: MeasureRequest, sizes: Sequence[int]) -> bool:
    """Are weights, gradients and what a pass keeps small enough for so many processes, and a pass
    short enough?"""
    sample, on_gpu = wanted.model.sample, torch.cuda.is_available()
    if sample is None or not sample.flop:
        return False
    times = max(1, -(-wanted.samples // max(sizes)))
    kept = wanted.model.n_blocks * dict(sample.kept_bytes).get("none", 0) + sample.ends_bytes
    n_bytes = 3 * 4 * wanted.model.n_params + 2 * times * kept
    free = free_gpu_bytes(torch.device("cuda", 0)) if on_gpu else free_host_bytes() // max(sizes)
    return n_bytes < free // 2 and sample.flop * times < (PASS_FLOP_GPU if on_gpu else PASS_FLOP)


def _sizes(n_gpus: int) -> tuple[int, ...]:
    """Numbers of processes: one for each GPU, or what the memory of a CPU machine bears."""
    if n_gpus:
        return tuple(sorted({1, n_gpus} | {2**i for i in range(1, 10) if 2**i <= n_gpus}))
    most = free_host_bytes() // PROCESS_BYTES
    if not most:
        raise SpecError(
            f"{gib(free_host_bytes())} of memory are free; measuring needs {gib(PROCESS_BYTES)}"
        )
    return tuple(n for n in SIZES if n <= most)


def _started(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} | dict(os.environ)
    environment["PYTHONPATH"] = python_path()
    with (folder / f"log-{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", measure_process.__name__, str(folder), str(rank)],
            stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def _found(
    folder: Path, processes: Sequence[subprocess.Popen[bytes]], limit_s: float
) -> dict[str, Any]:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        with suppress(FileNotFoundError):
            return json.loads((folder / "found.json").read_text())  # type: ignore[no-any-return]
        for rank, process in enumerate(processes):
            if process.poll():
                raise InternalError(
                    f"measuring process {rank} ended with {process.returncode}: "
                    f"{_last(folder, rank)}"
                )
        time.sleep(LOOK_S)
    raise InternalError(f"measuring did not end within {limit_s:.0f} s: {_last(folder, 0)}")


def _last(folder: Path, rank: int) -> str:
    lines = (folder / f"log-{rank}").read_text(errors="replace").split("\n")
    return (
        " / ".join([line.strip() for line in lines if line.strip()][-LAST_LINES:])
        or "it said nothing"
    )


# ----------------------------------------------------------------------------- as a HardwareProfile


def hardware_of(found: dict[str, Any], accelerator_type: str) -> HardwareProfile:
    """The numbers that the planner knows by name. The large product is the peak, so `reached` is 1.
    Links between nodes are measured only where all nodes are on one machine: the embedded cluster,
    on CPUs."""
    plain = HardwareProfile(accelerator_type)
    collectives = found["collectives"]
    n_bytes_per_s, hop_s = _ring(collectives)
    crowded = found["crowded"]
    values: dict[str, Any] = {
        "peak_flop_per_s": max(found["flop_per_s"].values()),
        "flop_per_s": tuple(found["flop_per_s"].items()),
        "reached": 1.0,
        "units": found.get("units", 0),
        "memory_bytes": found.get("memory_bytes", 0),
        "arch": found.get("arch", ""),
        "memory_bytes_per_s": found["memory_bytes_per_s"],
        "host_bytes_per_s": min(found["copy_bytes_per_s"].values()),
        "node_bytes_per_s": n_bytes_per_s,
        "node_hop_s": hop_s,
        "launch_s": found["launch_s"],
        "attention_flop_per_s": found.get("attention_flop_per_s", 0.0),
        "op_bytes_per_s": found["op_bytes_per_s"],
        "storage_write_bytes_per_s": found.get("storage_write_bytes_per_s", 0.0),
        "storage_read_bytes_per_s": found.get("storage_read_bytes_per_s", 0.0),
        "products": tuple(
            (one["rows"], one["k"], one["n"], one["flop_per_s"]) for one in found["products"]
        ),
        "crowded": tuple(
            (one["processes"], one["flop_per_s"]) for one in crowded if "flop_per_s" in one
        ),
        "crowded_passes": tuple(
            (one["processes"], one["passes_flop_per_s"])
            for one in crowded
            if "passes_flop_per_s" in one
        ),
        "crowded_bytes": tuple((one["processes"], one["bytes_per_s"]) for one in crowded),
        "collectives": tuple(
            (one["op"], one["ranks"], one["alpha_s"], one["beta_s_per_byte"]) for one in collectives
        ),
    }
    if accelerator_type == "CPU" and n_bytes_per_s:
        values |= {"link_bytes_per_s": n_bytes_per_s, "link_hop_s": hop_s}
    known = {k: value for k, value in values.items() if value and value != getattr(plain, k)}
    measured = tuple(name for name in known if name not in ("units", "memory_bytes", "arch"))
    return replace(plain, **known, measured=measured)


def _ring(collectives: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Bytes/s of one rank's link and seconds of each step, from the smallest group's all_gather and
    reduce_scatter: a ring of n sends (n - 1) / n of the bytes in n - 1 steps (Thakur et al. 2005,
    section 4.1)."""
    known = [one for one in collectives if one["op"] in ("all_gather", "reduce_scatter")]
    known = [one for one in known if one["beta_s_per_byte"]]
    few = [one for one in known if one["ranks"] == min(other["ranks"] for other in known)]
    if not few:
        return 0.0, 0.0
    rates = [(one["ranks"] - 1) / one["ranks"] / one["beta_s_per_byte"] for one in few]
    hop_s = sum(one["alpha_s"] / (one["ranks"] - 1) for one in few) / len(few)
    return sum(rates) / len(rates), hop_s
