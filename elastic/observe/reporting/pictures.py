"""Pictures, drawn without a display, and what stacked bars of parts have in common there and in
letters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic.errors import SpecError

Parts = Mapping[str, tuple[str, str, str]]  # part -> letter, color, what it is
OTHER = ("?", "#17202a", "")


def blank(
    width: float, height: float, rows: int = 1, *, columns: int = 1, **shared: Any
) -> tuple[Any, Any]:
    """A figure of so many inches, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **shared)


def saved(figure: Any, path: str | Path) -> Path:
    """The file, in a folder that is made where there is none."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # a run without a step has a small picture
        warnings.filterwarnings("ignore", "constrained_layout not applied")
        figure.savefig(target, dpi=120)
    return target


@contextmanager
def asked_for(path: str | Path) -> Iterator[None]:
    """Around what saves the picture of --png. Raises SpecError where that cannot be."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise SpecError(
            f"--png {path}: cannot be written ({error}); give a file that ends in .png"
        ) from error


def ordered(parts: Iterable[str], known: Parts) -> list[str]:
    """Each once: those that are known first, in their order."""
    there = list(dict.fromkeys(parts))
    return [*(name for name in known if name in there), *(n for n in there if n not in known)]


def letters(
    parts: Mapping[str, float], known: Parts, whole: float, *, room: int
) -> list[tuple[str, str]]:
    """`CCCC`, `fff`, `tt` with the color of each: their shares of `whole` in so many characters."""
    found, drawn, reached = [], 0, 0.0
    for name in ordered(parts, known):
        reached += parts[name]
        end = min(room, round(room * reached / whole)) if whole else 0
        letter, color = known.get(name, OTHER)[:2]
        found.append((letter * (end - drawn), color))
        drawn = max(drawn, end)
    return found


def stacked(
    draw: Callable[..., object],
    rows: Sequence[Mapping[str, float]],
    known: Parts,
    *,
    start: str,
    at: Sequence[Any],
    **look: Any,
) -> None:
    """`draw`: of axes, bar or barh; `start`: what it calls where a bar begins."""
    begin = [0.0] * len(rows)
    for name in ordered([name for row in rows for name in row], known):
        sizes = [row.get(name, 0.0) for row in rows]
        color = known.get(name, OTHER)[1]
        draw(at, sizes, label=name, color=color, **{start: begin}, **look)
        begin = [a + b for a, b in zip(begin, sizes, strict=True)]
