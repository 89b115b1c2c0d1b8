"""CPU seconds of a search for the best layouts: 8 to 16,384 equal GPUs, and 1,024 of three kinds.

Equal GPUs are one kind to the planner, so that what it looks at grows with the divisors of their
number. Each search is one that `elastic plan` makes, the reading of catalog and job left out; the
first one in a process is not counted.
"""

from __future__ import annotations

import sys
from statistics import median
from time import process_time
from typing import Any

import report
from trial import Clock

from elastic import catalog
from elastic.planner.cost import catalog_hardware, compute
from elastic.planner.layout_choice import plan_layout
from elastic.planner.node_sets import LayoutLimits
from elastic.planner.offer_search import find_offers
from elastic.planner.offers import Aim, NodeGroup
from elastic.planner.published.decoder import Decoder
from elastic.types import Job, Node

MODELS = {
    "8b": Decoder(32, 4096, 32, 8, 14336, 128256, 8192),
    "70b": Decoder(80, 8192, 64, 8, 28672, 128256, 8192),
}
SIZES = (8, 64, 512, 1024, 4096, 16384)
KINDS = (("H100-80GB-SXM", 64), ("A100-80GB-SXM", 32), ("H200-141GB-SXM", 32))
PER_GPU = 2  # samples of a step
MOST_S = 600.0


def group(chip: str, n_nodes: int) -> NodeGroup:
    return NodeGroup(
        chip, catalog_hardware.profile(catalog.find_chip(chip)), n_nodes, 8, usd_per_node_h=30.0
    )


def searched_s(groups: list[NodeGroup], model: Decoder, aim: Aim) -> float:
    """Nothing is known from the search before."""
    batch = PER_GPU * sum(one.n_gpus for one in groups)
    profile = model.profile()
    compute.matmul_s.cache_clear()
    began_s = process_time()
    found = find_offers(profile, Job(global_batch=batch, precision="bfloat16"), groups, aim=aim)
    seconds = process_time() - began_s
    assert found.best
    return seconds


def run_s(model: Decoder, kinds: tuple[tuple[str, int], ...]) -> float:
    """What a run's own choice of a layout takes on nodes of several kinds."""
    known = {name: catalog_hardware.profile(catalog.find_chip(name)) for name, _ in kinds}
    nodes = [Node(f"{name}-{i}", name, 8) for name, n in kinds for i in range(n)]
    memory = {node.node_id: known[node.pool].memory_bytes for node in nodes}
    limits = LayoutLimits(
        min(memory.values()),
        hardware={node.node_id: known[node.pool] for node in nodes},
        memory=memory,
    )
    profile, batch = model.profile(), PER_GPU * 8 * len(nodes)
    compute.matmul_s.cache_clear()
    began_s = process_time()
    plan_layout(profile, Job(global_batch=batch, precision="bfloat16"), nodes, limits=limits)
    return process_time() - began_s


def measure(clock: Clock, repeats: int) -> dict[str, Any]:
    """The slower model of the two counts for a size."""
    equal: dict[int, dict[str, float]] = {}
    searched_s([group("H100-80GB-SXM", 1)], MODELS["8b"], Aim())
    for n in SIZES:
        clock.look(f"{n} GPUs")
        nodes = [group("H100-80GB-SXM", n // 8)]
        fitting = {name: model for name, model in MODELS.items() if n > 8 or name == "8b"}
        equal[n] = {
            name: median(searched_s(nodes, model, Aim()) for _ in range(repeats))
            for name, model in fitting.items()
        }
    three = [group(chip, n) for chip, n in KINDS]
    aims = {"": Aim(), "_cheapest": Aim("cheapest")}
    mixed = {
        name: median(searched_s(three, MODELS["70b"], aim) for _ in range(repeats))
        for name, aim in aims.items()
    }
    figures = {
        "search_64_s": max(equal[64].values()),
        "search_1024_s": mixed[""],
        "search_16384_s": max(equal[16384].values()),
    }
    few = tuple((chip, n // 16) for chip, n in KINDS)
    for name, kinds in (("run_64_s", few), ("run_1024_s", KINDS)):
        figures[name] = max(
            median(run_s(model, kinds) for _ in range(repeats)) for model in MODELS.values()
        )
    figures |= {f"search_1024{name}_s": seconds for name, seconds in mixed.items() if name}
    return {
        **{name: round(seconds, 4) for name, seconds in figures.items()},
        "growth_s": {
            n: {name: round(seconds, 4) for name, seconds in by.items()} for n, by in equal.items()
        },
        "mixed_1024_over_64": round(figures["search_1024_s"] / figures["search_64_s"], 2),
        "equal_16384_over_64": round(figures["search_16384_s"] / figures["search_64_s"], 2),
    }


def main() -> int:
    given = report.options(__doc__, MOST_S, repeats=5)
    return report.finish("planner", given, lambda clock: measure(clock, given.repeats))


if __name__ == "__main__":
    sys.exit(main())
