"""What binds the steps themselves: computation, memory, the network, or ranks that wait for others.
Pure.

How the time of a step divides comes from the cost model, where the hardware is known (`elastic
profile`, or a GPU of the catalog); what each rank computes comes from its measured forward passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean, median

from elastic.observe.accounting.model_flops import mfu
from elastic.observe.diagnosis.evidence import Evidence, GenerationFacts
from elastic.observe.diagnosis.verdicts import WORTH, Bound, RunVerdict, of_time, percent
from elastic.text import size
from elastic.types import Job, Plan, WorkerId
from elastic.types.grid import stages_and_shares
from elastic.types.typed_job import IN_JOB

COMPUTES = ("products", "attention", "recomputed")
MOVES = ("moved", "optimizer", "accumulate", "offload")
# part of a step -> its axis, and what makes it smaller
SENDS = {
    "fsdp": ("dp_shard", "zero_stage: 2, or layout: auto, in job.yaml (docs/layouts.md)"),
    "replicas": ("dp_replicate", "a larger global_batch in job.yaml: gradients are summed less"),
    "tp": ("tp", "a smaller tp in `layout`, or layout: auto, in job.yaml"),
    "cp": ("cp", "a smaller cp in `layout`, or layout: auto, in job.yaml"),
    "ep": ("ep", "a smaller ep in `layout`, in job.yaml"),
    "pp": ("pp", "a larger microbatch_size, or fewer stages in `layout`, in job.yaml"),
    "commit": ("all axes", "a larger global_batch in job.yaml: the steps are very short"),
    "jitter": ("all axes", "elastic status RUN: the nodes that others wait for"),
}
PASSES = 3.0  # a backward pass computes twice what a forward pass does
SLOW_LINK = 0.5  # of the median of the others
BEYOND = 1.25  # times as long as the cost model says: worth a word
HOT = re.compile(r"temperature|°C|power limit|power brake|hardware slowdown", re.IGNORECASE)
SLOWED = 0.05


def verdicts(seen: Evidence) -> tuple[RunVerdict, ...]:
    """All that are worth a line, what would win most first; at the end what the steps are spent on
    when all else is gone. A run that has failed before its first step is bound by its error."""
    if seen.state.phase == "failed" and not seen.state.step:
        return ()
    found = [*of_time(seen)]
    facts = seen.main
    if facts is not None and facts.step_s > 0:
        found += [v for v in _waiting(seen, facts) if v.share >= WORTH]
    found += _hot(seen, facts)
    ordered = sorted(found, key=lambda verdict: -verdict.share)
    busy = _busy(seen, facts) if facts is not None and facts.step_s > 0 else ()
    place = seen.state.job.keys_in
    return tuple(
        replace(one, advice=one.advice.replace(IN_JOB, place)) for one in (*ordered, *busy)
    )


def loads(facts: GenerationFacts) -> list[float]:
    """Seconds that each rank's forward passes take in a step: its seconds per unit, times its
    samples and its blocks; [] = not measured."""
    plan, timed = facts.plan, facts.timed
    if timed is None or not plan.samples or len(timed.unit_s) != len(plan.ranks):
        return []
    blocks = [sum(plan.layers[p :: plan.layout.pp]) or 1 for p in range(plan.layout.pp)]
    return [
        unit_s * plan.samples[dp] * blocks[pp]
        for unit_s, (pp, dp) in zip(timed.unit_s, stages_and_shares(plan.layout), strict=True)
    ]


def computing(facts: GenerationFacts) -> float:
    """Of a step, the share in which the busiest rank computes, by its forward passes; 0 = not
    measured."""
    busiest = max(loads(facts), default=0.0)
    return min(1.0, PASSES * busiest / facts.step_s) if facts.step_s else 0.0


def _waiting(seen: Evidence, facts: GenerationFacts) -> Iterator[RunVerdict]:
    hot = {worker.node_id for worker in _hot_workers(seen)}
    for verdict in (
        _imbalance(seen, facts, hot), _tokens(seen, facts), _bubble(seen, facts),
        _network(seen, facts),
    ):  # fmt: skip
        if verdict is not None:
            yield verdict


def _of_steps(
    seen: Evidence, bound: Bound, share: float, *, number: str, advice: str
) -> RunVerdict:
    """`share`: of the steps that count."""
    won, usd = share * seen.share("productive"), share * seen.usd("productive")
    return RunVerdict(bound, won, usd, number, advice)


# ------------------------------------------------------------------------------- ranks that wait


def _imbalance(seen: Evidence, facts: GenerationFacts, hot: set[str]) -> RunVerdict | None:
    """Ranks with less to compute wait for the one that computes longest; of a node that is hot that
    is said elsewhere."""
    found = loads(facts)
    if not found or min(found) <= 0:
        return None
    rank = max(range(len(found)), key=lambda k: found[k])
    node = facts.plan.ranks[rank].node_id
    if node in hot:
        return None
    times = found[rank] / fmean(found)
    number = f"rank {rank} on {node} computes {times:.2f} times as long as the mean of the ranks"
    advice = _evener(seen.state.job, facts.plan, node)
    share = (1 - 1 / times) * computing(facts)
    return _of_steps(seen, "imbalance", share, number=number, advice=advice)


def _evener(job: Job, plan: Plan, node: str) -> str:
    if not job.rebalance:
        return "rebalance: true in job.yaml gives slower GPUs fewer samples"
    if plan.layout.pp > 1:
        return "layout: auto in job.yaml, or blocks that divide by the stages"
    return f"a larger global_batch in job.yaml divides more evenly; or replace {node}"


def _tokens(seen: Evidence, facts: GenerationFacts) -> RunVerdict | None:
    """Samples of unlike lengths: as the steps themselves have told."""
    if not facts.imbalance:
        return None
    times = fmean(facts.imbalance)
    number = f"the fullest rank of a step has {percent(times - 1)} more tokens than the mean"
    share = (1 - 1 / times) * (computing(facts) or 1.0)
    advice = "data.train.pack: true in job.yaml evens them out (docs/data.md)"
    return _of_steps(seen, "imbalance", share, number=number, advice=advice)


def _bubble(seen: Evidence, facts: GenerationFacts) -> RunVerdict | None:
    """By the cost model, else as a share of the useful time (pp - 1) / (v m) (Narayanan et al.
    2021, section 2.2)."""
    layout, m = facts.plan.layout, facts.plan.n_microbatches
    if layout.pp == 1:
        return None
    whole = sum(seen.parts.values())
    idle = (layout.pp - 1) / max(1, m) * layout.pp / layout.n_stages
    share = seen.parts.get("bubble", 0.0) / whole if whole else idle / (1 + idle)
    number = (
        f"{layout.pp} pipeline stages with {m} microbatches are idle {percent(share)} of a step"
    )
    advice = (
        "a smaller microbatch_size in job.yaml: more microbatches fill the pipeline"
        if layout.schedule == "interleaved1f1b"
        else "schedule: interleaved1f1b, or a smaller microbatch_size, in job.yaml"
    )
    return _of_steps(seen, "pipeline bubble", share, number=number, advice=advice)


def _network(seen: Evidence, facts: GenerationFacts) -> RunVerdict | None:
    """What a trace has or the cost model expects; without both, what neither computation nor the
    pipeline explains. On GPUs only: processes on CPUs also wait for a core, in collectives too."""
    if _on_cpus(seen, facts.plan):
        return None
    whole = sum(seen.parts.values())
    if whole:
        sends = {name: seen.parts.get(name, 0.0) for name in SENDS}
        worst = max(sends, key=lambda name: sends[name])
        share, (axis, advice) = sum(sends.values()) / whole, SENDS[worst]
        number = (
            f"{percent(share)} of a step is communication that computation does not hide, most of "
            f"it on {axis}{_read_from(seen, facts, whole)}"
        )
    else:
        busy = computing(facts)
        if len(facts.plan.ranks) == 1 or not busy:
            return None
        bubble = _bubble(seen, facts)
        share = max(0.0, 1 - busy - (bubble.share if bubble is not None else 0.0))
        number = (
            f"the busiest rank computes {percent(busy)} of a step (3 times its measured forward "
            "passes); most of the rest is waiting for others"
        )
        advice = "elastic profile JOB on the nodes, then elastic plan JOB --explain 1"
    if slow := _slow_link(seen, facts.plan):
        number, advice = f"{number}; {slow}", "elastic doctor on that node: NCCL and EFA settings"
    return _of_steps(seen, "network", share, number=number, advice=advice)


def _read_from(seen: Evidence, facts: GenerationFacts, whole_s: float) -> str:
    """A trace was measured; of the cost model is said where the steps take much longer."""
    if seen.traced:
        return f" (measured, profile {facts.profile})"
    if facts.step_s <= BEYOND * whole_s:
        return ""
    return f" (expected {whole_s:.3f} s a step, measured {facts.step_s:.3f} s)"


def _slow_link(seen: Evidence, plan: Plan) -> str:
    """The slowest link of the plan's nodes, where it is far below the others."""
    links = {node: rate for node, rate in seen.links.items() if node in plan.workers_per_node}
    if len(links) < 3:
        return ""
    node = min(links, key=lambda name: links[name])
    usual = median(links.values())
    if links[node] >= SLOW_LINK * usual:
        return ""
    return f"{node} reaches its neighbor with {size(links[node])}/s, others with {size(usual)}/s"


def _on_cpus(seen: Evidence, plan: Plan) -> bool:
    nodes = [seen.nodes[name] for name in plan.nodes if name in seen.nodes]
    used = [seen.state.pool(node.pool) for node in nodes]
    return any(pool is None or pool.accelerator_type == "CPU" for pool in used) or not used


# ----------------------------------------------------------------------------------- heat or power


def _hot_workers(seen: Evidence) -> dict[WorkerId, str]:
    return {worker: note for worker, note in seen.devices.items() if HOT.search(note)}


def _hot(seen: Evidence, facts: GenerationFacts | None) -> Iterator[RunVerdict]:
    """The GPU that has lost most of its speed, by what it says of itself."""
    found = _hot_workers(seen)
    if not found:
        return
    speeds = seen.node_speeds.speeds(seen.nodes)
    worker = min(found, key=lambda one: speeds.get(one, 1.0))
    speed = min(1.0, speeds.get(worker, 1.0))
    slower = f" and is {1 / speed:.2f} times slower than its pool" if 1 - speed > SLOWED else ""
    more = f"; {len(found) - 1} others likewise" if len(found) > 1 else ""
    taking_part = facts is not None and worker in facts.plan.workers
    share = (1 - speed) * (computing(facts) or 1.0) if facts is not None and taking_part else 0.0
    number = f"the GPU of {worker} says: {found[worker]}{slower}{more}"
    advice = f"cooling and power limit of {worker.node_id} (nvidia-smi -q -d PERFORMANCE), or "
    advice += "release that node"
    yield _of_steps(seen, "heat or power", share, number=number, advice=advice)


# ------------------------------------------------------------------------- what is left to be done


def _busy(seen: Evidence, facts: GenerationFacts) -> Iterator[RunVerdict]:
    """What the steps are spent on that must be done."""
    whole, job = sum(seen.parts.values()), seen.state.job
    cpus = _on_cpus(seen, facts.plan)
    reached = mfu(seen.state, facts.plan, seen.nodes, step_s=median(facts.steps_s))
    said = f"; {percent(reached)} of the peak FLOP/s (MFU)" if reached else ""
    if not whole:
        busy = computing(facts)
        if busy or reached:
            number = f"the busiest rank computes {percent(busy)} of a step{said}"
            if cpus:
                number += "; processes on CPUs wait for a core in the rest"
            yield _of_steps(seen, "compute", 0.0, number=number, advice=_faster(job, cpus))
        return
    computes = sum(seen.parts.get(name, 0.0) for name in COMPUTES) / whole
    moves = sum(seen.parts.get(name, 0.0) for name in MOVES) / whole
    again = seen.parts.get("recomputed", 0.0) / whole
    if moves > computes:
        number = f"{percent(moves)} of a step moves bytes in memory, {percent(computes)} computes"
        advice = "compile: true in job.yaml" if not job.compile else _faster(job, cpus)
        yield _of_steps(seen, "memory bandwidth", 0.0, number=f"{number}{said}", advice=advice)
        return
    number = f"{percent(computes)} of a step computes{said}"
    if again >= WORTH:
        number += f"; {percent(again)} computes activations a second time"
        advice = "activation_checkpointing: selective (or none), if memory allows, in job.yaml"
    else:
        advice = _faster(job, cpus)
    won = again if again >= WORTH else 0.0
    yield _of_steps(seen, "compute", won, number=number, advice=advice)


def _faster(job: Job, on_cpus: bool) -> str:
    if on_cpus:
        return "GPUs, or more cores: elastic plan JOB --cluster FILE compares what there is"
    if job.precision == "float32":
        return "precision: bfloat16 in job.yaml"
    if not job.compile:
        return "compile: true in job.yaml"
    return "more or faster GPUs: elastic plan JOB --cluster FILE compares them"
