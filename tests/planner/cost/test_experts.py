"""Experts spread over ranks: planned where elastic is not to run it, and said to be planned
only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic import catalog
from elastic.planner.cost import catalog_hardware
from elastic.planner.cost.memory import memory_bytes
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.offer_search import find_offers
from elastic.planner.offers import Aim, NodeGroup
from elastic.planner.published.decoder import Decoder
from elastic.types import Job, Layout

MOE = Decoder(24, 2048, 32, 4, 768, 32000, 2048, head_dim=128, experts=64, active=4).profile()
JOB = Job(global_batch=256, precision="bfloat16")
NODES = [NodeGroup("p", catalog_hardware.profile(catalog.find_chip("H100-80GB-SXM")), 4, 8)]


def test_only_where_it_is_asked_for() -> None:
    assert all(offer.layout.ep == 1 for offer in find_offers(MOE, JOB, NODES).best)
    found = find_offers(MOE, replace(JOB, ep=True), NODES, aim=Aim(n_best=20))
    with_ep = [offer for offer in found.best if offer.layout.ep > 1]
    assert with_ep or "ep" in found.rejected
    for offer in with_ep:
        assert (
            64 % offer.layout.ep == 0
            and (offer.layout.dp_shard * offer.layout.cp) % offer.layout.ep == 0
        )
        assert "planned only" in " ".join(offer.warnings) and f"ep={offer.layout.ep}" in str(
            offer.layout
        )


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_what_is_gathered_of_a_block_falls_with_ep(ep: int) -> None:
    """The state is spread over all ranks either way; a rank gathers only the experts that it
    has."""
    work = ModelCost.of(MOE)
    plain, spread = (memory_bytes(work, Layout(dp_shard=8, ep=n), "bfloat16") for n in (1, ep))
    assert plain - spread == pytest.approx(2 * work.experts * 0.5 * (1 - 1 / ep), rel=1e-3)
