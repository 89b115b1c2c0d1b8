"""Journal entries in, the values of the metric table out. Pure, and bounded however long a run
is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import get_args

from elastic.observe.accounting.accounts import Account, Books
from elastic.observe.accounting.model_flops import mfu
from elastic.observe.accounting.transitions import PHASES, Transition
from elastic.observe.metrics.node_loads import NodeLoads, over_nodes
from elastic.policy.state.fold import EMPTY, Change, Phase, State
from elastic.types import (
    CopyDamaged,
    CopyFailed,
    CopyStored,
    Evaluated,
    Event,
    GuardTripped,
    NodeLost,
    Notice,
    RequestFailed,
    StepDone,
    WrongNumbers,
)
from elastic.types.nouns import Cause, NodeStatus

STEPS_KEPT = 5000  # that may still be undone; see Books
PHASE_WORDS: tuple[str, ...] = get_args(Phase)
CAUSES: tuple[str, ...] = get_args(Cause)
STATUSES: tuple[str, ...] = tuple(word for word in get_args(NodeStatus) if word != "lost")
COPY_RESULTS = ("stored", "failed", "skipped", "damaged")

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric, with the values of its labels in their order."""

    name: str
    value: float
    labels: Labels = ()


@dataclass
class RunNumbers:
    """What has been taken in so far. `counted`: what only grows, by metric and labels."""

    state: State = EMPTY
    books: Books = field(default_factory=lambda: Books(keeps=STEPS_KEPT))
    at_s: float = 0.0
    last: StepDone | None = None
    last_at_s: float = 0.0
    validation_loss: float | None = None
    saved: CopyStored | None = None
    saved_at_s: float = 0.0
    loads: NodeLoads = field(default_factory=NodeLoads)
    counted: Counter[tuple[str, Labels]] = field(default_factory=Counter)
    _n_transitions: int = 0  # that are counted

    def take(self, change: Change) -> None:
        before, self.state = self.state, change.after
        self.at_s = change.at_s
        self.books.take(change)
        if self.state.pools != before.pools:
            self._begin_pools()
        self.loads.take(change.event, change.at_s)
        if change.event is not None:
            self._count(change.event, before, change.at_s)
        self._count_transitions()

    # ---------------------------------------------------------------------------------- questions

    @property
    def mfu(self) -> float | None:
        """Of the newest step; None where nobody knows the model's FLOPs or a GPU's peak."""
        state, done = self.state, self.last
        plan = state.plans.get(done.generation) if done is not None else None
        if done is None or plan is None:
            return None
        return mfu(state, plan, state.nodes, step_s=done.step_time_s)

    @property
    def newest_transition(self) -> Transition | None:
        """That has made its first step."""
        found = self.books.timing.transitions
        return found[-1] if found else None

    def system(self) -> dict[str, float]:
        """Of all nodes that have told their load; see `over_nodes`."""
        return over_nodes(self.loads.of(node.node_id for node in self.state.alive))

    def samples(self) -> list[Sample]:
        """All that is known now."""
        account = self.books.so_far()
        counted = [Sample(name, value, labels) for (name, labels), value in self.counted.items()]
        parts = self._of_steps(), self._of_money(account), self._of_nodes(), self._of_loads()
        return [*chain.from_iterable(parts), *counted]

    # ---------------------------------------------------------------------------------------- parts

    def _of_steps(self) -> Iterator[Sample]:
        state, done = self.state, self.last
        for phase in PHASE_WORDS:
            yield Sample("elastic_run_phase", float(phase == state.phase), (phase,))
        yield Sample("elastic_step", state.step)
        yield Sample("elastic_steps_wanted", state.steps)
        yield Sample("elastic_generation", state.plan.generation if state.plan else 0)
        yield Sample("elastic_workers", len(state.plan.ranks) if state.plan else 0)
        yield Sample("elastic_storage_away", float(state.away is not None))
        yield Sample("elastic_journal_timestamp_seconds", self.at_s)
        if done is not None:
            yield Sample("elastic_last_step_timestamp_seconds", self.last_at_s)
            yield Sample("elastic_train_loss", done.train_loss)
            yield Sample("elastic_grad_norm", done.grad_norm)
            yield Sample("elastic_step_seconds", done.step_time_s)
            if done.step_time_s > 0:
                yield Sample("elastic_tokens_per_second", done.tokens / done.step_time_s)
        if (mfu := self.mfu) is not None:
            yield Sample("elastic_mfu_ratio", mfu)
        if self.validation_loss is not None:
            yield Sample("elastic_validation_loss", self.validation_loss)
        if self.saved is not None:
            yield Sample("elastic_checkpoint_step", self.saved.copy.step)
            yield Sample("elastic_checkpoint_timestamp_seconds", self.saved_at_s)

    def _of_money(self, account: Account) -> Iterator[Sample]:
        yield Sample("elastic_goodput_ratio", account.totals.goodput)
        yield Sample("elastic_gpu_seconds_total", account.totals.gpu_seconds)
        yield Sample("elastic_spend_usd_total", account.totals.usd)
        yield Sample("elastic_spend_usd_per_hour", self.state.usd_per_h)
        if self.state.job.budget_usd is not None:
            yield Sample("elastic_budget_usd", self.state.job.budget_usd)
        for category, gpu_s in account.gpu_seconds.items():
            yield Sample("elastic_account_gpu_seconds", gpu_s, (category,))
            yield Sample("elastic_account_usd", account.usd[category], (category,))

    def _of_nodes(self) -> Iterator[Sample]:
        state = self.state
        bad = {node.node_id for node in state.alive if node.status == "quarantined"}
        bad |= state.faulty_nodes
        for pool in state.pools:
            mine = [node for node in state.alive if node.pool == pool.name]
            there = Counter(node.status for node in mine)
            for status in STATUSES:
                yield Sample("elastic_nodes", there[status], (pool.name, status))  # type: ignore[index]
            faulty = sum(node.node_id in bad for node in mine)
            yield Sample("elastic_faulty_nodes", faulty, (pool.name,))
            asked = sum(one.count for one in state.requests.values() if one.pool == pool.name)
            yield Sample("elastic_nodes_requested", asked, (pool.name,))
            yield Sample("elastic_node_usd_per_hour", pool.usd_per_node_h, (pool.name,))

    def _of_loads(self) -> Iterator[Sample]:
        for load in self.loads.of(node.node_id for node in self.state.alive):
            for name, value in (
                ("node_cpu_ratio", load.cpu_share),
                ("node_memory_available_bytes", load.memory_free_bytes),
                ("node_memory_size_bytes", load.memory_size_bytes),
                ("worker_resident_memory_bytes", load.worker_bytes),
                ("node_gpu_utilization_ratio", load.gpu_share),
                ("node_gpu_memory_bytes", load.gpu_memory_bytes),
                ("node_gpu_memory_size_bytes", load.gpu_memory_size_bytes),
                ("node_gpu_power_watts", load.gpu_power_w),
                ("node_gpu_temperature_celsius", load.gpu_celsius),
            ):
                if value is not None:
                    yield Sample(f"elastic_{name}", value, (load.node_id,))

    # ------------------------------------------------------------------------------------- counting

    def _add(self, name: str, value: float, *labels: str) -> None:
        self.counted[name, labels] += value  # type: ignore[assignment]

    def _begin_pools(self) -> None:
        """What is counted of a pool begins with 0: a curve that begins with 1 shows no rise."""
        for pool in self.state.pools:
            for name in ("notices", "nodes_lost", "requests_failed"):
                self._add(f"elastic_{name}_total", 0, pool.name)
        for name in ("steps", "tokens", "wrong_numbers"):
            self._add(f"elastic_{name}_total", 0)
        for cause in CAUSES:
            for name in ("transitions", "transition_pause_seconds", "transition_lost_steps"):
                self._add(f"elastic_{name}_total", 0, cause)
        for result in COPY_RESULTS:
            for kind in ("peer", "durable"):
                self._add("elastic_copies_total", 0, kind, result)

    def _count(self, event: Event, before: State, at_s: float) -> None:
        match event:
            case StepDone() if self.state.last_step is event:
                self.last, self.last_at_s = event, at_s
                self._add("elastic_steps_total", 1)
                self._add("elastic_tokens_total", event.tokens)
            case Evaluated(metrics=metrics) if "validation_loss" in metrics:
                self.validation_loss = metrics["validation_loss"]
            case Notice(node_id=node_id):
                self._of_node("elastic_notices_total", node_id, before)
            case NodeLost(node_id=node_id, cause=cause) if cause != "released":
                self._of_node("elastic_nodes_lost_total", node_id, before)
            case RequestFailed(pool=pool):
                self._add("elastic_requests_failed_total", 1, pool)
            case CopyStored():
                self._stored(event, at_s)
            case CopyFailed(skipped=skipped):
                result = "skipped" if skipped else "failed"
                self._add("elastic_copies_total", 1, "durable", result)
            case CopyDamaged():
                self._add("elastic_copies_total", 1, "durable", "damaged")
            case GuardTripped():
                self._add("elastic_guard_trips_total", 1, event.guard, event.do)
            case WrongNumbers():
                self._add("elastic_wrong_numbers_total", 1)
            case _:
                pass

    def _of_node(self, name: str, node_id: str, state: State) -> None:
        node = state.nodes.get(node_id)
        if node is not None:
            self._add(name, 1, node.pool)

    def _stored(self, event: CopyStored, at_s: float) -> None:
        kind = event.copy.kind
        self._add("elastic_copies_total", 1, kind, "stored")
        self._add("elastic_copy_seconds_total", event.seconds, kind)
        self._add("elastic_copy_bytes_total", event.copy.n_bytes, kind)
        known = self.saved.copy if self.saved is not None else event.copy
        # a run that went back has older steps in a newer generation
        newer = (event.copy.generation, event.copy.step) >= (known.generation, known.step)
        if kind == "durable" and newer:
            self.saved, self.saved_at_s = event, at_s

    def _count_transitions(self) -> None:
        """Of the newest one the pause is not known before its second step."""
        timing = self.books.timing
        for one in settled(timing.transitions[self._n_transitions :], timing.gap_s is not None):
            self._n_transitions += 1
            self._add("elastic_transitions_total", 1, one.cause)
            self._add("elastic_transition_pause_seconds_total", one.pause_s, one.cause)
            self._add("elastic_transition_lost_steps_total", one.steps_lost, one.cause)
            for phase in PHASES:
                seconds = one.phases_s.get(phase, 0.0)
                self._add("elastic_transition_phase_seconds_total", seconds, one.cause, phase)


def settled(transitions: Sequence[Transition], open_: bool) -> Sequence[Transition]:
    return transitions[:-1] if open_ else transitions
