"""What a plan may not exceed: a deadline, a budget, and the workers that the job asks for; and what
a run does otherwise than it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic.api.planning import conflicts, query, sizing
from elastic.api.planning.phase_plans import of_phases
from elastic.api.planning.plan_nodes import MachineGroup
from elastic.api.planning.query import Query
from elastic.api.planning.run_nodes import too_many, within_max_nodes
from elastic.errors import InfeasiblePlan
from elastic.observe.plans import plan_tables
from elastic.planner.layout_choice import most_workers
from elastic.text import count, hours, n_of, seconds, usd
from elastic.types import is_auto
from elastic.types.nouns import AUTO

MOST_TIMES = 8  # as many nodes, that are tried where these hold no layout


def plan(asked: Query, machines: Sequence[MachineGroup]) -> dict[str, Any]:
    """The offers within the limits, the best first. Raises SpecError, or InfeasiblePlan with what
    would do."""
    given, machines = machines, within_max_nodes(asked.subject.job, machines)
    try:
        data = query.plan(asked, machines)
    except InfeasiblePlan as error:
        raise InfeasiblePlan(f"{error}{_what_fits(asked, machines)}") from None
    data |= of_phases(asked, machines)
    late = _too_late(asked, machines, data)
    if late:
        raise InfeasiblePlan(late)
    data["offers"] = _within_budget(asked, machines, data)
    if not data["offers"]:
        return plan(replace(asked, aim=replace(asked.aim, purpose="cheapest")), given)
    of_job = [*_of_job(asked, given, data), *_entered(asked, machines, data)]
    data["notes"] = [*of_job, *data["notes"]]
    return data


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


def _later_usd(data: Mapping[str, Any]) -> float:
    """Of the phases behind the first, whose offers these are."""
    return float(sum(row["usd"] for row in data.get("phases", ())[1:]))


def _too_late(asked: Query, machines: Sequence[MachineGroup], data: Mapping[str, Any]) -> str:
    """That no offer makes the deadline, and how many of these GPUs would; '' = one does."""
    aim = asked.aim
    fastest = min(offer["hours"] for offer in data["offers"])
    if "phases" in data:
        fastest = data["all_phases"]["hours"]
    if not aim.deadline_h or not aim.tokens or fastest <= aim.deadline_h:
        return ""
    enough = ""
    if len(machines) == 1:
        kind = sizing.fewest_nodes(asked, machines[0])
        if kind["makes_it"]:
            more = _words(machines[0].with_nodes(kind["n_nodes"]))
            enough = f"{more} make it in {hours(kind['hours'])}; take them"
    return (
        f"{_tokens(asked, data)} within {hours(aim.deadline_h)}: "
        f"{' + '.join(map(_words, machines))} need {hours(fastest)}; "
        f"{enough or 'take more nodes (with --gpus KIND alone, --within says how many)'}, fewer "
        "tokens or more time"
    )


def _within_budget(
    asked: Query, machines: Sequence[MachineGroup], data: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The offers that cost no more; [] where the cheapest ones are still to be asked for."""
    aim = asked.aim
    if not aim.tokens or not aim.budget_usd:
        return list(data["offers"])
    later_usd = _later_usd(data)
    offers = [offer for offer in data["offers"] if offer["usd"] + later_usd <= aim.budget_usd]
    if not offers and aim.purpose == "cheapest":
        least = min(data["offers"], key=lambda offer: offer["usd"])
        raise InfeasiblePlan(
            f"{_tokens(asked, data)} for {usd(aim.budget_usd)}: the cheapest way on "
            f"{' + '.join(map(_words, machines))} costs {usd(least['usd'] + later_usd)}; "
            f"{_bought(aim.budget_usd, least, data)}"
        )
    return [{**offer, "n": n} for n, offer in enumerate(offers, 1)]


def _of_job(
    asked: Query, machines: Sequence[MachineGroup], data: Mapping[str, Any]
) -> Iterator[str]:
    """What else the job limits, that `elastic run` keeps to."""
    job, n_gpus = asked.subject.job, conflicts.n_gpus_of(machines)
    costs_usd = data["offers"][0]["usd"] + _later_usd(data)
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
