"""What a plan costs beside its nodes, and what is lost where nodes are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.offers import NodeGroup
from elastic.types import Job, Layout

# between zones of a region, both ends (AWS EC2 on-demand pricing, data transfer, 0.01 each way)
ZONE_USD_PER_GB = 0.02
STORED_USD_PER_GB_MONTH = 0.023  # S3 standard
STORED_BYTES_PER_S = 1e9  # that a node writes to object storage with parallel parts
COPIES_KEPT = 2
# docs/benchmarks.md: a killed node, and groups, build and first step after it
DETECT_S, REBUILD_S = 2.0, 5.0
REPLACED_S = 300.0  # until another node has taken its place
FORWARD_SHARE = 1 / 3  # of a step: the backward pass has twice its FLOPs (Kaplan et al. 2020, 2.1)
COPY_SHARE = 0.01  # of the time, that copies to peers may take: so often they are made


@dataclass(frozen=True)
class Loss:
    """Of taken nodes. `per_h`: of all of them; `seconds`: of training that one costs."""

    per_h: float
    seconds: float
    moved_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Share of the time that is training: 1 / (1 + losses x seconds), as for any renewal
        process."""
        return 1 / (1 + self.per_h * self.seconds / 3600)


def loss(groups: Sequence[NodeGroup], work: ModelCost, layout: Layout, *, step_s: float) -> Loss:
    """Found, rebuilt, fetched from peers over the network, some steps done again, and one node less
    for a while."""
    per_h = sum(group.n_nodes * group.lost_per_node_h for group in groups)
    n_nodes = sum(group.n_nodes for group in groups)
    slowest = min(group.hardware.link_bytes_per_s for group in groups)
    fetched = (
        work.copied_bytes
        / (layout.pp * layout.tp * max(1, layout.dp_shard * layout.cp))
        / max(1.0, slowest)
    )
    # steps since the last copy, on average
    redone = (max(1.0, fetched / (COPY_SHARE * step_s)) + 1) / 2 if step_s else 0.0
    seconds = DETECT_S + REBUILD_S + fetched + redone * step_s + REPLACED_S / max(1, n_nodes)
    return Loss(per_h, seconds, fetched)


@dataclass(frozen=True)
class Copying:
    """Of the training state (parameters and optimizer entries). `stall_s`: a checkpoint holds the
    steps up so long, while each GPU's part goes to host memory; `write_s`: it is written behind
    them; `lost_node_s`: what one taken node costs; `moved_s`: of that, fetching what was on it."""

    state_bytes: float
    stall_s: float
    write_s: float
    lost_node_s: float
    moved_s: float


def copying(
    groups: Sequence[NodeGroup], work: ModelCost, layout: Layout, *, step_s: float
) -> Copying:
    """At the links' own speeds; a node writes STORED_BYTES_PER_S, or what was measured."""
    state = work.copied_bytes
    links = [group.hardware.host_bytes_per_s for group in groups if group.hardware.host_bytes_per_s]
    writes = [
        group.n_nodes * (group.hardware.storage_write_bytes_per_s or STORED_BYTES_PER_S)
        for group in groups
    ]
    lost = loss(groups, work, layout, step_s=step_s)
    stall_s = state / layout.world_size / min(links) if links else 0.0
    return Copying(state, stall_s, state / sum(writes), lost.seconds, lost.moved_s)


def validating(job: Job) -> float:
    """Time of the validations by that of the steps between them: as many forward passes."""
    if not job.eval_every or not job.global_batch:
        return 0.0
    return FORWARD_SHARE * job.eval_samples / job.global_batch / job.eval_every


def moved_usd_per_h(groups: Sequence[NodeGroup], work: ModelCost, *, step_s: float) -> float:
    """Gradients between zones: a ring over replicas in several zones crosses each border once each
    way with twice the shard."""
    zones = {group.zone for group in groups if group.zone}
    if len(zones) < 2 or step_s <= 0:
        return 0.0
    return 2 * len(zones) * work.gradient_bytes / 1e9 * ZONE_USD_PER_GB * 3600 / step_s


def stored_usd_per_h(work: ModelCost) -> float:
    """Of the checkpoints that are kept."""
    return COPIES_KEPT * work.copied_bytes / 1e9 * STORED_USD_PER_GB_MONTH / 730


def host_bytes(gpus_per_node: int, work: ModelCost, layout: Layout) -> float:
    """Of a node: each GPU's own boxes and a partner's, pinned, and what offload keeps there."""
    n = layout.pp * layout.tp * max(1, layout.dp_shard * layout.cp)
    own = work.copied_bytes / n
    offloaded = work.state_bytes / n if layout.offload else 0.0
    return min(gpus_per_node, layout.world_size) * (2 * own + offloaded)
