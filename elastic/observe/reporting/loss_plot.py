"""loss.png: the loss of every optimizer step that counts, with what happened to the cluster marked
on the curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic.observe.reporting.pictures import blank, saved
from elastic.observe.run_view import View
from elastic.text import n_of
from elastic.types import Plan

COLORS = {
    "start": "#888888", "notice": "#d98e04", "loss": "#c0392b", "growth": "#1e8449",
    "release": "#7d6608",
    "rebalance": "#2471a3", "infeasible": "#7d3c98", "rollback": "#c0392b",
    "phase": "#117a65",
}  # fmt: skip


def save_loss(view: View, path: str | Path) -> Path:
    """Draw the curve of a run; returns the file."""
    figure, axes = blank(11, 5.5)
    curve = view.curve()
    axes.plot(
        [p.step for p in curve],
        [p.train_loss for p in curve],
        color="#34495e",
        linewidth=1.2,
        label="train_loss",
    )
    measured = view.validation_losses()
    if measured:
        axes.plot(
            list(measured),
            list(measured.values()),
            "o",
            color="#2471a3",
            markersize=5,
            label="validation loss",
        )
    _lost(axes, view)
    _marks(axes, view)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"loss per {view.unit.removesuffix('s')}")
    axes.set_title(
        f"{view.state.run}: {n_of(view.step, 'step')}, {n_of(len(view.entered), 'generation')}",
        loc="left",
        fontsize=11,
        pad=12,
    )
    axes.grid(alpha=0.25)
    axes.margins(x=0.01, y=0.14)
    if curve:
        axes.legend(loc="lower left", frameon=False, ncols=3)
    return saved(figure, path)


def _lost(axes: Any, view: View) -> None:
    """Steps that were trained and then taken back, as crosses."""
    counted = {(p.step, p.generation) for p in view.curve()}
    lost = [p for p in view.points if (p.step, p.generation) not in counted]
    if lost:
        axes.plot(
            [p.step for p in lost],
            [p.train_loss for p in lost],
            "x",
            color="#c0392b",
            markersize=5,
            label="lost steps",
        )


def _marks(axes: Any, view: View) -> None:
    """A line per generation with its cause and layout."""
    for i, (_, entered) in enumerate(view.entered):
        plan: Plan | None = view.planned.get(entered.generation)
        if plan is None:
            continue
        color = COLORS.get(plan.cause, "#888888")
        axes.axvline(entered.step, color=color, linewidth=1, linestyle="--", alpha=0.8)
        late = entered.step > 0.85 * max(1, view.step)
        axes.annotate(
            f"{plan.cause}\n{plan.layout}\n{n_of(len(plan.ranks), 'worker')}",
            (entered.step, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if late else 3, -4 - 34 * (i % 3)),
            textcoords="offset points",
            va="top",
            ha="right" if late else "left",
            fontsize=7,
            color=color,
        )
