"""The race as a picture: train loss and workers that train, against the wall clock since the
launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from race_figures import TITLES, Race, groups

COLORS = {"elastic": "#1e8449", "script": "#8e44ad", "ray_train": "#2471a3", "torchrun": "#d98e04"}
SMOOTH = 9  # steps of the running mean of the loss


def save(races: Sequence[Race], title: str, path: Path) -> Path:
    figure = Figure(figsize=(11, 2.6 + 1.1 * len(races)), layout="constrained")
    FigureCanvasAgg(figure)
    loss, *rows = figure.subplots(
        1 + len(races), sharex=True, height_ratios=[2.6, *(0.9 for _ in races)], squeeze=False
    ).ravel()  # fmt: skip
    for race in races:
        at_s = [done.at_s - race.launched_s for done in race.steps]
        values = [done.train_loss for done in race.steps]
        smooth = [
            sum(part) / len(part)
            for k in range(len(values))
            if (part := values[max(0, k - SMOOTH + 1) : k + 1])
        ]
        loss.plot(
            at_s,
            smooth,
            color=COLORS[race.name],
            linewidth=1.4,
            label=f"{TITLES[race.name]}: step {race.steps[-1].step} at {at_s[-1]:.0f} s",
        )
        loss.plot(at_s[-1:], smooth[-1:], "o", color=COLORS[race.name])
    loss.set_ylabel("train loss")
    loss.set_title(title, loc="left", fontsize=11)
    loss.legend(frameon=False, loc="upper right")
    loss.grid(alpha=0.25)
    for axes, race in zip(rows, races):
        draw_workers(axes, race)
    rows[-1].set_xlabel(
        "seconds since the launch (gray line: nodes that stand; filled: workers that train)"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def draw_workers(axes: Any, race: Race) -> None:
    """One race's workers and nodes over time, its events marked."""
    steps = [(at_s - race.launched_s, n) for at_s, n in groups(race)]
    axes.step(
        [t for t, _ in steps],
        [n for _, n in steps],
        where="post",
        color=COLORS[race.name],
        linewidth=1,
    )
    axes.fill_between(
        [t for t, _ in steps],
        [n for _, n in steps],
        step="post",
        color=COLORS[race.name],
        alpha=0.35,
    )
    nodes = [*race.nodes, (race.until_s, race.nodes[-1][1])]
    axes.step(
        [t - race.launched_s for t, _ in nodes],
        [n for _, n in nodes],
        where="post",
        color="#888888",
        linewidth=0.8,
    )
    for at_s, what in race.events:
        axes.axvline(
            at_s - race.launched_s,
            color="#c0392b" if what == "kill" else "#888888",
            linewidth=0.8,
            linestyle=":",
        )
        axes.annotate(
            what,
            (at_s - race.launched_s, 1.0),
            xycoords=("data", "axes fraction"),
            fontsize=6,
            va="top",
        )
    axes.set_ylabel(f"{TITLES[race.name]}\nworkers", fontsize=7)
    axes.set_ylim(0, 5)
    axes.set_yticks([0, 2, 4])
