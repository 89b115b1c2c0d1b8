"""How many nodes a deadline takes, with made-up offers: the search over node counts alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from elastic.api.planning import aim_limits, sizing
from elastic.api.planning import query as answers
from elastic.api.planning.model_source import Subject, of_model
from elastic.api.planning.plan_nodes import MachineGroup, of_pool
from elastic.api.planning.query import Query
from elastic.errors import InfeasiblePlan, SpecError
from elastic.planner.cost.memory import Step
from elastic.planner.offers import Aim, NodeGroup, Offer, Offers
from elastic.types import Job, Layout, ModelProfile, Pool

SUBJECT: Subject = of_model("gpt2-124m", 512)


def query(
    hours: Callable[[int], float], deadline_h: float = 100.0, least: int = 1
) -> tuple[Query, list[int]]:
    """`hours`: of so many nodes; with fewer than `least` nothing fits. Also the numbers of nodes
    that were asked about."""
    asked: list[int] = []

    def find(model: ModelProfile, job: Job, groups: Sequence[NodeGroup], *, aim: Aim) -> Offers:
        n = sum(group.n_nodes for group in groups)
        asked.append(n)
        if n < least:
            raise InfeasiblePlan(f"{least} nodes hold it")
        usd_per_h, h = groups[0].usd_per_h, hours(n)
        offer = Offer(
            Layout(dp_shard=8 * n), (), Step(1, 1, 1), 1.0, {}, {}, 0, 0.0, 1.0, 0.4, usd_per_h,
            1.0, min(1.0, 8 / n), 1.0, h, usd_per_h * h,
        )  # fmt: skip
        return Offers((offer,))

    return Query(SUBJECT, Aim("deadline", 1e12, deadline_h), find), asked


def machines(usd: float = 10.0, kind: str = "H100", read_bytes_per_s: float = 0.0) -> MachineGroup:
    found = of_pool(Pool(kind, kind, 8, "on-demand", usd, 0, 1), 1)
    gpu = replace(found.group.hardware, storage_read_bytes_per_s=read_bytes_per_s)
    return replace(found, group=replace(found.group, hardware=gpu))


@pytest.mark.parametrize("needed", [3, 7, 8, 13, 30])
def test_the_fewest_nodes(needed: int) -> None:
    asked_for, asked = query(lambda n: 100.0 * needed / n)
    row = sizing.capacity(asked_for, [machines()])["kinds"][0]
    assert (row["n_nodes"], row["makes_it"]) == (needed, True)
    assert len(set(asked)) < 20


def test_hours_and_dollars_are_those_of_all_phases() -> None:
    asked_for, _ = query(lambda n: max(75.0, 600.0 / n))
    phases = (replace(SUBJECT, steps=9), replace(SUBJECT, steps=3))
    both = replace(asked_for, subject=replace(SUBJECT, phases=phases))
    data = sizing.capacity(replace(both, aim=replace(both.aim, deadline_h=400.0)), [machines()])
    (row,) = data["kinds"]
    assert (row["n_nodes"], row["hours"], row["usd"]) == (3, 400.0, 12000.0)
    assert data["tokens"] == 1e12 + phases[1].tokens > 1e12
    with pytest.raises(SpecError, match=r" take 6\.2 days"):
        sizing.capacity(both, [machines()])


def test_rounder_numbers_that_divide_better_are_found() -> None:
    # bisection between 32 and 64 ends at 60
    asked_for, _ = query(lambda n: (3900 if n % 5 == 0 else 6300) / n)
    assert sizing.capacity(asked_for, [machines()])["kinds"][0]["n_nodes"] == 40


def test_memory_may_ask_for_more_than_speed() -> None:
    asked_for, _ = query(lambda n: 1.0, least=9)
    assert sizing.capacity(asked_for, [machines()])["kinds"][0]["n_nodes"] == 9


def test_the_cheapest_kind_is_marked_and_a_kind_that_is_too_slow_is_not() -> None:
    asked_for, _ = query(lambda n: 400.0 / n)
    rows = sizing.capacity(asked_for, [machines(20.0), machines(10.0, "A100")])["kinds"]
    assert [row["cheapest"] for row in rows] == [False, True]


def test_no_number_of_nodes_makes_it() -> None:
    asked_for, asked = query(lambda n: 150.0 if n >= 16 else 2400.0 / n)
    with pytest.raises(
        SpecError, match=r"exclude each other at a step of 524,288 tokens: .* take 6.2 days"
    ):
        sizing.capacity(asked_for, [machines()])
    assert max(asked) < 512  # it is seen that more do not help


def test_scaling_ends_where_efficiency_has_fallen() -> None:
    asked_for, asked = query(lambda n: 100.0 / n)
    data = answers.scaling(asked_for, machines(), 0.5)
    assert [row["n_gpus"] for row in data["curve"]] == [8, 16, 32, 64, 128, 256]
    assert (data["useful_gpus"], asked) == (128, [1, 2, 4, 8, 16, 32])
    assert len(answers.scaling(asked_for, machines(), 0.5, n_most=16)["curve"]) == 2
    asked_for, _ = query(lambda n: 100.0 / n, least=4)
    first = answers.scaling(asked_for, machines(), 0.5)["curve"][0]
    assert (first["layout"], first["why_not"]) == (None, "4 nodes hold it")
    with pytest.raises(InfeasiblePlan, match="4 nodes hold it"):
        answers.scaling(asked_for, machines(), 0.5, n_most=16)


@pytest.mark.parametrize(("sample_bytes", "read", "what"), [
    (4 << 30, 0.0, "takes 4.3 GB/s of samples (as tensors), few disks read more than 1 GB/s"),
    (4 << 30, 8e9, ""), (1 << 29, 0.4e9,
    "takes 0.54 GB/s of samples (as tensors), its storage was measured to read 0.4 GB/s"), (1 << 29,
    0.0, ""), (0, 0.4e9, ""),
])  # fmt: skip
def test_data_that_comes_too_slowly(sample_bytes: int, read: float, what: str) -> None:
    asked_for, _ = query(lambda n: 1.0)  # a token a second
    # 1024 tokens to a sample, 8 data-parallel ranks
    subject = replace(SUBJECT, sample_bytes=sample_bytes * 1024 * 8)
    said = answers.plan(replace(asked_for, subject=subject), [machines(read_bytes_per_s=read)])[
        "offers"
    ][0]["warnings"]
    assert [what in line for line in said] == ([True] if what else [])


def test_the_phases_begin_with_the_first_offer_that_is_within_the_limits() -> None:
    """The best one is too slow."""
    slow = Offer(
        Layout(dp_shard=8), (), Step(1, 1, 1), 1.0, {}, {}, 0, 0.0, 1.0, 0.4, 1.0, 1.0, 1.0, 1.0,
        60.0, 10.0,
    )  # fmt: skip
    fast = replace(slow, layout=Layout(dp_replicate=8), step_s=0.5, hours=40.0, usd=30.0)
    phases = (replace(SUBJECT, steps=9), replace(SUBJECT, steps=3))
    both = replace(SUBJECT, phases=phases)
    aim = Aim("cheapest", 1e12, 110.0)
    asked = Query(both, aim, lambda *_, aim: Offers((slow, fast)))
    data = aim_limits.plan(asked, [machines()])
    assert [offer["layout"] for offer in data["offers"]] == ["dp_replicate=8"]
    first, later = data["phases"]
    assert (first["layout"], first["step_s"]) == ("dp_replicate=8", 0.5)
    assert (first["hours"], first["usd"], later["hours"]) == (40.0, 30.0, 60.0)
    assert (data["all_phases"]["hours"], data["all_phases"]["usd"]) == (100.0, 40.0)
