"""Whether this worker's node may take part in the run: versions, memory, a matmul, the program, a
link to a neighbor.

What costs nothing is looked at before the program is opened, the rest beside that. Most nodes that
are bad are so from their start (a wrong image, memory that others use, a GPU that computes wrongly,
a security group that lets nothing through): here it costs seconds, in a generation it would cost
the whole run a recovery.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from elastic import version
from elastic.config.fingerprint import differences
from elastic.errors import StorageFailed, StorageRefused
from elastic.storage import open_storage
from elastic.text import gib
from elastic.types import Admission, Mark, Terms, apart, version_differences
from elastic.types.admission import PLACE, Entry
from elastic.worker.process.free_memory import free_gpu_bytes, free_host_bytes
from elastic.worker.process.gpu_health import memory_holders
from elastic.worker.profile.link_probe import Door, Link, measure

log = logging.getLogger(__name__)

PERIOD = 7  # of the matrices, in every direction
# a power of 2 times the period: every sum is exact, also in bfloat16
CPU_SIZE, GPU_SIZE = 64 * PERIOD, 512 * PERIOD
# Ray then leaves CUDA_VISIBLE_DEVICES as it is
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
END_MOST_S = 30.0  # what is not over by then is not waited for
# the driver frees the memory of a process that was killed in seconds, with a kernel that hangs in
# longer
FREE_MOST_S = 60.0
FREE_EVERY_S = 0.5
REACH_MOST_S = 10.0  # of the run's storage
NCCL_HANGS = "2.26."


class NodeRejected(Exception):
    """Why this node may not take part, in one line. `may_pass`: it lacks memory of a GPU, which
    others hold. `neighbors`: the nodes that it did not reach."""

    def __init__(self, why: str, may_pass: bool = False, neighbors: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.may_pass, self.neighbors = may_pass, neighbors


@dataclass
class Checks:
    """Of one worker that starts. `linked`: the first of its node, which looks at the link too.
    `tick`: is called while it waits for memory. Each of `begin`, `program`, `end` raises
    Refused."""

    entry: Entry
    device: torch.device
    linked: bool
    tick: Callable[[], None] = lambda: None
    _began_s: float = 0.0
    _spent_s: float = 0.0
    _versions: dict[str, str] = field(default_factory=dict)
    _free: tuple[int, int] = (0, 0)
    _speed: Future[tuple[float, float]] | None = None
    _link: Future[tuple[Link | None, float]] | None = None
    _mark: Future[None] | None = None
    _storage: Future[None] | None = None

    def begin(self, background: Callable[..., Future[Any]]) -> None:
        """What is known at once; the rest begins in the background."""
        self._began_s = time.monotonic()
        terms, on_gpu = self.entry.terms, self.device.type == "cuda"
        if terms.on_gpu and not on_gpu:
            raise NodeRejected(no_gpu())
        other = on_gpu and not self.linked
        if other and (why := shared_gpu(os.environ, torch.cuda.device_count())):
            raise NodeRejected(why)
        self._versions = versions()
        if different := version_differences(terms.versions, self._versions):
            raise NodeRejected(different)
        if self.linked and on_gpu and (why := doubtful(self._versions)):
            log.warning(why)
        gpu_bytes = free_gpu_bytes(self.device)
        if gpu_bytes < terms.gpu_bytes:
            free = partial(free_gpu_bytes, self.device)
            gpu_bytes = awaited(terms.gpu_bytes, free, tick=self.tick)
        self._free = free_host_bytes(), gpu_bytes
        if why := too_little(terms, *self._free):
            if terms.host_bytes > self._free[0]:
                raise NodeRejected(why)
            raise NodeRejected(
                f"{why} (still, after {FREE_MOST_S:.0f} s{held_by(self.device)})", may_pass=True
            )
        if self.linked and terms.mark is not None:
            self._mark = background(answer, terms.mark)
        if self.linked and terms.storage:
            self._storage = background(reach, terms.storage)
        self._speed = background(_timed, multiply, self.device)
        if self.linked:
            self._link = background(_timed, try_links, self.entry.doors)
        self._spent_s = time.monotonic() - self._began_s

    def program(self, run: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
        """The fingerprints of the run's program and of the one that was opened here."""
        if different := differences(run, mine):
            raise NodeRejected(f"its program is another one: {different}")

    def end(self) -> Admission:
        """Waits for what is still under way."""
        asked_s = time.monotonic()
        assert self._speed is not None
        try:
            flop_per_s, speed_s = self._speed.result(END_MOST_S)
        except TimeoutError:
            raise NodeRejected(
                f"a matmul of {CPU_SIZE} to {GPU_SIZE} rows did not end within {END_MOST_S:.0f} s"
            ) from None
        mark = self.entry.terms.mark if self._mark is not None else None
        if self._mark is not None and mark is not None:
            try:
                self._mark.result(END_MOST_S)
            except TimeoutError:
                late = f"no answer within {END_MOST_S:.0f} s on this node from"
                raise NodeRejected(apart(mark.uri, late)) from None
        if self._storage is not None:
            with suppress(TimeoutError):  # it may be away, which a run outlives
                self._storage.result(END_MOST_S)
        link, link_s = None, 0.0
        if self._link is not None:
            try:
                link, link_s = self._link.result(END_MOST_S)
            except TimeoutError:
                link_s = END_MOST_S
        if link is not None and link.problem:
            raise NodeRejected(link.problem, neighbors=link.failed)
        waited_s = time.monotonic() - asked_s
        name, bytes_per_s = (link.name, link.bytes_per_s) if link is not None else ("", 0.0)
        took_s = self._spent_s + max(speed_s, link_s)
        return Admission(
            round(took_s, 4), round(waited_s, 4), self._versions, flop_per_s, *self._free,
            bytes_per_s, name, mark.text if mark is not None else "",
        )  # fmt: skip

    def refusal(self) -> NodeRejected | None:
        """That of the node, where the checks come to it by now or soon; for a program that could
        not be opened there."""
        try:
            if self._speed is not None:
                self.end()
        except NodeRejected as refused:
            return refused
        return None


def _timed(what: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    began_s = time.monotonic()
    found = what(*arguments)
    return found, time.monotonic() - began_s


# ------------------------------------------------------------------------------ versions and memory


def versions() -> dict[str, str]:
    """What must be the same on all nodes; builds of torch for CPU have no NCCL."""
    found = version.versions()
    if dist.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def doubtful(found: Mapping[str, str]) -> str:
    """What is known against these versions, though they may be used; '' = nothing."""
    if not f"{found.get('NCCL', '')}.".startswith(NCCL_HANGS):
        return ""
    return (
        f"NCCL {found['NCCL']} was reported to hang now and then while communicators are set up "
        "in the non-blocking mode that "
        "elastic needs (pytorch issues 153960 and 154055); take 2.21 to 2.25, or 2.27 and later"
    )


def shared_gpu(environment: Mapping[str, str], n_visible: int) -> str:
    """For a worker that is not the first of its node, whose GPU is the first that it sees: why that
    is another worker's GPU too. '' = Ray shows each worker its own GPU only."""
    if environment.get(NOSET, "").lower() not in ("1", "true") or n_visible < 2:
        return ""
    return (
        f"{NOSET} is set, so every worker of the node sees all {n_visible} GPUs and would take "
        "cuda:0: unset it for Ray"
    )


def no_gpu() -> str:
    """Why this worker, of a pool of GPUs, sees none."""
    try:
        torch.cuda.init()
        why = f"CUDA_VISIBLE_DEVICES is '{os.environ.get('CUDA_VISIBLE_DEVICES', '')}'"
    except (AssertionError, RuntimeError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    return (
        f"its pool is of GPUs, and torch {torch.__version__}, built for {build}, finds none here: "
        f"{why}"
    )


def too_little(terms: Terms, host_bytes: int, gpu_bytes: int) -> str:
    """'' = the memory is enough, as far as is known."""
    for what, free, needed in (
        ("host memory", host_bytes, terms.host_bytes),
        ("a GPU's memory", gpu_bytes, terms.gpu_bytes),
    ):
        if needed > free:
            return f"{gib(free)} of {what} are free, the job needs {gib(needed)} there"
    return ""


def awaited(
    n_bytes: int, free: Callable[[], int], *, clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep, tick: Callable[[], None] = lambda: None,
) -> int:  # fmt: skip
    """Free bytes, once there are `n_bytes`, or after FREE_MOST_S: what a process that was killed
    has held is free some seconds later. `clock`, `sleep`: seconds."""
    until_s = clock() + FREE_MOST_S
    while (found := free()) < n_bytes and clock() < until_s:
        tick()
        sleep(FREE_EVERY_S)
    return found


def held_by(device: torch.device) -> str:
    """Who holds the rest of it, where NVML tells."""
    names = [f"process {pid}" + (f" ({gib(n)})" if n else "") for pid, n in memory_holders(device)]
    return f"; memory is held by {', '.join(names)}" if names else ""


# ------------------------------------------------------------------------------------------ storage


def answer(mark: Mark) -> None:
    """Finds the driver's file in the run's storage and answers it there. Raises Refused."""
    storage = open_storage(mark.uri)
    try:
        found = storage.get(mark.file)
        if found == mark.text.encode():
            storage.put(mark.answer, found)
            return
        what = "another file than the driver's is on this node in"
    except FileNotFoundError:
        what = "a file that the driver has written is not there on this node, in"
    except OSError as error:
        what = f"this node cannot read and write ({error.strerror or error})"
    raise NodeRejected(apart(mark.uri, what))


def reach(uri: str) -> None:
    """One request to the run's object storage. Raises Refused where it says no; one that does not
    answer may be away for all nodes."""
    try:
        open_storage(uri).hasty(REACH_MOST_S).list(f"{PLACE}/")
    except StorageRefused as error:
        raise NodeRejected(f"the run's storage refuses it: {error}") from error
    except StorageFailed as error:
        log.warning("the run's storage does not answer on this node: %s", error)


# ----------------------------------------------------------------------------------------- a matmul


def multiply(device: torch.device, matmul: Callable[..., torch.Tensor] = torch.matmul) -> float:
    """FLOP/s of a product of known value. Raises Refused where it comes out wrong, or not at
    all."""
    try:
        return _multiply(device, matmul)
    except RuntimeError as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NodeRejected(f"it cannot compute on {device.type}: {line}") from error


def _multiply(device: torch.device, matmul: Callable[..., torch.Tensor]) -> float:
    """FLOP/s.

    a[i, k] = (i + 2 k) mod 7 - 3 and b[k, j] = (3 k + j) mod 7 - 3 repeat every 7, so that each
    element of the product is size / 7 times one of 49 integers of at most 28: exact in float32,
    TF32 and bfloat16, whatever the order of the sums."""
    on_gpu = device.type == "cuda"
    size, dtype = (GPU_SIZE, torch.bfloat16) if on_gpu else (CPU_SIZE, torch.float32)
    n = torch.arange(size, device=device)
    a = ((n[:, None] + 2 * n[None, :]) % PERIOD - 3).to(dtype)
    b = ((3 * n[:, None] + n[None, :]) % PERIOD - 3).to(dtype)
    matmul(a, b)  # the first one also loads the library
    _settle(device)
    began_s = time.monotonic()
    c = matmul(a, b)
    _settle(device)
    took_s = time.monotonic() - began_s
    few = _known(size // PERIOD).to(device)
    # a NaN differs from everything
    wrong = int((c != few[n % PERIOD][:, n % PERIOD].to(dtype)).sum())
    finite = "" if not wrong or bool(c.isfinite().all()) else ", some are no numbers"
    if on_gpu:
        del a, b, c
        torch.cuda.empty_cache()
    if wrong:
        raise NodeRejected(
            f"it computes wrongly: {wrong} of {size * size} elements of a product on "
            f"{device.type}{finite}"
        )
    return 2.0 * size**3 / max(took_s, 1e-9)


def _known(times: int) -> torch.Tensor:
    """[7, 7]: the elements of the product by row and column mod 7, in Python's integers."""
    every = range(PERIOD)
    rows = [
        [sum(((i + 2 * k) % PERIOD - 3) * ((3 * k + j) % PERIOD - 3) for k in every) for j in every]
        for i in every
    ]
    return torch.tensor(rows, dtype=torch.float32) * times


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------------------ a link


def try_links(doors: Callable[[], Sequence[Door]]) -> Link | None:
    """The first neighbor that is reached; None = nobody was there to be asked. Where none of
    several is reached, the node is at fault and not one of them."""
    failed: list[Link] = []
    for door in doors():
        found = measure(door)
        if not found.problem:
            return found
        failed.append(found)
    return replace(failed[0], failed=tuple(link.name for link in failed)) if failed else None
