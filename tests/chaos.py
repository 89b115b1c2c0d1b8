"""Random jobs under random faults: on the virtual clock (hundreds of runs a minute or two), on
markets that are drawn, too, or in processes of this machine.

    python tests/chaos.py --runs 500                    # on the virtual clock, from a random seed on
    python tests/chaos.py --seed 84 --runs 1            # that run again
    python tests/chaos.py --engine markets --seed 0 --runs 10000
    python tests/chaos.py --engine processes --minutes 10

Each run is judged by elastic/scenarios/judge.py. The exit code is 1 where one was wrong; its seed
is said, and belongs into KEPT of tests/sim/test_random_runs.py, of tests/sim/markets/
test_random_worlds.py, or SEEDS of tests/e2e/test_chaos_runs.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

SEED_MOST = 10**7
RUNS = {"virtual": 500, "markets": 1000, "processes": 10}
SAY_EVERY_S = 10.0


@dataclass
class Table:
    """What happened so far."""

    began_s: float = field(default_factory=time.monotonic)
    runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failed: dict[int, list[str]] = field(default_factory=dict)
    failed_with: Counter[str] = field(default_factory=Counter)
    said_s: float = 0.0

    def add(self, seed: int, kinds: Iterable[str], wrong: list[str]) -> None:
        kinds = list(kinds)
        self.runs += 1
        self.faults.update(kinds)
        if wrong:
            self.failed[seed] = wrong
            self.failed_with.update(set(kinds))
            print(
                f"seed {seed}: {wrong[0][:300]}"
                + (f" (and {len(wrong) - 1} more)" if wrong[1:] else ""),
                flush=True,
            )
        if time.monotonic() - self.said_s > SAY_EVERY_S:
            self.said_s = time.monotonic()
            print(f"{self.runs} runs in {self.seconds:.0f} s, {len(self.failed)} wrong", flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    def __str__(self) -> str:
        rows = [f"{'fault':14} {'happened':>9} {'in wrong runs':>14}"]
        rows += [
            f"{kind:14} {n:9} {self.failed_with[kind]:14}" for kind, n in self.faults.most_common()
        ]
        rows.append(
            f"{self.runs} runs, {sum(self.faults.values())} faults in {self.seconds:.0f} s: "
            f"{len(self.failed)} runs are wrong"
        )
        return "\n".join(
            [
                *rows,
                *(f"seed {seed}: {'; '.join(wrong)[:600]}" for seed, wrong in self.failed.items()),
            ]
        )


def simulated(seed: int) -> tuple[list[str], list[str]]:
    """The kinds of its faults, and what is wrong."""
    from support.chaos.simulated import play

    played = play(seed)
    return [fault.kind for fault in played.faults], played.wrong


def markets(seed: int) -> tuple[list[str], list[str]]:
    """What its generations came of, and what is wrong."""
    from support.chaos.markets import play

    played = play(seed)
    return [*Counter(played.result.causes).elements()], played.wrong


def processes(seed: int) -> tuple[list[str], list[str]]:
    from support.chaos.processes import play

    played = play(seed)
    return [fault.kind for fault in played.happened], played.wrong


def judged(
    one: Callable[[int], tuple[list[str], list[str]]], seed: int
) -> tuple[list[str], list[str]]:
    """A run that raises is wrong."""
    try:
        return one(seed)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other seeds are played
        traceback.print_exc()
        return [], [f"{type(error).__name__}: {error}"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=tuple(RUNS), default="virtual")
    parser.add_argument(
        "--seed", type=int, help="of the first run (default: by chance); the next ones follow"
    )
    parser.add_argument(
        "--runs",
        type=int,
        help=f"at most (default: {RUNS}; with --minutes, as many as there is time for)",
    )
    parser.add_argument("--minutes", type=float, help="no run begins later")
    given = parser.parse_args()
    first = SystemRandom().randrange(SEED_MOST) if given.seed is None else given.seed
    runs = given.runs or (RUNS[given.engine] if given.minutes is None else sys.maxsize)
    print(f"{given.engine}: seeds from {first} on", flush=True)
    engines = {"virtual": simulated, "markets": markets, "processes": processes}
    one, table = engines[given.engine], Table()
    seed = first
    try:
        while table.runs < runs and (given.minutes is None or table.seconds < 60 * given.minutes):
            table.add(seed, *judged(one, seed))
            seed += 1
    except KeyboardInterrupt:
        print("interrupted")
    print(table)
    return int(bool(table.failed))


if __name__ == "__main__":
    sys.exit(main())
