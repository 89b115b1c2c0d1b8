"""Models, chips and pools that the tests of the planner share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic import catalog
from elastic.planner.cost import catalog_hardware
from elastic.planner.cost.memory import Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.sites import site_of
from elastic.planner.cost.step_cost import Cost, step_cost
from elastic.planner.offer_search import find_offers
from elastic.planner.offers import Aim, NodeGroup, Offer
from elastic.planner.published.decoder import Decoder
from elastic.types import HardwareProfile, Job, Layout, ModelProfile

LLAMA_8B = Decoder(32, 4096, 32, 8, 14336, 128256, 8192)
LLAMA_70B = Decoder(80, 8192, 64, 8, 28672, 128256, 8192)
LLAMA_405B = Decoder(126, 16384, 128, 8, 53248, 128256, 8192)
QWEN_MOE = Decoder(48, 2048, 32, 4, 768, 151936, 4096, head_dim=128, experts=128, active=8)
SMALL = Decoder(8, 512, 8, 4, 1408, 32000, 1024)
JOB = Job(global_batch=64, precision="bfloat16")


def gpu(name: str = "H100-80GB-SXM", gbps: float = 0.0) -> HardwareProfile:
    return catalog_hardware.profile(catalog.find_chip(name), gbps)


def group(
    name: str = "H100-80GB-SXM", n_nodes: int = 1, per_node: int = 8, pool: str = "", **more: Any
) -> NodeGroup:
    return NodeGroup(pool or name, gpu(name, more.pop("gbps", 0.0)), n_nodes, per_node, **more)


def best(
    model: Decoder | ModelProfile,
    *groups: NodeGroup,
    batch: int = 64,
    aim: Aim | None = None,
    **job: Any,
) -> Offer:
    profile = model.profile() if isinstance(model, Decoder) else model
    return find_offers(profile, replace(JOB, global_batch=batch, **job), groups, aim=aim).best[0]


def cost_on(
    model: Decoder,
    chip: HardwareProfile,
    layout: Layout,
    rows: int = 1,
    m: int = 1,
    per_node: int = 8,
) -> Cost:
    """Of `m` microbatches of `rows` samples on each data-parallel rank."""
    step = Step(m, m * rows, m * rows * layout.dp, per_node, "bfloat16")
    return step_cost(site_of(JOB, chip, per_node), ModelCost.of(model.profile()), layout, step=step)
