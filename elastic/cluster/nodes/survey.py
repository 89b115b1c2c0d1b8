"""Which nodes still live; and whether it is they that do not answer, or this host that is cut
off."""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import ray

from elastic.cluster.nodes.providers import RayNode, living
from elastic.cluster.ray import _ray_private
from elastic.types import NodesMute
from elastic.worker.hosting.thread_boundary import ThreadBoundary, waiting

log = logging.getLogger(__name__)

SURVEY_S, PROBE_S = 0.5, 0.1
PROBE_WAIT_S, SUSPECT_MOST_S = 0.3, 5.0
MUTE_MOST_S = 3.0  # a suspect whose raylet cannot be reached for so long is gone
REFUSES = "raylet unreachable"
AT_ONCE = 256  # ports that are asked beside each other
# a single host that is mute may have ended as well as be cut off; that two end at once, unheard, is
# rarer than that the link of this one is down
HOSTS_LEAST = 2
WITNESSES = 8  # hosts that are asked before all the others
RESENT_MOST_S = 120.0  # TCP sends again what was lost after so long at most
ASKED_MOST_S = 1.0  # a longer pause between two looks at the head was this process's own
# Ray ends every process whose GCS is away for so long:
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
# this one is to end before, in some 10 s
AWAY_MOST_S = 0.5 * float(os.environ.get(RECONNECT) or 60.0)


CODES = {0: True, errno.ECONNREFUSED: False}  # of a connection: any other is no answer


class Survey:
    """Looks at the cluster in threads of its own: one takes what Ray says, which may take long, one
    asks ports. `alive`, `draining` and `gone` are whole and new at every look.

    `suspect`: the nodes on which something broke. Their raylets are asked at once: a port that
    refuses is a node that is gone, long before Ray says so. One that is mute is gone until it
    answers again, where Ray has not given it up meanwhile: its link was cut. Where no other host
    answers either, nothing is known of any of them: see Isolation, which lasts `alone_most_s` at
    most. `head_lost`: why nothing more can come of this cluster; '' = it stands. That is where this
    process's own raylet is gone, or the head's GCS refuses for `refused_most_s` or is mute for
    AWAY_MOST_S.
    """

    def __init__(
        self, refused_most_s: float = AWAY_MOST_S, alone_most_s: float = AWAY_MOST_S
    ) -> None:
        self.alive: Mapping[str, RayNode] = {}
        self.draining: Mapping[str, float] = {}
        self.gone: Mapping[str, str] = {}  # Ray id -> why
        self._mute: set[str] = set()  # of the gone ones: they may answer again
        self.head_lost = ""
        # Ray id -> suspected until, reached last
        self._suspects: dict[str, tuple[float, float]] = {}
        self._unasked: dict[str, float] = {}  # of them, which were not asked yet -> since when
        self._isolation = Isolation(alone_most_s)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        place = ray.get_runtime_context()
        self._head = HeadService(place.gcs_address, refused_most_s)
        self._own = place.get_node_id()
        self._looked = threading.Event()  # since the head was asked last
        self._look()
        self._threads = [
            threading.Thread(target=run, name="survey", daemon=True)
            for run in (self._run, self._ask)
        ]
        for thread in self._threads:
            thread.start()

    def suspect(self, ray_ids: Iterable[str]) -> None:
        now_s = time.monotonic()
        with self._lock:
            for ray_id in ray_ids:
                if ray_id not in self._suspects:
                    self._unasked[ray_id] = now_s
                reached_s = self._suspects.get(ray_id, (0.0, now_s))[1]
                self._suspects[ray_id] = (now_s + SUSPECT_MOST_S, reached_s)

    @property
    def suspects(self) -> bool:
        """Is any node suspected?"""
        return bool(self._suspects)

    @property
    def liveness_known(self) -> bool:
        """May workers be taken for silent that do not answer? Not before it is known whether other
        hosts do, and not while none does."""
        now_s = time.monotonic()
        with self._lock:
            unasked = any(now_s - since_s < MUTE_MOST_S for since_s in self._unasked.values())
        return not unasked and self._isolation.liveness_known(now_s)

    def news(self, now_s: float) -> list[NodesMute]:
        """What was found out of this host's own link since the last call. `now_s`: in epoch
        seconds."""
        ahead_s = now_s - time.monotonic()
        return [
            NodesMute(hosts, round(since_s + ahead_s, 2), over)
            for hosts, since_s, over in waiting(self._isolation.told)
        ]

    def check(self, ray_id: str) -> str:
        """Asks the node now; returns why it is gone, '' = it answers or it is not known."""
        found = self.alive.get(ray_id)
        if found is not None and reaches(found.address, found.port) is False:
            self._lose(ray_id, REFUSES)
        return self.gone.get(ray_id, "")

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            # a call to a head that is gone may take a minute
            thread.join(0.0 if self.head_lost else 5.0)

    def _run(self) -> None:
        looking = ThreadBoundary(log, "asking the head for its nodes")
        while not self._stop.wait(SURVEY_S):
            looking.holds(self._look)  # where the head does not answer, nothing new is known

    def _ask(self) -> None:
        asked_s = time.monotonic()
        probing = ThreadBoundary(log, "asking nodes")
        of_the_head = ThreadBoundary(log, "asking the head")
        while not self._stop.wait(PROBE_S):
            probing.holds(self._probe)
            if time.monotonic() - asked_s >= SURVEY_S:
                asked_s = time.monotonic()
                of_the_head.holds(self._ask_head)

    def _ask_head(self) -> None:
        looked = self._looked.is_set()
        self._looked.clear()
        if self.head_lost:
            return
        if why := self.check(self._own):
            self.head_lost = f"this process's own raylet has ended ({why})"
        else:
            self.head_lost = self._head.ask(looked, time.monotonic())

    def _probe(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._suspects = {
                r: times
                for r, times in self._suspects.items()
                if times[0] > now_s and r not in self.gone
            }
            suspects, unasked = dict(self._suspects), [*self._unasked]
        alive = self.alive
        asked = {ray_id: alive[ray_id] for ray_id in suspects if ray_id in alive}
        places = reach_each(node.place for node in asked.values())
        answers = {ray_id: places[node.place] for ray_id, node in asked.items()}
        for ray_id in [ray_id for ray_id, answer in answers.items() if answer is False]:
            self._lose(ray_id, REFUSES)
        now_s = time.monotonic()
        reached = [ray_id for ray_id, answer in answers.items() if answer]
        mute = [ray_id for ray_id in suspects if answers.get(ray_id) is None]
        alone = self._alone(mute, {asked[r].address for r, a in answers.items() if a is not None})
        if alone is False:  # from here on those that are mute have their time
            reached = [*suspects]
        with self._lock:
            for ray_id in reached:
                self._suspects[ray_id] = (self._suspects[ray_id][0], now_s)
            for ray_id in unasked:
                self._unasked.pop(ray_id, None)
        for ray_id in mute if alone is None else ():
            if now_s - suspects[ray_id][1] > MUTE_MOST_S:
                self._lose(ray_id, f"its raylet cannot be reached for {MUTE_MOST_S:.0f} s")
                self._mute.add(ray_id)

    def _alone(self, mute: Sequence[str], heard: set[str]) -> bool | None:
        """Is this host cut off? None = no; False = no more. `mute`: nodes that have just not
        answered. `heard`: addresses that have."""
        lasts = self._isolation.since_s is not None
        own = self.alive.get(self._own)
        if own is None or not (mute or lasts):
            return None
        others: dict[str, RayNode] = {}
        for node in self.alive.values():
            if node.address != own.address and not node.address.startswith("127."):
                others.setdefault(node.address, node)
        answering = next(iter(sorted(heard & set(others))), "")
        if not answering and len(others) >= HOSTS_LEAST:
            asked = {self.alive[ray_id].address for ray_id in mute if ray_id in self.alive}
            rest = [node.place for address, node in others.items() if address not in asked]
            for some in (rest[:WITNESSES], rest[WITNESSES:]):
                found = reach_each(some)
                answering = next((a for (a, _), one in found.items() if one is not None), "")
                if answering:
                    break
        return self._isolation.seen(len(others), answering, time.monotonic())

    def _look(self) -> None:
        found = living()
        for ray_id in set(self.alive) - {node.ray_id for node in found}:
            self._lose(ray_id, "Ray lists it as dead")
        self._find_again(found)
        self.draining = draining = _ray_private.draining_nodes()
        found = [replace(node, draining=node.ray_id in draining) for node in found]
        with self._lock:
            self.alive = {node.ray_id: node for node in found if node.ray_id not in self.gone}
        self._looked.set()

    def _find_again(self, found: Iterable[RayNode]) -> None:
        """Those that were mute and answer."""
        mute = [node for node in found if node.ray_id in self._mute]
        answers = reach_each(node.place for node in mute)
        back = {node.ray_id for node in mute if answers[node.place]}
        with self._lock:
            self._mute -= back
            self.gone = {known: why for known, why in self.gone.items() if known not in back}

    def _lose(self, ray_id: str, why: str) -> None:
        with self._lock:
            self.gone = {**self.gone, ray_id: why}
            self.alive = {known: node for known, node in self.alive.items() if known != ray_id}


@dataclass
class Isolation:
    """None of the other hosts answers, of HOSTS_LEAST at least: then this one is taken for cut off,
    and no node counts as lost for being mute, nor a worker as silent. It is over when the first of
    them answers, when Ray has given up all but one, and after `most_s`."""

    most_s: float
    since_s: float | None = None  # while it lasts
    # hosts, since when, why it is over ('' = it began), once it lasts as long as one may be mute
    told: SimpleQueue[tuple[int, float, str]] = field(default_factory=SimpleQueue)
    _is_told: bool = False
    _over: bool = False  # it has lasted too long
    _hosts: int = 0
    _patient_until_s: float = 0.0

    def liveness_known(self, now_s: float) -> bool:
        """Answers that were lost are sent again after up to as long as they could not be sent."""
        return (self.since_s is None or self._over) and now_s >= self._patient_until_s

    def seen(self, hosts: int, answering: str, now_s: float) -> bool | None:
        """Whether it lasts; None = it does not; False = it has just ended. `answering`: one of the
        other hosts, '' = none does."""
        if hosts < HOSTS_LEAST or answering:
            return self._end(answering, now_s)
        if self.since_s is None:
            self.since_s, self._hosts = now_s, hosts
        lasts_s = now_s - self.since_s
        if not self._is_told and lasts_s > MUTE_MOST_S:
            self._is_told = True
            self.told.put((hosts, self.since_s, ""))
        if lasts_s > self.most_s and not self._over:
            self._over = True
            self.told.put((hosts, self.since_s, "they count as lost from here on"))
        return None if self._over else True

    def _end(self, answering: str, now_s: float) -> bool | None:
        if self.since_s is None:
            return None
        since_s, told, over = self.since_s, self._is_told, self._over
        self.since_s, self._is_told, self._over = None, False, False
        if answering and not over:
            self._patient_until_s = now_s + min(RESENT_MOST_S, now_s - since_s)
        if told and not over:
            why = f"{answering} answers again" if answering else "Ray lists them as dead"
            self.told.put((self._hosts, since_s, why))
        return None if over else False


@dataclass
class HeadService:
    """The head's GCS as it is seen from here. Where it keeps its memory elsewhere it may come back:
    `refused_most_s` is how long that is waited for. What this process itself stalled does not
    count."""

    address: str
    refused_most_s: float
    _away_s: float = 0.0  # since it gave a sign of life
    _refused: bool = False
    _asked_s: float | None = None

    def ask(self, looked: bool, now_s: float) -> str:
        """Why it is gone for good; '' = it is not. `looked`: it has answered a call since the last
        time."""
        host, _, port = self.address.rpartition(":")
        answer = reaches(host.strip("[]"), int(port))
        back = self._refused and answer is True
        self._refused = answer is False
        gap_s = 0.0 if self._asked_s is None else min(ASKED_MOST_S, now_s - self._asked_s)
        self._asked_s = now_s
        self._away_s = 0.0 if looked or back else self._away_s + gap_s
        how = "has refused connections" if self._refused else "has not answered"
        if self._away_s <= (self.refused_most_s if self._refused else AWAY_MOST_S):
            return ""
        return f"the head's GCS at {self.address} {how} for {self._away_s:.0f} s"


def reaches(address: str, port: int) -> bool | None:
    """True = something listens there, False = refused, None = no answer in time."""
    return reach_each([(address, port)])[address, port]


def reach_each(places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], bool | None]:
    """The same of many, which are asked at once."""
    wanted = [*dict.fromkeys(places)]
    found: dict[tuple[str, int], bool | None] = {}
    for first in range(0, len(wanted), AT_ONCE):
        found |= _reach(wanted[first : first + AT_ONCE])
    return found


def _reach(places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], bool | None]:
    answers: dict[tuple[str, int], bool | None] = dict.fromkeys(places)
    with ExitStack() as opened:
        selector = opened.enter_context(selectors.DefaultSelector())
        for place in places:
            family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
            connecting = opened.enter_context(socket.socket(family))
            connecting.setblocking(False)
            try:
                code = connecting.connect_ex(place)
            except OSError:  # a name that nobody knows
                continue
            if code == errno.EINPROGRESS:
                selector.register(connecting, selectors.EVENT_WRITE, place)
            else:
                answers[place] = CODES.get(code)
        until_s = time.monotonic() + PROBE_WAIT_S
        while selector.get_map() and (
            ready := selector.select(max(0.0, until_s - time.monotonic()))
        ):
            for key, _ in ready:
                connected = key.fileobj
                assert isinstance(connected, socket.socket)
                code = connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                answers[key.data] = CODES.get(code)
                selector.unregister(connected)
    return answers
