"""A run whose drill is simulated beforehand, with the delays of a run of another drill: by how much
the two differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from support.places import PROGRAMS

STEPS = 110
JOB: dict[str, Any] = {
    "steps": STEPS, "global_batch": 12, "seed": 1, "eval_samples": 8, "peer_every": 5,
    "durable_every": 25, "layout": {str(n): f"dp_shard={n}" for n in (3, 2, 1)},
    "program": str(PROGRAMS / "tiny_timed.py"), "budget_usd": 20, "pools": [
        {"name": "spot", "market_type": "spot", "usd_per_node_h": 1.2, "max_nodes": 2},
        {"name": "on-demand", "market_type": "on-demand", "usd_per_node_h": 3.4, "max_nodes": 1},
    ],
}  # fmt: skip
# Each kill a few steps behind a peer replica, so that one under way decides nothing; of a notice the
# seconds that a busy machine needs, too (support/e2e/runs.py, SOON_S).
FIRST_DRILL = [
    {"at_step": 12, "notice": "any-spot", "deadline_s": 12},
    {"at_step": 23, "add": "spot"},
    {"at_step": 53, "kill": "any-spot"},
    {"at_step": 63, "add": "spot"},
]
OTHER_DRILL = [
    {"at_step": 13, "kill": "any-spot"},
    {"at_step": 24, "add": "spot"},
    {"at_step": 58, "notice": "any-spot", "deadline_s": 12},
    {"at_step": 82, "add": "spot"},
]


def transitions(ledger: Mapping[str, Any]) -> list[tuple[str, str, str, str, int]]:
    """What is exact of each: cause, source, both layouts; steps lost."""
    return [
        (one["cause"], one["source"], one["from_layout"], one["to_layout"], one["steps_lost"])
        for one in ledger["transitions"]
    ]


@dataclass(frozen=True)
class Deviations:
    """Of a prediction from what came: relative, of the wall time and of each pause; in points, of
    each category of the paid GPU-seconds. `pauses_s`: predicted and real."""

    wall: float
    pauses: tuple[float, ...]
    pauses_s: tuple[tuple[float, float], ...]
    categories: Mapping[str, float]

    @property
    def worst_pause(self) -> float:
        return max(map(abs, self.pauses), default=0.0)

    @property
    def worst_category(self) -> float:
        return max(map(abs, self.categories.values()), default=0.0)

    def lines(self) -> list[str]:
        pauses = ", ".join(f"{one:.2f} s for {real:.2f} s" for one, real in self.pauses_s)
        far = {
            name: f"{points:+.1f}" for name, points in self.categories.items() if abs(points) > 1
        }
        return [
            f"wall time {self.wall:+.1%}; pauses: {pauses} (worst {self.worst_pause:.0%})",
            f"categories in points, beyond one: {far or 'none'}",
        ]


def deviations(predicted: Mapping[str, Any], real: Mapping[str, Any]) -> Deviations:
    """Both as `elastic ledger --json` has them."""
    pairs = tuple(
        (mine["pause_s"], its["pause_s"])
        for mine, its in zip(predicted["transitions"][1:], real["transitions"][1:], strict=True)
    )
    return Deviations(
        predicted["totals"]["wall_s"] / real["totals"]["wall_s"] - 1,
        tuple(mine / its - 1 for mine, its in pairs),
        pairs,
        {name: shares(predicted)[name] - share for name, share in shares(real).items()},
    )


def shares(ledger: Mapping[str, Any]) -> dict[str, float]:
    """Of the paid GPU-seconds, in percent."""
    paid = sum(one["gpu_seconds"] for one in ledger["categories"].values())
    return {name: 100 * one["gpu_seconds"] / paid for name, one in ledger["categories"].items()}
