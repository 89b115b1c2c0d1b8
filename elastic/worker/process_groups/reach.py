"""Which nodes do not answer this one while a generation meets.

gloo says of a connection that nobody answers that it timed out, after two minutes, and of whom by
an address; who waits to be connected to is told nothing. So where a meeting takes long, the nodes
look for themselves: a participant of each listens, says in the generation's store where (with a
proof: torch's store takes words of anybody), and knocks at those of all others. The kernel answers
for a process that is busy or stopped, and refuses for one that is gone: who does neither is cut off
from here, though it has reached the store.
"""

from __future__ import annotations

import hmac
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from errno import ECONNREFUSED, EINPROGRESS

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from elastic.types.orders import Rendezvous
from elastic.worker.process_groups import rendezvous
from elastic.worker.process_groups.rendezvous import BACKLOG, PROOF_BYTES, proof
from elastic.worker.process_groups.sockets import inode

log = logging.getLogger(__name__)

LATE_S = 10.0  # that a meeting may take until somebody looks, and between two looks
# for an answer; the kernel asks at once, after 1, 3 and 7 s
ANSWER_S = 10.0
ANSWERS = (0, ECONNREFUSED)
LOOK_MS = 100
ENDED_MOST_S = 2.0  # for whoever looks, when the meeting has ended


class PeersUnreached(ConnectionError):
    """Nodes that have come to a meeting, and do not answer this one."""

    def __init__(self, node_id: str, unreached: tuple[str, ...]) -> None:
        super().__init__(
            f"{node_id} does not reach {', '.join(unreached)}: no answer within {ANSWER_S:.0f} s, "
            "though all have come to the meeting"
        )
        self.unreached = unreached


class Reach:
    """One node's part in that; of several participants on it the first one's. `cut_off`: called,
    from a thread, when others do not answer; `unreached` are these."""

    def __init__(self, at: Rendezvous, me: int, cut_off: Callable[[], None]) -> None:
        first: dict[str, int] = {}
        for number, worker in enumerate(at.participants):
            first.setdefault(worker.node_id, number)
        self.node_id = at.participants[me].node_id
        self._mine = first.pop(self.node_id) == me
        self._at, self._me, self._others = at, me, first
        self._cut_off = cut_off
        self._done = threading.Event()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._place = ""
        self.unreached: tuple[str, ...] = ()

    def begin(self, store: Store, place: str, here: str) -> int | None:
        """Says where this node listens, at its address `here`, in `store`, whose keys are below
        `place`. The inode of its socket, if it has one."""
        if not self._mine or not self._others:
            return None
        try:
            self._listener = socket.create_server((here, 0), family=_family(here), backlog=BACKLOG)
            self._listener.setblocking(False)
        except OSError as error:  # an address that this machine does not have itself
            log.info("nobody can find out whether %s is reached: %s", self.node_id, error)
            return None
        self._place = place
        port = self._listener.getsockname()[1]
        store.set(_key(self._me), place_told(self._at.secret, self._me, f"{here} {port}"))
        self._thread = threading.Thread(target=self._watch, name="reach", daemon=True)
        self._thread.start()
        return inode(self._listener.fileno())

    def end(self) -> None:
        """All have met, or nobody waits any more."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(ENDED_MOST_S)
        if self._listener is not None:
            self._listener.close()

    def check(self) -> None:
        """Raises PeersUnreached where that is why the meeting ended."""
        if self.unreached:
            raise PeersUnreached(self.node_id, self.unreached)

    def _watch(self) -> None:
        while not self._done.wait(LATE_S):
            self._let_go()
            with suppress(OSError, DistError):  # the store is gone: the driver has aborted it
                found = unanswered(self._come(), ANSWER_S, self._done.is_set)
                if found and not self._done.is_set():
                    self.unreached = found
                    self._cut_off()
                    return

    def _let_go(self) -> None:
        """Of those that have knocked: whoever is not taken would fill the queue."""
        with suppress(OSError):  # there is no other
            while self._listener is not None:
                self._listener.accept()[0].close()

    def _come(self) -> dict[str, tuple[str, int]]:
        """Where those nodes listen that have come. Over a connection of its own: the other one
        waits in a call."""
        tcp, _ = rendezvous.connect_store(*self._at.store, self._done.is_set)
        store = PrefixStore(self._place, tcp)
        found = {}
        for node_id, number in self._others.items():
            if store.check([_key(number)]):
                told = store.get(_key(number))
                text = told[2 * PROOF_BYTES :].decode(errors="replace")
                # what a stranger has put there is as if nobody had said it
                if hmac.compare_digest(told, place_told(self._at.secret, number, text).encode()):
                    host, _, port = text.rpartition(" ")
                    found[node_id] = (host, int(port))
        return found


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _key(participant: int) -> str:
    return f"reach/{participant}"


def place_told(secret: str, participant: int, address: str) -> str:
    """What a participant says of where it listens, behind the proof that it is the one."""
    return proof(secret, f"{_key(participant)} {address}").hex() + address


def unanswered(
    addresses: Mapping[str, tuple[str, int]], most_s: float, given_up: Callable[[], bool]
) -> tuple[str, ...]:
    """Of these, by name, those to which no connection is made or refused within that time."""
    ends_s, silent = time.monotonic() + most_s, set(addresses)
    poll, waiting = select.poll(), dict[int, tuple[str, socket.socket]]()
    with ExitStack() as stack:
        for name, address in addresses.items():
            sock = stack.enter_context(socket.socket(_family(address[0])))
            sock.setblocking(False)
            if (error := sock.connect_ex(address)) == EINPROGRESS:
                waiting[sock.fileno()] = name, sock
                poll.register(sock, select.POLLOUT)
            elif error in ANSWERS:
                silent.discard(name)
        while waiting and time.monotonic() < ends_s and not given_up():
            for fd, _ in poll.poll(LOOK_MS):
                poll.unregister(fd)
                name, sock = waiting.pop(fd)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in ANSWERS:
                    silent.discard(name)
    return tuple(sorted(silent))
