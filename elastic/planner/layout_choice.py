"""The layout that a run enters: the first of the ranked ones, with a place for each worker.

A layout that the job names is taken as it is written; where it would not fit, with options that
the job leaves open (less computed at once, some of it twice); where nothing of it fits by
prediction, as it is written all the same, unless its state alone is too large or it was tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from elastic.errors import InfeasiblePlan
from elastic.planner.choice import Choice
from elastic.planner.cost import memory
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.hetero import unequal_shares
from elastic.planner.hetero.hetero_assign import HeteroAssignment
from elastic.planner.layout_search import (
    PER_GUESSED_OPTION,
    PER_OPTION,
    Candidate,
    Fastest,
    LayoutSearch,
    Ranking,
)
from elastic.planner.layout_space import cut, n_options
from elastic.planner.node_sets import LayoutLimits, NodeSet, SearchedNodes
from elastic.text import n_of
from elastic.types import NAMED_AXES, Job, Layout, ModelProfile, Node, is_auto, parse_layout
from elastic.types.nouns import AUTO

SHOWN = 6  # rejections that an error message names


@dataclass(frozen=True, eq=False)
class Ranked:
    """`best`: layouts, the best first; none where nothing fits. `search`: that found them.
    `as_written`: why the layout that the job names is not taken as it stands there."""

    best: Sequence[Candidate]
    search: LayoutSearch
    as_written: str = ""


def plan_layout(
    model: ModelProfile, job: Job, nodes: Sequence[Node], *, limits: LayoutLimits | None = None
) -> Choice:
    """What a run enters on these nodes, which are used in the given order. Raises InfeasiblePlan
    with the reason of each rejection."""
    found = ranked_layouts(model, job, nodes, limits=limits)
    if not found.best:
        raise InfeasiblePlan(_why(found.search))
    return _choice(found.best[0], found)


def ranked_layouts(
    model: ModelProfile,
    job: Job,
    nodes: Sequence[Node],
    *,
    limits: LayoutLimits | None = None,
    ranking: Ranking | None = None,
    n_best: int = 1,
) -> Ranked:
    """`ranking`: without it the fastest first. Raises InfeasiblePlan where these nodes give too few
    workers."""
    every = SearchedNodes(ModelCost.of(model), job, tuple(nodes), limits or LayoutLimits())
    n = every.n_workers
    if n < job.min_workers:
        raise InfeasiblePlan(f"{n} of {job.min_workers} required (min_workers)")
    per_option = PER_OPTION if every.known else PER_GUESSED_OPTION
    search = LayoutSearch(every, job, ranking or Fastest(n, per_option), n_best)
    if text := named_for(job, n):
        found = _named(search, text)
        if found is not None:
            return found
        search.job = replace(job, layout=AUTO)
    best = search.ranked()
    _check(best, search)
    return Ranked(best, search)


def _named(search: LayoutSearch, text: str) -> Ranked | None:
    """None where another layout than the one that is named may be taken."""
    job, why = search.job, ""
    some = [search.every.whole, *search.every.larger]
    layout = job.layout_of(text)
    for there in some:
        try:
            return Ranked([_alone(search, there, layout)], search)
        except InfeasiblePlan as error:
            why = why or str(error)
    search.rejected.append((layout, why))
    open_ones = LayoutSearch(
        search.every, replace(job, layout=pinned(text)), search.ranking, search.n_best
    )
    best = open_ones.ranked()
    open_ones.rejected[:0] = search.rejected
    if best:
        return Ranked(best, open_ones, why)
    for there in some:
        with suppress(InfeasiblePlan):
            return Ranked([_alone(search, there, layout, exact=True)], search, why)
    return None if isinstance(job.layout, Mapping) else Ranked([], open_ones, why)


def _alone(
    search: LayoutSearch, there: NodeSet, layout: Layout, *, exact: bool = False
) -> Candidate:
    """That layout. Raises InfeasiblePlan."""
    step = search.fitting(there, layout, exact)
    if not there.uneven:
        return Candidate(there, layout, step, search.even_cost(there, layout, step))
    assigned = there.assigner.assign(layout, step, exact=exact)
    return Candidate(there, layout, step, assigned.cost, assigned)


def _check(best: Sequence[Candidate], search: LayoutSearch) -> None:
    least = search.job.min_workers
    most = best[0].layout.world_size if best else least
    if most < least:
        told = f"only {n_of(most, 'worker')} can be used, min_workers is {least}"
        raise InfeasiblePlan(f"{told}; {_why(search)}")


# ------------------------------------------------------------------------------------------ named


def named_for(job: Job, n_workers: int) -> str:
    """The layout that the job names for this many workers, as it is written; '' = free choice."""
    wanted = job.layout
    if isinstance(wanted, Mapping):
        fitting = [key for key in wanted if int(key) <= n_workers]
        return str(wanted[max(fitting, key=int)]) if fitting else ""
    return "" if is_auto(wanted) else str(wanted)


def pinned(text: str) -> str:
    """A layout that is named whole, as `auto` with all of its axes and what else it says pinned."""
    said = [part.partition("=")[0] for part in text.replace(" ", "").split(",")]
    return ",".join([AUTO, text, *(f"{axis}=1" for axis in NAMED_AXES if axis not in said)])


def most_workers(job: Job) -> int | None:
    """More workers than this are of no use to the job; None = no such limit is known."""
    bounds = [job.max_workers] if job.max_workers else []
    wanted = job.layout
    if isinstance(wanted, Mapping) and wanted:
        bounds.append(max(int(key) for key in wanted))
    elif not is_auto(wanted) and not isinstance(wanted, Mapping):
        bounds.append(parse_layout(wanted).world_size)
    return min(bounds, default=None)


# ------------------------------------------------------------------------------------------ places


def _choice(found: Candidate, ranked: Ranked) -> Choice:
    search, there, layout, step = ranked.search, found.there, found.layout, found.step
    assigned = found.assigned or _alike(found)
    work = search.work
    most = replace(step, largest_share=max(assigned.samples)) if there.uneven else step
    state = memory.memory_bytes(work, layout, step.dtype)
    active = memory.activation_bytes(work, layout, most)
    deepest = max(unequal_shares.blocks_at(layout, assigned.layers))
    if work.sample is not None and work.sample.block_flop:  # its blocks are the smaller ones
        deepest = -(-work.n_blocks // layout.pp)
    if deepest > -(-work.n_blocks // layout.pp):
        active = memory.stage_bytes(work, layout, most, n_blocks=deepest) - state
    return Choice(
        layout, assigned.ranks, assigned.samples, assigned.layers, step.n_microbatches,
        memory_bytes=state,
        activation_bytes=active,
        parts=found.cost.parts,
        model_step_s=found.cost.step_s if search.every.timed else 0.0,
        hardware_known=search.every.hardware_known,
        rejected=tuple(_rejected(found, search)),
        nodes=tuple(node.node_id for node in search.every.nodes),
    )  # fmt: skip


def _alike(found: Candidate) -> HeteroAssignment:
    """On GPUs that are about equal: even stages, nodes in their order."""
    there, layout, step = found.there, found.layout, found.step
    work, m = there.every.work, step.n_microbatches
    slots = next(there.place.arrangements(layout, there.every.job.max_workers or 0))
    ranks = tuple(worker for slot in slots for worker in slot.workers)
    rates = [slot.rate for slot in slots]
    least = min(rates)
    if least == max(rates):
        speeds = [least] * layout.dp
    else:
        speeds = [min(rates[d :: layout.dp]) for d in range(layout.dp)]
    unit = m * max(1, work.model.together)
    samples = unequal_shares.shares(step.global_batch // unit, speeds, unit)
    loads, ends, cache = tuple[float, ...](), 0.0, there.every.cache
    if layout.pp > 1 and (loads := cache.loads(there.site(layout.world_size), layout, step.n_rows)):
        ends = cache.ends(there.site(layout.world_size), layout, step.n_rows)
    layers = unequal_shares.stage_layers(work.model.n_blocks, layout.n_stages, loads, ends=ends)
    return HeteroAssignment(ranks, samples, layers, found.cost)


# ------------------------------------------------------------------------------------------ words


def _rejected(found: Candidate, search: LayoutSearch) -> list[str]:
    """Why it is nothing simpler, nor more workers; the most telling first."""
    layout, n = found.layout, search.every.n_workers
    said = [f"no {axis}: {why}" for axis, why in search.model.closed.items()]
    said = said if layout.world_size < n else []
    if search.every.zones and found.there is search.every.whole:
        names = " and ".join(sorted({zone or "unnamed" for zone in search.every.zones.values()}))
        crossing = f"{Layout(dp_shard=n)}: its shards would lie in {names}"
        said.append(f"{crossing}; only replicas may, unless across_zones is true")
    return [*_larger(found, search), *said, *_simpler(found, search)]


def _larger(found: Candidate, search: LayoutSearch) -> list[str]:
    """What more workers would do."""
    world = found.layout.world_size
    more = [one for one in search.kept.values() if one.layout.world_size > world]
    first = min(more, key=search.value, default=None)
    if first is None:
        return []
    left = first.layout.world_size - world
    times = first.cost.step_s / found.cost.step_s
    several = f"{left} worker{'s' * (left > 1)} more"
    return [f"{first.layout}: with {several} a step would take {times:.2f} times as long"]


def _simpler(found: Candidate, search: LayoutSearch) -> list[str]:
    cuts, options = cut(found.layout), n_options(found.layout)

    def simpler(layout: Layout) -> bool:
        n = cut(layout)
        return n < cuts or (n == cuts and n_options(layout) < options)

    said = [f"{one}: {why}" for one, why in search.rejected if simpler(one)]
    plain = search.simplest
    if plain is not None and search.every.known and simpler(plain.layout):
        seconds = f"{plain.cost.step_s:.3g} s, not {found.cost.step_s:.3g} s"
        said.append(f"{plain.layout}: a step would take {seconds}")
    return list(dict.fromkeys(said))


def _why(search: LayoutSearch) -> str:
    said = [f"no {axis}: {why}" for axis, why in search.model.closed.items()]
    said += [f"{layout}: {why}" for layout, why in search.rejected]
    shown = list(dict.fromkeys(said))
    more = f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    reasons = "; ".join(shown[:SHOWN]) or "there are none"
    return f"no layout fits {n_of(search.every.n_workers, 'worker')}: {reasons}{more}"
