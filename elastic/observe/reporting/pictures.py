"""Pictures of a run, drawn without a display."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any


def blank(width: float, height: float) -> tuple[Any, Any]:
    """A figure of so many inches, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def saved(figure: Any, path: str | Path) -> Path:
    """The file, in a folder that is made where there is none."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # a run without a step has a small picture
        warnings.filterwarnings("ignore", "constrained_layout not applied")
        figure.savefig(target, dpi=120)
    return target
