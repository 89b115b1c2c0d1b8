"""Moving a state of about 1 GB between layouts of four ranks: live from memory to memory, next to
bare gloo and to DCP by disk.

Four processes and gloo, no Ray, no model: only the bytes. Every figure is a ratio of things
measured one after the other in the same processes, the median over the repeats; that of all pairs
of layouts is the median over the pairs, `_least` and `_most` the worst of them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import moves
from figures import Spread
from moves import Took
from report import finish, options
from support.worker.movers import Case, Cut, Movers, checked_move, decoder
from trial import Clock, Failed

from elastic.reshard.chunks import staging_bytes
from elastic.reshard.pieces import Side, bytes_of
from elastic.reshard.rank_reuse import place
from elastic.types import Layout, ModelProfile, WorkerId

MOST_S = 420.0
N = 4
DP4: Cut = (Layout(dp_shard=4), ())
DP3: Cut = (Layout(dp_shard=3), ())
TP2_DP2: Cut = (Layout(dp_shard=2, tp=2), ())
PP2_DP2: Cut = (Layout(pp=2, dp_shard=2), (5, 3))
PP2_TP2: Cut = (Layout(pp=2, tp=2), (4, 4))
PP4: Cut = (Layout(pp=4), (1, 3, 2, 2))
HSDP: Cut = (Layout(dp_replicate=2, dp_shard=2), ())
TP4: Cut = (Layout(tp=4), ())
PAIRS: dict[str, tuple[Cut, Cut]] = {
    "dp4>tp2xdp2": (DP4, TP2_DP2),
    "dp4>pp2xdp2": (DP4, PP2_DP2),
    "dp4>dp3": (DP4, DP3),
    "dp3>dp4": (DP3, DP4),
    "tp2xdp2>pp2xtp2": (TP2_DP2, PP2_TP2),
    "hsdp2x2>dp4": (HSDP, DP4),
    "pp2xdp2>pp4": (PP2_DP2, PP4),
    "dp4>tp4": (DP4, TP4),
}


@dataclass(frozen=True)
class Size:
    """`pairs`: how many are measured; `least_mb`: what a pair must move for a rate to mean
    anything."""

    model: ModelProfile
    pairs: int
    least_mb: int


WHOLE, SMOKE = Size(decoder(8, 896, 8000), len(PAIRS), 50), Size(decoder(8, 64, 80), 3, 0)


def answers(movers: Movers, what: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Of all participants; raises Failed with what one of them raised."""
    found = movers.call(what, *arguments)
    for answer in found:
        if isinstance(answer, Exception):
            raise Failed(f"{what.__name__}: {answer!r}")
    return found


def slowest_s(found: list[Took]) -> float:
    return max(took.seconds for took in found)


def case_of(model: ModelProfile, old: Cut, new: Cut) -> Case:
    """Four workers on nodes of their own, in the order of ranks that the policy would give them;
    those that are too many at the end of the order only send."""
    workers = [WorkerId(f"n{i}", 0) for i in range(N)]
    n_new = new[0].world_size
    held = {workers[rank]: [rank] for rank in range(old[0].world_size)}
    order = [*place(model, (old, new), held, ranks=workers[:n_new], kinds={}), *workers[n_new:]]
    holders = {ranks[0]: (order.index(worker),) for worker, ranks in held.items()}
    return Case(model, old, new, holders, tuple(worker.node_id for worker in order))


def measured(movers: Movers, case: Case, repeats: int, clock: Clock) -> dict[str, Any]:
    """One pair of layouts: what each repeat gave, as lists."""
    answers_of: dict[str, list[float]] = {
        name: [] for name in ("vs_raw", "vs_warm_raw", "live_s", "gbps", "raw_gbps", "peak")
    }
    answers(movers, moves.fill, case)
    old, new = moves.shards(case, N)
    n_bytes = 0
    # the first is a rehearsal: memory that this machine never gave before is slow
    for i in range(repeats + 1):
        clock.look("reshard")
        wire, raw = (
            answers(movers, moves.live, case, True),
            answers(movers, moves.bare, case, False),
        )
        warm, whole = (
            answers(movers, moves.bare, case, True),
            answers(movers, moves.live, case, False),
        )
        n_bytes = sum(took.received_bytes for took in wire)
        if i == 0:
            continue
        answers_of["vs_raw"].append(slowest_s(raw) / slowest_s(wire))
        answers_of["vs_warm_raw"].append(slowest_s(warm) / slowest_s(wire))
        answers_of["live_s"].append(slowest_s(whole))
        answers_of["gbps"].append(n_bytes / slowest_s(wire) / 1e9)
        answers_of["raw_gbps"].append(n_bytes / slowest_s(raw) / 1e9)
        promised = [a + b + staging_bytes(N) for a, b in zip(old, new, strict=True)]
        answers_of["peak"].append(
            max((old[me] + took.peak_bytes) / promised[me] for me, took in enumerate(whole))
        )
    return {**answers_of, "n_bytes": n_bytes}


def by_disk_s(movers: Movers, case: Case) -> float:
    folder = tempfile.mkdtemp(prefix="elastic-bench-dcp-")
    try:
        return slowest_s(answers(movers, moves.by_dcp, case, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def contents_equal(movers: Movers) -> bool:
    """Small states whose elements all differ are moved between all pairs of layouts, and every bit
    is compared."""
    for name, (old, new) in PAIRS.items():
        for answer in movers.call(checked_move, case_of(SMOKE.model, old, new)):
            if isinstance(answer, AssertionError):
                print(f"reshard: {name}: {answer}", file=sys.stderr)
                return False
            if isinstance(answer, Exception):
                raise Failed(f"{name}: {answer!r}")
    return True


def measure(clock: Clock, repeats: int, size: Size) -> Mapping[str, Any]:
    movers = Movers(N)
    pairs: dict[str, dict[str, Any]] = {}
    try:
        equal = contents_equal(movers)
        for name, (old, new) in list(PAIRS.items())[: size.pairs]:
            case = case_of(size.model, old, new)
            found = measured(movers, case, repeats, clock)
            least, best = moves.least_bytes(case)
            dcp_s = [by_disk_s(movers, case) for _ in range(max(1, repeats // 2))]
            pairs[name] = {
                "moved_mb": round(found["n_bytes"] / 1e6),
                "moved_vs_least": round(found["n_bytes"] / max(1, least), 4),
                "moved_vs_best_order": round(found["n_bytes"] / max(1, best), 4),
                "live_s": median(found["live_s"]), "dcp_s": median(dcp_s),
                "live_vs_dcp": median(dcp_s) / median(found["live_s"]),
                **{name: median(found[name]) for name in ("vs_raw", "vs_warm_raw", "gbps",
                "raw_gbps")}, "peak": max(found["peak"]),
                "spread": {"vs_raw": Spread(tuple(found["vs_raw"])).plain()},
            }  # fmt: skip
    finally:
        movers.close()
    return {**summary(pairs, size), "contents_equal": equal}


def summary(pairs: Mapping[str, Mapping[str, Any]], size: Size) -> dict[str, Any]:
    def over(name: str) -> list[float]:
        wire = name in ("vs_raw", "vs_warm_raw")
        return [
            float(pair[name])
            for pair in pairs.values()
            if not wire or pair["moved_mb"] >= size.least_mb
        ]

    state_mb = sum(bytes_of(Side(size.model, (Layout(), ())))) / 1e6
    return {
        "state_mb": round(state_mb),
        "gbps_vs_raw": round(median(over("vs_raw")), 3),
        "gbps_vs_raw_least": round(min(over("vs_raw")), 3),
        "gbps_vs_warm_raw": round(median(over("vs_warm_raw")), 3),
        "moved_vs_least": max(over("moved_vs_least")),
        "moved_vs_best_order": max(over("moved_vs_best_order")),
        "peak_vs_promise": round(max(over("peak")), 3),
        "live_vs_dcp": round(median(over("live_vs_dcp")), 2),
        "live_vs_dcp_least": round(min(over("live_vs_dcp")), 2),
        "pairs": {
            name: {k: round(v, 3) if isinstance(v, float) else v for k, v in pair.items()}
            for name, pair in pairs.items()
        },
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    given = options(__doc__, MOST_S)
    size, repeats = (SMOKE, given.repeats) if given.smoke else (WHOLE, max(2, given.repeats))
    sys.exit(finish("reshard", given, lambda clock: measure(clock, repeats, size)))
