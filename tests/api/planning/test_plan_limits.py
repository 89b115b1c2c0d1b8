"""What `elastic plan` may not exceed, and what it says of choices that are not alike: deadline,
budget, min_workers, layouts, clouds and prices of different days."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT

from elastic.cli.command_line import main
from elastic.config.hardware import PLACE

SMALL = ("--model", "gpt2-124m", "--top", "2")
ON_8 = (*SMALL, "--gpus", "H100:8")
PROGRAM = (ROOT / "jobs" / "quickstart" / "program.py").read_text()
POOLS = "pools: [{name: a, accelerator_type: H100, gpus_per_node: 8, max_nodes: 8, market_type: owned}]\n"


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """With a layout for 16 workers and more, and none for fewer."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    (folder / "job.yaml").write_text(
        f"steps: 1000\nglobal_batch: 512\nprecision: bfloat16\nlayout: {{16: 'dp_shard=8,tp=2'}}\n{POOLS}"
    )
    return folder


def called(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(("plan", *map(str, words)))
    out = capsys.readouterr()
    return code, out.out, out.err


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    code, out, err = called(capsys, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    code, out, err = called(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


# ------------------------------------------------------------------------------------ side by side


@pytest.mark.slow
def test_choices_with_the_jobs_own_layout_and_without_one_are_told_apart(
    capsys: pytest.CaptureFixture[str], job: Path
) -> None:
    words = (job, "--what-if", "H100:8", "--what-if", "H100:16")
    rows = as_json(capsys, *words)["choices"]
    assert [row["own"] for row in rows] == [False, True]
    code, out, _ = called(capsys, *words)
    assert code == 0
    small, large = (line for line in out.splitlines() if line.startswith("H100:"))
    assert small.endswith("(a free choice)") and large.endswith("dp_shard=8,tp=2  (the job's)")
    assert "note: the job names no layout for H100:8: a free choice, as in elastic run; of" in out
    alike = called(capsys, job, "--what-if", "H100:16", "--what-if", "H200:16")[1]
    assert "the job names no layout" not in alike and "(the job's)" not in alike
    freely = called(capsys, job, "--gpus", "H100:8")[1]
    assert "asked for:" not in freely and "best: " in freely


def test_a_deadline_and_a_budget_count_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--tokens", "10B", "--what-if", "H100:8@spot", "--what-if", "H100:64")
    slow, fast = as_json(capsys, *words)["choices"]
    assert slow["cheapest"] and slow["usd"] < fast["usd"] and slow["hours"] > fast["hours"]
    within = f"{(slow['hours'] + fast['hours']) / 2 * 60:.1f}m"
    late, made = as_json(capsys, *words, "--within", within)["choices"]
    assert (late["in_time"], late["cheapest"], made["in_time"]) == (False, False, True)
    assert made["cheapest"] and made["fastest"]
    out = called(capsys, *words, "--within", within, "--budget", str(slow["usd"]))[1]
    assert "10 B tokens within " in out and " for $" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("H100:")}
    assert "not in time" in lines["H100:8@spot"] and "over the budget" not in lines["H100:8@spot"]
    assert "fastest, cheapest, over the budget" in lines["H100:64"]


def test_the_answer_says_that_it_is_over_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--tokens", "10B", "--within", "1d", "--gpus", "H100,A100-80GB")
    (best,) = (row for row in as_json(capsys, *words)["kinds"] if row["cheapest"])
    for usd, said in ((best["usd"] + 1, "cheapest: "), (best["usd"] / 2, "not for $")):
        out = called(capsys, *words, "--budget", str(usd))[1]
        assert out.splitlines()[2].startswith(said) and "cheapest: " in out


def test_clouds_and_days_that_differ_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--what-if", "a3-highgpu-8g:8", "--what-if", "p5.48xlarge:8")
    notes = [line for line in called(capsys, *words)[1].splitlines() if line.startswith("note: ")]
    assert "note: nodes of several clouds are compared, aws and gcp" in notes
    assert any("prices are of different days, 2024-11-07 and 2026-11-22;" in n for n in notes)
    google = called(capsys, *SMALL, "--gpus", "a3-highgpu-8g:8")[1]
    assert "note: prices are those of the dated table of 2024-11-07;" in google
    assert "several clouds" not in google


# ------------------------------------------------------------------------------------ limits


@pytest.mark.slow
def test_a_deadline_that_is_missed_names_the_nodes_that_would_make_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*SMALL, "--tokens", "10B", "--within", "40m")
    err = refused(capsys, *words, "--gpus", "H100:8")
    (needed,) = as_json(capsys, *words, "--gpus", "H100")["kinds"]
    assert "8 x H100-80GB-SXM need " in err
    assert f"; {needed['n_gpus']} x H100-80GB-SXM make it in " in err
    assert called(capsys, *words, "--gpus", f"H100:{needed['n_gpus']}")[0] == 0


@pytest.mark.slow
def test_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--gpus", "H100:64", "--tokens", "10B")
    fast, *_ = as_json(capsys, *words)["offers"]
    cheap, *_ = as_json(capsys, *words, "--purpose", "cheapest")["offers"]
    assert cheap["usd"] < fast["usd"]
    within = as_json(capsys, *words, "--budget", (cheap["usd"] + fast["usd"]) / 2)
    assert within["purpose"] == "cheapest" and within["offers"][0]["n"] == 1
    assert all(offer["usd"] <= within["budget_usd"] for offer in within["offers"])
    ample = as_json(capsys, *words, "--budget", "200k")
    assert (ample["budget_usd"], ample["offers"][0]) == (200_000, fast)
    err = refused(capsys, *words, "--budget", "1")
    assert "10 B tokens for $1.00: the cheapest way on 64 x H100-80GB-SXM costs $" in err
    assert "; that budget buys " in err
    out = called(capsys, *SMALL, "--gpus", "H100:64", "--budget", "$1.5M")[1]
    assert "$1.5 M buys " in out and " tokens in " in out
    assert "--budget much: it must be dollars in all" in refused(capsys, *words, "--budget", "much")


@pytest.mark.slow
def test_offers_are_within_the_deadline_and_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """The fewer GPUs, the cheaper and the later."""
    words = ("--model", "gpt2-124m", "--gpus", "H100:64", "--tokens", "10B")
    fast, *_ = as_json(capsys, *words)["offers"]
    cheap, *_ = as_json(capsys, *words, "--purpose", "cheapest")["offers"]
    hours = (cheap["hours"] + fast["hours"]) / 2
    within = ("--within", f"{hours * 60:.3f}m")
    best, *_ = as_json(capsys, *words, *within)["offers"]
    assert cheap["usd"] < best["usd"] and best["hours"] <= hours < cheap["hours"]
    for more in ((), ("--purpose", "cheapest"), ("--purpose", "fastest")):
        data = as_json(capsys, *words, *within, *more, "--budget", best["usd"] * 1.001)
        assert min(offer["usd"] for offer in data["offers"]) == best["usd"]
        assert all(offer["hours"] <= hours for offer in data["offers"])
        assert all(offer["usd"] <= data["budget_usd"] for offer in data["offers"])
        err = refused(capsys, *words, *within, *more, "--budget", best["usd"] * 0.999)
        assert "on 64 x H100-80GB-SXM the cheapest in time costs $" in err
        assert ", the fastest for that budget takes " in err and "take fewer tokens, " in err
    err = refused(capsys, *words, *within, "--budget", cheap["usd"] / 2)
    assert "the cheapest in time costs $" in err and ", the cheapest at all costs $" in err
    err = refused(capsys, *words, "--within", "1m", "--budget", cheap["usd"])
    assert "64 x H100-80GB-SXM need " in err and "more time" in err


def test_a_jobs_own_budget_is_a_note(capsys: pytest.CaptureFixture[str], job: Path) -> None:
    words = (job, "--gpus", "H100:16", "--set", "max_workers=8")
    usd = as_json(capsys, *words)["offers"][0]["usd"]
    notes = as_json(capsys, *words, "--set", f"budget_usd={usd / 4}")["notes"]
    assert any(
        "the job's budget_usd of $" in n and n.endswith("ends the run at 25%") for n in notes
    )
    assert "max_workers=8: elastic run uses no more of these 16 GPUs" in notes
    assert not any("budget_usd" in n for n in as_json(capsys, *words)["notes"])


@pytest.mark.slow
def test_the_head_is_among_the_dollars(capsys: pytest.CaptureFixture[str], job: Path) -> None:
    """Also where nodes cost nothing."""
    words = (job, "--layout", "auto", "--gpus", "H100:16")
    without = as_json(capsys, *words)["offers"][0]["usd_per_h"]
    priced = as_json(capsys, *words, "--set", "head_usd_per_h=5")["offers"][0]
    assert priced["usd_per_h"] == pytest.approx(without + 5)
    assert priced["usd"] == pytest.approx(priced["usd_per_h"] * priced["hours"])
    owned = (job, "--layout", "auto", "--set", "head_usd_per_h=5")
    assert as_json(capsys, *owned)["offers"][0]["usd_per_h"] == 5


def test_no_more_nodes_are_planned_than_a_run_pays_for(
    capsys: pytest.CaptureFixture[str], job: Path
) -> None:
    bound = as_json(capsys, job, "--layout", "auto", "--gpus", "H100:16", "--set", "max_nodes=1")
    assert "max_nodes=1: elastic run pays for no more of these 2 nodes" in bound["notes"]
    assert bound["offers"][0]["n_gpus"] <= 8 and bound["pools"][0]["n_gpus"] == 8


@pytest.mark.slow
def test_a_deadline_and_a_budget_are_those_of_all_phases(
    capsys: pytest.CaptureFixture[str], job: Path
) -> None:
    """None of the phases alone is over them."""
    phased = ("--layout", "auto", "--set", "phases=[{from_step: 500, global_batch: 256}]")
    words = (job, *phased, "--gpus", "H100:16")

    def over(data: Any, key: str) -> float:
        return float((max(row[key] for row in data["phases"]) + data["all_phases"][key]) / 2)

    cheapest = (*words, "--purpose", "cheapest")
    usd = over(as_json(capsys, *cheapest), "usd")
    err = refused(capsys, *cheapest, "--budget", usd)
    assert "the cheapest way on 16 x H100" in err and err.endswith("steps or a larger budget\n")
    notes = as_json(capsys, *cheapest, "--set", f"budget_usd={usd}")["notes"]
    assert any("the job's budget_usd of $" in note for note in notes)
    deadline = ("--set", f"deadline_h={over(as_json(capsys, *words), 'hours')}")
    assert "16 x H100-80GB-SXM need " in refused(capsys, *words, *deadline)
    (row,) = as_json(capsys, job, *phased, *deadline, "--what-if", "H100:16")["choices"]
    assert row["in_time"] is False


@pytest.mark.slow
def test_fewer_gpus_than_min_workers_are_no_choice(
    capsys: pytest.CaptureFixture[str], job: Path
) -> None:
    least = ("--set", "min_workers=16")
    err = refused(capsys, job, "--gpus", "H100:8", *least)
    assert (
        "these nodes have 8 workers, the job needs 16 (min_workers): elastic run would wait" in err
    )
    small, large = as_json(capsys, job, "--what-if", "H100:8", "--what-if", "H100:16", *least)[
        "choices"
    ]
    assert small["layout"] is None and "have 8 workers" in small["why_not"] and large["layout"]
    words = (job, "--gpus", "H100:32", "--layout", "auto", "--purpose", "cheapest", "--top", "20")
    sizes = {offer["n_gpus"] for offer in as_json(capsys, *words)["offers"]}
    kept = {offer["n_gpus"] for offer in as_json(capsys, *words, *least)["offers"]}
    assert min(sizes) < 16 <= min(kept)


def test_what_does_not_fit_is_not_advised_to_take_as_many(
    capsys: pytest.CaptureFixture[str],
) -> None:
    err = refused(capsys, "--model", "8b", "--gpus", "H100:8", "--layout", "dp_replicate=8")
    assert "takes at least" not in err
    assert "its state of 120 GiB alone would fit, what else such a layout holds does not" in err
    assert "; a free choice fits: --layout auto, dp_shard=8" in err
    err = refused(capsys, "--model", "70b", "--gpus", "H100:8")
    assert (
        "takes at least 16 x H100-80GB-SXM; tried: 16 x H100-80GB-SXM are enough, with dp_" in err
    )


# ------------------------------------------------------------------------------------ purposes


@pytest.mark.slow
def test_a_job_says_its_purpose_in_the_words_of_the_plan(
    capsys: pytest.CaptureFixture[str], job: Path
) -> None:
    words = (job, "--gpus", "H100:16", "--layout", "auto")
    of = {
        said: as_json(capsys, *words, *(w for key in said.split() for w in ("--set", key)))["purpose"]
        for said in (
            "purpose=deadline deadline_h=5", "purpose=cheapest", "purpose=fastest deadline_h=5",
            "deadline_h=5", "seed=1",
        )
    }  # fmt: skip
    assert list(of.values()) == ["deadline", "cheapest", "fastest", "deadline", "fastest"]
    asked = (*words, "--set", "deadline_h=5", "--purpose", "deadline")
    assert as_json(capsys, *asked)["deadline_h"] == 5
    err = refused(capsys, *words, "--set", "purpose=deadline")
    assert "purpose: deadline: until when? give deadline_h, in hours" in err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((*SMALL, "--what-if", "H100:8", "--explain"), "--explain shows an offer on given nodes"),
        (
            (*SMALL, "--gpus", "H100", "--scaling", "--png", "x.png"),
            "--png shows an offer on given",
        ),
        (
            (*SMALL, "--tokens", "1B", "--within", "1d", "--explain"),
            "--within without counts of GPUs",
        ),
        ((*SMALL, "--what-if", "H100:8", "--cluster", "x"), "--cluster and --what-if are two ways"),
        ((*SMALL, "--what-if", "H100:8", "--nodes", "a=1"), "--nodes and --what-if are two ways"),
        ((*SMALL, "--cloud", "aws", "--cluster", "x"), "--cloud and --cluster are two ways"),
    ],
)
def test_what_a_question_would_not_show_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], what: str
) -> None:
    assert what in refused(capsys, *words)


@pytest.mark.slow
def test_gpus_of_a_choice_that_its_layout_has_no_use_for_are_told(
    capsys: pytest.CaptureFixture[str], job: Path
) -> None:
    words = ("--set", "layout=dp_shard=2", "--what-if", "H100:8", "--what-if", "H100:16")
    notes = as_json(capsys, job, *words)["notes"]
    told = "14 of 16 GPUs stay idle: its layout uses 2, and the dollars are those of the nodes"
    assert [note for note in notes if note.startswith(f"H100:16: {told}")], notes
