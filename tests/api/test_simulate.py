"""`elastic simulate` as it is typed: what it answers, and what it says of wrong input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli.calls import as_json, called
from support.places import PROGRAMS, ROOT

from elastic.api.simulate import StepTimes
from elastic.types import Layout, Plan, WorkerId

JOB = str(ROOT / "jobs" / "quickstart")


def pools_of(**nodes: int) -> str:
    """Pools of nodes with two GPUs, by their market."""
    each = (
        f"{{name: {name}, market_type: {name}, gpus_per_node: 2, usd_per_node_h: 1, max_nodes: {n}}}"
        for name, n in nodes.items()
    )
    return f"pools=[{', '.join(each)}]"


ONE_OF_EACH = pools_of(**{"spot": 1, "on-demand": 1})


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two nodes, then one, then none, for twenty minutes each."""
    path = tmp_path / "spot.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 1200}, "data": [2, 2, 1, 0, 2, 1]}))
    return str(path)


def words(trace: str, *more: str) -> list[str]:
    return [
        "simulate", JOB, "--set", "steps=3000", "--set", "budget_usd=100", "--trace", trace,
        "--start-times", "1", *more,
    ]  # fmt: skip


def test_it_says_dollars_time_and_misses_of_each_policy(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = as_json(capsys, *words(trace, "--compare", "on-demand,bound", "--deadline", "4h"))
    assert list(data["policies"]) == ["elastic", "on-demand", "bound"]
    assert (data["deadline_h"], data["starts"], data["nodes"], data["steps"]) == (4.0, 1, 2, 3000)
    assert data["traces"] == {"spot": {"name": "spot", "share": 0.6667, "days": 0.08}}
    own = data["policies"]["elastic"]
    assert own["deadline_misses"] == 0 and own["cost_vs_bound"]["median"] >= 1
    assert own["cost_vs_on_demand"]["median"] < 1 < own["wall_h"]["median"] * 10
    assert data["policies"]["on-demand"]["cost_vs_on_demand"]["median"] == 1
    assert any("--calibrate" in note for note in data["notes"])


def test_a_trace_says_what_nodes_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a pool that says no price."""
    path = tmp_path / "spot.csv"
    levels = ((0, 2), (2400, 1), (3600, 0), (4800, 2), (6000, 1), (7200, 1))
    path.write_text("at_s,nodes,usd_per_node_h\n" + "".join(f"{s},{n},3\n" for s, n in levels))

    def answered(usd: float) -> dict[str, Any]:
        pool = f"{{name: spot, market_type: spot, gpus_per_node: 2, usd_per_node_h: {usd}, "
        few = ("--compare", "on-demand,greedy,bound", "--deadline", "4h")
        return as_json(capsys, *words(str(path), *few, "--set", f"pools=[{pool}max_nodes: 2}}]"))

    as_the_pool, *others = answered(3), answered(10), answered(0)
    for other in others:
        assert other["policies"] == as_the_pool["policies"]
        assert "pool spot: a node costs what its trace says, $3" in "".join(other["notes"])
    assert as_the_pool["policies"]["elastic"]["cost_vs_bound"]["median"] >= 1


def test_runs_that_the_budget_ends_are_told(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, *words(trace), "--set", "budget_usd=0.2")
    (note,) = [note for note in data["notes"] if "budget_usd" in note]
    assert note.startswith("1 of 1 starts end before the job is done, since its budget_usd of $0.2")


def test_a_plan_names_the_budget_that_ends_its_starts(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--set", "steps=3000", "--set", "budget_usd=0.2", "--trace", trace]
    code, out, _ = called(capsys, "plan", JOB, *few)
    (line,) = (line for line in out.splitlines() if line.startswith("on these traces: "))
    assert code == 0 and "12 of 12 starts end at the budget of $0.20 before the job" in line
    assert "deadline" not in line and "dollars and days are those until then" in out


def test_what_is_not_known_is_no_number_and_has_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """A bound of many nodes, and what they cost on demand."""
    few = ("--set", pools_of(spot=65), "--set", "steps=300", "--compare", "on-demand,bound")
    asked = ("simulate", JOB, *few, "--start-times", "1")
    code, out, err = called(capsys, *asked, "--json")
    assert code == 0, err
    data = json.loads(out, parse_constant=pytest.fail)
    assert [one["cost_usd"] is None for one in data["policies"].values()] == [False, True, True]
    assert data["policies"]["elastic"]["cost_vs_on_demand"] is None
    notes = "\n".join(data["notes"])
    assert "bound: not computed above 64 nodes; the job has 65" in notes
    assert "what nodes as those of spot cost on demand is not known" in notes


def test_validations_take_their_time(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As many forward passes as a step has samples, behind each: a third of it."""

    def hours_of(*keys: str) -> float:
        more = [word for key in keys for word in ("--set", key)]
        return as_json(capsys, *words(trace, "--compare", "on-demand", *more))["ideal_h"]

    without, validated = hours_of("eval_every=0"), hours_of("eval_every=1", "eval_samples=24")
    assert validated == pytest.approx(4 / 3 * without, rel=0.02)


def test_its_table_and_its_picture(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "run.png"
    code, out, _ = called(capsys, *words(trace, "--compare", "greedy", "--png", str(picture)))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if "$" in line] == ["elastic", "greedy"]
    assert "spot: spot, 67% there on average" in out
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in out


def test_a_plan_has_it_in_one_line(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(
        capsys, "plan", JOB, "--set", "steps=3000", "--set", "budget_usd=100", "--trace", trace
    )
    assert code == 0
    (line,) = (line for line in out.splitlines() if line.startswith("on these traces: "))
    assert "(p95 $" in line and "on demand $" in line and "starts" not in line
    assert "--calibrate RUN takes those of a run" in out.partition("on these traces: ")[2]
    validations = "validations, of at most 240 samples every 65 steps (eval_samples, eval_every)"
    assert f"note: {validations}, make it 5% longer" in out


def test_a_script_is_simulated_as_its_plan_is(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in one line of its plan."""
    pool = "{name: spot, market_type: spot, usd_per_node_h: 1.2, max_nodes: 2}"
    keys = ["--set", "steps=300000", "--set", "budget_usd=100", "--set", f"pools=[{pool}]"]
    script = ["--script", str(PROGRAMS / "loop_tiny.py"), *keys]
    market = ["--trace", trace]
    data = as_json(capsys, "simulate", *script, *market, "--start-times", "1")
    assert (data["job"], data["steps"], data["nodes"]) == ("loop_tiny", 300000, 2)
    assert data["policies"]["elastic"]["deadline_misses"] == 0
    code, out, _ = called(capsys, "plan", *script, *market)
    assert code == 0 and "\non these traces: " in out
    code, _, err = called(capsys, "simulate", "--trace", trace)
    assert (code, "simulate: JOB or --script is missing" in err) == (2, True)


def test_markets_are_made_up_where_no_trace_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["simulate", JOB, "--set", "steps=3000", "--start-times", "1", "--compare", "greedy"]
    first, again = (as_json(capsys, *few) for _ in range(2))
    assert first == again
    assert any("no --trace: markets are made up" in note for note in first["notes"])
    assert as_json(capsys, *few, "--seed", "1")["traces"] != first["traces"]


def test_a_run_of_a_few_steps_without_a_deadline_is_simulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is over before nodes have started, so that what counts is their start."""
    few = ["simulate", JOB, "--set", "steps=20", "--start-times", "1", "--compare", "on-demand"]
    data = as_json(capsys, *few)
    assert data["deadline_h"] is None
    assert all(one["deadline_misses"] == 0 for one in data["policies"].values())


def test_others_like_a_trace(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["simulate", JOB, "--set", "steps=3000", "--start-times", "1", "--compare", "greedy"]
    data = as_json(capsys, *few, "--fit", trace)
    assert data["traces"]["spot"]["name"] == "like spot"
    assert set(data["fit"]) == {
        "share", "share_made", "changes_per_day", "changes_per_day_made",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--compare", "gready"], "no policy 'gready'; there are elastic"),
        (["--deadline", "1h", "--set", "steps=300000"], "cannot be met even on demand"),
        (["--deadline", "0"], "--deadline 0: it must be a duration"),
        (["--set", "steps=3"], "its tick of 1200 s is longer than the run"),
        (["--fit", "TRACE"], "--trace and --fit are two ways at once"),
        (["--policy", "nowhere:at_all"], "give module:function"),
        (["--calibrate", "no-such-run"], "no run 'no-such-run'"),
        (["--png", "/dev/null/at/all.png"], "cannot be written"),
        (["--set", "steps=0"], "steps"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    more: list[str], said: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [trace if word == "TRACE" else word for word in more]
    code, _, err = called(capsys, *words(trace, "--compare", "greedy", *given))
    assert (code, err.count("\n")) == (2, 1) and said in err


def test_a_folder_must_have_a_trace_for_each_pool(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "zones"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.json").write_text(Path(trace).read_text())
    code, _, err = called(capsys, *words(str(folder)))
    assert code == 2 and "3 traces for 1 spot pools (spot)" in err
    code, _, err = called(capsys, "simulate", JOB, "--fit", str(folder))
    assert (code, err.count("\n")) == (2, 1) and "a folder of 3 traces; give one file" in err
    (folder / "spot.json").write_text(Path(trace).read_text())
    assert as_json(capsys, *words(str(folder), "--compare", "greedy"))["traces"]["spot"]


def test_steps_take_what_was_measured_then_what_was_predicted() -> None:
    ranks = (WorkerId("a", 0), WorkerId("a", 1))
    plan = Plan(1, Layout(dp_shard=2), ranks, (1, 1), (4,), model_step_s=3.0)
    measured = {(0, "dp_shard=2"): 5.0, (1, "dp_shard=2"): 7.0}
    assert StepTimes(1.0, 4, measured, 2.0)(plan) == 5.0
    assert StepTimes(1.0, 4, measured, 2.0, (1.0,))(replace(plan, phase=1)) == 7.0
    assert StepTimes(1.0, 4, measured, validating=(0.2,))(plan) == 6.0
    assert StepTimes(1.0, 4, {}, 2.0)(plan) == 6.0
    unknown = Plan(1, Layout(dp_shard=2), ranks, (1, 1), (4,))
    assert StepTimes(1.0, 4)(unknown) == 2.0


def test_who_takes_more_on_demand_nodes_than_there_are_is_told(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job has one node on demand, and two at once on spot."""

    def told(*more: str) -> list[str]:
        notes = as_json(capsys, *words(trace, "--deadline", "9h", *more))["notes"]
        return [note for note in notes if "as published" in note]

    assert told("--compare", "greedy,bound") == [
        "bound, greedy: as published they take all 2 nodes on demand, and the cluster has 1 such; "
        "elastic alone keeps to that"
    ]
    assert told("--compare", "no-replicas") == []


def test_hours_are_those_on_all_nodes_also_where_they_do_no_more_than_one(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of one sample: the second node has nothing to do. All nodes on demand are paid twice
    for it; the least that the job can cost is that of one."""

    def told(nodes: int) -> tuple[float, float, float, float]:
        named = "name: spot, market_type: spot, instance_type: m5.2xlarge"
        pool = f"{{{named}, usd_per_node_h: 1.2, max_nodes: {nodes}}}"
        keys = ("steps=3000000", "global_batch=1", "budget_usd=1e6", f"pools=[{pool}]")
        data = as_json(
            capsys, "simulate", "--script", str(PROGRAMS / "loop_tiny.py"),
            *(word for key in keys for word in ("--set", key)),
            "--trace", trace, "--start-times", "1", "--compare", "on-demand,bound",
        )  # fmt: skip
        fixed, bound = data["policies"]["on-demand"], data["policies"]["bound"]
        cost = [one["cost_usd"]["median"] for one in (fixed, bound)]
        return data["ideal_h"], fixed["wall_h"]["median"], cost[0], cost[1]

    (alone_h, wall_h, usd, least), (hours, both_h, both_usd, both_least) = told(1), told(2)
    assert hours == pytest.approx(alone_h, rel=0.05)
    assert both_h == pytest.approx(wall_h, rel=0.05) and both_usd == pytest.approx(2 * usd, rel=0.1)
    assert both_least <= least


def test_a_cluster_file_says_the_floor_as_in_a_run(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    laptop = str(ROOT / "cluster_configs" / "laptop.yaml")
    few = words(trace, "--cluster", laptop, "--compare", "on-demand")
    of = {
        said: as_json(capsys, *few, *said.split())["policies"]["elastic"]
        for said in ("", "--set on_demand_floor=1", "--set on_demand_floor=auto")
    }
    assert of[""] == of["--set on_demand_floor=1"] != of["--set on_demand_floor=auto"]


def test_the_head_is_on_every_bill(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = words(trace, "--compare", "on-demand,bound", "--deadline", "4h")
    without = as_json(capsys, *few)["policies"]
    priced = as_json(capsys, *few, "--set", "head_usd_per_h=0.5")["policies"]
    more = {
        name: priced[name]["cost_usd"]["median"] - without[name]["cost_usd"]["median"]
        for name in priced
    }
    for name in ("elastic", "on-demand"):
        assert more[name] == pytest.approx(0.5 * priced[name]["wall_h"]["median"], abs=1e-3)
    assert 0 < more["bound"] <= more["elastic"]
    data = as_json(capsys, *words(trace), "--set", "head_usd_per_h=50", "--set", "budget_usd=5")
    assert any("1 of 1 starts end before the job is done" in note for note in data["notes"])


def test_nodes_on_demand_count_where_a_run_has_them_at_once(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other policies do the same work, on as many nodes as the spot pool has."""
    few = words(trace, "--compare", "on-demand", "--set", ONE_OF_EACH)
    fastest = as_json(capsys, *few)
    cheapest = as_json(capsys, *few, "--set", "purpose=cheapest")
    assert (fastest["nodes"], cheapest["nodes"]) == (2, 1)
    assert fastest["ideal_h"] < cheapest["ideal_h"]
    of = [one["policies"]["on-demand"]["cost_usd"] for one in (fastest, cheapest)]
    assert of[0] == of[1]
    both = as_json(capsys, *few, "--set", "purpose=cheapest", "--set", "min_workers=4")
    assert (both["nodes"], both["ideal_h"]) == (2, fastest["ideal_h"])


@pytest.mark.slow
@pytest.mark.parametrize("purpose", ["fastest", "deadline"])
def test_a_deadline_that_all_nodes_meet_is_simulated(
    trace: str, capsys: pytest.CaptureFixture[str], purpose: str
) -> None:
    """Spot alone is too slow for it; so are the other policies, which take as many nodes."""
    keys = ["--set", pools_of(spot=1, **{"on-demand": 3}), "--set", "steps=30000"]
    few = words(trace, *keys, "--set", f"purpose={purpose}", "--set", "deadline_h=6")
    data = as_json(capsys, *few)
    misses = {name: one["deadline_misses"] for name, one in data["policies"].items()}
    assert misses == {name: int(name != "elastic") for name in misses} and len(misses) == 6
    assert any("they miss the deadline, whatever the market" in note for note in data["notes"])
    assert (
        "h cannot be met even on all nodes, which takes "
        in called(capsys, *few, "--deadline", "1h")[2]
    )


def test_nodes_stand_by_also_for_the_smallest_layout_that_is_named(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four workers, and the spot pool has two."""
    keys = [ONE_OF_EACH, "layout={4: dp_shard=4}", "purpose=cheapest"]
    few = words(trace, "--compare", "greedy", *(word for key in keys for word in ("--set", key)))
    assert as_json(capsys, *few)["nodes"] == 2
