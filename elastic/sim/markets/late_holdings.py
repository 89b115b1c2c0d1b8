"""What workers hold, written down when somebody asks for it: of the steps and copies of an
undisturbed generation only the newest are ever asked for, and each is as many holdings as there are
workers."""

from __future__ import annotations

from collections.abc import Callable, ValuesView
from typing import Any

from elastic.types import Holding, WorkerId


class LateHoldings(dict[WorkerId, tuple[Holding, ...]]):
    """`write_down` brings it up to date; `late`: there is something to write down."""

    def __init__(self, write_down: Callable[[], None]) -> None:
        super().__init__()
        self._write_down, self.late = write_down, False

    def _current(self) -> None:
        if self.late:
            self.late = False
            self._write_down()

    def get(self, worker: WorkerId, default: Any = None) -> Any:
        self._current()
        return super().get(worker, default)

    def pop(self, worker: WorkerId, default: Any = None) -> Any:
        self._current()
        return super().pop(worker, default)

    def __setitem__(self, worker: WorkerId, holdings: tuple[Holding, ...]) -> None:
        self._current()
        super().__setitem__(worker, holdings)

    def values(self) -> ValuesView[tuple[Holding, ...]]:  # type: ignore[override]
        self._current()
        return super().values()
