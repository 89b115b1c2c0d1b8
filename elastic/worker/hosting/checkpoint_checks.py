"""The newest checkpoint, read back beside the run: by its digests, from storage itself, no faster
than is needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elastic.errors import ElasticError
from elastic.types import Copy, CopyDamaged, CopyReadBegun, CopyVerified, Event

log = logging.getLogger(__name__)

Paced = Callable[[int], object]  # told of the bytes of each part that was read
Verify = Callable[[str, Paced], list[str]]  # (uri, paced) -> what is wrong, one text for each file
LEAST_BYTES_PER_S = 100e6
# a copy that takes longer at that is read faster, so that it is done before it is old
READ_IN_S = 600.0
AGAIN_S = 60.0  # after storage has not answered


class CopyChecks:
    """One copy at a time; of those that were committed meanwhile the newest is next, the others are
    left out."""

    def __init__(self, tell: Callable[[Event], object], verify: Verify) -> None:
        self._tell, self._verify = tell, verify
        self._next: Copy | None = None
        self._reading = ""  # its URI; '' = nothing, or what is not wanted any more
        self._change, self._closed = threading.Condition(), threading.Event()
        # storage may never answer
        self._thread = threading.Thread(target=self._run, name="copy-checks", daemon=True)
        self._thread.start()

    def check(self, copy: Copy) -> None:
        """-> CopyReadBegun, then CopyVerified or CopyDamaged, in a while."""
        with self._change:
            if self._next is None or copy.step >= self._next.step:
                self._next = copy
            self._change.notify()

    def removed(self, uri: str) -> None:
        """It is no damage that this one is not whole any more."""
        with self._change:
            self._next = None if self._next is not None and self._next.uri == uri else self._next
            self._reading = "" if self._reading == uri else self._reading

    def close(self) -> None:
        """Whatever is being read is left; nothing more is reported."""
        self._closed.set()
        with self._change:
            self._change.notify()

    def _run(self) -> None:
        told = ""
        while not self._closed.is_set():
            with self._change:
                self._change.wait_for(lambda: self._next is not None or self._closed.is_set())
                copy, self._next = self._next, None
                self._reading = copy.uri if copy is not None else ""
            if copy is None:
                continue
            if copy.uri != told:  # else it is tried again
                self._tell(CopyReadBegun(told := copy.uri))
            if not self._done(copy):
                self._closed.wait(AGAIN_S)
                with self._change:
                    self._next = self._next or (copy if self._reading else None)

    def _done(self, copy: Copy) -> bool:
        """False: storage did not answer, and nothing is known."""
        pace = ReadPace(max(LEAST_BYTES_PER_S, copy.n_bytes / READ_IN_S), self._closed.wait)
        began_s = time.monotonic()
        try:
            problems = self._verify(copy.uri, pace.read)
        except InterruptedError:
            return True
        except (OSError, ElasticError) as error:
            log.warning("%s was not read back: %s", copy.uri, error)
            return False
        except Exception as error:  # noqa: BLE001 - the boundary of this thread: a copy that cannot be read is no copy
            problems = [f"{copy.uri}: {type(error).__name__}: {error}"]
        with self._change:
            wanted = bool(self._reading) and not self._closed.is_set()
        if wanted and problems:
            self._tell(CopyDamaged(copy.uri, "; ".join(problems[:3])))
        elif wanted:
            self._tell(CopyVerified(copy.uri, copy.n_bytes, time.monotonic() - began_s))
        return True


class ReadPace:
    """`bytes_per_s` in the mean. `wait`: as Event.wait; True ends the reading by
    InterruptedError."""

    def __init__(
        self,
        bytes_per_s: float,
        wait: Callable[[float], bool],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bytes_per_s, self._wait, self._now_s = bytes_per_s, wait, now_s
        self._due_s = now_s()

    def read(self, n_bytes: int) -> None:
        """Waits until so many bytes more were due; what was slower than the pace is not made up
        for."""
        now_s = self._now_s()
        self._due_s = max(self._due_s, now_s - 1.0) + n_bytes / self._bytes_per_s
        if self._wait(max(0.0, self._due_s - now_s)):
            raise InterruptedError("the driver ends")
