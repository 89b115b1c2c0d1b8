"""Few ranks connected as many are: a tree of pairs, and no mesh of more than two."""

from __future__ import annotations

from elastic import mesh
from elastic.worker import groups

MOST, ROW = mesh.MESH_MOST, mesh.ROW


def _set(most: int, row: int) -> None:
    for module in (mesh, groups):
        module.MESH_MOST, module.ROW = most, row  # type: ignore[attr-defined]


def use() -> None:
    """In a worker's process, from the next generation on."""
    _set(2, 2)


def leave() -> None:
    _set(MOST, ROW)
