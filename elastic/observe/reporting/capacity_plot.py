"""capacity.png: what a run had of machines over time, pool over pool, and what of it trained."""

from __future__ import annotations

from pathlib import Path

from elastic.observe.reporting.capacity_history import CapacityHistory
from elastic.observe.reporting.pictures import blank, saved
from elastic.observe.run_view import View

COLORS = ("#4c78a8", "#f0b35a", "#7aa874", "#b07aa1")


def save_capacity(view: View, history: CapacityHistory, path: str | Path) -> Path:
    """Draw it; returns the file."""
    figure, axes = blank(11, 3.6)
    end_s = max([view.at_s, *(moment.at_s for moment in history.moments[-1:])])
    moments = [*history.moments, *history.moments[-1:]]
    at = [moment.at_s - view.started_at_s for moment in history.moments]
    at += [end_s - view.started_at_s] if moments else []
    unit_s, name = (3600.0, "hours") if at and at[-1] > 7200 else (60.0, "minutes")
    pools = list(dict.fromkeys(pool for moment in moments for pool in moment.gpus))
    times = [one / unit_s for one in at]
    if pools:
        rows = [[moment.gpus.get(pool, 0) for moment in moments] for pool in pools]
        colors = [COLORS[k % len(COLORS)] for k in range(len(pools))]
        axes.stackplot(times, rows, labels=pools, step="post", alpha=0.7, colors=colors)
        training = [moment.training for moment in moments]
        axes.step(times, training, where="post", color="#1c2833", linewidth=1.3, label="training")
        axes.legend(loc="lower left", frameon=False, ncols=len(pools) + 1)
    axes.set_xlabel(name)
    axes.set_ylabel("GPUs (workers) paid for")
    axes.set_title(f"{view.state.run}: capacity", loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.margins(x=0)
    return saved(figure, path)
