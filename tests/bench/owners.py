"""The step of tensors that an optimizer steps whole, each at its owner, beside plain ways to do it:
Muon on a small decoder, cut over two and over four ranks (gloo, no Ray, made-up gradients).

Plain: each rank gathers values and gradients of every tensor, all of them at once or one after the
other, steps all of them and keeps its part. All ways take turns in the same processes and must end
with the same bits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import owner_ways
from figures import ratio
from owner_ways import EVERYWHERE, IN_TURN, ONE_BUCKET, OWNERS, WAYS, Size
from report import finish, options
from support.worker.ranks import on_ranks
from trial import Clock

MOST_S, REPEATS = 900.0, 5
RANKS = (2, 4)
WHOLE, SMOKE = Size(256, 8, 4 << 20), Size(192, 2, 512 << 10)
Found = list[dict[str, dict[str, Any]]]  # of each rank, by way


def slowest_s(found: Found, way: str, name: str) -> float:
    """The median over the repeats of the rank that took longest."""
    return median(map(max, zip(*(rank[way][name] for rank in found), strict=True)))


def summed_s(found: Found, way: str, name: str) -> float:
    return median(map(sum, zip(*(rank[way][name] for rank in found), strict=True)))


def most_mb(found: Found, way: str, name: str) -> float:
    return round(max(rank[way][name] for rank in found) / 1e6, 3)


def of_way(found: Found, way: str) -> dict[str, Any]:
    return {
        "step_s": round(slowest_s(found, way, "step_s"), 4),
        "cpu_s": round(summed_s(found, way, "cpu_s"), 4),
        "optimizer_s": round(slowest_s(found, way, "optimizer_s"), 4),
        "came_mb": most_mb(found, way, "came_bytes"),
        "peak_mb": most_mb(found, way, "peak_bytes"),
        "kept_mb": most_mb(found, way, "kept_bytes"),
        "held_mb": round(max(r[way]["peak_bytes"] + r[way]["kept_bytes"] for r in found) / 1e6, 3),
    }


def measure(size: Size, repeats: int, clock: Clock) -> dict[str, Any]:
    out: dict[str, Any] = {"contents_equal": 1}
    for n in RANKS:
        clock.look(f"{n} ranks")
        left_s = clock.most_s * (1 - clock.spent)
        found: Found = on_ranks(owner_ways.ways, n, size, repeats, within_s=left_s)
        each = {way: of_way(found, way) for way in WAYS}
        for rank in found:
            if len({rank[way]["values"] for way in WAYS}) > 1:
                out["contents_equal"] = 0
        out[f"ranks_{n}"] = {**each, "buckets": found[0][OWNERS]["n_buckets"]}
        for other in (EVERYWHERE, IN_TURN, ONE_BUCKET):
            for name in ("step", "cpu", "came", "peak", "kept", "held"):
                unit = "s" if name in ("step", "cpu") else "mb"
                of = f"{name}_{unit}"
                out[f"{name}_vs_{other}_{n}"] = ratio(each[OWNERS][of], each[other][of])
    return out


def main() -> int:
    given = options(__doc__, MOST_S, repeats=REPEATS)
    size = SMOKE if given.smoke else WHOLE
    return finish("owners", given, lambda clock: measure(size, given.repeats, clock))


if __name__ == "__main__":
    sys.exit(main())
