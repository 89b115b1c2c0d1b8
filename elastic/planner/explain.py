"""Why a layout is offered, or not, and what to mind: one sentence each, with numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from elastic.planner.cost.memory import USABLE
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.step_cost import Cost
from elastic.planner.offers import Candidate, NodeGroup
from elastic.types import Layout

GIB = 2**30
TOLD = {
    "products": "matrix products",
    "attention": "attention",
    "moved": "memory traffic",
    "recomputed": "computing activations again",
    "tp": "collectives of tp",
    "cp": "collectives of cp",
    "ep": "exchange between experts",
    "pp": "sends between stages",
    "commit": "the step's last all-reduce",
    "accumulate": "adding up gradients",
    "uneven": "uneven stages or shares",
    "bubble": "the pipeline's bubble",
    "fsdp": "gathering and scattering shards",
    "replicas": "adding up over replicas",
    "optimizer": "the optimizer",
    "offload": "copies from and to host memory",
    "jitter": "waiting for the slowest of many nodes",
}
STATE_SHARE = 0.6  # of the memory, for the state: the rest is for activations and what is gathered
SAME = 0.01  # of a step
MOST_WAITING = 0.15  # of a step, in one kind of waiting, that is worth a warning
NEAR = 0.92  # of what may be used of the memory


def family(layout: Layout) -> str:
    """`plain sharding`, `tp`, `tp x pp` ..."""
    axes = [name for name in ("tp", "pp", "cp", "ep") if getattr(layout, name) > 1]
    return " x ".join(axes) or ("replicas" if layout.dp_replicate > 1 else "plain sharding")


def families(found: Candidate) -> Iterator[str]:
    layout = found.layout
    yield family(layout)
    if layout.zero_stage < 3 and layout.pp == 1:
        yield f"zero_stage={layout.zero_stage}"
    if layout.pp > 1:
        yield (
            "interleaved pipelines"
            if layout.n_stages > layout.pp
            else f"{layout.schedule} pipelines"
        )
    if layout.activation_checkpointing != "none":
        yield f"activation_checkpointing={layout.activation_checkpointing}"
    if layout.offload:
        yield "offload"


def too_large(needs: float, usable: float, room: int) -> str:
    return (
        f"needs {needs / GIB:.1f} GiB per GPU, {usable / GIB:.1f} of {room / GIB:.0f} can be used"
    )


def too_large_for_host(needs: float, group: NodeGroup) -> str:
    return (
        f"offload needs {needs / GIB:.0f} GiB of host memory per node, there are "
        f"{group.host_memory_bytes / GIB:.0f}"
    )


def leaves_node(layout: Layout, per_node: int) -> str:
    return f"tp x cp = {layout.tp * layout.cp} would leave its node of {per_node} GPUs"


def slower(cost: Cost, best: Cost) -> str:
    """Against the best offer, with what takes most more."""
    more = cost.step_s / best.step_s - 1
    if abs(more) < SAME:
        return f"as fast as the first within {SAME:.0%}"
    name, extra = max(
        ((k, cost.parts.get(k, 0.0) - best.parts.get(k, 0.0)) for k in cost.parts),
        key=lambda pair: pair[1],
    )
    word = "slower" if more > 0 else "faster"
    if extra <= 0 or more < 0:
        return f"{abs(more):.0%} {word} than the first"
    return (
        f"{more:.0%} slower than the first: {TOLD[name]} takes {extra / best.step_s:.0%} of its "
        "step more"
    )


def why(found: Candidate, best: Candidate) -> str:
    """Of the best: what its step is spent on; of others: what they lose."""
    if found is not best:
        return slower(found.cost, best.cost)
    step_s = found.cost.step_s
    waits = {
        k: v
        for k, v in found.cost.parts.items()
        if k not in ("products", "attention", "moved", "optimizer")
    }
    name = max(waits, key=lambda k: waits[k])
    busy = 1 - sum(waits.values()) / step_s
    most = (
        f"; most of the rest is {TOLD[name]} ({waits[name] / step_s:.0%})"
        if waits[name] > 0.005 * step_s
        else ""
    )
    return f"{busy:.0%} of a step is computation that must be done{most}"


def warnings(found: Candidate, batch: int) -> tuple[str, ...]:
    layout, said = found.layout, []
    step_s, used = found.cost.step_s, sum(found.memory.values())
    n_gpus, there = layout.world_size, sum(group.n_gpus for group in found.groups)
    if layout.ep > 1:
        said.append(
            f"ep={layout.ep} is planned only: elastic itself does not spread experts over ranks"
        )
    room = found.room_bytes
    if room and used > NEAR * USABLE * room:
        said.append(
            f"memory is tight: {used / GIB:.1f} of {USABLE * room / GIB:.1f} GiB that can be used"
        )
    for name in ("fsdp", "tp", "replicas", "bubble", "cp", "uneven"):
        if found.cost.parts.get(name, 0.0) > MOST_WAITING * step_s:
            said.append(f"{found.cost.parts[name] / step_s:.0%} of a step goes into {TOLD[name]}")
    if n_gpus < there:
        said.append(f"{there - n_gpus} of {there} GPUs stay idle: {_idle(found, batch)}")
    if found.cost.parts.get("optimizer", 0.0) > MOST_WAITING * step_s:
        said.append(
            "the optimizer takes longer than it should: the batch is small for so many GPUs"
        )
    return tuple(said)


def _idle(found: Candidate, batch: int) -> str:
    layout = found.layout
    if layout.dp >= batch:
        return f"a step of {batch} samples feeds {layout.dp} data-parallel ranks"
    return f"they are no multiple of tp x cp x pp = {layout.tp * layout.cp * layout.pp}"


def nowhere(work: ModelCost, groups: Sequence[NodeGroup], reasons: Mapping[str, str]) -> str:
    """That nothing fits, and the fewest such nodes whose memory would hold the state."""
    there = (
        ", ".join(f"{group.n_gpus} x {group.hardware.accelerator_type}" for group in groups)
        or "no GPUs"
    )
    first = next(iter(reasons.items()), ("", "there are no nodes"))
    kinds = {
        group.hardware.accelerator_type: group for group in groups if group.hardware.memory_bytes
    }
    least = {kind: fewest(work, group) for kind, group in kinds.items()}
    more = [f"{n} x {kind}" for kind, n in least.items() if n > n_gpus(groups, kind)]
    enough, state = "", f"its state of {work.state_bytes / GIB:.0f} GiB"
    if len(more) < len(least):  # here, or on so many, it is not the state that does not fit
        enough = f"; {state} alone would fit, what else such a layout holds does not"
    elif least:
        enough = f"; {state} and activations want about {' or '.join(more)}"
    return f"no layout fits {there} ({first[0]}: {first[1]}){enough}"


def n_gpus(groups: Sequence[NodeGroup], kind: str) -> int:
    return sum(group.n_gpus for group in groups if group.hardware.accelerator_type == kind)


def fewest(work: ModelCost, group: NodeGroup) -> int:
    """GPUs in whole nodes that hold the state in STATE_SHARE of their memory."""
    per_node = STATE_SHARE * USABLE * group.hardware.memory_bytes * group.gpus_per_node
    return ceil(work.state_bytes / per_node) * group.gpus_per_node
