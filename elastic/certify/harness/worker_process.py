"""One worker process without Ray: a Session behind a pipe. Ends with the process that started it,
also when it is stopped."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from elastic.cluster.ray.processes import die_with_parent
from elastic.types import WorkerId
from elastic.types.orders import WorkerOrder
from elastic.worker.process.environment import settle

SESSION = "elastic.worker.session.session:Session"
POLL_S = 0.5


@dataclass(frozen=True)
class Opening:
    """A new session is to be made; `serial`: of this one among all."""

    serial: int
    me: WorkerId
    job: dict[str, Any]
    run_uri: str


Word = Opening | WorkerOrder


class Served:
    """A session for one job after another, and its orders. `put` gets its messages as (serial,
    event)."""

    def __init__(self, put: Callable[[Any], None], session_name: str) -> None:
        module, _, name = session_name.partition(":")
        self.make = getattr(import_module(module), name)
        self.put = put
        self.session: Any = None

    def __call__(self, word: Word) -> None:
        if isinstance(word, WorkerOrder):
            self.session.order(word)
            return
        if self.session is not None:
            self.session.close()
        self.session = self.make(word.me, word.job, word.run_uri)
        threading.Thread(
            target=self._forward, args=(self.session, word.serial), daemon=True
        ).start()

    def _forward(self, session: Any, serial: int) -> None:
        ack = 0
        while not session._closed:
            for number, event in session.poll(ack, POLL_S).messages:
                ack = number
                self.put((serial, event))


def serve(pipe: Connection, environment: Mapping[str, str], session_name: str) -> None:
    """Orders come and messages go through the pipe."""
    die_with_parent()
    os.environ.update(environment)
    settle()
    lock = threading.Lock()

    def put(message: Any) -> None:
        with lock:
            pipe.send(message)

    served = Served(put, session_name)
    while True:
        try:
            word = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        served(word)
