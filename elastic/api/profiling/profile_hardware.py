"""profile(): measures this machine, or nodes of a Ray cluster, with what a job computes, and leaves
the numbers where plan and run find them."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.api.running.local_pools import adapted
from elastic.api.running.options import Options, ray_address
from elastic.config.hardware import check_writable, path_of, write_hardware
from elastic.config.job import JobSpec, load_job
from elastic.errors import SpecError
from elastic.observe import find_runs
from elastic.observe.run_tables import columns
from elastic.program import load_program
from elastic.types import HardwareProfile

if TYPE_CHECKING:
    from elastic.worker.profile.measure import MeasureRequest

START_S = 15.0  # until the measuring processes have loaded torch
LEAST_S = 20
QUIET = 0.95  # of a core, for a process that only computes
MANY = 16  # samples, of which the passes that are timed are made


@dataclass(frozen=True)
class ProfileRequest:
    """`out`: where the file goes, default: where plan and run look for it. `local`: this machine,
    also where a Ray address is known."""

    out: str | Path | None = None
    seconds: float = 60.0
    overrides: tuple[str, ...] = ()
    local: bool = False


@dataclass(frozen=True)
class Profiled:
    """`found`: all numbers, as `elastic.worker.profile.measure` tells them."""

    path: Path
    about: Mapping[str, Any]
    found: Mapping[str, Any]
    profile: HardwareProfile

    def plain(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            **self.about,
            "found": dict(self.found),
            "profile": asdict(self.profile),
        }

    def lines(self) -> list[str]:
        found, about = self.found, self.about
        cores = (
            f", {found['cores']} cores, {found['threads']} threads per process"
            if "cores" in found
            else ""
        )
        lines = [
            f"{about['host']}: {found['chip']}{cores}; torch {found['torch']}; "
            f"{about['precision']}",
            *_alone(found),
        ]
        names = ("flop_per_s", "passes_flop_per_s", "bytes_per_s")
        rows: list[Sequence[str]] = [
            ("PROCESSES AT ONCE", "PRODUCTS GFLOP/S", "PASSES GFLOP/S", "OTHER GB/S")
        ]
        rows += [
            (str(one["processes"]), *(_giga(one.get(name)) for name in names))
            for one in found["crowded"]
        ]
        lines += ["", *columns(rows, right=(0, 1, 2, 3))]
        if found["collectives"]:
            rows = [("COLLECTIVE", "RANKS", "ALPHA US", "BETA NS/KIB")]
            rows += [_collective(one) for one in found["collectives"]]
            lines += ["", *columns(rows, right=(1, 2, 3))]
        if found["cpu_share"] < QUIET:
            share = f"{found['cpu_share']:.0%} of a core"
            lines += [
                "",
                f"other processes were busy: this one alone had {share}; on a quiet machine the "
                "numbers are better",
            ]
        return [
            *lines,
            "",
            f"written to {self.path}; elastic plan and elastic run read it from there",
        ]


def profile(job: str | Path, wishes: ProfileRequest | None = None) -> tuple[Profiled, ...]:
    """Takes about `seconds`. Raises SpecError where the input is wrong, ProgramError where the
    program cannot be traced."""
    wishes = wishes or ProfileRequest()
    if wishes.seconds < LEAST_S:
        raise SpecError(f"--seconds {wishes.seconds:g}: measuring takes at least {LEAST_S} s")
    spec = load_job(job, wishes.overrides)
    address = ray_address(Options(local=wishes.local))
    program = load_program(spec.program)

    from elastic.worker.equivalence.job_numbers import model_profile_of, samples_of
    from elastic.worker.profile.measure import MeasureRequest, accelerator_here

    kind = _kind(spec, accelerator_here())
    check_writable(_path(wishes, kind))
    keys, uri = spec.job(), find_runs.storage_uri(spec.storage)
    wanted = MeasureRequest(
        model_profile_of(program, keys), spec.precision, spec.global_batch,
        wishes.seconds - START_S, uri, job=keys, some=samples_of(program, keys, MANY),
    )  # fmt: skip
    found = _here(wanted, kind) if address is None else _there(address, wanted, spec)
    if wishes.out is not None and len(found) > 1:
        raise SpecError(
            f"--out {wishes.out}: the cluster has {', '.join(found)}; without --out each kind "
            "gets a file of its own"
        )
    return tuple(
        _kept(_path(wishes, kind), kind, one, spec=spec, uri=uri) for kind, one in found.items()
    )


def _here(wanted: MeasureRequest, kind: str) -> dict[str, dict[str, Any]]:
    from elastic.worker.profile import measure

    return {kind: measure.measure(wanted) | {"host": socket.gethostname()}}


def _there(address: str, wanted: MeasureRequest, spec: JobSpec) -> dict[str, dict[str, Any]]:
    from elastic.cluster.workers.measured_nodes import measured

    return measured(address, wanted, [pool.accelerator_type for pool in spec.pools])


def _kept(path: Path, kind: str, found: dict[str, Any], *, spec: JobSpec, uri: str) -> Profiled:
    """Writes the file of one kind."""
    from elastic.worker.profile.measure import hardware_of

    about = {
        "job": spec.name, "host": found.pop("host"),
        "at": datetime.now(UTC).isoformat(timespec="seconds"), "accelerator_type": kind,
        "precision": spec.precision, "storage": uri,
    }  # fmt: skip
    made = hardware_of(found, kind)
    write_hardware(path, made, about | {"found": found})
    return Profiled(path, about, found, made)


def _path(wishes: ProfileRequest, kind: str) -> Path:
    return Path(wishes.out).expanduser() if wishes.out is not None else path_of(kind)


def _kind(spec: JobSpec, here: str) -> str:
    """As the job's pools name it, where they are of one kind: the embedded cluster's is `GPU`,
    whatever the chip."""
    kinds = {pool.accelerator_type for pool in adapted(spec, Options(drill=None), None).pools} - {
        "CPU"
    }
    return kinds.pop() if here != "CPU" and len(kinds) == 1 else here


def _alone(found: Mapping[str, Any]) -> list[str]:
    """What one process alone reaches."""
    products = [one["flop_per_s"] for one in found["products"]]
    rows = [
        (f"a large product in {name}", f"{_giga(rate)} GFLOP/s")
        for name, rate in found["flop_per_s"].items()
    ]
    if products:
        rows.append(
            ("the job's products", f"{_giga(min(products))} to {_giga(max(products))} GFLOP/s")
        )
    if "attention_flop_per_s" in found:
        rows.append(("the job's attention", f"{_giga(found['attention_flop_per_s'])} GFLOP/s"))
    rows += [
        (
            "other operations",
            f"{_giga(found['op_bytes_per_s'])} GB/s, {found['launch_s'] * 1e6:.1f} us each at "
            "least",
        ),
        ("memory", f"{_giga(found['memory_bytes_per_s'])} GB/s"),
        *(
            (f"copies {way.replace('_', ' ')}", f"{_giga(rate)} GB/s")
            for way, rate in found["copy_bytes_per_s"].items()
        ),
    ]
    if "storage_write_bytes_per_s" in found:
        write, read = (_giga(found[f"storage_{way}_bytes_per_s"]) for way in ("write", "read"))
        rows.append(
            ("storage", f"writes {write} GB/s, reads {read} GB/s (what it has just written)")
        )
    return [f"  {line}" for line in columns(rows)]


def _collective(one: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return (
        one["op"],
        str(one["ranks"]),
        f"{one['alpha_s'] * 1e6:.0f}",
        f"{one['beta_s_per_byte'] * 1024e9:.0f}",
    )


def _giga(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.3g}"
