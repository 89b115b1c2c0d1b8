"""Experts shared out over ranks: searched for where the model has them, and what they cost."""

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
from elastic.types import Job, Layout, parse_layout

MOE = Decoder(24, 2048, 32, 4, 768, 32000, 2048, head_dim=128, experts=64, active=4).profile()
JOB = Job(global_batch=256, precision="bfloat16")
NODES = [NodeGroup("p", catalog_hardware.profile(catalog.find_chip("H100-80GB-SXM")), 4, 8)]


def test_every_share_that_divides_experts_and_ranks_is_looked_at() -> None:
    found = find_offers(MOE, JOB, NODES, aim=Aim(n_best=20))
    assert any(offer.layout.ep > 1 for offer in found.best) or "ep" in found.rejected
    for offer in found.best:
        layout = offer.layout
        assert 64 % layout.ep == 0 and (layout.dp_shard * layout.cp) % layout.ep == 0


def test_a_job_may_say_its_own() -> None:
    found = find_offers(MOE, replace(JOB, layout="auto,ep=4"), NODES)
    assert {offer.layout.ep for offer in found.best} == {4}
    dense = replace(MOE, n_experts=0)
    assert {offer.layout.ep for offer in find_offers(dense, JOB, NODES).best} == {1}


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("dp_shard=6,ep=3", "ep=3, but ep must divide the 64 experts of the model"),
        ("dp_shard=2,cp=3,ep=4", "ep=4, but ep must divide dp_shard x cp, which is 6"),
        ("dp_shard=2,ep=2,activation_checkpointing=selective", "not with selective"),
        ("dp_shard=4,tp=2,ep=4", ""),
    ],
)
def test_what_cannot_be_shared_out_is_one_line(layout: str, why: str) -> None:
    found = MOE.refusal(parse_layout(layout))
    assert why in found and "\n" not in found and bool(why) == bool(found)
    dense = replace(MOE, n_experts=0).refusal(parse_layout("dp_shard=2,ep=2"))
    assert dense.startswith("ep=2, but the model has no experts that ranks can have a share of")


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_what_is_gathered_of_a_block_falls_with_ep(ep: int) -> None:
    """The state is spread over all ranks either way; a rank gathers only the experts that it
    has."""
    work = ModelCost.of(MOE)
    plain, spread = (memory_bytes(work, Layout(dp_shard=8, ep=n), "bfloat16") for n in (1, ep))
    assert plain - spread == pytest.approx(2 * work.experts.total * 0.5 * (1 - 1 / ep), rel=1e-3)
