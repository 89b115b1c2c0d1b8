"""What a drill lets a worker be cut off from: its peers, storage. For trials only."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

LOOK_S = 0.02
MADE_UP = "storage does not answer (made up by a drill)"


class CutOff:
    """Until when this worker does not reach its peers, and storage. Set by a call, asked for by any
    thread."""

    def __init__(self) -> None:
        self._peers_until_s = self._storage_until_s = 0.0
        self._apart_until_s: dict[str, float] = {}

    def begin(
        self, for_s: float, nodes: bool, storage: bool, *, apart_from: Collection[str] = ()
    ) -> None:
        until_s = time.monotonic() + for_s
        self._apart_until_s = self._apart_until_s | dict.fromkeys(apart_from, until_s)
        self._peers_until_s = max(self._peers_until_s, until_s if nodes else 0.0)
        self._storage_until_s = max(self._storage_until_s, until_s if storage else 0.0)

    def wait_for_peers(self, given_up: Callable[[], bool]) -> None:
        """Until they are reached again, or nobody waits for that any more."""
        while time.monotonic() < self._peers_until_s and not given_up():
            time.sleep(LOOK_S)

    def wait_for_nodes(
        self, nodes: Collection[str], most_s: float, given_up: Callable[[], bool]
    ) -> tuple[str, ...]:
        """Until this worker reaches all of these, or nobody waits any more; those that it does not
        reach after `most_s`."""
        ends_s = time.monotonic() + most_s
        while apart := self._apart_from(nodes):
            if given_up() or time.monotonic() > ends_s:
                return () if given_up() else apart
            time.sleep(LOOK_S)
        return ()

    def _apart_from(self, nodes: Collection[str]) -> tuple[str, ...]:
        now_s, until_s = time.monotonic(), self._apart_until_s
        return tuple(sorted(name for name in nodes if until_s.get(name, 0.0) > now_s))

    def check_storage(self) -> None:
        """Raises TimeoutError while it is not reached."""
        if time.monotonic() < self._storage_until_s:
            raise TimeoutError(MADE_UP)


class CutStorage:
    """A storage, every call to which raises TimeoutError while it is not reached."""

    def __init__(self, storage: Any, cut: CutOff) -> None:
        self._storage, self._cut = storage, cut

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        if not callable(found):
            return found

        def asked(*arguments: Any, **options: Any) -> Any:
            self._cut.check_storage()
            return found(*arguments, **options)

        return asked
