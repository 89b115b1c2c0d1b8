"""Wishes that exclude each other, found before anything is searched: each message names both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from elastic.api.planning.model_source import Subject
from elastic.api.planning.plan_nodes import MachineGroup
from elastic.errors import InfeasiblePlan, SpecError
from elastic.planner.hetero import unequal_shares
from elastic.planner.layout_choice import named_for, pinned
from elastic.text import n_of
from elastic.types import Job, Layout, is_auto
from elastic.types.nouns import AUTO


def wanted(subject: Subject, n_gpus: int) -> str:
    """The layout that is asked for on that many GPUs, as it is written; `auto` = none is. A job's
    map of layouts is keyed by workers: the largest one that fits counts, as in a run."""
    return named_for(subject.job, n_gpus) or _free(subject.job)


def _free(job: Job) -> str:
    return job.layout if isinstance(job.layout, str) else AUTO


def layout_of(subject: Subject, n_gpus: int) -> Layout:
    """With one rank on each axis that is left open. Raises SpecError."""
    text = wanted(subject, n_gpus)
    return (
        Layout(**replace(subject.job, layout=text).pins)
        if is_auto(text)
        else subject.job.layout_of(text)
    )


def pinning(subject: Subject, n_gpus: int) -> Job:
    """The job, a layout that is asked for whole written as `auto` with all of its axes pinned."""
    text = wanted(subject, n_gpus)
    return replace(subject.job, layout=text if is_auto(text) else pinned(text))


def needed(subject: Subject, machines: Sequence[MachineGroup]) -> tuple[MachineGroup, ...]:
    """The nodes that a layout which is asked for whole has a use for, in the order of the pools:
    only they are paid for."""
    left = layout_of(subject, n_gpus_of(machines)).world_size
    if is_auto(wanted(subject, n_gpus_of(machines))):
        return tuple(machines)
    found = []
    for each in machines:
        n = min(each.group.n_nodes, -(-left // each.group.gpus_per_node))
        left -= n * each.group.gpus_per_node
        found += [each.with_nodes(n)] if n else []
        if left <= 0:
            break
    return tuple(found)


def n_gpus_of(machines: Sequence[MachineGroup]) -> int:
    return sum(each.group.n_gpus for each in machines)


def check(subject: Subject, machines: Sequence[MachineGroup], flag: str = "layout") -> None:
    """Raises SpecError for the first one."""
    layout = layout_of(subject, n_gpus_of(machines))
    for problem in _problems(subject, machines, layout):
        raise SpecError(f"{flag} '{layout}': {problem}")


def _problems(subject: Subject, machines: Sequence[MachineGroup], layout: Layout) -> Iterator[str]:
    model, batch = subject.model, subject.job.global_batch
    groups = [each.group for each in machines]
    n_gpus, largest = (
        sum(group.n_gpus for group in groups),
        max(group.gpus_per_node for group in groups),
    )
    inside = layout.tp * layout.cp
    if inside > largest:
        yield (
            f"tp x cp = {inside}, but the nodes have {largest} GPUs, which such a group never "
            f"leaves; take at most {largest}"
        )
    if layout.world_size > n_gpus:
        yield f"it needs {n_of(layout.world_size, 'GPU')}, but there are {n_gpus}"
    if why := model.refusal(layout):
        yield why
    if layout.tp > 1 and model.tp_limit % layout.tp:
        yield (
            f"tp={layout.tp}, but tp must divide {model.tp_limit} (key-value heads, or what the "
            "program's tp plan allows)"
        )
    if layout.n_stages > max(1, model.n_blocks):
        yield f"{layout.n_stages} pipeline stages, but the model has {model.n_blocks} blocks"
    if layout.pp > 1 and not model.pipeline:
        yield f"pp={layout.pp}, but this program cannot be spread over pipeline stages"
    if layout.dp > batch:
        yield (
            f"{layout.dp} data-parallel ranks, but a step has {batch} samples (its batch); take "
            "fewer ranks, or more samples"
        )
    try:
        unequal_shares.microbatches(batch, layout, model.together)
    except InfeasiblePlan as error:
        yield str(error)


def idle(subject: Subject, machines: Sequence[MachineGroup]) -> str:
    """What a layout that is asked for whole leaves unused, in words; '' = nothing."""
    there = n_gpus_of(machines)
    if is_auto(wanted(subject, there)):
        return ""
    used, paid = layout_of(subject, there).world_size, n_gpus_of(needed(subject, machines))
    told = f", the dollars are those of {paid}" if paid < there else ""
    return (
        f"{there - used} of {there} GPUs idle: the layout asks for {used}{told}"
        if used < there
        else ""
    )
