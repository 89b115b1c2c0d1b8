"""What a part of one_shot.py tells, beside what was expected before any run; and processes with a
bound."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from elastic.cluster.ray.processes import end_tree
from elastic.worker.process.environment import die_with_parent

HERE = Path(__file__).resolve().parent
TEXT_MOST = 600
SKIPPED = "skipped"
FORK = get_context("fork")  # torch is imported once; no process that forks has used CUDA
LOOK_S = 0.02


@dataclass(frozen=True)
class Expect:
    """`text`: the prediction; the bounds are what makes it right or wrong, none = it is a number to
    look at."""

    unit: str
    text: str
    most: float | None = None
    least: float | None = None
    begins: str = ""

    def ok(self, value: Any) -> bool | None:
        if self.begins:
            return str(value).startswith(self.begins)
        if self.most is None and self.least is None:
            return None
        if not isinstance(value, int | float):
            return False
        return (self.most is None or value <= self.most) and (
            self.least is None or value >= self.least
        )


def no(text: str = "no") -> Expect:
    return Expect("0/1", text, most=0)


def yes(text: str = "yes") -> Expect:
    return Expect("0/1", text, least=1)


# By part; names may be patterns, the first that fits counts. Written down before the first run on a
# GPU.
EXPECTED: dict[str, dict[str, Expect]] = {
    "facts": {
        "import.*": yes("every module of elastic.worker can be imported without Ray"),
        "steps.done": Expect("steps", "3", least=3), "steps.loss_difference": Expect("",
        "as on the CPU, 1e-4", most=1e-4),
        "settings.expandable_segments": yes("in force, though it is set by the process itself"),
        "settings.knows_pinned": Expect("0/1",
        "1 (torch 2.13 knows pinned_max_cached_size_mb; 2.11 may not)"), "nccl": Expect("",
        "2.21 to 2.25, or 2.27 and later"), "*": Expect("", "a fact"),
    },
    "nccl": {
        "hang.world_abort_frees": no("no: abort of the world frees its own communicator only"),
        "hang.freed_s": Expect("s", "below 1", most=2.0),
        "hang.item_raises": no("no: an aborted kernel ends like one that is done"),
        "hang.item_value": Expect("", "1 or garbage; the sum would be 2"),
        "hang.next_call_raises": yes(), "hang.close_s": Expect("s", "below 2", most=10.0),
        "hang.again": yes("a new generation in the same process"), "together.freed_s": Expect("s",
        "below 2: all communicators at once", most=5.0), "one_by_one.freed_s": Expect("s",
        "more than together, or never within 20 s"), "kill.freed_s": Expect("s", "below 1",
        most=2.0), "kill.close_s": Expect("s", "below 2", most=5.0),
        "kill_dump.freed_s": Expect("s",
        "below 2, or 10: the watchdog sleeps 60 s with its lock held"),
        "kill_dump.close_s": Expect("s", "10: the bound of Transport.take_down"),
        "to_all.with_sizes*": yes("what tokens for experts do"), "to_all.without": Expect("",
        "RuntimeError: NCCL operation in progress (torch 2.10 and later over NCCL 2.28)"),
        "warm.messages_done": yes("the group was used by all ranks when it was joined"),
        "cold.messages_done": no("no: the first use waits for all ranks"),
        "cold.freed_s": Expect("s", "20 or more: torch holds the lock that abort needs"),
        "set_up.raises": yes("the one that waits for a rank that does not come is freed"),
        "set_up.freed_s": Expect("s", "below 1: the sockets of the set-up are shut", most=5.0),
        "set_up.close_s": Expect("s", "below 2", most=10.0), "set_up.why": Expect("",
        "an error of NCCL's or of the generation"),
        "set_up.again": yes("a new generation in the same process"),
        "blocking.*": Expect("", "as set_up, or 20 s: the blocking mode"),
    },
    "faults": {
        "sticky.kind_is_device": yes(), "sticky.error": Expect("",
        "an illegal memory access was encountered"), "sticky.reported_s": Expect("s", "below 2",
        most=5.0), "sticky.process_alive": yes("it stays to serve host copies"),
        "sticky.others_left_s": Expect("s", "below 2", most=10.0),
        "sticky.lost_offers_live": no("nothing that lies on the lost device is offered"),
        "sticky.went_on": yes("the other resumes from memory"), "sticky.went_on_s": Expect("s",
        "below 5", most=30.0), "endless*.named_right": yes(), "endless*.named_s": Expect("s", "2",
        most=20.0), "endless*.named": Expect("",
        "that worker: its GPU stands in work of its own, the other's waits"),
        "endless*.others_left_s": Expect("s", "below 2", most=10.0),
    },
    "step": {
        "*.bare_s": Expect("s", "one, copy 0.30 (H200: 125 TFLOP at 400 TFLOP/s), eight 0.64"),
        "*.step_s": Expect("s", "as bare_s"),
        "*.over_bare": Expect("ratio", "one 1.02, eight 1.10, copy 1.05, session 1.03", most=1.25),
        "*.syncs": Expect("per step", "1", most=1.0),
        "*.sync_places": Expect("", "readback.py"),
        "*.busy": Expect("share", "0.97 or more"),
        "loss_difference": Expect("", "1e-2: bfloat16, the same batch and weights", most=5e-2),
        "tokens_per_s": Expect("1/s", "50000"),
        "flop_per_s": Expect("FLOP/s", "4e14"),
        "peak_gb": Expect("GB", "60"),
        "fill_s": Expect("s", "5"),
    },
    "memory": {
        "pin.*.gb_per_s": Expect("GB/s", "2.5 to 5; faster with host_register"),
        "pin.none.*.held_share": Expect("ratio",
        "1.88 at 17 GB, 1.23 at 13 GB (the next power of two)"),
        "pin.ours.*.held_share": Expect("ratio", "1.0", most=1.1),
        "pin.ours.*.kept_share": Expect("ratio", "0: freed memory goes back", most=0.1),
        "pin.*": Expect("ratio", "a number to look at"), "copy.first_s": Expect("s",
        "pinning counts: 5"), "copy.pinned_gb_per_s": Expect("GB/s", "50 (PCIe 5)", least=10.0),
        "copy.pageable_gb_per_s": Expect("GB/s", "3 to 8"),
        "copy.equal": yes("the copy is the state"), "to_host.gb_per_s": Expect("GB/s",
        "50 with a buffer that is there", least=5.0), "to_host.freed_share": Expect("ratio",
        "1: the device's memory is free again", least=0.9), "killed.free_again_s": Expect("s",
        "1 to 10 (admission waits 60)", most=60.0),
    },
    "generations": {
        "n": Expect("generations", "30"),
        "join_s": Expect("s", "1.0 (three communicators of four ranks that share a GPU)"),
        "close_s": Expect("s", "0.1"),
        "gpu_mib.slope": Expect("MiB per generation", "0 (within 1)", most=1.0),
        "rss_mib.slope": Expect("MiB per generation", "0 (within 1)", most=1.0),
        "fds.slope": Expect("per generation", "0", most=0.1),
        "threads.slope": Expect("per generation", "0", most=0.1),
    },
    "live": {
        "n": Expect("generations", "50"),
        "pause_s": Expect("s", "0.6"),
        "allocated_mib.slope": Expect("MiB per generation", "0 (within 1)", most=1.0),
        "reserved_mib.slope": Expect("MiB per generation", "0 (within 2)", most=2.0),
        "rss_mib.slope": Expect("MiB per generation", "0 (within 2)", most=2.0),
        "used_mib.slope": Expect("MiB per generation", "0 (within 2)", most=2.0),
        "oom.kind": Expect("", "out_of_memory", begins="out_of_memory"),
        "oom.smaller_batch_steps": yes(),
        "oom.held_gb": Expect("GB", "what the state takes: 5", most=12.0),
    },
    "digest": {
        "*_s_per_gb": Expect("s/GB", "0.03 at 2**24 words; 5 to 10 times that at 2**17"),
        "matmul_slower": Expect("ratio", "1.1 to 1.5 beside a digest"),
        "sum64.*": Expect("GB/s", "100 at 256 KiB, 1500 or more at 64 MiB"),
        "pack.*": Expect("ms", "together below 10, one by one 20 or more"),
        "equal": yes("the same number by every block, and on the CPU"),
    },
    "compile": {
        "cold_s": Expect("s", "20"), "reset_s": Expect("s",
        "5: the folder is warm, tracing is done again"), "warm_s": Expect("s", "6: a new process"),
        "syncs": Expect("per pass",
        "0; one for each block if the table of rotations is made anew there", most=0),
        "same": yes("results as without it, 2e-2"),
    },
    "certify": {
        "checkpoint": Expect("", "pass", begins="pass"),
        "step time*": Expect("", "may fail: the model is small, it measures launches"),
        "planner error": Expect("", "not run: there is no such check yet"),
        "*.*": Expect("", "a figure of the check"),
        "*": Expect("", "pass", begins="pass"),
    },
}  # fmt: skip
OWN = {
    "error": no("none"),
    "cut": no("none"),
    "seconds": Expect("s", "below its bound"),
    "skipped": Expect("", ""),
}


class Tell:
    """`tell(name, value)`: a row, at once. On a CPU nothing is judged."""

    def __init__(self, part: str, fd: int, cpu: bool) -> None:
        self.part, self.fd, self.cpu = part, fd, cpu

    def __call__(self, name: str, value: Any) -> None:
        known = {**OWN, **EXPECTED[self.part]}
        expect = known.get(name) or next(
            (e for pattern, e in known.items() if fnmatchcase(name, pattern)), None
        )
        assert expect is not None, f"{self.part}.{name}: nothing was predicted of it"
        if isinstance(value, bool):
            value = int(value)
        if isinstance(value, float):
            value = float(f"{value:.6g}")
        if not isinstance(value, int | float):
            value = str(value)[:TEXT_MOST]
        judged = name in ("error", "cut") or not self.cpu
        self._put(name, value, (expect.unit, expect.text), expect.ok(value) if judged else None)

    def skip(self, name: str, why: str) -> None:
        self._put(name, SKIPPED, ("", why), None)

    def error(self, error: BaseException) -> None:
        traceback.print_exception(error)
        where = traceback.extract_tb(error.__traceback__)[-1]
        self(
            "error",
            f"{type(error).__name__}: {error} at {Path(where.filename).name}:{where.lineno}",
        )

    def _put(self, name: str, value: Any, said: tuple[str, str], ok: bool | None) -> None:
        row = {
            "part": self.part,
            "name": name,
            "value": value,
            "unit": said[0],
            "expected": said[1],
            "ok": ok,
        }
        os.write(self.fd, (json.dumps(row) + "\n").encode())


# ---------------------------------------------------------------------------------------- processes


def start(work: Callable[[], None], tell: Tell) -> int:
    """A fork in a session of its own that runs `work`; what it raises becomes a row. Its pid."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    die_with_parent()
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - the boundary of a part: what it raises is its result
        tell.error(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def guarded(tell: Tell, *works: Callable[[], None]) -> None:
    """One after the other; what one of them raises is a row, and the others are done."""
    for work in works:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the boundary of a part of a part
            tell.error(error)


def over(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid


def end(pid: int) -> None:
    """With all that it started."""
    end_tree(pid)
    os.waitpid(pid, 0)


def all_bounded(
    cases: list[tuple[str, Callable[[], None]]], tell: Tell, at_once: int, each_s: float
) -> None:
    """Runs the cases, so many at a time, each in a fork of its own with its bound."""
    waiting, running = list(cases), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name, work = waiting.pop(0)
            running[start(work, tell)] = (name, time.monotonic() + each_s)
        for pid, (name, ends_s) in list(running.items()):
            late = time.monotonic() > ends_s
            if late and not over(pid):
                end(pid)
                tell("cut", f"{name} after {each_s:g} s")
                del running[pid]
            elif late or over(pid):
                del running[pid]
        time.sleep(LOOK_S)  # sleeps: between looks at processes that have a bound


class Ranks:
    """`n` forks that run `work(rank, talk, ...)`, and a pipe to each: they tell (name, value) and
    wait for words."""

    def __init__(
        self,
        n: int,
        work: Callable[..., None],
        environments: list[dict[str, str | None]],
        *more: Any,
    ) -> None:
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(n):
            mine, theirs = FORK.Pipe()
            process = FORK.Process(
                target=_rank, args=(environments[rank], work, rank, theirs, more), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def ready(self, seconds: float = 60.0) -> None:
        """Waits until each has said so."""
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(seconds), f"rank {rank} was not ready within {seconds:g} s"
            name, value = pipe.recv()
            assert name == "ready", f"rank {rank} says {name}: {value}"

    def told(self, rank: int, seconds: float = 60.0) -> Iterator[tuple[str, Any]]:
        """What it says until it has said `done`."""
        while self.pipes[rank].poll(seconds):
            name, value = self.pipes[rank].recv()
            if name == "done":
                return
            yield name, value
        yield "error", f"rank {rank} said nothing for {seconds:g} s"

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)
        self.processes[rank].join()

    def go(self, rank: int) -> None:
        self.pipes[rank].send("go")


def _rank(
    environment: dict[str, str | None],
    work: Callable[..., None],
    rank: int,
    pipe: Any,
    more: tuple[Any, ...],
) -> None:
    die_with_parent()
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        work(rank, pipe, *more)
    except Exception as error:  # noqa: BLE001 - told to the parent
        traceback.print_exc()
        with suppress(OSError):
            pipe.send(("error", f"{type(error).__name__}: {error}"))
    with suppress(EOFError, OSError):
        pipe.send(("done", None))
        pipe.recv()  # its end would end its connections
    os._exit(0)


def paths() -> str:
    """PYTHONPATH of a Python that is started anew."""
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(HERE), str(HERE.parents[1]), *([given] if given else [])])


def threads() -> int:
    return len(os.listdir("/proc/self/task"))
