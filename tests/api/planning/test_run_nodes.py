"""Which nodes a plan counts on: those that a run of the job has."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.api.planning import aim_limits
from elastic.api.planning.model_source import Subject, machines_of, of_model
from elastic.api.planning.query import Query
from elastic.api.planning.run_nodes import run_nodes
from elastic.config.hardware import PLACE
from elastic.planner.offers import Aim, Purpose
from elastic.types import Job, Pool

SPOT = Pool("spot", "H100", 8, "spot", 20.0, 0, 4)
FIXED = Pool("fixed", "H100", 8, "on-demand", 55.0, 0, 3)
OWNED = Pool("owned", "H100", 8, "owned", 0.0, 0, 1)
SUBJECT: Subject = of_model("gpt2-124m", 512)


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path))


@pytest.mark.parametrize(
    ("keys", "nodes", "standby"),
    [
        ({}, [4, 3, 1], 0),
        ({"purpose": "fastest", "deadline_h": 9.0}, [4, 3, 1], 0),
        ({"max_nodes": 5}, [4, 0, 1], 0),
        ({"purpose": "cheapest"}, [4, 0, 1], 0),
        ({"on_demand_floor": 2}, [4, 2, 1], 0),
        ({"on_demand_floor": 2, "max_nodes": 4}, [1, 2, 1], 0),
        ({"deadline_h": 9.0}, [4, 0, 1], 0),
        ({"purpose": "cheapest", "min_workers": 56}, [4, 2, 1], 2),
        ({"purpose": "cheapest", "min_workers": 56, "max_nodes": 6}, [4, 1, 1], 1),
    ],
)
def test_nodes_are_those_that_a_run_asks_for(
    keys: dict[str, Any], nodes: list[int], standby: int
) -> None:
    pools = (SPOT, FIXED, OWNED)
    found = run_nodes(replace(SUBJECT.job, steps=10, **keys), SUBJECT.model, pools)
    assert [found.nodes[pool.name] for pool in pools] == nodes
    assert found.standby == {"spot": 0, "fixed": standby, "owned": 0}


def test_a_deadline_may_need_nodes_on_demand() -> None:
    """As many as are there without spot, which is what a run that is behind takes."""
    pools = (replace(SPOT, max_nodes=1), FIXED)
    found = run_nodes(replace(SUBJECT.job, steps=10, deadline_h=9.0), SUBJECT.model, pools)
    assert (found.nodes, found.standby["fixed"]) == ({"spot": 1, "fixed": 2}, 2)
    assert found.notes == (
        "2 of 3 nodes of pool fixed (on demand): elastic run takes more only while too few others "
        "are there, or the deadline needs them",
    )


@pytest.mark.parametrize(("lasts_h", "standby"), [(1, 0), (10, 2)])
def test_reservations_that_end_before_the_deadline_do_not_count_for_it(
    lasts_h: float, standby: int
) -> None:
    ends_at_s = time.time() + 3600 * lasts_h
    held = replace(OWNED, name="held", market_type="reserved", max_nodes=3, ends_at_s=ends_at_s)
    pools = (replace(SPOT, max_nodes=1), FIXED, held)
    found = run_nodes(replace(SUBJECT.job, steps=10, deadline_h=9.0), SUBJECT.model, pools)
    assert found.standby["fixed"] == standby


def test_what_is_named_is_taken_as_it_is_named() -> None:
    job: Job = replace(SUBJECT.job, steps=10, purpose="cheapest")
    subject = replace(SUBJECT, job=job, pools=(SPOT, FIXED), literal=True)

    def nodes(**counts: int) -> dict[str, int]:
        return {each.group.pool: each.group.n_nodes for each in machines_of(subject, counts)}

    assert nodes() == {"spot": 4}
    assert nodes(spot=2) == {"spot": 2}
    assert nodes(fixed=2) == {"spot": 4, "fixed": 2}
    published = replace(subject, literal=False)
    assert len(machines_of(published, {})) == 2, "no run of it is known"


def notes(purpose: Purpose, batch: int, budget_usd: float = 0.0) -> list[str]:
    job = replace(SUBJECT.job, steps=1000, purpose=purpose, global_batch=batch)
    subject = replace(SUBJECT, job=job, pools=(SPOT, FIXED), literal=True, steps=1000)
    asked = Query(subject, Aim(purpose, subject.tokens, budget_usd=budget_usd))
    told: list[str] = aim_limits.plan(asked, machines_of(subject, {}))["notes"]
    return [note for note in told if "max_nodes: " in note or "takes the fastest" in note]


def test_what_a_run_enters_and_keeps_is_told_where_the_first_offer_is_another() -> None:
    (note,) = notes("cheapest", 512)
    assert note.startswith(
        "elastic run takes the fastest layout on all nodes that it has, 32 x H100-80GB-SXM: "
        "dp_shard=32, "
    )
    assert notes("fastest", 512) == []
    (note,) = notes("fastest", 4)
    assert note.startswith("6 more nodes without a part in dp_shard=4,") and note.endswith(
        " in all; max_nodes: 1 leaves them out"
    )
    assert ", which elastic run keeps and pays for: $225/h, $" in note
    assert notes("cheapest", 4)[-1].startswith("3 more nodes without a part in ")


def test_what_a_run_enters_is_told_where_the_budget_leaves_another_offer() -> None:
    """The fastest one, on three nodes, costs $0.24; the next one $0.05, on one of them."""
    (idle,) = notes("fastest", 8)
    entered, kept = notes("fastest", 8, 0.1)
    assert entered.startswith("elastic run takes the fastest layout on all nodes that it has, ")
    assert ": dp_shard=6,cp=2,tp=2,zero_stage=1, " in entered
    assert kept == idle and "without a part in dp_shard=6,cp=2,tp=2," in idle
