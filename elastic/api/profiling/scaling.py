"""scaling_study(): a job runs some steps at each of several numbers of workers; tokens/s beside
linear and beside the plan, and where the time goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from elastic.api.profiling.live_profile import new_id, planned_of
from elastic.api.running.options import Options
from elastic.api.running.run import run_job
from elastic.config.job import load_job
from elastic.errors import ElasticError, SpecError
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.observe.profiles.profile_bars import save_scaling, scaling_lines
from elastic.observe.profiles.profile_files import mean_parts, read_profile
from elastic.observe.reporting.pictures import asked_for
from elastic.observe.run_view import View
from elastic.storage import open_storage
from elastic.text import n_of
from elastic.worker.hosting.inbox import profile_order

log = logging.getLogger(__name__)

WARM_UP, MEASURED, LEAST = 2, 12, 3  # steps that do not count; that do, and at least
LOOK_S = 0.5  # between two looks at the run's journal
MOST = 16  # numbers of workers at once


@dataclass(frozen=True)
class ScalingRequest:
    """`steps`: that are traced at each number of workers. `png`: a picture of it."""

    workers: tuple[int, ...]
    steps: int = 3
    options: Options = field(default_factory=Options)
    png: str | Path | None = None


@dataclass(frozen=True)
class ScaledRun:
    """Of one number of workers. `parts`: seconds of a traced step, a mean over the ranks;
    `planned_step_s`: by the cost model, 0 = of hardware that nobody has measured."""

    run: str
    workers: int
    layout: str
    steps: int
    step_s: float
    tokens_per_s: float
    parts: Mapping[str, float]
    planned_step_s: float
    planned_parts: Mapping[str, float]
    tokens_per_step: float


@dataclass(frozen=True)
class ScalingStudy:
    """`png`: the picture that was written, '' = none."""

    job: str
    runs: tuple[ScaledRun, ...]
    png: str = ""

    def plain(self) -> dict[str, Any]:
        first, rows = self.runs[0], []
        for one in self.runs:
            linear = first.tokens_per_s * one.workers / first.workers
            planned = one.tokens_per_step / one.planned_step_s if one.planned_step_s else None
            rows.append(
                asdict(one)
                | {
                    "linear_tokens_per_s": linear, "efficiency": one.tokens_per_s / linear,
                    "planned_tokens_per_s": planned, "hardware_known": one.planned_step_s > 0,
                }
            )  # fmt: skip
        return {"job": self.job, "scale": rows, "png": self.png}

    def lines(self, width: int = 100) -> list[str]:
        picture = [f"picture: {self.png}"] if self.png else []
        return [*scaling_lines(self.plain(), width), *picture]


def scaling_study(job: str | Path, wishes: ScalingRequest) -> ScalingStudy:
    """Runs the job once for each number, and stops it when enough is measured. Raises SpecError
    where the input is wrong, ElasticError where a run fails."""
    if len(wishes.workers) > MOST or list(wishes.workers) != sorted(set(wishes.workers)):
        numbers = ",".join(map(str, wishes.workers))
        raise SpecError(
            f"--scale {numbers}: must be up to {MOST} numbers, each larger than the last"
        )
    specs = [load_job(job, _overrides(wishes.options, n)) for n in wishes.workers]
    storage = find_runs.storage_uri(specs[0].storage)
    name = f"{specs[0].name}-scale-{time.strftime('%Y%m%d-%H%M%S')}"
    runs = tuple(_Scaled(f"{name}-{n}", storage, wishes).run(job, n) for n in wishes.workers)
    study = ScalingStudy(specs[0].name, runs)
    if wishes.png is None:
        return study
    with asked_for(wishes.png):
        png = save_scaling(study.plain(), wishes.png)
    return ScalingStudy(study.job, study.runs, str(png))


def _overrides(options: Options, n: int) -> tuple[str, ...]:
    """Exactly so many workers, and nothing that happens to them."""
    return (*options.overrides, f"min_workers={n}", f"max_workers={n}", "drill=[]")


class _Scaled:
    """A run at one number of workers: its profile is ordered before it starts, its stop when
    enough steps were done behind that."""

    def __init__(self, name: str, storage: str, wishes: ScalingRequest) -> None:
        self.place = RunFolder.of(open_storage(f"{storage}/{name}"))
        self.name, self.wishes = name, wishes
        self.order = profile_order({"profile_id": new_id(), "steps": wishes.steps, "ranks": "all"})
        self._looked_s = 0.0
        self._since: int | None = None  # the step at which the profile had ended
        self._stopped = False

    def run(self, job: str | Path, n: int) -> ScaledRun:
        options = replace(
            self.wishes.options, run_name=self.name, show=False, on_step=self._seen,
            overrides=_overrides(self.wishes.options, n),
        )  # fmt: skip
        spec = load_job(job, options.overrides)
        find_runs.order(self.place.storage, {"profile": asdict(self.order)})
        result = run_job(spec, options)
        if result.outcome == "failed":
            raise ElasticError(
                f"at {n_of(n, 'worker')} run '{self.name}' has failed: {result.reason}"
            )
        return self._measured(find_runs.view(self.place), n)

    def _seen(self, row: Mapping[str, Any]) -> None:
        """In a thread beside the driver's."""
        now_s, step = time.monotonic(), int(row["step"])
        if self._since is None and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            if self.order.profile_id in find_runs.now(self.place).state.profiles:
                self._since = step
        if self._since is not None and step > self._since + MEASURED and not self._stopped:
            self._stopped = True
            find_runs.order(self.place.storage, {"stop": "the scaling study has what it needs"})

    def _measured(self, view: View, n: int) -> ScaledRun:
        """Raises ElasticError where it made too few steps."""
        ranks = read_profile(self.place.storage, self.order.profile_id)
        traced = {step + more for one in ranks for step in one.steps for more in (0, 1)}
        last = view.points[-1].generation if view.points else 0
        own = [point for point in view.points if point.generation == last]
        kept = [point for point in own[WARM_UP:] if point.step not in traced]
        plan = view.planned.get(last)
        if len(kept) < LEAST or plan is None:
            raise ElasticError(
                f"at {n_of(n, 'worker')} run '{self.name}' made {n_of(len(own), 'step')}, "
                "too few to measure; give it more: --set steps=200"
            )
        if len(plan.ranks) != n:
            log.warning("asked for %s workers, the plan has %s", n, len(plan.ranks))
        step_s = median(point.step_time_s for point in kept)
        tokens = sum(point.tokens for point in kept) / len(kept)
        planned = planned_of(view.state, plan) or {}
        known = bool(planned.get("hardware_known"))
        return ScaledRun(
            self.name, len(plan.ranks), str(plan.layout), len(kept), step_s, tokens / step_s,
            mean_parts(ranks) if ranks else {}, planned["step_s"] if known else 0.0,
            planned["parts"] if known else {}, tokens,
        )  # fmt: skip
