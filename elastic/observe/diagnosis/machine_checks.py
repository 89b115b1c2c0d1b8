"""What every machine needs: versions that go together, memory, limits, clocks, ports, storage that
answers fast enough."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from elastic.errors import StorageFailed, StorageRefused
from elastic.observe.diagnosis.doctor_check import DoctorCheck, HostView, checked
from elastic.storage import LocalStorage, Storage, open_storage
from elastic.text import size

BOUNDS = {"torch": ((2, 11), (2, 14)), "ray": ((2, 55), (3, 0))}  # as in pyproject.toml
MIN_SHM_BYTES = 1 << 30
MIN_MEMORY_BYTES = 4 << 30
MIN_DISK_BYTES = 2 << 30
MIN_FILES = 4096
MIN_PROCESSES = 4096
PROBE_BYTES = 4 << 20
SLOW_BYTES_PER_S = 2e7  # below it a checkpoint of 1 GB takes a minute
UNSYNCHRONIZED = 5  # TIME_ERROR of adjtimex(2)


def python() -> DoctorCheck:
    found = ".".join(map(str, sys.version_info[:3]))
    return (
        DoctorCheck("python", found)
        if sys.version_info >= (3, 11)
        else DoctorCheck("python", found, "bad", "3.11 or newer is needed")
    )


def package(machine: HostView, name: str) -> DoctorCheck:
    low, high = BOUNDS[name]
    wanted = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    found = machine.version(name)
    if not found:
        return DoctorCheck(name, "not installed", "bad", f"pip install '{name}{wanted}'")
    version = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    return (
        DoctorCheck(name, found)
        if low <= version < high
        else DoctorCheck(name, found, "look", f"outside the tested bounds {wanted}")
    )


def requirements(machine: HostView, names: tuple[str, ...] = ("elastic-ray", "torch", "ray")
                 ) -> DoctorCheck:  # fmt: skip
    """Are the packages there that these ask for, in the versions that they ask for?"""
    clashes = [text for name in names for text in _clashes(machine, name)]
    if not clashes:
        return DoctorCheck("packages", f"what {', '.join(names)} ask for is there")
    more = f"; and {len(clashes) - 3} more" if len(clashes) > 3 else ""
    hint = "pip install -c constraints.txt -e . in a new environment"
    return DoctorCheck("packages", "; ".join(clashes[:3]) + more, "look", hint)


def _clashes(machine: HostView, name: str) -> Iterator[str]:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for text in wanted:
        try:
            needed = Requirement(text)
        except InvalidRequirement:
            continue
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        found = machine.version(needed.name)
        if not found:
            yield f"{name} needs {needed.name}{needed.specifier}, which is not installed"
        elif not needed.specifier.contains(found, prereleases=True):
            yield f"{name} needs {needed.name}{needed.specifier}, not {found}"


def cpus(machine: HostView) -> list[DoctorCheck]:
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = [checked("cpu cores", str(n), n >= 2, hint="workers share one core")]
    governor = machine.text("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor == "powersave":
        hint = "sudo cpupower frequency-set -g performance"
        found.append(DoctorCheck("cpu clocks", "the governor is powersave", "look", hint))
    return found


def memory(machine: HostView) -> DoctorCheck:
    """What the machine has free, or the container may still take."""
    lines = machine.text("proc/meminfo").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in fields:
        return DoctorCheck("memory", "not known on this system")
    free = int(fields["MemAvailable"].split()[0]) * 1024
    most, used = (machine.text(f"sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    limited = most.isdigit() and used.isdigit() and int(most) - int(used) < free
    free = int(most) - int(used) if limited else free
    hint = "the embedded default takes about 0.5 GB a worker"
    name = "memory left to this container" if limited else "memory available"
    return checked(name, size(free), free >= MIN_MEMORY_BYTES, hint=hint)


def shm(machine: HostView) -> DoctorCheck:
    place = machine.root / "dev/shm"
    if not place.is_dir():
        hint = "Ray keeps its objects in temporary files instead; slower"
        return DoctorCheck("/dev/shm", "not there", "look", hint)
    free = shutil.disk_usage(place).free
    hint = "in a container: --shm-size=2g or more"
    return checked("/dev/shm free", size(free), free >= MIN_SHM_BYTES, hint=hint)


def ports() -> DoctorCheck:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            pass
    except OSError as error:
        hint = "workers talk over TCP; look at the firewall"
        return DoctorCheck("ports", f"a local connection fails: {error}", "bad", hint)
    return DoctorCheck("ports", "a local TCP connection works")


# --------------------------------------------------------------------------------------- limits


def limits(machine: HostView) -> list[DoctorCheck]:
    try:
        import resource
    except ImportError:
        return [DoctorCheck("open files", "not known on this system")]

    def limit(which: int) -> float:
        soft = resource.getrlimit(which)[0]
        return float("inf") if soft == resource.RLIM_INFINITY else soft

    files, processes = limit(resource.RLIMIT_NOFILE), limit(resource.RLIMIT_NPROC)
    found = [
        checked("open files", _shown(files), files >= MIN_FILES,
        hint=f"ulimit -n {MIN_FILES}: each worker keeps a socket per peer"),
        checked("processes and threads", _shown(processes), processes >= MIN_PROCESSES,
        hint=f"ulimit -u {MIN_PROCESSES}: Ray starts hundreds of threads"),
    ]  # fmt: skip
    pins = (machine.root / "dev/nvidia0").exists() or (machine.root / "dev/infiniband").is_dir()
    locked = limit(resource.RLIMIT_MEMLOCK)
    if pins:
        hint = "ulimit -l unlimited (docker: --ulimit memlock=-1): EFA and InfiniBand lock memory"
        said = _shown(locked, of_bytes=True)
        found.append(checked("locked memory", said, locked == float("inf"), hint=hint))
    return found


def _shown(limit: float, of_bytes: bool = False) -> str:
    if limit == float("inf"):
        return "unlimited"
    return size(limit) if of_bytes else str(int(limit))


def clock() -> DoctorCheck:
    """Is the system's clock kept right by anybody?"""
    try:
        kept = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024))
    except (OSError, AttributeError):
        return DoctorCheck("clock", "not known on this system")
    hint = "start chrony or ntpd: deadlines of notices and prices are times of day"
    if kept == UNSYNCHRONIZED:
        return DoctorCheck("clock", "the kernel says that it is not synchronized", "look", hint)
    return DoctorCheck("clock", "synchronized" if kept >= 0 else "not known on this system")


# -------------------------------------------------------------------------------------- storage


def storage(uri: str) -> list[DoctorCheck]:
    """Room, an answer, and how fast a few megabytes go there and back; leaves nothing."""
    place = open_storage(uri)
    free = place.free_bytes()
    if free is not None:
        name, hint = f"disk free at {place.uri}", "checkpoints need room"
        room = checked(name, size(free), free >= MIN_DISK_BYTES, hint=hint)
        at = next(path for path in (Path(place.uri), *Path(place.uri).parents) if path.exists())
        return [room, *_local_speed(place.uri, at)]
    try:
        found = f"answers; holds {len(place.folders())} folders"
        return [DoctorCheck(f"storage {place.uri}", found), _speed(place, place.uri)]
    except (StorageRefused, StorageFailed) as error:
        return [DoctorCheck(f"storage {place.uri}", str(error), "bad")]


def _local_speed(uri: str, at: Path) -> Iterator[DoctorCheck]:
    try:
        with tempfile.TemporaryDirectory(prefix=".elastic-doctor-", dir=at) as folder:
            yield _speed(LocalStorage(Path(folder)), uri)
    except OSError as error:
        hint = "checkpoints go there: give --storage a folder that you may write"
        yield DoctorCheck(f"writing at {uri}", str(error), "bad", hint)


def _speed(place: Storage, uri: str) -> DoctorCheck:
    """Reading is of what was just written: on a disk that is the page cache."""
    key, data = f"elastic-doctor-{secrets.token_hex(6)}", os.urandom(PROBE_BYTES)
    began_s = time.perf_counter()
    place.put(key, data)
    wrote_s = time.perf_counter()
    whole = place.get(key) == data
    read_s = time.perf_counter()
    place.delete(key)
    rates = [PROBE_BYTES / max(1e-9, s) for s in (wrote_s - began_s, read_s - wrote_s)]
    found = f"{size(rates[0])}/s written, {size(rates[1])}/s read back ({size(PROBE_BYTES)})"
    if not whole:
        hint = "what was read is not what was written: do not keep checkpoints there"
        return DoctorCheck(f"speed of {uri}", found, "bad", hint)
    hint = "checkpoints will hold up the steps: storage nearer to the nodes, or a larger "
    hint += "checkpoint_every"
    return checked(f"speed of {uri}", found, min(rates) >= SLOW_BYTES_PER_S, hint=hint)


# ------------------------------------------------------------------------------------- clusters


def open_clusters(processes: Path = Path("/proc")) -> DoctorCheck:
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
    hint = "start Ray with RAY_AUTH_MODE=token (docs/network.md)"
    return DoctorCheck("ray clusters here", found, "look", hint)
