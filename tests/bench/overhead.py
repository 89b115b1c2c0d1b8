"""What a run costs under elastic when nothing happens, next to a bare script with the same model,
layout and batch.

Both are there at once, and one is frozen (SIGSTOP to all its processes) while the other runs:
blocks of a few seconds in turn, elastic and bare, bare and elastic, so that whatever the machine
does meanwhile falls on both. Under elastic: two nodes of one worker each (dp_shard=2) on the
embedded cluster, peer replicas and journal on. How often it copies is what a run before it comes to
by itself (one that is frozen now and then measures long steps, and copies more often). Bare:
bare.py in two processes. The part `watched`: the same run with each tracker that is installed
(offline), with the metrics endpoint scraped, with `--dashboard` and a page open, with all of them and
`elastic status` once a minute, each next to one without; and such a pair of which neither is watched
(`twin`): what two runs differ by anyway.
Wall seconds and CPU seconds per step; CPU seconds are of all processes,
under elastic also of driver and Ray.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol

import bare_trial
import figures
import viewer
from figures import Block
from report import finish, options
from trial import LOOK_S, PROGRAM, ROOT, Clock, Failed, Tree, Trial, running

from elastic.cluster.ray import processes

MOST_S, PAIRS, ENOUGH = 5400.0, 32, 0.9
BATCH = 8
WATCHED, TRACKERS = "watched", ("wandb", "mlflow", "trackio")
MODELS = {"small": PROGRAM, "wide": PROGRAM.with_name("wide.py")}
TINY = ROOT / "tests" / "programs" / "tiny.py"
JOB = {
    "name": "overhead", "steps": 100_000, "global_batch": BATCH, "seed": 1, "clip_grad_norm": 1.0,
    "eval_samples": 12, "layout": "dp_shard=2", "min_workers": 2, "durable_every": 0,
    "pools": [{"name": "owned", "market_type": "owned", "max_nodes": 2}],
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """`warm`: steps before the first block; `undisturbed`: steps in which a run finds its own
    cadence."""

    models: Mapping[str, Path]
    warm: int = 15
    undisturbed: int = 100
    steps_a_block: int = 10
    block_least_s: float = 2.5

    def block_s(self, step_s: float) -> float:
        return max(self.block_least_s, (self.steps_a_block + figures.SETTLES) * step_s)


WHOLE = Size(MODELS)
SMOKE = Size(
    dict.fromkeys(MODELS, TINY), warm=6, undisturbed=10, steps_a_block=4, block_least_s=0.5
)


class Contender(Protocol):
    trees: list[Tree]

    def ends(self) -> list[float]:
        """When each step so far ended (epoch seconds)."""
        ...

    def parts_s(self, since_s: float) -> Mapping[str, float]:
        """Means per step since then of what it tells about its steps."""
        ...


@dataclass
class Elastic:
    trial: Trial
    told: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)

    @property
    def trees(self) -> list[Tree]:
        return self.trial.trees

    def ends(self) -> list[float]:
        self.trial.look()
        if len({generation for generation, _, _ in self.trial.steps}) > 1:
            raise Failed("something happened to the run: it has more than one generation")
        return [at_s for _, _, at_s in self.trial.steps]

    def parts_s(self, since_s: float) -> Mapping[str, float]:
        times = [
            t for (_, _, at_s), t in zip(self.trial.steps, self.trial.times_s) if at_s >= since_s
        ]
        ends = [at_s for _, _, at_s in self.trial.steps if at_s >= since_s]
        if len(ends) < 3:
            return {}
        names = sorted({name for t in times for name in t})
        means = {name: sum(t[name] for t in times[1:]) / len(times[1:]) for name in names}
        return {**means, "between_steps": (ends[-1] - ends[0]) / (len(ends) - 1) - means["step"]}


@dataclass
class Bare:
    out: Path
    trees: list[Tree]

    def ends(self) -> list[float]:
        return [
            float(at_s)
            for at_s in re.findall(
                r"^step \d+ ended (\S+) loss", self.out.read_text(), re.MULTILINE
            )
        ]

    def parts_s(self, since_s: float) -> Mapping[str, float]:
        return {}


def signal_all(contender: Contender, number: int) -> None:
    for tree in contender.trees:
        tree.look()
        processes.send(tree.left(), number)


def cpu_s(contender: Contender) -> dict[str, float]:
    kept: dict[int, tuple[str, float]] = {}
    for tree in contender.trees:
        tree.cpu_s(kept)
    out: dict[str, float] = {}
    for kind, seconds in kept.values():
        out[kind] = out.get(kind, 0.0) + seconds
    return out


def run_block(contender: Contender, seconds: float) -> Block | None:
    """Lets it run for so long, then freezes it again."""
    before, thawed_s = cpu_s(contender), time.time()
    signal_all(contender, signal.SIGCONT)
    time.sleep(seconds)
    signal_all(contender, signal.SIGSTOP)
    active_s, after = time.time() - thawed_s, cpu_s(contender)
    ends = [at_s for at_s in contender.ends() if at_s > thawed_s]
    spent = {kind: after[kind] - before.get(kind, 0.0) for kind in after}
    found = figures.block(ends, spent, active_s)
    return replace(found, parts_s=contender.parts_s(ends[figures.SETTLES - 1])) if found else None


def warm(
    contender: Contender, n_steps: int, clock: Clock, process: Popen[bytes], log: Path
) -> float:
    """Waits for its first steps, then freezes it. Returns the seconds of a step."""
    while len(ends := contender.ends()) < n_steps:
        clock.look("the first steps")
        if process.poll() is not None:
            raise Failed(
                f"it ended first (exit code {process.returncode}): "
                f"{log.read_text(errors='replace')[-1500:]}"
            )
        time.sleep(LOOK_S)
    signal_all(contender, signal.SIGSTOP)
    return (ends[-1] - ends[-6]) / 5


def own_cadence(program: Path, n_steps: int, clock: Clock) -> int:
    """Steps between peer replicas that a run of the program comes to when nothing disturbs it."""
    with running({**JOB, "program": str(program)}, clock) as trial:
        trial.until(lambda: len(trial.steps) >= n_steps, "the run that finds its cadence")
        return trial.peer_every


@contextmanager
def under_elastic(
    program: Path, n_steps: int, clock: Clock, *, words: Sequence[str] = (), **more: Any
) -> Iterator[Elastic]:
    """`more`: keys of its job; `words`: of its command line."""
    with running({**JOB, "program": str(program), **more}, clock, words) as trial:
        contender = Elastic(trial)
        assert trial.process is not None
        try:
            warm(contender, n_steps, clock, trial.process, trial.folder / "run.log")
            yield contender
        finally:
            signal_all(contender, signal.SIGCONT)


@contextmanager
def under_bare(program: Path, n_steps: int, clock: Clock) -> Iterator[tuple[Bare, float]]:
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        out = Path(folder) / "bare.log"
        with out.open("w") as file:
            ranks = bare_trial.start(file, [2], 0, BATCH, program)
        contender = Bare(out, [Tree(process.pid) for process in ranks])
        try:
            yield contender, warm(contender, n_steps, clock, ranks[0], out)
        finally:
            bare_trial.end(ranks)


def compare(program: Path, n_pairs: int, size: Size, clock: Clock) -> dict[str, Any]:
    every = own_cadence(program, size.undisturbed, clock)
    with (
        under_elastic(program, size.warm, clock, peer_every=every) as ours,
        under_bare(program, size.warm, clock) as (bare, step_s),
    ):
        rounds = in_turn({"ours": ours, "bare": bare}, size.block_s(step_s), n_pairs, clock)
    pairs = [(one["ours"], one["bare"]) for one in rounds if len(one) == 2]
    return {**figures.overhead(pairs), "peer_every": every}


def compare_watched(
    program: Path, names: Sequence[str], n_rounds: int, size: Size, clock: Clock
) -> dict[str, Any]:
    """The same run watched in several ways, each beside one that nothing watches."""
    trackers = [name for name in TRACKERS if find_spec(name) is not None]
    page: dict[str, Any] = {"words": ("--dashboard",)}
    ways: dict[str, dict[str, Any]] = {
        "twin": {},
        "trackers": {"trackers": trackers},
        "endpoint": {"metrics_port": 0},
        "dashboard": page,
        "all": {"trackers": trackers, "metrics_port": 0, **page},
    }
    if unknown := [name for name in names if name not in ways]:
        raise Failed(f"--watchers {' '.join(unknown)}: must be some of {' '.join(ways)}")
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        os.environ |= {
            "WANDB_MODE": "offline", "WANDB_DIR": folder, "TRACKIO_DIR": folder,
            "MLFLOW_TRACKING_URI": f"file:{folder}/mlflow",
        }  # fmt: skip
        rounds = [
            one
            for name in names
            for one in beside_nothing(program, name, ways[name], size=size, n=n_rounds, clock=clock)
        ]
    return {**figures.watched(rounds, os.cpu_count() or 1), "installed": trackers}


def beside_nothing(
    program: Path, name: str, way: Mapping[str, Any], *, size: Size, n: int, clock: Clock
) -> list[dict[str, Block]]:
    """Two runs at once, as elsewhere here: one that is frozen for longer than a block or two takes
    itself for one whose nodes were lost."""
    with ExitStack() as stack:
        watched = stack.enter_context(under_elastic(program, size.warm, clock, peer_every=0, **way))
        begun(watched, way, clock)
        if urls := shown_at(watched):
            run = watched.trial.journal.parent if name == "all" else None
            stack.enter_context(viewed(watched, urls, run))
        alone = stack.enter_context(under_elastic(program, size.warm, clock, peer_every=0))
        ends = alone.ends()
        seconds = size.block_s((ends[-1] - ends[-6]) / 5)
        return in_turn({name: watched, "nothing": alone}, seconds, n, clock)


def begun(watched: Elastic, way: Mapping[str, Any], clock: Clock) -> None:
    """Lets it run until all of its watchers are there: each library has been imported and has taken
    a step, which is of a run's start."""
    signal_all(watched, signal.SIGCONT)
    n_trackers, n_urls = len(way.get("trackers", ())), len({"metrics_port", "words"} & {*way})
    while (
        len({*watched.trial.folder.glob("**/trackers/*.json")}) < n_trackers
        or len(shown_at(watched)) < n_urls
    ):
        clock.look("the watchers' first steps")
        time.sleep(LOOK_S)
    signal_all(watched, signal.SIGSTOP)


def shown_at(watched: Elastic) -> dict[str, str]:
    """Where its endpoint and its page are, as it says."""
    said = (watched.trial.folder / "run.log").read_text(errors="replace")
    return dict(re.findall(r"(metrics for Prometheus|dashboard): (http\S+)", said))


@contextmanager
def viewed(watched: Elastic, urls: Mapping[str, str], run: Path | None) -> Iterator[None]:
    """Somebody looks at them, and asks for the `run`'s status."""
    process, tree = viewer.started(
        urls.get("metrics for Prometheus", ""), urls.get("dashboard", ""), run
    )
    watched.trees.append(tree)
    try:
        yield
        if process.poll() is not None:
            raise Failed(f"who looked at it has ended (exit code {process.returncode})")
    finally:
        watched.trees.remove(tree)
        process.kill()
        process.wait()
        tree.gone()


def in_turn(
    contenders: Mapping[str, Contender], seconds: float, n_rounds: int, clock: Clock
) -> list[dict[str, Block]]:
    """Rounds of a block of each, those that tell something and that there is time for; every other
    round the other way round."""
    rounds: list[dict[str, Block]] = []
    for number in range(n_rounds):
        if clock.spent > ENOUGH and len(rounds) > 1:
            break
        clock.look(f"round {number} of {n_rounds}")
        names = [*contenders] if number % 2 == 0 else [*reversed(contenders)]
        found = {name: run_block(contenders[name], seconds) for name in names}
        rounds.append({name: one for name, one in found.items() if one is not None})
    return rounds


def measure(clock: Clock, given: argparse.Namespace, size: Size) -> dict[str, Any]:
    """The figures of the wide model by their names, those of the small one below `small`."""
    parts, n = given.parts, max(2, given.repeats)
    found = {name: compare(size.models[name], n, size, clock) for name in parts if name != WATCHED}
    if WATCHED in parts:
        names = given.watchers.split()
        found[WATCHED] = compare_watched(size.models["wide"], names, n, size, clock)
    watched = {WATCHED: found[WATCHED]} if WATCHED in found else {}
    small = (
        {"small": found["small"], "small_step_time_ratio": found["small"]["step_time_ratio"]}
        if "small" in found
        else {}
    )
    return {**found.get("wide", {}), **small, **watched, "processes_left": 0}


if __name__ == "__main__":
    given = options(
        __doc__, MOST_S, repeats=PAIRS, parts=(*MODELS, WATCHED), smoke_parts=("wide",),
        values={"watchers": "twin trackers endpoint dashboard all"},
    )  # fmt: skip
    size = SMOKE if given.smoke else WHOLE
    sys.exit(finish("overhead", given, lambda clock: measure(clock, given, size)))
