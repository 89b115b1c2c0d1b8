"""Why a layout is offered, or not, and what to mind: one sentence each, with numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from elastic.planner.cost.memory import USABLE
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.step_cost import Cost
from elastic.planner.offers import NodeGroup
from elastic.text import GIB, n_of
from elastic.types import Layout

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
SAME = 0.01  # of a step
MOST_WAITING = 0.15  # of a step, in one kind of waiting, that is worth a warning
NEAR = 0.92  # of what may be used of the memory


def family(layout: Layout) -> str:
    """`plain sharding`, `tp`, `tp x pp` ..."""
    axes = [name for name in ("tp", "pp", "cp", "ep") if getattr(layout, name) > 1]
    return " x ".join(axes) or ("replicas" if layout.dp_replicate > 1 else "plain sharding")


def families(layout: Layout) -> Iterator[str]:
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
    there = f"{_gib(usable)} of {room / GIB:.3g} can be used"
    return f"needs {_gib(needs)} GiB per GPU, {there}"


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.1f}" if n_bytes >= GIB else f"{n_bytes / GIB:.3g}"


def too_large_for_host(needs: float, room: int) -> str:
    there = f"there are {room / GIB:.0f}"
    return f"offload needs {needs / GIB:.0f} GiB of host memory per node, {there}"


def leaves_node(layout: Layout, per_node: int) -> str:
    return f"tp x cp = {layout.tp * layout.cp} would leave its node of {n_of(per_node, 'GPU')}"


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
        f"{more:.0%} slower than the first: it spends {extra / best.step_s:.0%} of its step more "
        f"on {TOLD[name]}"
    )


def why(cost: Cost, best: Cost) -> str:
    """Of the best: what its step is spent on; of others: what they lose."""
    if cost is not best:
        return slower(cost, best)
    busy_parts = ("products", "attention", "moved", "optimizer")
    waits = {k: v for k, v in cost.parts.items() if k not in busy_parts}
    name = max(waits, key=lambda k: waits[k])
    busy = 1 - sum(waits.values()) / cost.step_s
    share = waits[name] / cost.step_s
    most = f"; most of the rest is {TOLD[name]} ({share:.0%})" if share > 0.005 else ""
    return f"{busy:.0%} of a step is computation that must be done{most}"


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the GPU that needs most. `usable`: of what there is on it, 0 = not known."""

    used: float
    usable: float


def warnings(
    layout: Layout, cost: Cost, memory: MemoryUse, *, n_gpus: int, batch: int
) -> tuple[str, ...]:
    """`n_gpus`: that there are."""
    said = []
    usable = memory.usable
    if usable and memory.used > usable:
        needs = f"{memory.used / GIB:.1f} GiB, and {usable / GIB:.1f} can be used"
        said.append(f"it should not fit: it needs {needs}; elastic run tries it, as it is written")
    elif usable and memory.used > NEAR * usable:
        used = f"{memory.used / GIB:.1f} of {usable / GIB:.1f} GiB"
        said.append(f"memory is tight: {used} that can be used")
    for name in ("fsdp", "tp", "replicas", "bubble", "cp", "uneven"):
        share = cost.parts.get(name, 0.0) / cost.step_s
        if share > MOST_WAITING:
            said.append(f"{share:.0%} of a step goes into {TOLD[name]}")
    if layout.world_size < n_gpus:
        idle = n_gpus - layout.world_size
        said.append(f"{idle} of {n_gpus} GPUs stay idle: {_idle(layout, n_gpus, batch)}")
    if cost.parts.get("optimizer", 0.0) > MOST_WAITING * cost.step_s:
        small = "the batch is small for so many GPUs"
        said.append(f"the optimizer takes longer than it should: {small}")
    return tuple(said)


def _idle(layout: Layout, n_gpus: int, batch: int) -> str:
    inner = layout.tp * layout.cp * layout.pp
    if layout.dp >= batch:
        return f"a step of {batch} samples feeds {layout.dp} data-parallel ranks"
    if n_gpus % inner:
        return f"they are no multiple of tp x cp x pp = {inner}"
    return "with them a step would take longer, or not fit"


def nowhere(work: ModelCost, groups: Sequence[NodeGroup], reasons: Mapping[str, str]) -> str:
    """That nothing fits, and the fewest such nodes whose memory would hold the state alone: with
    less, none is found by trying."""
    there = ", ".join(f"{g.n_gpus} x {g.hardware.accelerator_type}" for g in groups) or "no GPUs"
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
        enough = f"; {state} alone takes at least {' or '.join(more)}"
    return f"no layout fits {there} ({first[0]}: {first[1]}){enough}"


def n_gpus(groups: Sequence[NodeGroup], kind: str) -> int:
    return sum(group.n_gpus for group in groups if group.hardware.accelerator_type == kind)


def fewest(work: ModelCost, group: NodeGroup) -> int:
    """GPUs in whole nodes that hold the state and nothing else."""
    per_node = USABLE * group.hardware.memory_bytes * group.gpus_per_node
    return ceil(work.state_bytes / per_node) * group.gpus_per_node
