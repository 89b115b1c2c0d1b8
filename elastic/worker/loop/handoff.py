"""Two threads that take turns: the user's script and the training thread. One of them always waits
for the other."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal

from elastic.worker.process.doing import doing
from elastic.worker.process.readback import Number


@dataclass(frozen=True)
class HandoffMessage:
    """What the script says when it hands over.

    next: it wants a batch. step: it is done with its batch; `loss_sum` and `tokens` are those of
    this rank's samples, scalar tensors where they are still on the device. ended: it has left the
    loop, `error` says why (None = in the ordinary way). next and step: `error` is a collective that
    aborted.
    """

    kind: Literal["next", "step", "ended"]
    loss_sum: Number = 0.0
    tokens: Number = 0
    clip_grad_norm: float | None = None
    error: BaseException | None = None


class Handoff:
    """The script says a Word and waits for the answer; the training thread hears it, and answers
    when it likes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._word: HandoffMessage | None = None
        self._answers: list[Any] = []

    @doing("handoff")
    def say(self, word: HandoffMessage) -> Any:
        """In the script's thread: hands over; returns the answer."""
        with self._changed:
            self._word = word
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._answers))
            return self._answers.pop()

    @doing("handoff")
    def hear(self, wait_s: float | None = None) -> HandoffMessage | None:
        """In the training thread: the word that is not answered yet; None = there was none within
        `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._word is not None, wait_s)
            return self._word

    def answer(self, what: Any) -> None:
        """In the training thread: the script continues with `what`."""
        with self._changed:
            self._word = None
            self._answers.append(what)
            self._changed.notify_all()
