"""The first offer of `elastic plan` is what `elastic run` enters, whatever the model and the pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.planner.pools import LLAMA_8B, LLAMA_70B, QWEN_MOE, SMALL

from elastic.api.planning.model_source import Subject
from elastic.api.planning.plan_nodes import known_of, of_pool
from elastic.api.planning.query import Query
from elastic.planner.choice import Choice
from elastic.planner.layout_choice import plan_layout
from elastic.planner.node_sets import LayoutLimits
from elastic.planner.offers import Aim, Offer
from elastic.planner.published.decoder import Decoder
from elastic.policy import plans
from elastic.policy.plans import choice_of, not_planned
from elastic.policy.state.state import State
from elastic.types import Job, Node, Pool, Resume, WorkerId

ONE_B = Decoder(16, 2048, 32, 8, 8192, 128256, 2048)
LONG = replace(LLAMA_8B, seq=131072)
DEEP = Decoder(26, 1024, 8, 8, 4096, 32000, 1024)
P5, P4D, P4DE, G6E = "p5.48xlarge", "p4d.24xlarge", "p4de.24xlarge", "g6e.48xlarge"
GiB = 1 << 30


def pool(name: str, kind: str, n_nodes: int, per_node: int = 8, **more: Any) -> Pool:
    return Pool(name, kind, per_node, "spot", 1.0, max_nodes=n_nodes, **more)


def h100(n_nodes: int, per_node: int = 8, **more: Any) -> Pool:
    return pool("h100", "H100", n_nodes, per_node, **{"instance_type": P5} | more)


def a100(n_nodes: int, per_node: int = 8, **more: Any) -> Pool:
    return pool("a100", "A100-80GB", n_nodes, per_node, **{"instance_type": P4DE} | more)


def small(n_nodes: int, per_node: int = 8, **more: Any) -> Pool:
    return pool("l40s", "L40S", n_nodes, per_node, **{"instance_type": G6E} | more)


def cpu(n_nodes: int, per_node: int = 2, **more: Any) -> Pool:
    return pool("cpu", "CPU", n_nodes, per_node, **more)


EAST, WEST = {"region": "r", "zone": "a"}, {"region": "r", "zone": "b"}
CASES: list[tuple[Decoder, int, tuple[Pool, ...], dict[str, Any]]] = [
    (LLAMA_70B, 256, (h100(16),), {}),
    (LLAMA_70B, 128, (h100(4),), {}),
    (LLAMA_70B, 2048, (h100(32),), {}),
    (LLAMA_70B, 64, (a100(8),), {}),
    (LLAMA_70B, 512, (h100(8), a100(8)), {}),
    (LLAMA_70B, 256, (h100(16),), {"layout": "auto,tp=8"}),
    (LLAMA_70B, 256, (h100(16),), {"layout": "pp=4,dp_shard=4,tp=8"}),
    (LLAMA_70B, 256, (h100(16),), {"activation_checkpointing": "full", "microbatch_size": 1}),
    (LLAMA_8B, 64, (h100(1),), {}),
    (LLAMA_8B, 64, (h100(1),), {"layout": "dp_shard=8"}),
    (LLAMA_8B, 64, (h100(1),), {"layout": {"8": "dp_shard=4,tp=2", "4": "dp_shard=4"}}),
    (LLAMA_8B, 512, (h100(8),), {}),
    (LLAMA_8B, 512, (small(4),), {}),
    (LLAMA_8B, 48, (h100(1), small(1)), {}),
    (LLAMA_8B, 96, (h100(1), a100(1), small(1)), {}),
    (LLAMA_8B, 256, (a100(4), small(4)), {"layout": "auto,pp=2"}),
    (LLAMA_8B, 64, (h100(2),), {"max_workers": 12}),
    (LLAMA_8B, 64, (h100(2),), {"zero_stage": 2}),
    (LLAMA_8B, 64, (h100(2),), {"float8": True}),
    (LLAMA_8B, 64, (h100(2),), {"compile": True}),
    (LLAMA_8B, 64, (h100(1, memory_bytes_per_gpu=40 * GiB),), {}),
    (LLAMA_8B, 8, (h100(1),), {"offload": True}),
    (LONG, 8, (h100(1),), {}),
    (LONG, 8, (h100(4),), {}),
    (QWEN_MOE, 256, (h100(4),), {}),
    (ONE_B, 64, (h100(1),), {}),
    (ONE_B, 64, (h100(1), a100(1)), {}),
    (ONE_B, 2, (h100(1),), {}),
    (ONE_B, 4096, (h100(64),), {"microbatch_size": 1}),
    (ONE_B, 32, (h100(1, 4), replace(h100(1, 1), name="lone")), {}),
    (ONE_B, 64, (a100(2), small(3, 4)), {}),
    (ONE_B, 64, (replace(h100(2), **EAST), replace(h100(2), name="west", **WEST)), {}),
    (ONE_B, 64, (replace(h100(3), **EAST), replace(h100(1), name="west", **WEST)), {}),
    (
        ONE_B,
        64,
        (replace(h100(1), **EAST), replace(h100(1), name="west", **WEST)),
        {"across_zones": True},
    ),
    (ONE_B, 64, (replace(h100(2), **EAST), replace(a100(2), **WEST)), {}),
    (DEEP, 48, (h100(1), replace(h100(1, 5), name="five")), {"schedule": "1f1b"}),
    (DEEP, 12, (small(13, 1),), {}),
    (SMALL, 64, (h100(1),), {}),
    (SMALL, 6, (h100(2),), {}),
    (SMALL, 64, (a100(1), small(1)), {}),
    (SMALL, 24, (cpu(3),), {}),
    (SMALL, 24, (cpu(3, memory_bytes_per_gpu=GiB),), {}),
    (SMALL, 24, (cpu(3),), {"layout": {"6": "dp_shard=3,tp=2", "4": "pp=2,dp_shard=2"}}),
    (SMALL, 24, (replace(cpu(1), **EAST), replace(cpu(2), name="west", **WEST)), {}),
    (SMALL, 6, (cpu(1, 8),), {"layout": "auto,pp=2"}),
]


def asked(model: Decoder, batch: int, pools: tuple[Pool, ...], keys: dict[str, Any]) -> State:
    """A run whose nodes are all there."""
    data = {"global_batch": batch, "layout": "auto", "precision": "bfloat16"} | keys
    nodes = {f"{p.name}-{i}": node_of(p, i) for p in pools for i in range(p.max_nodes)}
    return State(
        job=Job.from_plain(data),
        pools=pools,
        model=model.profile(),
        hardware=known_of(pools),
        nodes=nodes,
    )


def node_of(of: Pool, i: int) -> Node:
    return Node(f"{of.name}-{i}", of.name, of.gpus_per_node, "prepared")


def entered(state: State) -> Choice:
    return choice_of(state, tuple(state.nodes.values()))


def offered(state: State) -> Offer:
    assert state.model is not None
    subject = Subject("it", state.model, state.job, state.pools, literal=True)
    return (
        Query(subject, Aim(n_best=2)).offers([of_pool(p, p.max_nodes) for p in state.pools]).best[0]
    )


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_first_offer_is_what_a_run_enters(case: int) -> None:
    state = asked(*CASES[case])
    offer, choice = offered(state), entered(state)
    assert choice.layout == offer.layout
    assert choice.model_step_s == pytest.approx(offer.step_s, rel=1e-9)
    assert choice.n_microbatches == offer.step.n_microbatches
    samples = dict.fromkeys(dict.fromkeys(worker.node_id for worker in choice.ranks), 0)
    assert len(choice.ranks) == offer.n_gpus and samples
    assert not not_planned(state, choice)


def test_a_70b_on_128_h100_runs_at_the_pace_that_is_offered() -> None:
    state = asked(*CASES[0])
    assert entered(state).model_step_s < 17.5, "which takes tp: plain sharding takes 19 s"
    assert any("a step would take" in why for why in entered(state).rejected)


def test_what_this_run_found_out_takes_the_next_offer_and_says_so() -> None:
    state = asked(*CASES[0])
    first = entered(state)
    tried = replace(state, infeasible={first.layout: 81 * GiB})
    second = entered(tried)
    assert second.layout != first.layout
    said = f"not as planned ({first.layout}): did not fit (81.00 GiB measured)"
    assert not_planned(tried, second) == said
    without = replace(state, unusable={"cp": "steps differ", "tp": "steps differ"})
    closed = entered(without)
    assert closed.layout.tp == closed.layout.cp == 1
    assert not_planned(without, closed).endswith("steps differ")
    assert not not_planned(state, first)


def test_what_was_planned_is_searched_only_for_a_plan_that_is_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = asked(*CASES[0])
    tried = replace(state, infeasible={entered(state).layout: 167 * GiB // 2}, generation=1)
    searches: list[LayoutLimits | None] = []

    def counted(*given: Any, limits: LayoutLimits) -> Choice:
        searches.append(limits)
        return plan_layout(*given, limits=limits)

    monkeypatch.setattr(plans, "plan_layout", counted)
    choice = entered(tried)
    assert len(searches) == 1
    said = plans.enter(tried, choice, Resume(), cause="start", why="it").reason
    assert "did not fit (83.50 GiB measured)" in said and len(searches) == 2


def test_measured_rates_count_for_a_run_alone() -> None:
    """Of 16 GPUs one computes at a tenth of the speed."""
    state = asked(ONE_B, 128, (h100(2),), {})
    slow = WorkerId("h100-1", 7)
    workers = [WorkerId(node.node_id, k) for node in state.nodes.values() for k in range(8)]
    rates = {worker: 0.1 if worker == slow else 1.0 for worker in workers}
    memory = dict.fromkeys(state.nodes, 80 * GiB)
    hardware = dict.fromkeys(state.nodes, state.hardware[0])
    limits = LayoutLimits(hardware=hardware, rates=rates, memory=memory, on_gpus=True)
    assert state.model is not None
    found = plan_layout(state.model, state.job, list(state.nodes.values()), limits=limits)
    assert slow not in found.ranks
    assert "with 1 worker more a step would take" in found.rejected[0]
