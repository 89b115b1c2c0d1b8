"""How long training stands still when nodes leave and come, next to a cold restart of the same run.

One run on the embedded cluster, four nodes of one worker each: again and again a node is killed, drained, hung, added. Then the
driver is killed, the cluster ends with it, and `elastic run` is started again with the same run name, at once: nothing is
counted for noticing. Beside it, bare.py tells what bare torch needs for the same change of groups in warm processes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import figures
from bare_trial import run_bare
from figures import ColdRestart, Drill
from report import finish, options
from trial import Clock, Failed, Trial

from elastic.ledger.accounts import account
from elastic.types import DrillAsked

MOST_S, ANOTHER_ROUND, ONE_MORE_RESTART = 420.0, 0.45, 0.8  # a repeat is begun only in the first so much of the time
SETTLE_STEPS = 8  # of a generation before the next thing happens; more than PEER_EVERY
PEER_EVERY, IN_FLIGHT = 5, 3  # a copy counts once it is acknowledged: steps that may pass until then
USD_PER_H = 3.6  # made up: a budget ends the run also when the bench itself was killed
BATCH = 4  # one sample per worker, as in the published measurement
JOB = {
    "name": "recovery", "steps": 100_000, "global_batch": BATCH, "seed": 1, "clip_grad_norm": 1.0, "eval_samples": 12,
    "layout": {4: "dp_shard=4", 3: "dp_shard=3", 2: "dp_shard=2"}, "min_workers": 2,
    "peer_every": PEER_EVERY, "durable_every": 20,
    "pools": [
        {"name": "spot", "market_type": "spot", "max_nodes": 3, "notice_s": 30, "usd_per_node_h": USD_PER_H},
        {"name": "on-demand", "market_type": "on-demand", "max_nodes": 1, "usd_per_node_h": USD_PER_H},
    ],
}  # fmt: skip


def happen(trial: Trial, world: int, *entries: str) -> None:
    """Lets it happen; waits until the run goes on with `world` workers."""
    before = trial.generation
    for entry in entries:
        trial.drill(*entry.split())
    trial.until(lambda: trial.settled(world, before, SETTLE_STEPS), f"{', '.join(entries)}: a generation of {world}")


def drills(trial: Trial, repeats: int) -> None:
    for number in range(repeats):
        if number and trial.clock.spent > ANOTHER_ROUND:
            break
        happen(trial, 3, "kill=any-spot")
        happen(trial, 2, "kill=any-spot")
        happen(trial, 4, "add=spot", "add=spot")
        happen(trial, 3, "notice=any-spot deadline_s=30")
        happen(trial, 4, "add=spot")
        if number == 0:
            happen(trial, 4, "hang=any-spot")  # its node stays: new processes are started there and join


def cold_restarts(trial: Trial, repeats: int) -> list[ColdRestart]:
    found = [cold_restart(trial)]
    while len(found) < repeats and trial.clock.spent < ONE_MORE_RESTART:
        found.append(cold_restart(trial))
    return found


def cold_restart(trial: Trial) -> ColdRestart:
    trial.until(lambda: trial.n_durable > 0, "a durable copy")
    trial.until(lambda: trial.settled(4, 0, SETTLE_STEPS), "a generation of 4")
    at_s = trial.kill()
    trial.start()
    trial.until(lambda: trial.steps[-1][2] > at_s, "the first step after the restart")
    return figures.cold_restart(trial.lines(), at_s)


def measure(clock: Clock, repeats: int) -> dict[str, Any]:
    worlds = [4, 3] * (repeats + 1) + [4]
    bare = run_bare(worlds, SETTLE_STEPS, BATCH, clock)
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        budget_usd = 4 * USD_PER_H * 1.2 * clock.most_s / 3600
        trial = Trial(Path(folder), JOB | {"budget_usd": budget_usd}, clock)
        try:
            trial.start()
            trial.until(lambda: trial.settled(4, 0, SETTLE_STEPS), "the start")
            drills(trial, repeats)
            colds = cold_restarts(trial, repeats)
        finally:
            left = trial.end()
        lines = trial.lines()
    asked = [
        Drill(next(kind for kind in figures.NAMES if kind in event.drill), at_s)
        for line in lines for at_s, event in line.events if isinstance(event, DrillAsked)
    ]  # fmt: skip
    answers = figures.answers(asked, account(lines).transitions)
    found = figures.recovery(answers, figures.gaps(lines), colds, bare.changes())
    if left:
        raise Failed(f"{len(left)} processes did not end by themselves: {left}")
    return {**found, "processes_left": len(left)}


if __name__ == "__main__":
    given = options(__doc__, MOST_S)
    sys.exit(finish("recovery", given, lambda clock: measure(clock, given.repeats)))
