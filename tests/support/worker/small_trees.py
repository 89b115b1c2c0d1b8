"""Few ranks connected as many are: a tree of pairs, and no mesh of more than two."""

from __future__ import annotations

from elastic.types import grid
from elastic.worker.process_groups import groups

MOST, ROW = grid.MESH_MOST, grid.ROW


def _set(most: int, row: int) -> None:
    for module in (grid, groups):
        module.MESH_MOST, module.ROW = most, row  # type: ignore[attr-defined]


def use() -> None:
    """In a worker's process, from the next generation on."""
    _set(2, 2)


def leave() -> None:
    _set(MOST, ROW)
