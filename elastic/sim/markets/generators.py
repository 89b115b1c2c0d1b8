"""Made-up markets: like a trace, but longer or larger, or of given rates where there is none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic.errors import SpecError
from elastic.sim.markets.traces import Trace, merged
from elastic.text import DAY_S

LEVELS = 9  # of availability that a fit tells apart, 0 and all among them


@dataclass(frozen=True)
class FittedMarket:
    """A Markov chain in continuous time over shares of all nodes. `stay_s`: [level] -> mean seconds
    in it; `next`: [level][level] -> how likely what comes next is. `levels`: the shares;
    `usd_per_node_h`: [level] -> the mean price in it, () = the trace has none."""

    name: str
    levels: tuple[float, ...]
    stay_s: tuple[float, ...]
    next: tuple[tuple[float, ...], ...]
    first: int
    share: float  # of the trace that was fitted
    changes_per_day: float
    usd_per_node_h: tuple[float, ...] = ()

    def made(self, *, nodes: int, length_s: float, seed: int = 0) -> Trace:
        """Another market like it. The same for the same seed."""
        chance = random.Random(seed)
        at_s, found, prices, level, now_s = [], [], list[float](), self.first, 0.0
        while now_s < length_s:
            at_s.append(now_s)
            found.append(round(self.levels[level] * nodes))
            prices += self.usd_per_node_h[level : level + 1]
            now_s += chance.expovariate(1 / self.stay_s[level])
            level = chance.choices(range(len(self.levels)), self.next[level])[0]
        return replace(merged(self.name, at_s, found, ends_s=length_s, prices=prices), of=nodes)

    def quality(self, trace: Trace, n: int = 8) -> dict[str, float]:
        """How near made-up ones come to the trace, over `n` of them: both shares, and changes a
        day."""
        made = [self.made(nodes=trace.most, length_s=trace.ends_s, seed=k) for k in range(n)]
        days = trace.ends_s / DAY_S
        return {
            "share": round(trace.share, 4),
            "share_made": round(sum(one.share * one.most for one in made) / n / trace.most, 4),
            "changes_per_day": round(len(trace.at_s) / days, 2),
            "changes_per_day_made": round(sum(len(one.at_s) for one in made) / n / days, 2),
        }


def fitted(trace: Trace) -> FittedMarket:
    """Raises SpecError for a trace that never changes: nothing can be fitted to it."""
    if len(set(trace.nodes)) < 2:
        raise SpecError(f"trace {trace.name} never changes; there is nothing to fit")
    n = min(LEVELS, trace.most + 1)
    levels = [round(count / trace.most * (n - 1)) for count in trace.nodes]
    row = merged(trace.name, trace.at_s, levels, ends_s=trace.ends_s)
    stay = [0.0] * n
    visits = [0] * n
    steps = [[0] * n for _ in range(n)]
    ends = (*row.at_s[1:], row.ends_s)
    for k, level in enumerate(row.nodes):
        stay[level] += ends[k] - row.at_s[k]
        visits[level] += 1
        if k + 1 < len(row.nodes):
            steps[level][row.nodes[k + 1]] += 1
    longest = max(s / v for s, v in zip(stay, visits, strict=True) if v)
    return FittedMarket(
        f"like {trace.name}",
        tuple(level / (n - 1) for level in range(n)),
        tuple(s / v if v else longest for s, v in zip(stay, visits, strict=True)),
        tuple(_shares(row, level) for level, row in enumerate(steps)),
        row.nodes[0],
        trace.share,
        len(trace.at_s) / (trace.ends_s / DAY_S),
        _prices(trace, levels, n) if trace.usd_per_node_h else (),
    )


def _prices(trace: Trace, levels: Sequence[int], n: int) -> tuple[float, ...]:
    """In the mean over the time in each level; of one that the trace has not, over all of it."""
    paid, stay = [0.0] * n, [0.0] * n
    ends = (*trace.at_s[1:], trace.ends_s)
    for level, at_s, end_s, usd in zip(levels, trace.at_s, ends, trace.usd_per_node_h, strict=True):
        paid[level] += (end_s - at_s) * usd
        stay[level] += end_s - at_s
    return tuple(usd / s if s else trace.mean_usd for usd, s in zip(paid, stay, strict=True))


def _shares(counts: Sequence[int], level: int) -> tuple[float, ...]:
    """A level that nothing followed is followed by its neighbor."""
    total = sum(counts)
    if total:
        return tuple(count / total for count in counts)
    near = level - 1 if level else 1
    return tuple(float(k == near) for k in range(len(counts)))


def usual(
    name: str, *, nodes: int, length_s: float, taken_per_node_h: float, dry_h: float, seed: int
) -> Trace:
    """Where no trace is known: each node is taken after a time of the given rate, and the pool
    gives another one after `dry_h` hours on average."""
    chance = random.Random(f"{name}/{seed}")
    moments: list[tuple[float, int]] = []
    for _ in range(nodes):
        now_s = 0.0
        while True:
            now_s += 3600 * chance.expovariate(taken_per_node_h)
            moments.append((now_s, -1))
            now_s += 3600 * chance.expovariate(1 / dry_h)
            if now_s >= length_s:
                break
            moments.append((now_s, 1))
    at_s, found = [0.0], [nodes]
    for now_s, change in sorted(moments):
        if now_s < length_s:
            at_s.append(now_s)
            found.append(found[-1] + change)
    return merged(name, at_s, found, ends_s=length_s)
