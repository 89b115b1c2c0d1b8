"""The process of one worker that a connection leads to: orders come, its beats go. It ends with the
process that has started it, also when it is stopped."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from elastic.types import WorkerId
from elastic.types.orders import WorkerOrder
from elastic.worker.process.environment import die_with_parent, settle

SESSION = "elastic.worker.session.session:Session"
SERVED = "elastic.worker.hosting.served_session:ServedSession"
POLL_S = 0.5  # a worker without news gives a sign of life as often
LEAVE_MOST_S = 60.0  # for the session before: torch's default group is one for the process


@dataclass(frozen=True)
class Opening:
    """A new session is to be made; `serial`: of this one among all."""

    serial: int
    me: WorkerId
    job: dict[str, Any]
    run_uri: str


Word = Opening | WorkerOrder


@dataclass(frozen=True)
class Said:
    """What goes out: of the session of that serial, mostly a Beat."""

    serial: int
    what: Any


Put = Callable[[Said], None]


def forward(session: Any, put: Put, serial: int = 0) -> None:
    """Until the session is closed, or nobody reads any more: each of its beats, at least every
    POLL_S."""
    ack = 0
    with suppress(OSError):
        while not session.closed:
            beat = session.poll(ack, POLL_S)
            ack = beat.messages[-1][0] if beat.messages else ack
            put(Said(serial, beat))


class ServedSession:
    """A session for one job after another, and its orders."""

    def __init__(self, put: Put, session_name: str = SESSION) -> None:
        self.make: Any = imported(session_name)
        self.put = put
        self.session: Any = None
        self.serial = 0

    def __call__(self, word: Word) -> None:
        if isinstance(word, Opening):
            self.open(word)
        elif self.session is not None:  # else of one that was started over
            self.session.order(word)

    def open(self, word: Opening) -> None:
        if self.session is not None:
            self.session.close(LEAVE_MOST_S)
        self.session, self.serial = self.make(word.me, word.job, word.run_uri), word.serial
        threading.Thread(
            target=forward, args=(self.session, self.put, word.serial), daemon=True
        ).start()


def imported(path: str) -> Any:
    """What `module:name` is."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def put_into(pipe: Any) -> Put:
    """From any thread."""
    lock = threading.Lock()

    def put(message: Said) -> None:
        with lock:
            pipe.send(message)

    return put


def serve(
    pipe: Connection, environment: Mapping[str, str], served: str, *, arguments: tuple[str, ...]
) -> None:
    """The whole life of a process: what comes through the pipe goes to what `served` (module:name)
    makes."""
    die_with_parent()
    os.environ.update(environment)
    settle()
    it = imported(served)(put_into(pipe), *arguments)
    while True:
        try:
            word = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        it(word)
