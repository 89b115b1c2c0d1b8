"""`elastic plan` on the command line: what it prints, as data and for people, and what it refuses
in one line."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.api.planning import model_source
from elastic.api.planning.model_source import OF_JOB, OWN_POOLS, of_model
from elastic.api.planning.plan_nodes import of_asked, of_pool
from elastic.api.planning.quantities import gpus_of
from elastic.api.planning.query import Query, notes_of
from elastic.cli.command_line import main
from elastic.config.hardware import PLACE
from elastic.config.pool_checks import fed
from elastic.planner.offers import Aim
from elastic.types import Job, Pool

SMALL = ("--model", "gpt2-124m", "--top", "2")
ON_8 = (*SMALL, "--gpus", "H100:8")


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path))


def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(("plan", *words))
    out = capsys.readouterr()
    return code, out.out, out.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    code, out, err = called(capsys, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_offers(capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, *ON_8, "--tokens", "10B")
    assert data["pools"][0]["n_gpus"] == 8
    best, second = data["offers"]
    assert best["step_s"] <= second["step_s"]
    assert best["tokens_per_s"] == pytest.approx(524288 / best["step_s"])
    assert best["hours"] == pytest.approx(1e10 / best["tokens_per_s"] / 3600 / best["goodput"])
    assert best["usd"] == pytest.approx(best["hours"] * best["usd_per_h"])
    assert sum(best["seconds"].values()) == pytest.approx(best["step_s"])
    assert 0 < best["memory_bytes"] <= best["room_bytes"] == 80 << 30
    code, out, _ = called(capsys, *ON_8, "--tokens", "10B")
    assert code == 0
    first = out.splitlines()
    assert first[0].startswith(
        "gpt2-124m: 124 M parameters, sequences of 1024, 512 sequences = 524 k tokens a step"
    )
    assert f"best: {best['layout']}" in out
    assert "10 B tokens: " in out
    assert " of 80.0 GiB" in out
    assert "left out (the cost of" in out


def test_a_cheaper_purpose_and_a_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--gpus", "H100:32", "--batch", "64", "--tokens", "1B")
    fast = as_json(capsys, *words)["offers"][0]
    cheap = as_json(capsys, *words, "--purpose", "cheapest")["offers"][0]
    assert cheap["usd"] < fast["usd"]
    assert cheap["hours"] > fast["hours"]
    late = as_json(capsys, *words, "--within", f"{2 * fast['hours'] * 60:.1f}m")
    assert late["purpose"] == "deadline"
    assert late["offers"][0]["hours"] <= late["deadline_h"]


def test_a_layout_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, *ON_8, "--layout", "dp_shard=2,tp=2")
    assert {
        offer["layout"].split(",mi")[0].split(",ze")[0].split(",ac")[0] for offer in data["offers"]
    } == {"dp_shard=2,tp=2"}
    assert data["offers"][0]["warnings"][-1] == "4 of 8 GPUs idle: the layout asks for 4"
    assert "a free choice" in data["notes"][0]
    on_two = as_json(capsys, *SMALL, "--gpus", "H100:16", "--layout", "dp_shard=8")
    assert "the dollars are those of 8" in on_two["offers"][0]["warnings"][-1]
    assert on_two["offers"][0]["usd_per_h"] < 1.1 * on_two["pools"][0]["usd_per_node_h"]
    pinned = as_json(capsys, *ON_8, "--layout", "auto,tp=4")
    assert all("tp=4" in offer["layout"] for offer in pinned["offers"])


def test_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = called(capsys, *ON_8, "--explain", "2", "--png", str(tmp_path / "plan.png"))
    assert code == 0
    lines = out[out.index("offer 2: ") :].splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert lines[2].startswith("[P")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        *SMALL,
        "--tokens",
        "1B",
        "--what-if",
        "H100:8",
        "--what-if",
        "H100:8@spot",
        "--what-if",
        "A100:16",
    )
    rows = {row["choice"]: row for row in as_json(capsys, *words)["choices"]}
    assert rows["H100:8@spot"]["usd_per_mtoken"] < rows["H100:8"]["usd_per_mtoken"]
    assert rows["H100:8@spot"]["goodput"] < rows["H100:8"]["goodput"] <= 1
    assert [name for name, row in rows.items() if row["cheapest"]] == [
        min(rows, key=lambda name: rows[name]["usd"])
    ]
    code, out, _ = called(capsys, *words)
    assert code == 0
    assert sum("H100:8@spot" in line for line in out.splitlines()) == 1
    code, out, _ = called(capsys, "--model", "70b", "--what-if", "L4:1", "--what-if", "H100:64")
    assert code == 0
    assert "does not fit: no layout fits 1 x L4" in out


@pytest.mark.slow
def test_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--gpus", "A100", "--scaling", "--efficiency", "0.8")
    data = as_json(capsys, *words)
    curve = data["curve"]
    assert [row["n_gpus"] for row in curve] == [8 * 2**n for n in range(len(curve))]
    assert curve[-1]["efficiency"] < 0.8 <= curve[-2]["efficiency"]
    assert data["useful_gpus"] == curve[-2]["n_gpus"]
    assert f"up to {data['useful_gpus']} GPUs" in called(capsys, *words)[1]
    to_16 = as_json(capsys, *SMALL, "--gpus", "A100:16", "--scaling", "--efficiency", "0.01")[
        "curve"
    ]
    assert [row["n_gpus"] for row in to_16] == [8, 16]


def test_how_many_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--tokens", "10B", "--within", "40m", "--gpus", "H100,A100")
    data = as_json(capsys, *words)
    h100, a100 = data["kinds"]
    assert h100["hours"] <= 2 / 3 and a100["hours"] <= 2 / 3
    assert h100["n_gpus"] < a100["n_gpus"]
    one_less = f"H100:{h100['n_gpus'] - 8}"
    code, _, err = called(capsys, *SMALL, "--tokens", "10B", "--within", "40m", "--gpus", one_less)
    assert code == 2
    assert "10 B tokens within 40 min" in err
    assert [row["cheapest"] for row in data["kinds"]] == [
        h100["usd"] < a100["usd"],
        a100["usd"] < h100["usd"],
    ]
    assert "<- cheapest" in called(capsys, *words)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "JOB, --script or --model is missing"),
        (("--script", "train.py", "--model", "8b"), "--script and --model are two ways at once"),
        (("--model", "8b"), "--model needs nodes"),
        (("jobs/gpt2_124m", "--model", "8b"), "JOB and --model are two ways at once"),
        (
            ("--model", "lama3", "--gpus", "H100:8"),
            "--model lama3: no such model in the table; did you mean",
        ),
        ((*SMALL, "--gpus", "H1000:8"), "unknown GPU 'H1000'; did you mean"),
        ((*SMALL, "--gpus", "H100"), "how many? give H100:64"),
        ((*SMALL, "--what-if", "H100"), "how many? as in H100:64"),
        ((*SMALL, "--gpus", "H100,A100", "--scaling"), "--scaling looks at one kind of GPU"),
        ((*SMALL, "--scaling"), "--scaling needs a kind of GPU"),
        ((*ON_8, "--tokens", "5X"), "--tokens 5X: it must be a number of tokens"),
        ((*ON_8, "--within", "3years", "--tokens", "1B"), "--within 3years: it must be a duration"),
        ((*ON_8, "--within", "3w"), "for how many tokens?"),
        ((*ON_8, "--purpose", "deadline"), "--purpose deadline: until when?"),
        ((*ON_8, "--explain", "9"), "--explain 9: there are 2 offers"),
        (
            (*ON_8, "--layout", "dp_shard=16"),
            "layout 'dp_shard=16': it needs 16 GPUs, but there are 8",
        ),
        (
            (*SMALL, "--gpus", "H100:16", "--layout", "tp=12"),
            "tp x cp = 12, but the nodes have 8 GPUs",
        ),
        ((*ON_8, "--layout", "tp=8"), "tp must divide 12"),
        ((*ON_8, "--layout", "dp=8"), "'dp' is not an axis"),
        (
            (*SMALL, "--gpus", "H100:16", "--layout", "pp=16"),
            "16 pipeline stages, but the model has 12 blocks",
        ),
        (
            (*ON_8, "--batch", "4", "--layout", "dp_shard=8"),
            "8 data-parallel ranks, but a step has 4 samples",
        ),
        (
            (*ON_8, "--batch", "15", "--layout", "dp_shard=8,microbatch_size=1"),
            "no number of microbatches divides 15 samples",
        ),
        (
            (*ON_8, "--tokens", "100T", "--within", "1d"),
            "100 T tokens within 24.0 h: 8 x H100-80GB-SXM need",
        ),
        (
            (*SMALL, "--tokens", "1T", "--within", "1m", "--gpus", "H100"),
            "exclude each other at a step of 524,288 tokens",
        ),
        (("--model", "405b", "--gpus", "L4:8"), "alone takes at least"),
        ((*ON_8, "--png", "/dev/null/plan.png"), "--png /dev/null/plan.png: cannot be written"),
        (("jobs",), "jobs/job.yaml: no such file"),
        (("jobs/quickstart", "--nodes", "spot=9"), "the pool gives at most 2"),
        (("jobs/gpt2_124m", "--set", "precision=int3"), "--set precision: key 'precision'"),
        (("jobs/gpt2_124m", "--score", "rows.csv"), "JOB and --score are two questions"),
        (("jobs/quickstart", "--cluster", "nowhere.yaml"), "nowhere.yaml: no such file"),
    ],
)
def test_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], what: str
) -> None:
    code, out, err = called(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("elastic: ")
    assert err.count("\n") == 1
    assert what in err


@pytest.mark.parametrize(
    "words",
    [
        ("--top", "0"),
        ("--efficiency", "80"),
        ("--purpose", "best"),
        ("--batch", "-1"),
        ("--batch", "9" * 14),
    ],
)
def test_values_that_argparse_refuses(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(("plan", *ON_8, *words))
    assert caught.value.code == 2
    assert "see elastic plan --help" in capsys.readouterr().err


def test_a_jobs_own_layout_is_planned_as_elastic_run_takes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not with a ZeRO stage or a microbatch that the planner likes better; where that does not fit,
    it says so and mends it."""
    quickstart, zero = "jobs/quickstart", "dp_shard=2,zero_stage=2"
    assert [offer["layout"] for offer in as_json(capsys, quickstart)["offers"]] == [
        "dp_shard=3,tp=2"
    ]
    assert as_json(capsys, quickstart, "--layout", zero)["offers"][0]["layout"] == zero
    subject = replace(of_model("8b", 64).with_layout("dp_shard=8"), literal=True)
    found = Query(subject, Aim()).offers([of_asked(gpus_of("H100:8")[0])])
    assert "GiB per GPU" in found.rejected["as it is written"]
    assert all(offer.layout.microbatch_size for offer in found.best)


def test_pools_of_a_cluster_file_called_as_the_default_ones_are_the_files() -> None:
    """`elastic init` calls them so too."""
    pool = Pool("spot", "L40S", 4, "spot", 5.0, 0, 2)
    subject = replace(of_model("8b", 64), pools=(pool,), notes=(OWN_POOLS,))
    assert OWN_POOLS in notes_of(subject, [of_pool(pool, 2, OF_JOB)])
    assert OWN_POOLS not in notes_of(subject, [of_pool(pool, 2, "table of 2026-11-22")])


def test_a_step_that_feeds_fewer_ranks_than_there_are_workers_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ("jobs/quickstart", "--layout", "auto", "--set", "global_batch=3")
    told = [note for note in as_json(capsys, *few)["notes"] if "(global_batch)" in note]
    assert len(told) == 1 and "a step has 3 samples (global_batch), the pools up to 6 w" in told[0]
    for enough in ("global_batch=6", "max_workers=3"):
        notes = as_json(capsys, *few, "--set", enough)["notes"]
        assert not any("(global_batch)" in note for note in notes)
    assert not fed(Job(global_batch=2, layout="dp_shard=2"), 4), "it is asked for"


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_a_cluster_file_is_read_once(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another one a moment later."""
    reader, seen = importlib.import_module("elastic.config.clusters.load_cluster"), list[str]()
    text_of = reader.text_of
    monkeypatch.setattr(reader, "text_of", lambda *asked: seen.append("read") or text_of(*asked))
    few = [
        "--set",
        "steps=3000",
        "--set",
        "budget_usd=100",
        "--cluster",
        "cluster_configs/laptop.yaml",
    ]
    more = ["--start-times", "1", "--compare", "on-demand"] if verb == "simulate" else []
    assert main([verb, "jobs/quickstart", *few, *more]) == 0
    assert (seen, capsys.readouterr().err) == (["read"], "")


def test_a_cluster_file_is_read_before_a_model_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*arguments: Any, **more: Any) -> None:
        raise AssertionError("built")

    monkeypatch.setattr(model_source, "of_job", built)
    code, out, err = called(capsys, "jobs/quickstart", "--cluster", "nowhere.yaml")
    assert (code, out, err.count("\n")) == (2, "", 1) and "nowhere.yaml: no such file" in err
