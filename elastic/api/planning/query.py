"""plan(), what_if(), scaling(): offers for given nodes, as plain data with units in the names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from elastic import catalog
from elastic.api.planning import conflicts
from elastic.api.planning.model_source import OF_JOB, OWN_POOLS, Subject
from elastic.api.planning.plan_nodes import MachineGroup
from elastic.config.pool_checks import fed
from elastic.errors import InfeasiblePlan
from elastic.planner import dollars
from elastic.planner.offer_search import find_offers
from elastic.planner.offers import Aim, NodeGroup, Offer, Offers
from elastic.text import n_of
from elastic.types import Job, ModelProfile, is_auto
from elastic.types.grid import axes_of
from elastic.types.nouns import AUTO

DISK_BYTES_PER_S = 1e9  # that a rank may read where nobody has measured its storage
WORTH_SAYING = 0.03  # of a step, that another layout would save, or that validations take besides
MOST_GPUS = 16384  # that --scaling and --within look at


class Find(Protocol):
    """A search for offers."""

    def __call__(
        self, model: ModelProfile, job: Job, groups: Sequence[NodeGroup], *, aim: Aim
    ) -> Offers: ...


@dataclass(frozen=True)
class Query:
    """What is asked for, and who answers it."""

    subject: Subject
    aim: Aim
    find: Find = find_offers

    def offers(self, machines: Sequence[MachineGroup]) -> Offers:
        """None that the job's min_workers forbids. Raises InfeasiblePlan."""
        n_gpus, least = conflicts.n_gpus_of(machines), self.subject.job.min_workers
        if n_gpus < least:
            raise InfeasiblePlan(
                f"these nodes have {n_of(n_gpus, 'worker')}, the job needs {least} (min_workers): "
                "elastic run would wait; take more nodes or a smaller min_workers"
            )
        found = self._wanted(machines)
        best = tuple(offer for offer in found.best if offer.layout.world_size >= least)
        if found.best and not best and is_auto(conflicts.wanted(self.subject, n_gpus)):
            most = max(offer.layout.world_size for offer in found.best)
            raise InfeasiblePlan(f"only {n_of(most, 'worker')} can be used, min_workers is {least}")
        return replace(found, best=best or found.best)

    def _wanted(self, machines: Sequence[MachineGroup]) -> Offers:
        n_gpus = conflicts.n_gpus_of(machines)
        groups = [each.group for each in conflicts.needed(self.subject, machines)]
        job, model = self.subject.job, self.subject.model
        if not self.subject.literal:
            job = conflicts.pinning(self.subject, n_gpus)
        elif not is_auto(text := conflicts.wanted(self.subject, n_gpus)):
            try:
                return self.find(model, replace(job, layout=text), groups, aim=self._own_aim)
            except InfeasiblePlan:
                if isinstance(job.layout, str):
                    raise
            job, groups = replace(job, layout=AUTO), [each.group for each in machines]
        return self.find(model, job, groups, aim=self._own_aim)

    @property
    def _own_aim(self) -> Aim:
        """A phase has its share of the deadline, by what its samples ask of the model."""
        work = [
            phase.steps * phase.job.global_batch * phase.model.sample.flop
            for phase in self.subject.phases
            if phase.model.sample
        ]
        share = work[0] / sum(work) if sum(work) else 1.0
        return replace(self.aim, deadline_h=share * self.aim.deadline_h)

    def of_phase(self, number: int, machines: Sequence[MachineGroup]) -> Offer:
        """The best one of a phase, counted from 1, planned for itself as `elastic run` does where
        it begins. Raises InfeasiblePlan that names it."""
        aim, phase = self.aim, self.subject.phases[number - 1]
        own = "fastest" if aim.purpose == "deadline" else aim.purpose
        alone = replace(aim, tokens=phase.tokens, deadline_h=0.0, purpose=own, budget_usd=0.0)
        try:
            return replace(self, subject=phase, aim=alone).offers(machines).best[0]
        except InfeasiblePlan as error:
            raise InfeasiblePlan(f"phase {number}: {error}") from error

    def plain(self) -> dict[str, Any]:
        aim = self.aim
        return {
            "model": self.subject.plain(), "budget_usd": aim.budget_usd,
            "purpose": aim.purpose, "tokens": aim.tokens,
            "deadline_h": aim.deadline_h, "prices_at": str(catalog.PRICES_AT),
        }  # fmt: skip

    def plain_of_all(self) -> dict[str, Any]:
        """With the tokens of all phases, as hours and dollars of `row_of` are."""
        return self.plain() | {"tokens": self.all_tokens}

    @property
    def all_tokens(self) -> float:
        return self.aim.tokens + sum(phase.tokens for phase in self.subject.phases[1:])


def plan(query: Query, machines: Sequence[MachineGroup]) -> dict[str, Any]:
    """The offers for these nodes, the best first. Raises SpecError, InfeasiblePlan."""
    conflicts.check(query.subject, machines)
    found = query.offers(machines)
    idle = conflicts.idle(query.subject, machines)
    n_gpus = conflicts.n_gpus_of(machines)
    return {
        **query.plain(),
        "pools": [each.plain() for each in machines],
        "offers": [
            offer_plain(
                offer,
                n,
                n_gpus,
                warnings=[*warnings_of(offer, idle), *_data_bound(offer, query.subject, machines)],
            )
            for n, offer in enumerate(found.best, 1)
        ],
        "rejected": dict(found.rejected),
        "n_looked_at": found.n_looked_at,
        "asked_for": _own(query.subject, machines),
        "notes": [
            *_freer(query, found, machines),
            *_not_compared(query.subject, found),
            *notes_of(query.subject, machines),
        ],
    }


def _not_compared(subject: Subject, found: Offers) -> list[str]:
    """A run refuses a layout that computes another function, which only its values show."""
    axes = {axis for offer in found.best for axis in axes_of(offer.layout)} - {"dp"}
    if subject.compared or not axes:
        return []
    return [
        f"that {', '.join(sorted(axes))} computes what one process does is tried when a run "
        "starts, not here: --check tries it now"
    ]


def _freer(query: Query, found: Offers, machines: Sequence[MachineGroup]) -> list[str]:
    """What a free choice would be, where the layout that is asked for is slower than that."""
    if is_auto(conflicts.wanted(query.subject, conflicts.n_gpus_of(machines))):
        return []
    best = replace(query, subject=query.subject.with_layout(AUTO)).offers(machines).best[0]
    less = 1 - best.step_s / found.best[0].step_s
    if less < WORTH_SAYING:
        return []
    return [
        f"this layout is asked for; a free choice (--layout auto) would be {best.layout}: "
        f"{less:.0%} less time"
    ]


def notes_of(subject: Subject, machines: Sequence[MachineGroup]) -> list[str]:
    own = any(each.price_from == OF_JOB for each in machines)
    said = [note for note in subject.notes if note != OWN_POOLS or own]
    if subject.literal and (few := fed(subject.job, conflicts.n_gpus_of(machines))):
        said.append(few)
    closed = [f"no {axis}: {why}" for axis, why in subject.model.closed.items()]
    return list(
        dict.fromkeys(
            [
                *said,
                *_validations(subject.job),
                *closed,
                *subject.model.notes,
                *(note for each in machines for note in each.notes),
            ]
        )
    )


def _validations(job: Job) -> list[str]:
    more = dollars.validating(job)
    if more < WORTH_SAYING:
        return []
    samples, steps = n_of(job.eval_samples, "sample"), n_of(job.eval_every, "step")
    return [
        f"validations, of at most {samples} every {steps} "
        f"(eval_samples, eval_every), make it {more:.0%} longer: hours and dollars of the whole "
        "job have that, a step does not"
    ]


def offer_plain(offer: Offer, n: int, n_gpus: int, *, warnings: Sequence[str]) -> dict[str, Any]:
    return {
        "n": n, "layout": str(offer.layout), "n_gpus": offer.n_gpus,
        "n_idle_gpus": n_gpus - offer.n_gpus, "n_microbatches": offer.step.n_microbatches,
        "samples_at_once": offer.step.n_rows, "step_s": offer.step_s,
        "tokens_per_s": offer.tokens_per_s, "mfu": offer.mfu,
        "memory_bytes": int(offer.memory_bytes), "room_bytes": offer.room_bytes,
        "host_bytes": int(offer.host_bytes), "usd_per_h": offer.usd_per_h,
        "usd_per_mtoken": offer.usd_per_mtoken, "efficiency": offer.efficiency,
        "goodput": offer.goodput, "hours": offer.hours, "usd": offer.usd,
        "copy_stall_s": offer.copy_stall_s, "copy_write_s": offer.copy_write_s,
        "lost_node_s": offer.lost_node_s, "moved_s": offer.moved_s, "why": offer.why,
        "warnings": list(warnings), "seconds": {name: seconds for name,
        seconds in offer.seconds.items() if seconds}, "memory": {name: int(n_bytes) for name,
        n_bytes in offer.memory.items() if n_bytes}, "parts": [
            {"pool": part.pool, "n_gpus": part.n_gpus, "samples": part.samples,
            "layers": list(part.layers), "busy": part.busy}
            for part in offer.parts
        ], "nodes": dict(offer.nodes),
    }  # fmt: skip


def warnings_of(offer: Offer, idle: str = "") -> list[str]:
    """The planner's own; a layout that was asked for says itself what it leaves idle."""
    found = [text for text in offer.warnings if not idle or "stay idle" not in text]
    return [*found, idle] if idle else found


def _data_bound(offer: Offer, subject: Subject, machines: Sequence[MachineGroup]) -> list[str]:
    """Each data-parallel rank reads its own samples: faster than its storage was measured to be,
    or, where nobody has measured that, faster than one disk may be."""
    rank_bytes_per_s = (
        offer.tokens_per_s / subject.sample_tokens * subject.sample_bytes / offer.layout.dp
    )
    known = [rate for each in machines if (rate := each.group.hardware.storage_read_bytes_per_s)]
    most = min(known, default=DISK_BYTES_PER_S)
    if rank_bytes_per_s <= most:
        return []
    told = (
        f"its storage was measured to read {most / 1e9:.2g}"
        if known
        else f"few disks read more than {most / 1e9:.2g}"
    )
    return [
        f"data: each data-parallel rank takes {rank_bytes_per_s / 1e9:.2g} GB/s of samples (as "
        f"tensors), {told} GB/s"
    ]


# ------------------------------------------------------------------------------------- side by side


def what_if(
    query: Query, choices: Sequence[tuple[str, tuple[MachineGroup, ...]]]
) -> dict[str, Any]:
    """The best offer on each of several sets of nodes. Raises InfeasiblePlan where nothing fits on
    any of them."""
    rows = []
    for name, machines in choices:
        conflicts.check(query.subject, machines, f"--what-if {name}: layout")
        rows.append(row_of(name, machines, query) | {"own": _own(query.subject, machines)})
    if all(row["layout"] is None for row in rows):
        raise InfeasiblePlan("; ".join(f"{row['choice']}: {row['why_not']}" for row in rows))
    marks = {"fastest": "step_s", "cheapest": "usd_per_mtoken"}
    fitting = [row for row in rows if row["layout"] is not None]
    in_time = [row for row in fitting if row["in_time"]] or fitting
    for mark, key in marks.items():
        best = min((row[key] for row in in_time if row[key]), default=None)
        for row in rows:
            row[mark] = best is not None and row in in_time and row[key] == best
    notes = [*_unlike(query, choices, rows), *_unused(rows)]
    notes += [note for _, machines in choices for note in notes_of(query.subject, machines)]
    pools = [each.plain() for _, machines in choices for each in machines]
    return {
        **query.plain_of_all(),
        "choices": rows,
        "pools": pools,
        "notes": list(dict.fromkeys(notes)),
    }


def _own(subject: Subject, machines: Sequence[MachineGroup]) -> bool:
    """Is its layout the one that is asked for, not a free choice?"""
    return not is_auto(conflicts.wanted(subject, conflicts.n_gpus_of(machines)))


def _unlike(
    query: Query,
    choices: Sequence[tuple[str, tuple[MachineGroup, ...]]],
    rows: Sequence[dict[str, Any]],
) -> list[str]:
    """What a reader must know where the layouts of some choices are given and those of others are
    not."""
    own = [row for row in rows if row["own"] and row["layout"] is not None]
    free = [row["choice"] for row in rows if not row["own"] and row["layout"] is not None]
    if not own or not free:
        return []
    auto = replace(query, subject=query.subject.with_layout(AUTO))
    machines_of = dict(choices)
    said = []
    for row in own:
        best = row_of(row["choice"], machines_of[row["choice"]], auto)
        faster = f"{best['layout']}, {1 - best['step_s'] / row['step_s']:.0%} less time"
        same = best["layout"] is None or best["step_s"] >= (1 - WORTH_SAYING) * row["step_s"]
        said.append(f"{row['choice']} ({'no better' if same else faster})")
    return [
        f"the job names no layout for {', '.join(free)}: a free choice, as in elastic run; of the "
        f"others its own is shown, a free choice (--layout auto) would be: {'; '.join(said)}"
    ]


def _unused(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """GPUs that a choice names and its layout has no use for."""
    return [
        f"{row['choice']}: {row['n_gpus'] - used} of {row['n_gpus']} GPUs stay idle: its layout "
        f"uses {used}, and the dollars are those of the nodes that hold them"
        for row in rows
        if (used := row["n_used_gpus"]) is not None and used < row["n_gpus"]
    ]


def row_of(name: str, machines: Sequence[MachineGroup], query: Query) -> dict[str, Any]:
    """The best offer, of phase 1 where the job has phases; `hours`, `usd` and limits are of all."""
    row: dict[str, Any] = {"choice": name, "n_gpus": conflicts.n_gpus_of(machines), "why_not": ""}
    try:
        offer = query.offers(machines).best[0]
        later = [query.of_phase(k, machines) for k in range(2, len(query.subject.phases) + 1)]
    except InfeasiblePlan as error:
        return row | dict.fromkeys((*KEYS, *LIMITS)) | {"layout": None, "why_not": str(error)}
    aim = query.aim
    budget = aim.budget_usd or query.subject.job.budget_usd or 0.0
    hours, usd = (sum(getattr(one, key) for one in (offer, *later)) for key in ("hours", "usd"))
    limits = (not aim.deadline_h or hours <= aim.deadline_h, not budget or usd <= budget)
    summed = {"hours": hours, "usd": usd}
    return row | short(offer) | summed | dict(zip(LIMITS, limits, strict=True))


KEYS = (
    "n_used_gpus", "step_s", "tokens_per_s", "mfu", "memory_bytes", "room_bytes", "usd_per_h",
    "usd_per_mtoken", "efficiency", "goodput", "hours", "usd",
)  # fmt: skip
LIMITS = ("in_time", "in_budget")


def short(offer: Offer) -> dict[str, Any]:
    return {"layout": str(offer.layout), "n_used_gpus": offer.n_gpus} | {
        key: getattr(offer, key) for key in KEYS[1:]
    }


def scaling(
    query: Query, machines: MachineGroup, least: float, *, n_most: int = 0
) -> dict[str, Any]:
    """From one node on, twice as many each time, until efficiency has fallen under `least` (a few
    GPUs may be under it too, where the model is large) or `n_most` are reached. Raises
    InfeasiblePlan where even the most hold nothing."""
    rows, per_node, useful = [], machines.group.gpus_per_node, None
    n_nodes, most = 1, (n_most or MOST_GPUS) // per_node
    while n_nodes <= most:
        row = row_of(f"{n_nodes * per_node}", [machines.with_nodes(n_nodes)], query)
        rows.append(row)
        if row["layout"] is not None and row["efficiency"] >= least:
            useful = row["n_gpus"]
        elif useful is not None and not n_most:
            break
        n_nodes *= 2
    if all(row["layout"] is None for row in rows):
        raise InfeasiblePlan(
            rows[-1]["why_not"] if rows else f"{n_most} GPUs are less than one node of {per_node}"
        )
    return {
        **query.plain_of_all(), "pools": [machines.with_nodes(1).plain()], "efficiency": least,
        "useful_gpus": useful, "curve": rows, "notes": notes_of(query.subject, [machines]),
    }  # fmt: skip
