"""Which layout on which workers: enumerate, drop what does not fit (with the reason), take the best.

As many workers as possible. Among layouts of that size plain data-parallel sharding comes first; tensor and pipeline
parallelism cut only as far as the memory or a small batch asks for, then the smallest relative step time wins. A tp x cp group
never leaves its node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.errors import InfeasiblePlan
from elastic.planner import balance, cost
from elastic.types import Layout, ModelProfile, Node, WorkerId, layout_options, parse_layout

SHOWN = 6  # rejections that an error message names


@dataclass(frozen=True)
class Choice:
    """The parts of a Plan that the planner decides, with what it expects and what it rejected."""

    layout: Layout
    ranks: tuple[WorkerId, ...]
    samples: tuple[int, ...]
    layers: tuple[int, ...]
    n_microbatches: int
    memory_bytes: int
    relative_time: float
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What layouts must fit into: bytes per worker (0 = not known) and layouts that were found not to (with the bytes)."""

    memory_bytes: int = 0
    infeasible: Mapping[Layout, int] | None = None


def plan_layout(model: ModelProfile, job: Mapping[str, Any], nodes: Sequence[Node], limits: Limits | None = None) -> Choice:
    """The best layout on these nodes, which are used in the given order. Raises InfeasiblePlan with the reason of each
    rejection."""
    limits = limits or Limits()
    n_workers = sum(node.gpus for node in nodes)
    if job.get("max_workers"):
        n_workers = min(n_workers, int(job["max_workers"]))
    rejected: list[str] = []
    minimum = int(job.get("min_workers") or 1)
    if n_workers < minimum:
        raise InfeasiblePlan(f"{n_workers} of the at least {minimum} workers (min_workers) are there")
    named = layout_for(job, n_workers)
    if named is not None:
        choice = _try(model, job, nodes, named, rejected)
        if choice and not _too_big(model, choice, limits, rejected, exact=True):
            return _with(choice, rejected)
        if not isinstance(job.get("layout"), Mapping):
            raise InfeasiblePlan(_why(n_workers, rejected))
    best: Choice | None = None
    options = layout_options(job)
    for layout in (replace(axes, **options) for axes in _layouts(model, nodes, n_workers)):
        if best and (layout.world_size < best.layout.world_size or _cut(layout) > _cut(best.layout)):
            break
        choice = _try(model, job, nodes, layout, rejected)
        if choice is None or _idle_pipeline(choice, rejected) or _too_big(model, choice, limits, rejected, exact=False):
            continue
        if best is None or choice.relative_time < best.relative_time:
            best = choice
    if best is None:
        raise InfeasiblePlan(_why(n_workers, rejected))
    if best.layout.world_size < minimum:
        raise InfeasiblePlan(
            f"only {best.layout.world_size} workers can be used, min_workers is {minimum}; {_why(n_workers, rejected)}"
        )
    return _with(best, rejected)


def layout_for(job: Mapping[str, Any], n_workers: int) -> Layout | None:
    """The layout that the job names for this many workers; None = free choice."""
    wanted = job.get("layout", "auto")
    if isinstance(wanted, Mapping):
        fitting = [key for key in wanted if int(key) <= n_workers]
        return parse_layout(wanted[max(fitting, key=int)], job) if fitting else None
    return None if wanted in ("auto", None, "") else parse_layout(str(wanted), job)


def most_workers(job: Mapping[str, Any]) -> int | None:
    """More workers than this are of no use to the job; None = no such limit is known."""
    bounds = [int(job["max_workers"])] if job.get("max_workers") else []
    wanted = job.get("layout", "auto")
    if isinstance(wanted, Mapping) and wanted:
        bounds.append(max(int(key) for key in wanted))
    elif wanted not in ("auto", None, "") and not isinstance(wanted, Mapping):
        bounds.append(parse_layout(str(wanted)).world_size)
    return min(bounds, default=None)


def _layouts(model: ModelProfile, nodes: Sequence[Node], n_workers: int) -> Iterator[Layout]:
    """Candidates, largest world first, then those that cut the model least; data-parallel ranks fill the world."""
    largest_node = max((node.gpus for node in nodes), default=0)
    tps = [tp for tp in range(1, min(model.tp_limit, largest_node) + 1) if model.tp_limit % tp == 0]
    most_pp = max(1, min(model.n_blocks, n_workers)) if model.pipeline else 1
    shapes = [(tp, pp) for tp in tps for pp in range(1, most_pp + 1)]
    shapes.sort(key=lambda shape: shape[0] * shape[1])
    for world in range(n_workers, 0, -1):
        for tp, pp in shapes:
            if world % (tp * pp) == 0:
                yield Layout(pp=pp, dp_shard=world // (tp * pp), tp=tp)


def _try(
    model: ModelProfile, job: Mapping[str, Any], nodes: Sequence[Node], layout: Layout, rejected: list[str]
) -> Choice | None:
    """The layout on the nodes; None when it cannot be, with the reason in `rejected`."""
    global_batch = int(job["global_batch"])
    try:
        ranks = place(layout, nodes, int(job.get("max_workers") or 0))
        if layout.tp > 1 and model.tp_limit % layout.tp:
            raise InfeasiblePlan(
                f"tp={layout.tp} must divide {model.tp_limit}, the most that the model's tensor-parallel plan allows"
            )
        if layout.tp > 1 and job.get("float8"):
            raise InfeasiblePlan(f"tp={layout.tp} does not go with float8: true")
        if layout.cp > 1 and job.get("compile"):
            raise InfeasiblePlan(f"cp={layout.cp} does not go with compile: true")
        if layout.pp > 1 and job.get("microbatch_tokens"):
            raise InfeasiblePlan(f"pp={layout.pp} needs micro-batches of one shape, which microbatch_tokens does not give")
        if layout.pp > 1 and not model.pipeline:
            raise InfeasiblePlan(f"pp={layout.pp}, but this program cannot be spread over pipeline stages")
        layers = balance.stage_layers(model.n_blocks, layout.n_stages)
        if layout.dp > global_batch:
            raise InfeasiblePlan(f"{layout.dp} data-parallel ranks are more than the {global_batch} samples of a step")
        n_microbatches = balance.microbatches(global_batch, layout)
        samples = balance.shares(global_batch // n_microbatches, _dp_speeds(layout, ranks, nodes), n_microbatches)
    except InfeasiblePlan as error:
        rejected.append(f"{layout}: {error}")
        return None
    relative = cost.relative_time(layout, n_microbatches, max(samples), global_batch)
    return Choice(layout, ranks, samples, layers, n_microbatches, cost.memory_bytes(model, layout), relative)


def _cut(layout: Layout) -> int:
    return layout.tp * layout.pp


def _idle_pipeline(choice: Choice, rejected: list[str]) -> bool:
    """Are there fewer microbatches than stages? Then stages only wait for each other."""
    idle = choice.n_microbatches < choice.layout.pp
    if idle:
        rejected.append(f"{choice.layout}: {choice.n_microbatches} microbatches cannot fill {choice.layout.pp} pipeline stages")
    return idle


def _too_big(model: ModelProfile, choice: Choice, limits: Limits, rejected: list[str], exact: bool) -> bool:
    """Does it need more memory than there is, or than what was found not to fit (`exact`: only the same layout)?"""
    infeasible = limits.infeasible or {}
    why = ""
    if choice.layout in infeasible:
        why = f"did not fit ({infeasible[choice.layout] / 2**30:.2f} GiB measured)"
    elif limits.memory_bytes and choice.memory_bytes > limits.memory_bytes:
        why = f"needs {choice.memory_bytes / 2**30:.2f} GiB per worker, there are {limits.memory_bytes / 2**30:.2f}"
    elif not exact:
        bigger = [layout for layout in infeasible if cost.memory_bytes(model, layout) <= choice.memory_bytes]
        why = f"needs at least as much memory as {bigger[0]}, which did not fit" if bigger else ""
    if why:
        rejected.append(f"{choice.layout}: {why}")
    return bool(why)


def place(layout: Layout, nodes: Sequence[Node], max_workers: int = 0) -> tuple[WorkerId, ...]:
    """Workers in rank order, node by node; each tp x cp group inside one node. Raises InfeasiblePlan with the numbers."""
    group = layout.tp * layout.cp
    ranks: list[WorkerId] = []
    for node in nodes:
        ranks += [WorkerId(node.node_id, k) for k in range(node.gpus // group * group)]
    n_workers = sum(node.gpus for node in nodes)
    if max_workers and layout.world_size > max_workers:
        raise InfeasiblePlan(f"needs {layout.world_size} workers, max_workers is {max_workers}")
    if len(ranks) < layout.world_size:
        inside = f", {len(ranks)} of them in groups of {group} inside a node" if group > 1 else ""
        raise InfeasiblePlan(f"needs {layout.world_size} workers, there are {n_workers} on {len(nodes)} nodes{inside}")
    return tuple(ranks[: layout.world_size])


def _dp_speeds(layout: Layout, ranks: Sequence[WorkerId], nodes: Sequence[Node]) -> list[float]:
    """Speed of each data-parallel rank: that of its slowest worker."""
    speeds = {node.node_id: max(1e-3, node.speed) for node in nodes}
    inner, stage = layout.cp * layout.tp, layout.world_size // layout.pp
    return [
        min(speeds[ranks[p * stage + d * inner + k].node_id] for p in range(layout.pp) for k in range(inner))
        for d in range(layout.dp)
    ]


def _with(choice: Choice, rejected: Sequence[str]) -> Choice:
    return Choice(**{**vars(choice), "rejected": tuple(rejected)})


def _why(n_workers: int, rejected: Sequence[str]) -> str:
    shown = list(dict.fromkeys(rejected))
    more = f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return f"no layout fits {n_workers} workers: " + ("; ".join(shown[:SHOWN]) or "there are none") + more
