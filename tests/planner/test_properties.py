"""What holds of every prediction and every search, whatever the model, the chips and the layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.planner.pools import JOB, LLAMA_8B, SMALL, best, cost_on, gpu, group

from elastic.errors import InfeasiblePlan
from elastic.planner import layout_search
from elastic.planner.cost import memory
from elastic.planner.cost.memory import Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.sites import site_of
from elastic.planner.cost.step_cost import step_cost
from elastic.planner.layout_search import IDLE, PER_OPTION, LayoutSearch
from elastic.planner.layout_space import n_options
from elastic.planner.offer_search import find_offers
from elastic.planner.offers import Aim, NodeGroup, Offer, Offers
from elastic.planner.published.decoder import Decoder
from elastic.types import HardwareProfile, Job, Layout

CHIPS = (
    "H100-80GB-SXM",
    "A100-80GB-SXM",
    "H200-141GB-SXM",
    "L40S-48GB",
    "B200-180GB-SXM",
    "V100-32GB-SXM2",
)
RATES = ("memory_bytes_per_s", "node_bytes_per_s", "host_bytes_per_s", "link_bytes_per_s")
HOPS = ("link_hop_s", "node_hop_s", "launch_s")
few = settings(max_examples=25, deadline=None)
searches = settings(max_examples=4, deadline=None)


@st.composite
def decoders(draw: st.DrawFn) -> Decoder:
    """Down to 4 blocks, so that a search takes milliseconds; heads that tp divides."""
    heads = draw(st.sampled_from([8, 16, 32]))
    experts = draw(st.sampled_from([0, 0, 8]))
    return Decoder(
        draw(st.sampled_from([4, 8, 12])), heads * draw(st.sampled_from([64, 128])), heads,
        draw(st.sampled_from([4, 8])), draw(st.sampled_from([1024, 5632, 14336])),
        draw(st.sampled_from([32000, 128256])), draw(st.sampled_from([512, 2048, 8192])),
        gated=draw(st.booleans()), experts=experts, active=2 if experts else 0,
    )  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    size = st.sampled_from([1, 2, 4])
    pp = draw(size)
    return Layout(
        pp=pp, dp_replicate=1 if pp > 1 else draw(size), dp_shard=draw(st.sampled_from([1, 2, 8,
        32])), cp=draw(size), tp=draw(size), schedule=draw(st.sampled_from(["1f1b",
        "interleaved1f1b"])) if pp > 1 else "1f1b", zero_stage=draw(st.sampled_from([1, 2, 3])),
        activation_checkpointing=draw(st.sampled_from(["none", "selective", "full"])),
        offload=draw(st.sampled_from([False, False, True])),
    )  # fmt: skip


chips = st.sampled_from(CHIPS).map(gpu)
# samples at once, microbatches
splits = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([4, 8, 16]))
HOST_BOUND = Decoder(4, 512, 8, 4, 1024, 32000, 512, gated=False)


def step_of(layout: Layout, split: tuple[int, int]) -> Step:
    n, m = split
    return Step(m, m * n, m * n * layout.dp, 8, "bfloat16")


def faster(chip: HardwareProfile, name: str, times: float) -> HardwareProfile:
    if name == "flop_per_s":
        flop = tuple((dtype, peak * times) for dtype, peak in chip.flop_per_s)
        return replace(chip, flop_per_s=flop, peak_flop_per_s=chip.peak_flop_per_s * times)
    return replace(chip, **{name: getattr(chip, name) * times})


# --------------------------------------------------------------------------------------- one layout


@pytest.mark.slow
@few
@given(decoders(), chips, layouts(), splits)
def test_parts_are_the_step_and_none_is_negative(
    model: Decoder, chip: HardwareProfile, layout: Layout, split: tuple[int, int]
) -> None:
    cost = cost_on(model, chip, layout, *split)
    assert cost.step_s == pytest.approx(sum(cost.parts.values())) and cost.step_s > 0
    assert {name: s for name, s in cost.parts.items() if s < -1e-12 * cost.step_s} == {}


@few
@given(decoders(), layouts(), splits)
def test_no_part_of_the_memory_is_negative(
    model: Decoder, layout: Layout, split: tuple[int, int]
) -> None:
    found = memory.parts(ModelCost.of(model.profile()), layout, step_of(layout, split))
    assert min(found.values()) >= 0 and sum(found.values()) > 0


changes = st.tuples(st.sampled_from(["flop_per_s", *RATES]), st.sampled_from([1.1, 2.0, 10.0]))


@few
@given(decoders(), chips, layouts(), splits, changes)
@example(
    HOST_BOUND,
    gpu(),
    Layout(zero_stage=1, activation_checkpointing="selective"),
    (1, 4),
    ("flop_per_s", 1.1),
)
def test_nothing_faster_makes_a_layout_slower(
    model: Decoder,
    chip: HardwareProfile,
    layout: Layout,
    split: tuple[int, int],
    change: tuple[str, float],
) -> None:
    before, after = (
        cost_on(model, chip, layout, *split),
        cost_on(model, faster(chip, *change), layout, *split),
    )
    assert after.step_s <= before.step_s * (1 + 1e-9)


SPREAD = (
    Layout(dp_replicate=4, dp_shard=8),
    Layout(dp_shard=64, zero_stage=1),
    Layout(pp=4, dp_shard=2, cp=2, tp=4),
    Layout(offload=True),
)


@pytest.mark.parametrize("name", ["flop_per_s", *RATES])
@pytest.mark.parametrize("layout", SPREAD, ids=str)
def test_each_rate_counts_where_it_is_used(name: str, layout: Layout) -> None:
    times = [
        cost_on(LLAMA_8B, faster(gpu(), name, n), layout, 1, 8).step_s
        for n in (0.1, 0.5, 1.0, 1.5, 3.0, 10.0, 1000.0)
    ]
    assert times == sorted(times, reverse=True)
    between = layout.world_size > 8
    used = {
        "host_bytes_per_s": layout.offload,
        "link_bytes_per_s": between,
        "node_bytes_per_s": between,
    }.get(name, True)
    assert (times[0] > times[2]) == used


@few
@given(decoders(), chips, layouts(), splits)
def test_twice_all_rates_and_half_of_all_latencies_is_half_the_time(
    model: Decoder, chip: HardwareProfile, layout: Layout, split: tuple[int, int]
) -> None:
    """Latencies of the software too. Without offload: the host's memory is no part of the
    profile."""
    layout, chip = (
        replace(layout, offload=False),
        replace(chip, link_hop_s=1.2e-5, node_hop_s=4e-6, launch_s=5e-6),
    )
    work, step = ModelCost.of(model.profile()), step_of(layout, split)
    twice = chip
    for name, times in [
        ("flop_per_s", 2.0),
        *((name, 2.0) for name in RATES),
        *((name, 0.5) for name in HOPS),
    ]:
        twice = faster(twice, name, times)
    found = []
    for one, share in ((chip, 1.0), (twice, 0.5)):
        site = site_of(JOB, one, 8)
        own = {
            name: getattr(site.kernels, name) * share
            for name in ("host_s", "launch_s", "microbatch_s")
        }
        site = replace(site, chip=replace(site.chip, kernels=replace(site.kernels, **own)))
        found.append(step_cost(site, work, layout, step=step).step_s)
    assert found[1] == pytest.approx(found[0] / 2, rel=1e-9)


# ----------------------------------------------------------------------------------------- a search

nodes = st.sampled_from([1, 2])
batches = st.sampled_from([16, 32])


def search(
    model: Decoder, groups: tuple[NodeGroup, ...], batch: int, aim: Aim | None = None
) -> Offers | None:
    """None where nothing fits."""
    try:
        return find_offers(model.profile(), replace(JOB, global_batch=batch), groups, aim=aim)
    except InfeasiblePlan:
        return None


@searches
@given(
    decoders(),
    chips,
    nodes,
    batches,
    st.tuples(st.sampled_from([4, 16, 80]), st.sampled_from([1.05, 1.5, 4.0])),
)
def test_more_memory_loses_no_layout_and_makes_nothing_slower(
    model: Decoder, chip: HardwareProfile, n_nodes: int, batch: int, room: tuple[int, float]
) -> None:
    gib, times = room
    small = replace(chip, memory_bytes=gib << 30)
    some = search(model, (NodeGroup("a", small, n_nodes, 8),), batch)
    more = search(
        model,
        (NodeGroup("a", replace(small, memory_bytes=int(times * (gib << 30))), n_nodes, 8),),
        batch,
    )
    if some is None:
        return
    assert more is not None
    values = [value(found.best[0], 8 * n_nodes) for found in (some, more)]
    assert values[1] <= values[0] * (1 + 1e-9)


def value(offer: Offer, n_gpus: int) -> float:
    """What the fastest is the fastest by: 1 % more for each axis and option that a layout says
    more, and 5 % where it leaves some of the GPUs idle."""
    options = n_options(replace(offer.layout, dp_shard=1, microbatch_size=0))
    return offer.step_s * (1 + PER_OPTION * options) * (1 + IDLE * (offer.n_gpus < n_gpus))


@pytest.mark.slow
@searches
@given(decoders(), chips, nodes, batches)
def test_names_and_their_order_do_not_count(
    model: Decoder, chip: HardwareProfile, n_nodes: int, batch: int
) -> None:
    other = gpu("L40S-48GB" if chip.accelerator_type.startswith("A100") else "A100-80GB-SXM")
    one = search(
        model, (NodeGroup("a", chip, n_nodes, 8), NodeGroup("b", other, n_nodes, 8)), batch
    )
    renamed = replace(chip, accelerator_type="X"), replace(other, accelerator_type="Y")
    two = search(
        model,
        (NodeGroup("z", renamed[1], n_nodes, 8), NodeGroup("y", renamed[0], n_nodes, 8)),
        batch,
    )
    assert one is not None and two is not None
    assert [offer.step_s for offer in two.best] == pytest.approx(
        [offer.step_s for offer in one.best]
    )


@searches
@given(decoders(), st.sampled_from(CHIPS), nodes, st.sampled_from([10.0, 400.0]))
def test_twice_the_nodes_are_not_slower(
    model: Decoder, name: str, n_nodes: int, gbps: float
) -> None:
    """By doublings: a step's samples are whole, so that 9 GPUs may be no faster than 8, and fewer
    nodes are tried by halves."""
    found = [search(model, (group(name, n, gbps=gbps),), 64) for n in (n_nodes, 2 * n_nodes)]
    if found[0] is None:
        return
    assert found[1] is not None
    one, two = (value(some.best[0], 0) for some in found if some is not None)
    assert two <= one * (1 + IDLE) * (1 + 1e-9)


def test_equal_gpus_have_equal_shares_wherever_they_come_from() -> None:
    """Two pools of one kind are one: every GPU computes as many samples."""
    offer = best(SMALL, group(n_nodes=1, pool="a"), group(n_nodes=3, pool="b"))
    assert [part.n_gpus for part in offer.parts] == [8, 24]
    assert {part.samples for part in offer.parts} == {offer.step.largest_share} and len(
        {part.busy for part in offer.parts}
    ) == 1
    assert offer.layout == best(SMALL, group(n_nodes=4)).layout


# ------------------------------------------------------------------- nothing is lost by leaving out

AIMS = (Aim(), Aim("cheapest"), Aim("deadline", tokens=1e10, deadline_h=20.0))
PRICES = {"H100-80GB-SXM": 90.0, "A100-80GB-SXM": 30.0, "L40S-48GB": 12.0}
POOLS = (
    ((("H100-80GB-SXM", 4),), LLAMA_8B),
    ((("H100-80GB-SXM", 2), ("A100-80GB-SXM", 2)), SMALL),
    pytest.param(
        (("A100-80GB-SXM", 4), ("L40S-48GB", 3)),
        Decoder(16, 2048, 32, 8, 8192, 128256, 2048),
        marks=pytest.mark.slow,
    ),
    (
        (("A100-80GB-SXM", 2), ("L40S-48GB", 1)),
        Decoder(12, 2048, 16, 8, 1024, 32000, 4096, experts=8, active=2),
    ),
)


def said(offer: Offer) -> tuple[object, ...]:
    return offer.layout, offer.parts, offer.step_s, offer.usd_per_mtoken


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("aim", AIMS, ids=[aim.purpose for aim in AIMS])
@pytest.mark.parametrize(
    ("pools", "model"), POOLS, ids=["8b", "mixed-small", "mixed-1b", "experts"]
)
def test_the_best_offers_are_those_of_a_search_that_leaves_nothing_out(
    pools: tuple[tuple[str, int], ...], model: Decoder, aim: Aim, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [group(name, n, usd_per_node_h=PRICES[name]) for name, n in pools]
    job, profile = replace(JOB, global_batch=64), model.profile()
    found = find_offers(profile, job, groups, aim=aim)
    monkeypatch.setattr(LayoutSearch, "limit_s", lambda self, there: float("inf"))
    monkeypatch.setattr(layout_search, "ROUNDED", float("inf"))
    every = find_offers(profile, job, groups, aim=aim)
    assert [said(offer) for offer in found.best] == [said(offer) for offer in every.best]
    assert len(every.best) == aim.n_best and found.n_looked_at <= every.n_looked_at
    assert aim.purpose != "fastest" or found.n_looked_at < 0.9 * every.n_looked_at


def test_what_is_pinned_does_not_leave_its_node() -> None:
    """cp=8 on nodes of 8 leaves no room for tp."""
    model = Decoder(8, 1024, 8, 8, 4096, 32000, 8192).profile()
    found = find_offers(
        model, Job(global_batch=64, precision="bfloat16", layout="auto,cp=8"), [group(n_nodes=2)]
    )
    assert all(offer.layout.tp == 1 for offer in found.best)
    assert found.rejected["tp x cp"] == "tp x cp = 16 would leave its node of 8 GPUs"
