"""Is this machine fit to run? With a journal: what went wrong in that run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from elastic.errors import StorageFailed, StorageRefused
from elastic.observe.diagnosis.verdicts import RunVerdict, percent
from elastic.observe.event_messages import size
from elastic.observe.run_view import View
from elastic.storage import Storage, open_storage

Mark = Literal["ok", "look", "bad"]
BOUNDS = {"torch": ((2, 11), (2, 14)), "ray": ((2, 55), (3, 0))}  # as in pyproject.toml
MIN_SHM_BYTES = 1 << 30
MIN_MEMORY_BYTES = 4 << 30
MIN_DISK_BYTES = 2 << 30
MIN_FILES = 4096
TROUBLES = {
    "NodeLost": "nodes lost", "WorkerFailed": "worker " "failures", "Silent": "silent workers",
    "PlanFailed": "failed plans", "DigestChecked": "content that differs",
    "CopyFailed": "checkpoints " "not " "made", "CopyDamaged": "damaged copies",
    "RequestFailed": "requests without a node", "WrongNumbers": "silent data corruption",
}  # fmt: skip


@dataclass(frozen=True)
class DoctorCheck:
    """One thing looked at. `hint` says what to do where it is not ok."""

    name: str
    found: str
    verdict: Mark = "ok"
    hint: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def machine(storage: str = ".") -> list[DoctorCheck]:
    """All checks of this machine; starts nothing and changes nothing."""
    return [
        _python(), _package("torch"), _package("ray"), _gpus(), _cpus(), _memory(), _shm(),
        _disk(storage), _ports(), _files(), _open_clusters(),
    ]  # fmt: skip


def run_troubles(view: View) -> list[DoctorCheck]:
    """What a journal shows that a person should know."""
    checks = [
        DoctorCheck(
            "phase",
            f"{view.phase} at step {view.progress}",
            "bad" if view.phase == "failed" else "ok",
            "",
        )
    ]
    for kind, name in TROUBLES.items():
        notes = [note for note in view.notes if note.kind == kind]
        if kind == "NodeLost":
            notes = [note for note in notes if " was released" not in note.text]
        if notes:
            verdict: Mark = "bad" if kind == "DigestChecked" else "look"
            checks.append(
                DoctorCheck(
                    name,
                    f"{len(notes)}, the last at step {notes[-1].step}: {notes[-1].text}",
                    verdict,
                )
            )
    lost = len(view.points) - len(view.curve())
    if lost:
        checks.append(
            DoctorCheck(
                "steps trained again",
                str(lost),
                "look",
                "elastic ledger shows their price (wasted_progress)",
            )
        )
    # a script keeps its own copies
    if view.saved_step is None and view.step and not view.job.restarted:
        checks.append(
            DoctorCheck(
                "checkpoint",
                "none",
                "look",
                "set checkpoint_every, or the loss of all nodes ends the run",
            )
        )
    return checks


def bounds(found: Sequence[RunVerdict]) -> list[DoctorCheck]:
    """What the run is bound by, with what to try next."""
    return [
        DoctorCheck(
            f"bound by {one.bound}" + (f", {percent(one.share)}" if one.share >= 0.005 else ""),
            one.number,
            "look" if one.share > 0 else "ok",
            one.advice,
        )
        for one in found
    ]


def _checked(name: str, found: str, fine: bool, *, hint: str) -> DoctorCheck:
    return DoctorCheck(name, found) if fine else DoctorCheck(name, found, "look", hint)


def _python() -> DoctorCheck:
    found = ".".join(map(str, sys.version_info[:3]))
    return (
        DoctorCheck("python", found)
        if sys.version_info >= (3, 11)
        else DoctorCheck("python", found, "bad", "3.11 or newer is needed")
    )


def _package(name: str) -> DoctorCheck:
    low, high = BOUNDS[name]
    wanted = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return DoctorCheck(name, "not installed", "bad", f"pip install '{name}{wanted}'")
    version = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    return (
        DoctorCheck(name, found)
        if low <= version < high
        else DoctorCheck(name, found, "look", f"outside the tested bounds {wanted}")
    )


def _gpus() -> DoctorCheck:
    if not shutil.which("nvidia-smi"):
        return DoctorCheck("gpus", "none; a worker is one process on the CPU")
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return DoctorCheck(
            "gpus", "nvidia-smi does not answer", "bad", "the driver hangs; restart the machine"
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return DoctorCheck(
            "gpus", "nvidia-smi fails", "bad", (done.stderr or done.stdout).strip()[:120]
        )
    return DoctorCheck("gpus", "; ".join(lines))


def _cpus() -> DoctorCheck:
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _checked("cpu cores", str(n), n >= 2, hint="workers share one core")


def _memory() -> DoctorCheck:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return DoctorCheck("memory", "not known on this system")
    free = int(fields["MemAvailable"].split()[0]) * 1024
    hint = "the embedded default takes about 0.5 GB a worker"
    return _checked("memory available", size(free), free >= MIN_MEMORY_BYTES, hint=hint)


def _shm() -> DoctorCheck:
    if not Path("/dev/shm").is_dir():
        return DoctorCheck(
            "/dev/shm",
            "not there",
            "look",
            "Ray keeps its objects in temporary files instead; slower",
        )
    free = shutil.disk_usage("/dev/shm").free
    hint = "in a container: --shm-size=2g or more"
    return _checked("/dev/shm free", size(free), free >= MIN_SHM_BYTES, hint=hint)


def _disk(storage: str) -> DoctorCheck:
    place = open_storage(storage)
    free = place.free_bytes()
    if free is None:
        return _answers(place)
    return _checked(
        f"disk free at {place.uri}",
        size(free),
        free >= MIN_DISK_BYTES,
        hint="checkpoints need room",
    )


def _answers(place: Storage) -> DoctorCheck:
    try:
        return DoctorCheck(f"storage {place.uri}", f"answers; holds {len(place.folders())} folders")
    except (StorageRefused, StorageFailed) as error:
        return DoctorCheck(f"storage {place.uri}", str(error), "bad")


def _ports() -> DoctorCheck:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            pass
    except OSError as error:
        return DoctorCheck(
            "ports",
            f"a local connection fails: {error}",
            "bad",
            "workers talk over TCP; look at the firewall",
        )
    return DoctorCheck("ports", "a local TCP connection works")


def _open_clusters(processes: Path = Path("/proc")) -> DoctorCheck:
    """Ray clusters of this user on this machine, and whether a stranger on the network could run
    code there."""
    heads: dict[str, bool] = {}
    for folder in processes.glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if Path(words[0]).name != "gcs_server" or folder.stat().st_uid != os.getuid():
                continue
            closed = b"RAY_AUTH_MODE=token" in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is not ours
            continue
        heads[folder.name] = closed or "--node-ip-address=127.0.0.1" in words
    exposed = sorted(pid for pid, closed in heads.items() if not closed)
    if not exposed:
        return DoctorCheck(
            "ray clusters here", f"{len(heads)}, none open to the network" if heads else "none"
        )
    found = f"process {', '.join(exposed)} takes code from anyone who reaches this machine"
    return DoctorCheck(
        "ray clusters here", found, "look", "start Ray with RAY_AUTH_MODE=token (docs/network.md)"
    )


def _files() -> DoctorCheck:
    try:
        import resource
    except ImportError:
        return DoctorCheck("open files", "not known on this system")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    hint = f"ulimit -n {MIN_FILES}: each worker keeps a socket per peer"
    return _checked("open files", str(soft), soft >= MIN_FILES or soft < 0, hint=hint)
