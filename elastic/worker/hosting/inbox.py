"""Orders from other terminals, which arrive through the run's inbox."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from elastic.config.job import drill_entry
from elastic.errors import SpecError, StorageRefused
from elastic.storage import Storage
from elastic.text import one_line, printable
from elastic.types import ProfileAsked
from elastic.worker.hosting.thread_boundary import ThreadBoundary, waiting

log = logging.getLogger(__name__)

INBOX, REJECTED = "inbox/", "inbox/rejected/"
KINDS = ("drill", "stop", "profile")
REMOTE_EVERY_S = 2.0
STORED_S = 20.0  # lines of the journal that change no plan reach object storage every 10 s
CLOSE_MOST_S = 5.0
MOST_BYTES = 1 << 16  # of an order
PROFILE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RANKS = re.compile(r"all|node|[0-9]{1,6}(,[0-9]{1,6})*")
REASON_MOST = 400  # characters of a stop's: it stands in the journal, and on terminals
STEPS_MOST = 100  # a trace of one step may have megabytes
PROFILE_KEYS = {"profile_id", "steps", "ranks"}


@dataclass(frozen=True)
class InboxOrders:
    """What the inbox held."""

    drills: tuple[dict[str, Any], ...] = ()
    stop: str | None = None
    profiles: tuple[ProfileAsked, ...] = ()


class Inbox:
    """Orders as they come. Object storage is asked by a thread every REMOTE_EVERY_S: the driver
    never waits for it.

    Anybody who may write the run's folder may leave a file there: nothing of it raises. What is no
    order, or cannot be read, goes to inbox/rejected with the reason; what storage did not answer is
    retried at the next look.

    A file stays until the next driver would find its order in the journal: see `written`. Only a
    drill goes before, lest it happens twice.

    `begun_at_s`: when a person started the run, which means that it trains: what the first look
    finds and is older was meant for the driver before, and is removed; but for drills. By that look
    and by the time, since who gives an order may have another clock. None = nobody did.
    """

    def __init__(self, storage: Storage, begun_at_s: float | None = None) -> None:
        self._storage, self._begun_at_s = storage, begun_at_s
        # given out or refused, and still there: they could not be removed, or are owed
        self._taken: set[str] = set()
        self._owed: set[str] = set()  # not known to be in the journal
        self._found: SimpleQueue[tuple[str, InboxOrders]] = SimpleQueue()
        self._given: list[str] = []  # by the last `take`
        # in the journal, and from when on the next driver finds it there
        self._written: SimpleQueue[tuple[str, float]] = SimpleQueue()
        self._due: list[tuple[str, float]] = []
        self._stored = threading.Event()
        self._done = threading.Event()
        self._boundary = ThreadBoundary(log, "inbox")
        self._thread: threading.Thread | None = None
        if storage.remote:
            self._thread = threading.Thread(target=self._follow, name="inbox", daemon=True)
            self._thread.start()

    def take(self) -> InboxOrders:
        """What has come since the last call."""
        if not self._storage.remote:
            self._boundary.holds(self._look)
        given = waiting(self._found)
        self._given += [key for key, _ in given]
        found = [orders for _, orders in given]
        stops = [orders.stop for orders in found if orders.stop is not None]
        return InboxOrders(
            tuple(drill for orders in found for drill in orders.drills),
            stops[-1] if stops else None,
            tuple(profile for orders in found for profile in orders.profiles),
        )

    def written(self, stored: bool = False) -> None:
        """What was given out so far stands in the journal. `stored`: in storage, too."""
        due_s = time.monotonic() + (STORED_S if self._storage.remote else 0.0)
        for key in self._given:
            self._written.put((key, due_s))
        self._given.clear()
        if stored:
            self._stored.set()

    def close(self) -> None:
        """What is written is removed: whoever starts the run again means it to train."""
        self._done.set()
        if self._thread is None:
            self._boundary.holds(self._remove)
        elif self._stored.is_set() and self._owed:
            self._thread.join(CLOSE_MOST_S)

    def _follow(self) -> None:
        while not self._done.wait(REMOTE_EVERY_S):
            self._boundary.holds(self._look)
        self._boundary.holds(self._remove)

    def _look(self) -> None:
        found = self._storage.list(INBOX)
        keys = [key for key in found if key.count("/") == 1 and key.endswith(".json")]
        self._taken.intersection_update(keys)
        for key in keys:
            if key not in self._taken:
                self._boundary.holds(partial(self._take, key))
        if self._taken.issuperset(keys):
            self._begun_at_s = None
        self._remove()

    def _remove(self) -> None:
        self._due += waiting(self._written)
        now_s, stored = time.monotonic(), self._stored.is_set()
        self._owed -= {key for key, due_s in self._due if stored or now_s >= due_s}
        self._due = [(key, due_s) for key, due_s in self._due if key in self._owed]
        for key in sorted(self._taken - self._owed):
            with suppress(OSError, SpecError):  # it stays, and is not taken again
                self._storage.delete(key)

    def _take(self, key: str) -> None:
        """Gives the order out. Raises OSError where storage did not answer: it is looked at
        again."""
        text = b""
        try:
            text = self._text(key)
            found = _order(text)
        except (FileNotFoundError, PermissionError, SpecError, ValueError, RecursionError) as error:
            if isinstance(error, StorageRefused):
                raise
            self._taken.add(key)
            kind = "" if isinstance(error, SpecError) else f"{type(error).__name__}: "
            self._refuse(key, text, f"{kind}{error}")
        else:
            self._taken.add(key)
            if not found.drills and self._is_old(key):
                log.info("%a is of before this start, and is not taken", key)
                return
            if not found.drills:
                self._owed.add(key)
            self._found.put((key, found))

    def _is_old(self, key: str) -> bool:
        """Left before a person started the run. A key begins with the nanoseconds of its time."""
        at_ns = key[len(INBOX) :].partition("-")[0]
        begun = self._begun_at_s
        return begun is not None and at_ns.isdecimal() and int(at_ns) < begun * 1e9

    def _text(self, key: str) -> bytes:
        if not self._storage.exists(key):
            raise FileNotFoundError(
                "there is no such file; it was removed, or is a link to nothing, or a pipe"
            )
        if self._storage.size(key) > MOST_BYTES:
            raise SpecError(f"an order has at most {MOST_BYTES} bytes")
        return self._storage.get(key)

    def _refuse(self, key: str, text: bytes, why: str) -> None:
        log.warning("%a is no order, and is not taken: %s", key, printable(why))
        record = json.dumps({"order": text.decode(errors="replace"), "why": why}).encode()
        try:
            self._storage.put(f"{REJECTED}{key[len(INBOX) :]}", record)
        except (OSError, SpecError) as error:
            log.warning("the reason could not be written to %s: %s", REJECTED, error)


def _order(text: bytes) -> InboxOrders:
    """Raises SpecError, ValueError, RecursionError for what is none."""
    order = json.loads(text)
    if not isinstance(order, dict) or len(order) != 1 or next(iter(order)) not in KINDS:
        raise SpecError('an order is {"drill": {...}}, {"stop": "reason"} or {"profile": {...}}')
    if "profile" in order:
        return InboxOrders(profiles=(profile_order(order["profile"]),))
    if "drill" in order:
        return InboxOrders((drill_entry(order["drill"], "drill").plain(),))
    if not isinstance(order["stop"], str):
        raise SpecError('the reason of a stop is a text, as in {"stop": "reason"}')
    return InboxOrders(stop=one_line(order["stop"], REASON_MOST))


def profile_order(data: Any) -> ProfileAsked:
    """Raises SpecError, in one line."""
    if not isinstance(data, dict) or set(data) != PROFILE_KEYS:
        raise SpecError(f"a profile has {', '.join(sorted(PROFILE_KEYS))}")
    profile_id, steps, ranks = (data[key] for key in ("profile_id", "steps", "ranks"))
    if not isinstance(profile_id, str) or not PROFILE_ID.fullmatch(profile_id):
        raise SpecError(f"profile: the id {profile_id!r} must be letters, digits, '.', '_' and '-'")
    if type(steps) is not int or not 1 <= steps <= STEPS_MOST:
        raise SpecError(f"--steps {steps}: a profile is of 1 to {STEPS_MOST} steps")
    if not isinstance(ranks, str) or not RANKS.fullmatch(ranks):
        raise SpecError(f"--ranks {ranks}: must be numbers with commas, as in 0,3, or all, or node")
    return ProfileAsked(profile_id, steps, ranks)
