"""How long training stands still when nodes leave and come, and what that costs in all, next to a cold restart, bare torch and
Ray Train.

drills: one run on the embedded cluster, four nodes of one worker: again and again a node is killed, drained, hung, added. Then
the driver is killed, the cluster ends with it, and `elastic run` is started again with the same run name, at once (nothing is
counted for noticing). Beside it, what bare torch needs for the same change of groups in warm processes. device_bound: the
drills with steps that wait as for a GPU, so that nodes that prepare do not take the cores of those that train. sizes: the
drills at about 10 MB, 100 MB and 1 GB of training state. ray_train: the same losses under Ray Train's elastic trainer, once
each.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import figures
from bare_trial import run_bare
from figures import ColdRestart, Drill, Found
from report import finish, options
from trial import PROGRAM, Clock, Failed, Trial

from elastic.ledger.accounts import account
from elastic.ledger.journal import Line
from elastic.reshard.shards import state_specs
from elastic.types import DrillAsked, DriverStarted

PARTS = ("drills", "device_bound", "sizes", "ray_train")
MOST_S, ANOTHER_ROUND, ONE_MORE_RESTART = 2700.0, 0.5, 0.6  # a repeat is begun only in the first so much of the time
REPEATS = 10
SETTLE_STEPS = 2 * figures.AROUND + 8  # of a generation before the next thing happens
SIZES_SETTLE_STEPS = 8  # more than PEER_EVERY and IN_FLIGHT together
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
NOTICE_S = 12  # a drill's notice: long enough to see that the node is used until it has to go
SIZES = {"10 MB": (128, 4), "100 MB": (416, 4), "1 GB": (832, 10)}  # width and layers
SIZED_PROGRAM = """
from dataclasses import replace

from elastic.data.sources import LEFT_OUT, TextFolder, python_stdlib_folder
from elastic.models.llama import Llama, LlamaConfig
from elastic.program import load_program

config = LlamaConfig(vocab_size=512, hidden={hidden}, n_layers={layers}, n_heads=8, n_kv_heads=8, max_seq=16)


def text():
    return TextFolder(python_stdlib_folder(), 16, "train", leave_out=LEFT_OUT)


program = replace(load_program({base!r}), model=lambda: Llama(config), dataset=text, validation=None, sample=None)
"""


def happen(trial: Trial, world: int, settle: int, *entries: str) -> None:
    """Lets it happen; waits until the run goes on with `world` workers."""
    before = trial.generation
    for entry in entries:
        trial.drill(*entry.split())
    trial.until(lambda: trial.settled(world, before, settle), f"{', '.join(entries)}: a generation of {world}")


def drills(trial: Trial, repeats: int, settle: int = SETTLE_STEPS) -> None:
    for number in range(repeats):
        if number and trial.clock.spent > ANOTHER_ROUND:
            break
        happen(trial, 3, settle, "kill=any-spot")
        happen(trial, 4, settle, "add=spot")
        happen(trial, 3, settle, f"notice=any-spot deadline_s={NOTICE_S}")
        happen(trial, 4, settle, "add=spot")
        happen(trial, 4, settle, "hang=any-spot")  # its node stays: new processes are started there and join


def cold_restarts(trial: Trial, repeats: int) -> list[ColdRestart]:
    found = [cold_restart(trial)]
    while len(found) < repeats and trial.clock.spent < ONE_MORE_RESTART:
        found.append(cold_restart(trial))
    return found


def cold_restart(trial: Trial) -> ColdRestart:
    trial.until(lambda: trial.n_durable > 0, "a durable copy")
    trial.until(lambda: trial.settled(4, 0, SIZES_SETTLE_STEPS), "a generation of 4")
    at_s = trial.kill()
    trial.start()
    trial.until(lambda: trial.steps[-1][2] > at_s, "the first step after the restart")
    return figures.cold_restart(trial.lines(), at_s)


def found_in(lines: Sequence[Line]) -> Found:
    asked = [
        Drill(next(kind for kind in figures.NAMES if kind in event.drill), at_s)
        for line in lines for at_s, event in line.events if isinstance(event, DrillAsked)
    ]  # fmt: skip
    transitions = figures.answers(asked, account(lines).transitions)
    return Found(transitions, figures.gaps(lines), figures.excesses(figures.pace(lines), asked, transitions))


def with_drills(clock: Clock, repeats: int) -> dict[str, Any]:
    bare = run_bare([4, 3] * (min(repeats, 4) + 1) + [4], SIZES_SETTLE_STEPS, BATCH, clock)
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        budget_usd = 4 * USD_PER_H * 1.2 * clock.most_s / 3600
        trial = Trial(Path(folder), JOB | {"budget_usd": budget_usd}, clock)
        try:
            trial.start()
            trial.until(lambda: trial.settled(4, 0, SETTLE_STEPS), "the start")
            drills(trial, repeats)
            colds = cold_restarts(trial, min(repeats, 3))
        finally:
            left = trial.end()
        lines = trial.lines()
    if left:
        raise Failed(f"{len(left)} processes did not end by themselves: {left}")
    return figures.recovery(found_in(lines), colds, bare.changes())


def device_bound(clock: Clock, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        trial = Trial(Path(folder), JOB | {"program": str(PROGRAM.with_name("device_bound.py"))}, clock)
        try:
            trial.start()
            trial.until(lambda: trial.settled(4, 0, SETTLE_STEPS), "device bound: the start")
            drills(trial, repeats)
        finally:
            trial.end()
        return figures.device_bound(found_in(trial.lines()))


def with_sizes(clock: Clock, repeats: int) -> dict[str, Any]:
    """Pauses at several sizes of the training state: what does not depend on it, and what each GB adds."""
    pauses: dict[str, list[tuple[float, float]]] = {}
    failed: dict[str, str] = {}
    for name, (hidden, layers) in SIZES.items():
        with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
            program = Path(folder) / "sized.py"
            program.write_text(SIZED_PROGRAM.format(hidden=hidden, layers=layers, base=str(PROGRAM)))
            trial = Trial(Path(folder), JOB | {"program": str(program), "durable_every": 200}, clock)
            try:
                trial.start()
                trial.until(lambda: trial.settled(4, 0, SIZES_SETTLE_STEPS), f"{name}: the start")  # noqa: B023
                drills(trial, repeats, SIZES_SETTLE_STEPS)
            except Failed as error:  # the others are measured all the same
                failed[name] = str(error)[:300]
                continue
            finally:
                trial.end()
            lines = trial.lines()
        gb = state_gb(lines)
        for cause, transitions in found_in(lines).transitions.items():
            if cause != "hang":
                pauses.setdefault(cause, []).extend((gb, t.pause_s) for t in transitions)
    return {"sizes": {cause: _of_size(points) for cause, points in pauses.items()}, "sizes_failed": failed}


def state_gb(lines: Sequence[Line]) -> float:
    start = next(e for line in lines for _, e in line.events if isinstance(e, DriverStarted))
    return sum(figures.n_bytes(spec) for spec in state_specs(start.model)) / 1e9


def _of_size(points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    through = figures.line_through(points)
    by_gb = {gb: median(p for g, p in points if g == gb) for gb in sorted({g for g, _ in points})}
    out: dict[str, Any] = {"pause_s_by_gb": {round(gb, 4): round(pause_s, 3) for gb, pause_s in by_gb.items()}}
    if through is not None:
        out |= {"intercept_s": round(through[0], 3), "slope_s_per_gb": round(through[1], 3)}
    return out


def measure(clock: Clock, repeats: int, parts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "drills" in parts:
        found |= with_drills(clock, repeats)
    if "device_bound" in parts:
        found |= device_bound(clock, max(1, repeats // 3))
    if "sizes" in parts:
        found |= with_sizes(clock, 1 if repeats < REPEATS else 2)
    if "ray_train" in parts:
        import ray_train

        found |= ray_train.measure(clock)
        for cause in ("loss", "notice", "growth"):
            key = {"loss": "ray_train_loss_s", "notice": "ray_train_notice_idle_s", "growth": "ray_train_growth_s"}[cause]
            found[f"ray_train_times_{cause}"] = figures.ratio(found.get(key), found.get(f"pause_{cause}_s"))
    return {**found, "processes_left": 0}


if __name__ == "__main__":
    given = options(__doc__, MOST_S, REPEATS, PARTS)
    sys.exit(finish("recovery", given, lambda clock: measure(clock, given.repeats, given.parts)))
