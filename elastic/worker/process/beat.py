"""What a session of a worker answers to a poll."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from elastic.config.masking import masked_text
from elastic.types import Event
from elastic.worker.process.call_log import PartCalls
from elastic.worker.process.doing import Doing, InCollective

# fields of events that say something in words, maybe in those of a program
TEXTS = ("error", "frames", "note", "reason", "what", "why")


@dataclass(frozen=True)
class Beat:
    """Answer to a poll. `progress` changes whenever the worker makes progress; `arrived`: see
    Generation.arrived. `doing`, `where`: what a worker is at that has made no progress since the
    poll before; `collective`: the one that it
    waits in, where that is known; `calls`: what its script has called."""

    messages: tuple[tuple[int, Event], ...]
    generation: int
    phase: str
    step: int
    progress: int
    pid: int
    said: tuple[str, ...] = ()  # lines that rank 0 has printed; put in by the actor's shell
    arrived: tuple[tuple[str, int, int], ...] = ()
    doing: Doing = ""
    where: str = ""
    calls: tuple[PartCalls, ...] = ()
    collective: InCollective | None = None


class Outbox:
    """Messages of a session, numbered from 1: each is kept until it is acknowledged. `changed`:
    also notified by its owner. What they say is without the secrets of this process's environment,
    which the driver that writes it down may not have."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._kept: list[tuple[int, Event]] = []
        self._number = 0

    def put(self, event: Event) -> None:
        said: dict[str, Any] = {
            name: masked_text(text) for name in TEXTS if (text := getattr(event, name, ""))
        }
        if any(text != getattr(event, name) for name, text in said.items()):
            event = replace(event, **said)
        with self._changed:
            self._number += 1
            self._kept.append((self._number, event))
            self._changed.notify_all()

    def after(
        self, ack: int, wait_s: float, over: Callable[[], bool] = bool
    ) -> tuple[tuple[int, Event], ...]:
        """Messages after `ack`, as soon as there are any, or it is `over`; older ones are
        forgotten. The lock is held, but for the wait."""
        until_s = time.monotonic() + wait_s
        self._kept = [(number, event) for number, event in self._kept if number > ack]
        while not self._kept and not over() and (left_s := until_s - time.monotonic()) > 0:
            self._changed.wait(left_s)
        return tuple(self._kept)
