"""What a plan may not exceed: a deadline, a budget, and the workers that the job asks for; and what
a run does otherwise than it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic.api.planning import conflicts, query, sizing
from elastic.api.planning.phase_plans import of_phases, with_first
from elastic.api.planning.plan_nodes import MachineGroup
from elastic.api.planning.query import Query
from elastic.api.planning.run_nodes import too_many, within_max_nodes
from elastic.errors import InfeasiblePlan
from elastic.observe.plans import plan_tables
from elastic.planner.layout_choice import most_workers
from elastic.planner.offers import Aim, Purpose
from elastic.text import count, hours, n_of, seconds, usd
from elastic.types import is_auto
from elastic.types.nouns import AUTO

WHOLE = ("hours", "usd")  # what the phases of a job have in sum
MOST_TIMES = 8  # as many nodes, that are tried where these hold no layout


def plan(asked: Query, machines: Sequence[MachineGroup]) -> dict[str, Any]:
    """The offers within the limits, the best first. Raises SpecError, or InfeasiblePlan with what
    would do."""
    given, machines = machines, within_max_nodes(asked.subject.job, machines)
    seen = list[Mapping[str, Any]]()
    for purpose in _purposes(asked.aim):
        tried = replace(asked, aim=replace(asked.aim, purpose=purpose))
        try:
            data = query.plan(tried, machines)
        except InfeasiblePlan as error:
            raise InfeasiblePlan(f"{error}{_what_fits(asked, machines)}") from None
        data |= of_phases(tried, machines)
        seen += [_with_later(offer, data) for offer in data["offers"]]
        kept = [offer for offer in data["offers"] if _within(asked.aim, _with_later(offer, data))]
        if kept:
            data |= with_first(kept[0], data)
            data["offers"] = [{**offer, "n": n} for n, offer in enumerate(kept, 1)]
            of_job = [*_of_job(tried, given, data), *_entered(tried, machines, data)]
            data["notes"] = [*of_job, *data["notes"]]
            return data
    raise InfeasiblePlan(_none_within(asked, machines, data, seen=seen))


def _purposes(aim: Aim) -> Sequence[Purpose]:
    """In which order offers are looked for until some are within the limits: by dollars where the
    purpose finds none, and the fastest, since a phase has but a share of the deadline."""
    limited = aim.deadline_h or aim.budget_usd
    if not aim.tokens or not limited:
        return (aim.purpose,)
    timed: tuple[Purpose, ...] = ("deadline",) if aim.deadline_h else ()
    return tuple(dict.fromkeys((aim.purpose, *timed, "cheapest", "fastest")))


def _what_fits(asked: Query, machines: Sequence[MachineGroup]) -> str:
    """What to ask for instead, tried."""
    n_gpus = conflicts.n_gpus_of(machines)
    if n_gpus < asked.subject.job.min_workers:
        return ""
    if not is_auto(conflicts.wanted(asked.subject, n_gpus)):
        free = replace(asked, subject=asked.subject.with_layout(AUTO))
        row = query.row_of("", machines, free)
        return f"; a free choice fits: --layout auto, {row['layout']}" if row["layout"] else ""
    if len(machines) > 1:
        return ""
    for n in (machines[0].group.n_nodes * 2**k for k in range(1, MOST_TIMES.bit_length())):
        more = machines[0].with_nodes(n)
        row = query.row_of("", [more], asked)
        if row["layout"] is not None:
            return f"; tried: {_words(more)} are enough, with {row['layout']}"
    return ""


def _with_later(offer: Mapping[str, Any], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the hours and dollars of the phases behind the first, whose offer it is."""
    later = data.get("phases", ())[1:]
    return {**offer, **{key: offer[key] + sum(row[key] for row in later) for key in WHOLE}}


def _within(aim: Aim, whole: Mapping[str, Any]) -> bool:
    return not aim.tokens or (_in_time(aim, whole) and _paid(aim, whole))


def _in_time(aim: Aim, whole: Mapping[str, Any]) -> bool:
    return not aim.deadline_h or bool(whole["hours"] <= aim.deadline_h)


def _paid(aim: Aim, whole: Mapping[str, Any]) -> bool:
    return not aim.budget_usd or bool(whole["usd"] <= aim.budget_usd)


def _none_within(
    asked: Query,
    machines: Sequence[MachineGroup],
    data: Mapping[str, Any],
    *,
    seen: Sequence[Mapping[str, Any]],
) -> str:
    """That no offer is within the limits, and what would be. `seen`: the offers of all purposes."""
    aim, on = asked.aim, " + ".join(map(_words, machines))
    within = f" within {hours(aim.deadline_h)}" if aim.deadline_h else ""
    budget = f" for {usd(aim.budget_usd)}" if aim.budget_usd else ""
    in_time = [each for each in seen if _in_time(aim, each)]
    if not in_time:
        fastest = min(each["hours"] for each in seen)
        return (
            f"{_tokens(asked, data)}{within}: {on} need {hours(fastest)}; "
            f"{_enough(asked, machines)}, fewer tokens or more time"
        )
    least = min(in_time, key=lambda each: each["usd"])
    if not aim.deadline_h:
        return (
            f"{_tokens(asked, data)}{budget}: the cheapest way on {on} costs {usd(least['usd'])}; "
            f"{_bought(aim.budget_usd, least, data)}"
        )
    paid = [each for each in seen if _paid(aim, each)]
    other = min(seen, key=lambda each: each["usd"])
    slow = f"the cheapest at all costs {usd(other['usd'])}"
    if paid:
        slow = f"the fastest for that budget takes {hours(min(each['hours'] for each in paid))}"
    return (
        f"{_tokens(asked, data)}{within}{budget}: on {on} the cheapest in time costs "
        f"{usd(least['usd'])}, {slow}; take fewer tokens, more time or a larger budget"
    )


def _enough(asked: Query, machines: Sequence[MachineGroup]) -> str:
    """How many of these GPUs make the deadline."""
    if len(machines) == 1:
        kind = sizing.fewest_nodes(asked, machines[0])
        if kind["makes_it"]:
            more = _words(machines[0].with_nodes(kind["n_nodes"]))
            return f"{more} make it in {hours(kind['hours'])}; take them"
    return "take more nodes (with --gpus KIND alone, --within says how many)"


def _of_job(
    asked: Query, machines: Sequence[MachineGroup], data: Mapping[str, Any]
) -> Iterator[str]:
    """What else the job limits, that `elastic run` keeps to."""
    job, n_gpus = asked.subject.job, conflicts.n_gpus_of(machines)
    costs_usd = _with_later(data["offers"][0], data)["usd"]
    if job.budget_usd and costs_usd > job.budget_usd and not asked.aim.budget_usd:
        share = job.budget_usd / costs_usd
        yield (f"the job's budget_usd of {usd(job.budget_usd)} ends the run at {share:.0%}")
    if job.max_workers and job.max_workers < n_gpus:
        yield f"max_workers={job.max_workers}: elastic run uses no more of these {n_gpus} GPUs"
    if bound := too_many(job, sum(each.group.n_nodes for each in machines)):
        yield bound


def _entered(
    asked: Query, machines: Sequence[MachineGroup], data: Mapping[str, Any]
) -> Iterator[str]:
    """What a run does otherwise than the first offer: it takes the fastest layout on all nodes that
    it has, and keeps those that have no part in it."""
    if not asked.subject.literal:
        return
    offer = data["offers"][0]
    has = [each.with_nodes(n) for each in machines if (n := each.group.n_nodes - each.standby)]
    other = data["purpose"] != "fastest" or bool(asked.aim.budget_usd)
    if other or any(each.standby for each in machines):
        fastest = replace(asked.aim, purpose="fastest", deadline_h=0.0, n_best=1)
        try:
            found = replace(asked, aim=fastest).offers(has).best[0]
        except InfeasiblePlan:
            return
        entered = query.offer_plain(found, 1, conflicts.n_gpus_of(has), warnings=())
        if entered["layout"] != offer["layout"]:
            yield (
                f"elastic run takes the fastest layout on all nodes that it has, "
                f"{' + '.join(map(_words, has))}: {entered['layout']}, {_costs(entered)}"
            )
        offer = entered
    if most_workers(asked.subject.job) is None:
        yield from _idle(has, offer)


def _idle(machines: Sequence[MachineGroup], offer: Mapping[str, Any]) -> Iterator[str]:
    """Nodes that a run keeps and that have no part in an offer."""
    idle, price = Counter[str](), {each.group.pool: each.group.usd_per_node_h for each in machines}
    for each in machines:
        idle[each.group.pool] += each.group.n_nodes
    idle.subtract(offer["nodes"])
    usd_per_h = sum(n * price.get(pool, 0.0) for pool, n in idle.items())
    if usd_per_h > 0:
        whole = f", {usd(usd_per_h * offer['hours'])} in all" if offer["hours"] else ""
        yield (
            f"{n_of(idle.total(), 'more node')} without a part in {offer['layout']}, which elastic "
            f"run keeps and pays for: {usd(usd_per_h)}/h{whole}; max_nodes: "
            f"{sum(offer['nodes'].values())} leaves them out"
        )


def _costs(offer: Mapping[str, Any]) -> str:
    whole = f", {hours(offer['hours'])}" if offer["hours"] else ""
    return f"{seconds(offer['step_s'])} a step{whole}" + (
        f" and {usd(offer['usd'])}" if offer["usd"] else ""
    )


def _bought(budget_usd: float, offer: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    if "phases" in data:
        return "take fewer steps or a larger budget"
    return f"that budget buys {plan_tables.bought(budget_usd, offer, data)}"


def _tokens(asked: Query, data: Mapping[str, Any]) -> str:
    tokens = data["all_phases"]["tokens"] if "phases" in data else asked.aim.tokens
    return f"{count(tokens)} {data['model']['unit']}"


def _words(each: MachineGroup) -> str:
    return f"{each.group.n_gpus} x {each.group.hardware.accelerator_type}"
