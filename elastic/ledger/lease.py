"""One driver per run: a lease in the run's storage, as objects that are only ever created, never
changed.

`lease/<epoch>-<n>.json` is the n-th sign of life of the driver of that epoch. A driver takes the
run over by creating object 0 of the next epoch; of several that try, storage lets one win. The
epoch fences whatever the older driver still tries to do.

Clocks of two machines are never trusted: a holder counts its own seconds since its last sign of
life, and one that looks expired is watched for its whole time to live before it is replaced.

What stands under `lease/` and is no such object (anybody who can write there may have put it) is
passed over and named once: it ends no run and keeps none from being taken over.

A holder that cannot renew has lost nothing yet: it keeps its epoch, and is not `certain` until a
renewal succeeds. The lease is `lost` once a newer epoch was seen. Workers obey the newest epoch
that they have seen, so whoever is not certain may order them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from elastic.errors import SpecError
from elastic.ledger.holder import Machine, started
from elastic.storage import Storage

log = logging.getLogger(__name__)

PREFIX = "lease/"
NAME = re.compile(re.escape(PREFIX) + r"([0-9]{8})-([0-9]{8})\.json")
GRACE_S = 1.0
RELEASE_MOST_S = 10.0
MOST_EPOCH = 1_000_000  # each driver that begins makes one
# times end with the year 9892
MOST = {"pid": 2**31, "started": 2**63, "since_s": 2.5e11, "at_s": 2.5e11, "ttl_s": 86400.0}


@dataclass(frozen=True)
class Sign:
    """A sign of life."""

    epoch: int
    n: int
    host: str
    boot: str
    pid: int
    started: int
    since_s: float
    at_s: float
    ttl_s: float
    released: bool = False

    @property
    def key(self) -> str:
        return f"{PREFIX}{self.epoch:08d}-{self.n:08d}.json"


@dataclass(frozen=True)
class Times:
    """`renew_s`: between signs of life; `ttl_s`: a holder that gave none for so long is gone."""

    renew_s: float = 3.0
    ttl_s: float = 15.0


class Lease:
    """Raises SpecError when another driver holds the run. `attached`: there was a driver before
    that did not end in order. `patient`: one on another machine that has just been heard of may be
    dead: it is watched, and not refused at once."""

    def __init__(
        self, storage: Storage, run: str, times: Times = Times(), *, patient: bool = False
    ) -> None:
        self.storage, self.run, self.times = storage, run, times
        self.trouble: Exception | None = None  # why the last renewal did not succeed
        self._lost, self._said = threading.Event(), False
        self._done = threading.Event()
        place = Machine.here()
        now_s = time.time()
        me: dict[str, Any] = {
            "host": place.host, "boot": place.boot, "pid": os.getpid(),
            "started": started(os.getpid()) or 0, "since_s": now_s, "ttl_s": times.ttl_s,
        }  # fmt: skip
        listed = storage.list(PREFIX)  # once: of a bucket that keeps versions it takes long
        before = newest(storage, listed=listed)
        if before is not None:
            self._refuse_living(before, patient)
        self.attached = before is not None and not before.released
        self.sign = Sign(epoch=before.epoch + 1 if before else 1, n=0, at_s=now_s, **me)
        # when the last sign of life that was given began to be written
        self._good_s = _awake_or_not_s()
        self._begin()
        if self._write(self.sign):
            raise SpecError(
                f"{storage.uri}: it overwrites what must not be (no If-None-Match); no run can be "
                "kept safe there"
            )
        since = storage.list(PREFIX, before.key if before is not None else "")
        found = sorted({*listed, *since})
        older = [key for key in found if NAME.fullmatch(key) and key < self.sign.key]
        if before is not None and max(older, default="") > before.key and not before.released:
            # it was heard again just now: it sees this epoch within its time to live
            time.sleep(before.ttl_s)
        with suppress(OSError):  # it only tidies up: the newest sign counts
            for key in older:
                storage.delete(key)
        self.storage = storage.hasty(times.ttl_s / 3)
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        return self.sign.epoch

    @property
    def lost(self) -> bool:
        """Another driver has taken the run over: this one may do nothing more."""
        return self._lost.is_set()

    @property
    def certain(self) -> bool:
        """No other driver can have taken the run over yet, by this process's own clock."""
        grace_s = min(GRACE_S, self.times.renew_s)
        return not self.lost and self.unheard_s <= self.times.ttl_s - grace_s

    @property
    def unheard_s(self) -> float:
        """Seconds since the last sign of life that was given, by this process's own clock."""
        return _awake_or_not_s() - self._good_s

    def give_up(self) -> None:
        """Another driver was heard of."""
        self._lost.set()
        self._done.set()

    def release(self) -> None:
        """The next driver need not wait. Where storage is out of reach, it must."""
        self._done.set()
        self._thread.join(timeout=min(self.times.ttl_s, RELEASE_MOST_S))
        if self._thread.is_alive() or not self.certain:
            return
        with suppress(OSError):
            self._write(self._next(released=True))

    def _begin(self) -> None:
        """Takes the next epoch. Something that is no sign of life may stand under its name: then
        the one after it."""
        while self.sign.epoch <= MOST_EPOCH:
            if self._write(self.sign):
                return
            winner = newest(self.storage, f"{PREFIX}{self.sign.epoch:08d}")
            if winner is not None and winner.epoch >= self.sign.epoch:
                raise SpecError(self._refusal(winner))
            self.sign = replace(self.sign, epoch=self.sign.epoch + 1)
        where = self.storage.uri_of(PREFIX)
        raise SpecError(
            f"{where}: epoch {MOST_EPOCH} is there, the last one: remove what is under it if no "
            "driver lives"
        )

    def _refuse_living(self, before: Sign, patient: bool) -> None:
        if before.released or self._dead_here(before):
            return
        if not patient and 0.0 <= time.time() - before.at_s <= before.ttl_s:
            raise SpecError(self._refusal(before))
        # its clock may be behind or ahead of ours, or this machine stalled: does it still give
        # signs?
        self._watch(before)

    def _watch(self, before: Sign) -> None:
        """Raises SpecError when a new sign of life comes while the last one expires by our own
        clock."""
        after = _sign_after(before, self.storage, self.times.renew_s)
        if after is not None:
            raise SpecError(self._refusal(after))

    def _dead_here(self, sign: Sign) -> bool:
        return sign.boot == Machine.here().boot and started(sign.pid) != sign.started

    def _refusal(self, holder: Sign) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder.since_s))
        return (
            f"run '{self.run}' is driven by process {holder.pid} on {holder.host} since {since} "
            f"(its last sign of life is {max(0.0, time.time() - holder.at_s):.0f} s old); stop it "
            "first, or choose another --run-name"
        )

    def _next(self, released: bool = False) -> Sign:
        return Sign(
            **{**asdict(self.sign), "n": self.sign.n + 1, "at_s": time.time(), "released": released}
        )

    def _write(self, sign: Sign) -> bool:
        return self.storage.put(sign.key, json.dumps(asdict(sign)).encode(), if_absent=True)

    def _renew(self) -> None:
        while not self._done.wait(self.times.renew_s):
            begun_s = _awake_or_not_s()
            try:
                if not self._renewed():
                    self._lost.set()
                    return
            except Exception as error:  # noqa: BLE001 - whatever it is, it does not say that somebody else has the run
                self._not_renewed(error)
            else:
                self._good_s, self.trouble = begun_s, None
                if self._said:
                    self._said = False
                    log.warning(
                        "%s answers again: the run continues under its own lease (epoch %d)",
                        self.storage.uri,
                        self.epoch,
                    )

    def _not_renewed(self, error: Exception) -> None:
        self.trouble = error
        if not self.certain and not self._said:
            self._said = True
            text = (
                "%s has taken no sign of life for %.0f s (%s): training and changes of plan "
                "continue, the run's end waits"
            )
            log.warning(text, self.storage.uri, self.unheard_s, error)

    def _renewed(self) -> bool:
        """False = somebody else has the run."""
        certain, before = self.certain, self.sign
        if self._replaced():
            return False
        sign = self._next()
        while not self._write(sign):
            if self._replaced():
                return False
            if self.sign.key == sign.key:  # its own, of which the answer was lost
                break
            if sign_at(self.storage, sign.key) is not None:
                return False
            sign = replace(sign, n=sign.n + 1)  # no sign of life stands there
        self.sign = sign
        if not certain and self._replaced():  # it was taken over between the look and the sign
            return False
        # the next one removes only its own predecessor; a new driver removes all
        with suppress(OSError):
            self.storage.delete(before.key)
        return True

    def _replaced(self) -> bool:
        """A newer epoch is there. A sign of our own whose answer was lost is the newest from then
        on. Looks behind the last sign alone: where a bucket keeps versions, a list goes through all
        that were ever removed before it."""
        after = newest(self.storage, self.sign.key)
        if after is not None and after.epoch > self.epoch:
            return True
        if after is not None and self._mine(after):
            self.sign = after
        return False

    def _mine(self, sign: Sign) -> bool:
        me = self.sign
        return (sign.epoch, sign.boot, sign.pid, sign.since_s) == (
            me.epoch,
            me.boot,
            me.pid,
            me.since_s,
        )


def _awake_or_not_s() -> float:
    """Seconds that never go back, those included in which the whole machine was suspended: others
    have waited meanwhile."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux's
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def newest(
    storage: Storage, after: str = "", *, listed: Sequence[str] | None = None
) -> Sign | None:
    """The last sign of life of the newest epoch; of those behind `after`. `listed`: what there was
    just now. Raises OSError where storage does not answer."""
    found = None
    for _ in range(20):
        gone = ""  # listed, and not there: replaced by the next one since, or a link to nothing
        keys = storage.list(PREFIX, after) if listed is None else listed
        for key in sorted(keys, reverse=True):
            if not NAME.fullmatch(key):
                _pass_over(storage.uri, key, "its name is not that of one")
                continue
            try:
                sign = sign_at(storage, key)
            except FileNotFoundError:
                gone = gone or key
                continue
            if sign is not None:
                found = sign
                break
        if not gone:
            return found
        after, listed = gone, None
    raise OSError(
        errno.EAGAIN, "its objects change faster than they can be read", storage.uri_of(PREFIX)
    )


def holder(run: Storage, *, patient: bool = True) -> str:
    """Who drives the run now, as `process 12 on host`; '' = nobody. `patient`: one on another
    machine whose last sign is not of just now by this one's clock is watched until it expires, or
    gives a sign."""

    def lives(sign: Sign) -> bool:
        age_s = time.time() - sign.at_s
        if not patient or abs(age_s) <= sign.ttl_s:
            return age_s <= sign.ttl_s
        return _sign_after(sign, run, sign.ttl_s / 5) is not None

    return _named(newest(run), lives)


class HolderWatch:
    """The same for who looks again and again, and need not wait: a driver on another machine lives
    as long as its signs of life change within its time to live, by this machine's own clock. At the
    first look the clocks of both count."""

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._sign: Sign | None = None  # the newest one
        self._since_s = 0.0  # from when on it has been that

    def __call__(self) -> str:
        return _named(newest(self._run), self._lives)

    def _lives(self, sign: Sign) -> bool:
        now_s, before = _awake_or_not_s(), self._sign
        if before is None:
            self._since_s = now_s - max(0.0, time.time() - sign.at_s)
        elif before.key != sign.key:
            self._since_s = now_s
        self._sign = sign
        return now_s - self._since_s <= sign.ttl_s


def _named(sign: Sign | None, lives: Callable[[Sign], bool]) -> str:
    """`lives`: does the driver of that sign, on another machine?"""
    if sign is None or sign.released:
        return ""
    here = sign.boot == Machine.here().boot
    alive = started(sign.pid) == sign.started if here else lives(sign)
    return f"process {sign.pid} on {sign.host}" if alive else ""


def _sign_after(before: Sign, storage: Storage, look_s: float) -> Sign | None:
    """The sign of life that comes while that one expires by this machine's own clock; None = none
    does. `look_s`: so often it is looked for."""
    until_s = time.monotonic() + before.ttl_s
    while time.monotonic() < until_s:
        time.sleep(min(look_s, before.ttl_s))
        after = newest(storage, before.key)
        if after is not None and not after.released:
            return after
    return None


def sign_at(storage: Storage, key: str) -> Sign | None:
    """None = something else stands there. Raises FileNotFoundError."""
    try:
        return decode(key, storage.get(key))
    except ValueError as error:
        _pass_over(storage.uri, key, str(error))
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ELOOP):
            raise
        _pass_over(storage.uri, key, str(error.strerror))
    return None


def decode(key: str, data: bytes) -> Sign:
    """Raises ValueError for what is no sign of life of this name. Keys that a newer version may
    have added do not count."""
    try:
        found = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is too deep") from error
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    given = {field.name: found[field.name] for field in fields(Sign) if field.name in found}
    for name, value in given.items():
        kinds = {"host": (str,), "boot": (str,), "released": (bool,)}.get(
            name, (int, float) if name.endswith("_s") else (int,)
        )
        if type(value) not in kinds:
            raise ValueError(f"its {name} is a {type(value).__name__}")
        if name in MOST and not 0 <= value <= MOST[name]:
            raise ValueError(f"its {name} is out of range")
    try:
        sign = Sign(**given)
    except TypeError as error:
        raise ValueError(f"something is missing: {error}") from error
    if sign.key != key or not 0 < sign.epoch <= MOST_EPOCH:
        raise ValueError("its name is that of another, or of no epoch")
    if not sign.host.isprintable():
        raise ValueError("its host is no name")
    return sign


@lru_cache(maxsize=1000)
def _pass_over(uri: str, key: str, why: str) -> None:
    """Once by each name: whoever holds the run looks every few seconds."""
    log.warning("%s: %.200r is no sign of life of a driver and is passed over (%s)", uri, key, why)
