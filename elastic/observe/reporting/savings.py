"""What a run saved: against on-demand nodes alone, and against trainers that restart at each
change. Pure, but for the catalog's prices.

Both comparisons lean against elastic: on-demand nodes are taken to start and train without any
pause, and a restart to take no longer than was measured with a model that loads in a moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from elastic.ledger.on_demand_price import on_demand_price
from elastic.observe.accounting.accounts import Account
from elastic.observe.reporting.capacity_history import CapacityHistory
from elastic.observe.run_view import View

# what on-demand nodes would have been paid for too
TRAINED = ("productive", "data_loading", "evaluation", "checkpoint_save", "between_steps")


@dataclass(frozen=True)
class OnDemand:
    """`usd`: of the same training on on-demand nodes. `saved_usd` < 0: the run cost more.
    `prices`: where each price is from."""

    usd: float
    saved_usd: float
    gpu_hours: float
    prices: tuple[str, ...]

    @property
    def saved_share(self) -> float:
        return self.saved_usd / self.usd if self.usd > 0 else 0.0


@dataclass(frozen=True)
class Restarted:
    """What a trainer that restarts would have taken for the same changes: time without a step, and
    steps since the last checkpoint trained again; less what this run took."""

    trainer: str
    source: str
    changes: int
    idle_s: float
    steps_again: int
    saved_s: float
    saved_gpu_s: float
    saved_usd: float


def against_on_demand(books: Account, history: CapacityHistory) -> OnDemand | str:
    """A string says why there is nothing to compare."""
    trained = {pool: s for pool, s in history.trained_gpu_s.items() if s > 0}
    used = [pool for name, pool in history.pools.items() if name in trained]
    if not used or not books.totals.gpu_seconds:
        return "the run has not trained"
    if books.totals.usd <= 0:
        return "its nodes have no price"
    if all(pool.market_type == "on-demand" for pool in used):
        return "all nodes that trained were on-demand"
    found = {pool.name: on_demand_price(pool, [*history.pools.values()]) for pool in used}
    unknown = [name for name, (usd, _) in found.items() if usd is None]
    if unknown:
        return f"the on-demand price of pool {', '.join(unknown)} is not known"
    needed_s = sum(books.gpu_seconds[name] for name in TRAINED)
    whole_s = sum(trained.values())
    usd = sum(
        needed_s * trained[name] / whole_s / 3600 * (price or 0.0)
        for name, (price, _) in found.items()
    )
    prices = tuple(dict.fromkeys(source for _, source in found.values()))
    return OnDemand(usd, usd - books.totals.usd, needed_s / 3600, prices)


def against_restarts(view: View, books: Account, history: CapacityHistory) -> tuple[Restarted, ...]:
    """By each trainer that was measured; () where nothing changed, or the run restarts itself."""
    from elastic.catalog.restart_times import CAUSES, RESTARTS  # brings what most runs do without

    changes = [one for one in books.transitions if one.cause in CAUSES]
    if not changes or view.job.restarted:
        return ()
    times = [point.step_time_s for point in view.points if point.step_time_s > 0]
    step_s = median(times) if times else 0.0
    lost: dict[int, int] = {}  # steps that were finished and that no checkpoint held
    for one in changes:
        if one.cause == "loss":
            reached = one.at_step + one.steps_lost
            known = (s for at_s, s in history.saved if at_s <= one.at_s and s <= reached)
            lost[one.generation] = reached - max(known, default=0)
    found = []
    for time in RESTARTS:
        idle_s = saved_s = gpu_s = usd = 0.0
        for one in changes:
            there = history.at(one.at_s)
            again_s = (lost.get(one.generation, one.steps_lost) - one.steps_lost) * step_s
            won_s = time.by_cause[one.cause] - one.pause_s + again_s
            idle_s += time.by_cause[one.cause]
            saved_s += won_s
            if there is not None:
                gpu_s += won_s * sum(there.gpus.values())
                usd += won_s * there.usd_per_h / 3600
        found.append(
            Restarted(
                time.trainer, time.source, len(changes), idle_s, sum(lost.values()), saved_s,
                gpu_s, usd,
            )
        )  # fmt: skip
    return tuple(found)


@dataclass(frozen=True)
class TargetLoss:
    """When the loss was first at or below `target`: the mean of the last steps, or a validation.
    `step` None = it was not; `best`: the lowest that was reached."""

    target: float
    step: int | None
    usd: float | None
    seconds: float | None
    best: float | None
    by: str


WINDOW = 10  # steps that a train loss is averaged over: single steps scatter


def to_target(view: View, history: CapacityHistory, target: float) -> TargetLoss:
    """By the validation loss where the run has measured it, else by the train loss."""
    curve = view.curve()
    at_s = {point.step: point.at_s for point in curve}
    measured = view.validation_losses()
    by = "validation loss"
    if not measured:
        by = f"mean train loss of {WINDOW} steps"
        measured = _means({point.step: point.train_loss for point in curve})
    step = next((step for step, loss in measured.items() if loss <= target), None)
    if step is None:
        return TargetLoss(target, None, None, None, min(measured.values(), default=None), by)
    since_s = at_s.get(step, view.at_s) - view.started_at_s
    return TargetLoss(target, step, history.usd_at.get(step), since_s, measured[step], by)


def _means(losses: Mapping[int, float]) -> dict[int, float]:
    """Of each step and those before it, from the WINDOW-th on (of a shorter curve: all)."""
    steps, found = list(losses), {}
    width = min(WINDOW, max(1, len(steps)))
    for k in range(width - 1, len(steps)):
        window = [losses[step] for step in steps[k - width + 1 : k + 1]]
        found[steps[k]] = sum(window) / width
    return found
