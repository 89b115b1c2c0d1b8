"""The process groups of the generation to come, made in a thread of their own while the one before
trains.

At most one set is under way in a process. It is used by an order to enter with the same rendezvous,
which the driver gives only when all participants have their groups; any other order, and an abort
of the generation that trains, takes it down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elastic.types import GroupsMade
from elastic.worker.process.side_stream import SideStream, on_device
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.reach import PeersUnreached
from elastic.worker.session.worker_errors import text_of
from elastic.worker.session.workplace import EnterOrder

log = logging.getLogger(__name__)

ENDED_MOST_S = 10.0  # for a thread whose groups were aborted


class GroupsAhead:
    """Makes `groups` for that order at once. `report`: told when they are there, or why they are
    not, but for dropped ones."""

    def __init__(
        self, order: EnterOrder, groups: Groups, report: Callable[[GroupsMade], None]
    ) -> None:
        self.order, self.groups, self.report = order, groups, report
        self._lock = threading.Lock()
        self._dropped = self._taken = False
        self._thread = threading.Thread(target=self._make, name="groups-ahead", daemon=True)
        self._thread.start()

    @property
    def generation(self) -> int:
        return self.order.plan.generation

    def take(self, order: EnterOrder) -> Groups | None:
        """The groups, if they are there and for just this order; else they are taken down and None
        is returned."""
        same = (order.rendezvous, order.me) == (self.order.rendezvous, self.order.me)
        with self._lock:
            self._taken = same and not self._dropped and self.groups.formed
        if not self._taken:
            self.drop()
        return self.groups if self._taken else None

    def drop(self) -> None:
        """Frees the thread and takes the groups down; waits until nothing of them is left,
        ENDED_MOST_S at most: the groups that come next must not be taken for these."""
        with self._lock:
            dropped, self._dropped = self._dropped, True
        if not dropped:
            self.groups.abort()
        self._thread.join(ENDED_MOST_S)
        if self._thread.is_alive():
            log.warning("the groups made ahead for generation %d do not end", self.generation)
        elif not dropped:
            self.groups.close()

    def _make(self) -> None:
        order, at, device = self.order, self.order.rendezvous, self.groups.device
        began, error = time.monotonic(), ""
        unreached: tuple[str, ...] = ()
        try:
            # on a stream of its own: the training's must not wait for ranks that set up their
            # groups later
            with on_device(device), SideStream(device).behind(None):
                self.groups.form(at, order.me)
        except Exception as failed:  # noqa: BLE001 - whatever it was, the groups are made again when the generation is entered
            error = text_of(failed)
            unreached = failed.unreached if isinstance(failed, PeersUnreached) else ()
        with self._lock:
            if self._dropped:
                return
        if error:
            log.warning(
                "the groups of generation %d were not made ahead: %s", self.generation, error
            )
        seconds = round(time.monotonic() - began, 4)
        self.report(GroupsMade(self.generation, at.store[1], order.me, seconds, error, unreached))
