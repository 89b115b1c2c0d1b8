"""1,000 GPUs of three kinds, by the cost model: one plan over all of them against equal shares, and
against leaving kinds out.

Every number is what `elastic plan` predicts (find_offers): nothing is trained. `unequal`: what it answers for all three kinds, of which it may
leave nodes out; `all_kinds`: the best that uses each kind. `equal`: at most what equal shares and
stages over all give: 1,000 GPUs of the kind that is slowest for the model, with the slowest links,
in the layout that suits them. `dropped`: the best over two kinds or one. `sum_of_kinds`: what each
kind gives in a job of its own, added up; they train no common model.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import combinations
from time import process_time
from typing import Any

import report
from trial import Clock

from elastic import catalog
from elastic.planner.cost import catalog_hardware
from elastic.planner.offer_search import find_offers
from elastic.planner.offers import Aim, NodeGroup, Offer
from elastic.planner.published import known_decoders
from elastic.types import Job, ModelProfile

Kinds = tuple[tuple[str, int, int], ...]
KINDS: Kinds = (("H100-80GB-SXM", 50, 8), ("A100-80GB-SXM", 75, 4), ("L40S-48GB", 75, 4))
MODELS = ("llama3-8b", "llama2-13b", "llama3-70b")
SMOKE_KINDS: Kinds = tuple((name, 1, 2) for name, _, _ in KINDS)
SMOKE_MODELS = ("llama3.2-1b",)
SAMPLES_PER_GPU, SEQUENCE = 8, 4096
WHOLE = 40  # offers that are kept, so that one over all kinds is among them
MOST_S = 600.0


def groups(kinds: Kinds = KINDS) -> tuple[NodeGroup, ...]:
    return tuple(
        NodeGroup(name, catalog_hardware.profile(catalog.find_chip(name)), n, size)
        for name, n, size in kinds
    )


def n_gpus(of: tuple[NodeGroup, ...]) -> int:
    return sum(group.n_gpus for group in of)


def offers(
    model: ModelProfile, of: tuple[NodeGroup, ...], batch: int, n_best: int = 1
) -> tuple[Offer, ...]:
    return find_offers(
        model, Job(global_batch=batch, precision="bfloat16"), of, aim=Aim(n_best=n_best)
    ).best


def most(found: tuple[Offer, ...]) -> float:
    """Tokens per second."""
    return max((offer.tokens_per_s for offer in found), default=0.0)


def over_all(found: tuple[Offer, ...], of: tuple[NodeGroup, ...]) -> float:
    """Tokens per second of the best plan that uses each of these kinds, in any number; 0 = none
    fits."""
    names = {group.pool for group in of}
    return max(
        (offer.tokens_per_s for offer in found if {part.pool for part in offer.parts} == names),
        default=0.0,
    )


def equal(model: ModelProfile, of: tuple[NodeGroup, ...], batch: int) -> float:
    """Of every kind in turn as if all GPUs were of it, the least."""
    slowest = min(group.hardware.link_bytes_per_s for group in of)
    size, total = min(group.gpus_per_node for group in of), n_gpus(of)
    found = []
    for group in of:
        gpu = replace(group.hardware, link_bytes_per_s=slowest)
        alone = replace(group, hardware=gpu, n_nodes=total // size, gpus_per_node=size)
        found.append(most(offers(model, (alone,), batch)))
    return min(found)


def compared(name: str, of: tuple[NodeGroup, ...] | None = None) -> dict[str, Any]:
    of = of or groups()
    batch = SAMPLES_PER_GPU * n_gpus(of)
    model = known_decoders.find(f"{name},seq={SEQUENCE}").decoder.profile()
    began_s = process_time()
    found = offers(model, of, batch)
    search_s = process_time() - began_s
    unequal, same = found[0].tokens_per_s, equal(model, of, batch)
    everyone = over_all(offers(model, of, batch, WHOLE), of)
    some = [kinds for n in range(1, len(of)) for kinds in combinations(of, n)]
    dropped = {"+".join(g.pool for g in kinds): most(offers(model, kinds, batch)) for kinds in some}
    best = max(dropped, key=lambda kinds: dropped[kinds])
    alone = sum(dropped[group.pool] for group in of)
    return {
        "layout": str(found[0].layout),
        "gpus": {part.pool: part.n_gpus for part in found[0].parts},
        "samples": {part.pool: part.samples for part in found[0].parts},
        "unequal_tokens_per_s": round(unequal),
        "all_kinds_tokens_per_s": round(everyone),
        "equal_tokens_per_s": round(same),
        "dropped_tokens_per_s": round(dropped[best]),
        "dropped_keeps": best,
        "sum_of_kinds_tokens_per_s": round(alone),
        "unequal_over_equal": round(unequal / same, 3) if same else 0.0,
        "all_kinds_over_dropped": round(everyone / dropped[best], 3) if dropped[best] else 0.0,
        "unequal_over_dropped": round(unequal / dropped[best], 3) if dropped[best] else 0.0,
        "unequal_over_sum": round(unequal / alone, 3) if alone else 0.0,
        "search_s": round(search_s, 3),
    }


def measure(clock: Clock, models: tuple[str, ...], kinds: Kinds) -> dict[str, Any]:
    found = {}
    for name in models:
        clock.look(name)
        found[name] = compared(name, groups(kinds))
    return {
        "by": "elastic plan's search (find_offers, mixed); predicted, not trained",
        "kinds": {name: n * size for name, n, size in kinds},
        "unequal_over_equal": min(one["unequal_over_equal"] for one in found.values()),
        "unequal_over_dropped": min(one["unequal_over_dropped"] for one in found.values()),
        "search_s": max(one["search_s"] for one in found.values()),
        "models": found,
    }


def main() -> int:
    given = report.options(__doc__, MOST_S, repeats=1)
    models, kinds = (SMOKE_MODELS, SMOKE_KINDS) if given.smoke else (MODELS, KINDS)
    return report.finish("unequal_plan", given, lambda clock: measure(clock, models, kinds))


if __name__ == "__main__":
    sys.exit(main())
