"""How long training stalls when nodes leave and come, and what that costs in all, next to a cold
restart, bare torch and Ray Train.

drills: one run on the embedded cluster, four nodes of one worker: again and again a node is killed,
drained, hung, added. Then the driver is killed, the cluster ends with it, and `elastic run` is
started again with the same run name, at once (nothing is counted for noticing). Beside it, what
bare torch needs for the same change of groups in warm processes. device_bound: the drills with
steps that wait as for a GPU, so that nodes that prepare do not take the cores of those that train.
sizes: the drills at about 10 MB, 100 MB and 1 GB of training state. ray_train: the same losses
under Ray Train's elastic trainer, once each.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import figures
from bare_trial import run_bare
from figures import ColdRestart, Drill, Found
from report import finish, options
from trial import PROGRAM, Clock, Failed, Trial, running

from elastic.ledger.journal import Line
from elastic.observe.accounting.accounts import account
from elastic.reshard.rank_boxes import state_specs
from elastic.types import DrillAsked, DriverStarted

PARTS = ("drills", "device_bound", "sizes", "ray_train")
# a repeat is begun only in the first so much of the time
MOST_S, ANOTHER_ROUND, ONE_MORE_RESTART = 2700.0, 0.5, 0.6
REPEATS = 10
# a copy counts once it is acknowledged: steps that may pass until then
PEER_EVERY, IN_FLIGHT = 5, 3
SHORT = PEER_EVERY + IN_FLIGHT  # steps of a generation before the next thing happens, at least
USD_PER_H = 3.6  # made up: a budget ends the run also when the bench itself was killed
BATCH = 4  # one sample per worker, as in the published measurement
NOTICE_S = 12  # a drill's notice: long enough to see that the node is used until it has to go
DRILLS = (
    "kill=any-spot",
    "add=spot",
    f"notice=any-spot deadline_s={NOTICE_S}",
    "add=spot",
    "hang=any-spot",
)


@dataclass(frozen=True)
class Size:
    """`world` and `least`: workers of the whole group, and with how few it continues; `around`:
    steps on both sides of an event that its excess looks at; `sizes`: width and layers of the
    models for `sizes`; `others`: what happens in the parts beside `drills`."""

    world: int
    least: int
    around: int
    sizes: Mapping[str, tuple[int, int]]
    others: Sequence[str]
    sample_s: float  # of a device-bound step

    @property
    def settle(self) -> int:
        """Steps of a generation before the next thing happens."""
        return 2 * self.around + SHORT

    def job(self, **more: Any) -> dict[str, Any]:
        pool = {"notice_s": 30, "usd_per_node_h": USD_PER_H}
        return {
            "name": "recovery", "steps": 100_000, "global_batch": BATCH, "seed": 1,
            "clip_grad_norm": 1.0, "eval_samples": 12,
            "layout": {n: f"dp_shard={n}" for n in range(self.least, self.world + 1)},
            "min_workers": self.least, "peer_every": PEER_EVERY, "durable_every": 20,
            "budget_usd": 1e6, "pools": [
                {"name": "spot", "market_type": "spot", "max_nodes": self.world - 1, **pool},
                {"name": "on-demand", "market_type": "on-demand", "max_nodes": 1, **pool},
            ],
            **more,
        }  # fmt: skip


WHOLE = Size(
    4, 2, figures.AROUND, {"10 MB": (128, 4), "100 MB": (416, 4), "1 GB": (832, 10)}, DRILLS, 0.25
)
SMOKE = Size(2, 1, 3, {"1 MB": (64, 2), "3 MB": (96, 2)}, DRILLS[:2], 0.02)
SIZED_PROGRAM = """
from dataclasses import replace

from elastic.data.sources.text_folder import LEFT_OUT, TextFolder, python_stdlib_folder
from elastic.models.llama import Llama, LlamaConfig
from elastic.program import load_program

config = LlamaConfig(vocab_size=512, hidden={hidden}, n_layers={layers}, n_heads=8, n_kv_heads=8, max_seq=16)


def text():
    return TextFolder(python_stdlib_folder(), 16, "train", leave_out=LEFT_OUT)


program = replace(load_program({base!r}), model=lambda: Llama(config), dataset=text, validation=None, sample=None)
"""


def happen(trial: Trial, world: int, settle: int, entry: str) -> None:
    """Lets it happen; waits until the run continues with `world` workers."""
    before = trial.generation
    trial.drill(*entry.split())
    trial.until(lambda: trial.settled(world, before, settle), f"{entry}: a generation of {world}")


def drills(
    trial: Trial, repeats: int, size: Size, settle: int, entries: Sequence[str] = DRILLS
) -> None:
    for number in range(repeats):
        if number and trial.clock.spent > ANOTHER_ROUND:
            break
        for entry in entries:  # the node of a hang stays: new processes are started there and join
            happen(trial, size.world - entry.startswith(("kill", "notice")), settle, entry)


def cold_restarts(trial: Trial, repeats: int, size: Size) -> list[ColdRestart]:
    found = [cold_restart(trial, size)]
    while len(found) < repeats and trial.clock.spent < ONE_MORE_RESTART:
        found.append(cold_restart(trial, size))
    return found


def cold_restart(trial: Trial, size: Size) -> ColdRestart:
    trial.until(lambda: trial.n_durable > 0, "a checkpoint")
    trial.until(lambda: trial.settled(size.world, 0, SHORT), f"a generation of {size.world}")
    at_s = trial.kill()
    trial.start()
    trial.until(lambda: trial.steps[-1][2] > at_s, "the first step after the restart")
    return figures.cold_restart(trial.lines(), at_s)


def found_in(lines: Sequence[Line], around: int) -> Found:
    asked = [
        Drill(next(kind for kind in figures.NAMES if kind in event.drill), at_s)
        for line in lines for at_s, event in line.events if isinstance(event, DrillAsked)
    ]  # fmt: skip
    transitions = figures.answers(asked, account(lines).transitions)
    return Found(
        transitions,
        figures.gaps(lines),
        figures.excesses(figures.pace(lines, around), asked, transitions),
    )


def with_drills(clock: Clock, repeats: int, size: Size) -> dict[str, Any]:
    worlds = [size.world, size.world - 1] * (min(repeats, 4) + 1) + [size.world]
    bare = run_bare(worlds, SHORT, BATCH, clock)
    budget_usd = 4 * USD_PER_H * 1.2 * clock.most_s / 3600
    with running(size.job(budget_usd=budget_usd), clock) as trial:
        trial.until(lambda: trial.settled(size.world, 0, size.settle), "the start")
        drills(trial, repeats, size, size.settle)
        colds = cold_restarts(trial, min(repeats, 3), size)
        lines = trial.lines()
    return figures.recovery(found_in(lines, size.around), colds, bare.changes())


def device_bound(clock: Clock, repeats: int, size: Size) -> dict[str, Any]:
    os.environ["BENCH_SAMPLE_S"] = str(size.sample_s)
    with running(size.job(program=str(PROGRAM.with_name("device_bound.py"))), clock) as trial:
        trial.until(lambda: trial.settled(size.world, 0, size.settle), "device bound: the start")
        drills(trial, repeats, size, size.settle, size.others)
        lines = trial.lines()
    return figures.device_bound(found_in(lines, size.around))


def with_sizes(clock: Clock, repeats: int, size: Size) -> dict[str, Any]:
    """Pauses at several sizes of the training state: what does not depend on it, and what each GB
    adds."""
    pauses: dict[str, list[tuple[float, float]]] = {}
    failed: dict[str, str] = {}
    for name, (hidden, layers) in size.sizes.items():
        try:
            lines = at_size(clock, repeats, size, (hidden, layers))
        except Failed as error:  # the others are measured all the same
            failed[name] = str(error)[:300]
            continue
        gb = state_gb(lines)
        for cause, transitions in found_in(lines, size.around).transitions.items():
            if cause != "hang":
                pauses.setdefault(cause, []).extend((gb, t.pause_s) for t in transitions)
    sizes = {cause: _of_size(points) for cause, points in pauses.items() if points}
    return {"sizes": sizes, "sizes_failed": failed, "n_sizes_failed": len(failed)}


def at_size(clock: Clock, repeats: int, size: Size, shape: tuple[int, int]) -> list[Line]:
    """`shape`: width and layers."""
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        program = Path(folder) / "sized.py"
        program.write_text(
            SIZED_PROGRAM.format(hidden=shape[0], layers=shape[1], base=str(PROGRAM))
        )
        with running(size.job(program=str(program), durable_every=200), clock) as trial:
            trial.until(lambda: trial.settled(size.world, 0, SHORT), f"width {shape[0]}: the start")
            drills(trial, repeats, size, SHORT, size.others)
            return trial.lines()


def state_gb(lines: Sequence[Line]) -> float:
    start = next(e for line in lines for _, e in line.events if isinstance(e, DriverStarted))
    return sum(figures.n_bytes(spec) for spec in state_specs(start.model)) / 1e9


def _of_size(points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    through = figures.line_through(points)
    by_gb = {gb: median(p for g, p in points if g == gb) for gb in sorted({g for g, _ in points})}
    out: dict[str, Any] = {
        "pause_s_by_gb": {round(gb, 4): round(pause_s, 3) for gb, pause_s in by_gb.items()}
    }
    if through is not None:
        out |= {"intercept_s": round(through[0], 3), "slope_s_per_gb": round(through[1], 3)}
    return out


def measure(clock: Clock, repeats: int, parts: Sequence[str], size: Size) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "drills" in parts:
        found |= with_drills(clock, repeats, size)
    if "device_bound" in parts:
        found |= device_bound(clock, max(1, repeats // 3), size)
    if "sizes" in parts:
        found |= with_sizes(clock, 1 if repeats < REPEATS else 2, size)
    if "ray_train" in parts:
        import ray_train

        found |= ray_train.measure(clock, size is SMOKE)
        for cause in ("loss", "notice", "growth"):
            key = {
                "loss": "ray_train_loss_s",
                "notice": "ray_train_notice_idle_s",
                "growth": "ray_train_growth_s",
            }[cause]
            found[f"ray_train_times_{cause}"] = figures.ratio(
                found.get(key), found.get(f"pause_{cause}_s")
            )
    return {**found, "processes_left": 0}


if __name__ == "__main__":
    given = options(__doc__, MOST_S, REPEATS, PARTS, smoke_parts=("drills",))
    size = SMOKE if given.smoke else WHOLE
    sys.exit(
        finish("recovery", given, lambda clock: measure(clock, given.repeats, given.parts, size))
    )
