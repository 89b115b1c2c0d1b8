"""Scores by hand on a small table, the rules by which its rows are read, and the published
measurements themselves."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT

from elastic.errors import SpecError
from elastic.planner.cost import memory
from elastic.planner.published import measurements
from elastic.planner.published.measurements import Case, cases
from elastic.planner.published.score import (
    Score,
    ScoreRow,
    constant_flop_per_s,
    quantile,
    ranks,
    score,
    spearman,
)
from elastic.types import Layout

ROW = {
    "id": "r1", "source": "s", "model": "llama3-8b", "params_b": "8.03", "layers": "32",
    "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256",
    "seq_len": "8192", "gpu": "H100-80GB-SXM", "gpus": "8", "gpus_per_node": "8", "tp": "1",
    "pp": "1", "micro_batch": "1", "global_batch": "8", "precision": "bf16",
    "activation_ckpt": "selective", "zero_stage": "fsdp2", "compile": "0",
    "tokens_per_s_per_gpu": "6000", "mem_gib_per_gpu": "", "fits": "1", "notes": "",
}  # fmt: skip


def row(**changes: str) -> dict[str, str]:
    return ROW | changes


def case(**changes: str) -> Case:
    return cases([row(**changes)])[0]


# --------------------------------------------------------------------------------- figures, by hand


def scored(*pairs: tuple[str, float, float, str], fits: tuple[bool, ...] = ()) -> Score:
    """(source, measured, predicted, tp) of each line; the constant baseline is off by twice as
    much."""
    lines = []
    for i, (source, measured, predicted, tp) in enumerate(pairs):
        one = case(
            source=source,
            tp=tp,
            tokens_per_s_per_gpu=str(measured),
            id=str(i),
            fits=str(int(fits[i])) if fits else "1",
        )
        error = abs(predicted / measured - 1)
        lines.append(ScoreRow(one, predicted, error, 2 * error, 0.1 * i if i < 3 else None, i != 1))
    return Score(tuple(lines), 9)


TABLE = (
    ("a", 100.0, 110.0, "1"),
    ("a", 200.0, 140.0, "2"),
    ("a", 50.0, 50.0, "4"),
    ("a", 150.0, 165.0, "8"),
    ("b", 80.0, 72.0, "1"),
)


def test_errors() -> None:
    found = scored(*TABLE).plain()  # errors 0.1, 0.3, 0, 0.1 of a, 0.1 of b
    assert (found["rows"], found["rows_timed"]) == (9, 5)
    assert found["median_abs_err"] == pytest.approx(0.1) and found["p90_abs_err"] == pytest.approx(
        0.3
    )
    assert found["source_mean_abs_err"] == pytest.approx((0.1 + 0.1) / 2)
    assert found["constant_mfu_median_abs_err"] == pytest.approx(0.2)
    assert found["constant_mfu_source_mean_abs_err"] == pytest.approx(0.2)
    assert (found["mem_rows"], found["mem_median_abs_err"]) == (3, pytest.approx(0.1))
    assert found["by_source"]["b"] == {"rows": 1, "median_abs_err": pytest.approx(0.1)}


def test_what_fits() -> None:
    found = scored(*TABLE, fits=(True, True, False, False, True)).plain()
    assert found["fits_table"] == {
        "fits_said_fits": 2,
        "fits_said_not": 1,
        "not_said_fits": 2,
        "not_said_not": 0,
    }
    assert found["fits_accuracy"] == 2 / 5


def test_rank_correlation() -> None:
    """Measured ranks 2, 4, 1, 3; predicted 2, 3, 1, 4: 1 - 6 (1 + 1) / (4 x 15)."""
    # b has one row
    assert scored(*TABLE).plain()["spearman_by_source"] == {"a": pytest.approx(1 - 6 * 2 / 60)}
    assert ranks([3.0, 1.0, 3.0]) == [2.5, 1.0, 2.5]
    assert spearman(scored(*[(s, m, 1.0, tp) for s, m, _, tp in TABLE]).lines) == 0.0


def test_regret_is_what_the_layout_that_is_predicted_fastest_loses() -> None:
    """Of a, tp=8 is predicted to be the fastest (165) and runs at 150 where tp=2 runs at 200."""
    found = scored(*TABLE).plain()
    assert found["choices"] == 1 and found["regret_median"] == found["regret_p90"] == pytest.approx(
        200 / 150 - 1
    )
    assert found["best_choice_within_5pct"] == 0.0
    near = scored(("a", 100.0, 120.0, "1"), ("a", 104.0, 110.0, "2")).plain()
    assert near["regret_median"] == pytest.approx(0.04) and near["best_choice_within_5pct"] == 1.0
    # measured twice
    assert scored(("a", 100.0, 120.0, "1"), ("a", 300.0, 110.0, "1")).plain()["choices"] == 0


def test_quantiles() -> None:
    assert (
        quantile([5.0, 1.0, 3.0], 0.5) == 3.0
        and quantile([float(i) for i in range(10)], 0.9) == 9.0
    )
    assert quantile([1.0], 0.9) == 1.0


def test_the_baseline_is_the_median_flop_rate_of_a_gpu_kind() -> None:
    some = cases([row(tokens_per_s_per_gpu=speed) for speed in ("1000", "3000", "2000", "")])
    flop = some[0].work.model.flop_per_token
    assert flop == pytest.approx(6 * 7.5e9, rel=0.01)  # without the embedding
    assert constant_flop_per_s(some) == {"H100-80GB-SXM": 2000 * flop}
    found = score([row(tokens_per_s_per_gpu=speed) for speed in ("1000", "3000", "2000")])
    assert [line.constant_error for line in found.lines] == pytest.approx([1.0, 1 / 3, 0.0])


def test_a_row_is_measured_against_its_own_cost() -> None:
    (line,) = score([row()]).lines
    one = line.case
    assert line.predicted == pytest.approx(8 * 8192 / one.cost().step_s / 8)
    assert line.error == pytest.approx(abs(line.predicted / 6000 - 1)) and line.memory_error is None
    assert score([row(gpu="")]).lines == ()  # says too little


# -------------------------------------------------------------------------------- how rows are read


def test_gated_and_tied_are_those_whose_parameters_come_nearest() -> None:
    assert case().work.model.n_params == pytest.approx(8.03e9, rel=1e-3)
    gpt = row(
        params_b="1.56",
        layers="48",
        hidden="1600",
        heads="25",
        kv_heads="",
        ffn="",
        vocab="50257",
        seq_len="1024",
    )
    found = measurements.decoder_of(
        gpt, 1024, "bfloat16", software="fsdp1"
    )  # GPT-2 XL: plain MLP, tied
    assert (found.gated, found.tied, found.ffn, found.kv_heads) == (False, True, 6400, 25)


def test_heads_that_are_not_said_are_128_wide_and_divide() -> None:
    assert (
        measurements.decoder_of(
            row(heads="", kv_heads=""), 8192, "bfloat16", software="fsdp2"
        ).heads
        == 32
    )
    assert measurements._heads(1000) == 5 and measurements._heads(64) == 1


def test_experts_are_said_in_the_notes() -> None:
    found = measurements.decoder_of(
        row(notes="128 experts top-8", params_b="30.5", layers="48", hidden="2048", kv_heads="4",
        ffn="768", vocab="151936"), 4096, "bfloat16", software="megatron-2024",
    )  # fmt: skip
    assert (found.experts, found.active, found.width) == (128, 8, 128)


def test_a_sequence_that_is_not_said_is_that_of_the_models_other_rows() -> None:
    assert cases([row(), row(seq_len="")])[1].tokens == 8192
    assert case(seq_len="").tokens == measurements.DEFAULT_SEQ


@pytest.mark.parametrize(
    ("said", "want"),
    [
        (
            {"pp": "4", "vpp": "5", "zero_stage": "1"},
            Layout(pp=4, dp_shard=2, schedule="interleaved1f1b", virtual_stages=5),
        ),
        ({"pp": "4", "vpp": "1", "zero_stage": "1"}, Layout(pp=4, dp_shard=2)),
        # more stages than GPUs are left
        ({"tp": "4", "pp": "16", "zero_stage": ""}, Layout(pp=2, tp=4)),
        ({"tp": "2", "cp": "2", "zero_stage": "0"}, Layout(dp_shard=2, cp=2, tp=2, zero_stage=0)),
        ({"dp_replicate": "2", "dp_shard": "4"}, Layout(dp_replicate=2, dp_shard=4, zero_stage=3)),
        ({"dp_replicate": "2", "dp_shard": "4", "zero_stage": "1"}, Layout(dp_shard=8)),  # one axis
        (
            {"activation_ckpt": "selective-2"},
            Layout(dp_shard=8, zero_stage=3, activation_checkpointing="selective"),
        ),
        (
            {"activation_ckpt": "full", "ep": "8"},
            Layout(dp_shard=8, ep=8, zero_stage=3, activation_checkpointing="full"),
        ),
    ],
)
def test_layouts(said: dict[str, str], want: Layout) -> None:
    stage = {"": 1, "0": 0, "1": 1}.get(said.get("zero_stage", "fsdp2"), 3)
    mode = "none" if "activation_ckpt" not in said else want.activation_checkpointing
    found = measurements.layout_of(row(activation_ckpt="") | said)
    assert found == replace(
        want, microbatch_size=1, zero_stage=stage, activation_checkpointing=mode
    )


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("bf16", "bfloat16"), ("fp8-cs", "float8"), ("bf16+float8-linear", "float8"), ("nvfp4",
        "float4"), ("fp16", "float16"), ("", "bfloat16"), ("bf16-true", "bfloat16"),
    ],
)  # fmt: skip
def test_precision_words(text: str, dtype: str) -> None:
    assert measurements.precision(text) == dtype


def test_pure_bfloat16_keeps_its_state_in_it() -> None:
    assert case(precision="bf16-true").work.state_bytes == case().work.state_bytes / 2


@pytest.mark.parametrize(
    ("arch", "said", "software"),
    [
        ("Volta", {}, "megatron-2022"),
        ("Turing", {"zero_stage": "3"}, "megatron-2022"),
        ("Ampere", {"tp": "8", "activation_ckpt": "full"}, "megatron-2022"),
        ("Ampere", {"tp": "1", "activation_ckpt": "full", "zero_stage": "3"}, "fsdp1"),
        ("Hopper", {"zero_stage": "3"}, "fsdp1"),
        ("Hopper", {"compile": "0"}, "fsdp2"),
        ("Hopper", {"compile": "1"}, "fsdp2-compiled"),
        ("Hopper", {"zero_stage": "1"}, "megatron-2024"),
        ("Hopper", {"zero_stage": "1", "notes": "container 25.09"}, "megatron-2024"),
        ("Hopper", {"zero_stage": "1", "notes": "container 26.06"}, "megatron-2026"),
    ],
)
def test_software_follows_from_what_was_used(
    arch: str, said: dict[str, str], software: str
) -> None:
    assert measurements.software_of(row(**said), arch) == software


def test_checkpointing_that_is_not_said_is_the_least_that_fits() -> None:
    sizes = [{"micro_batch": str(n), "global_batch": str(8 * n)} for n in (1, 3, 6)]
    found = [case(activation_ckpt="", seq_len="4096", **size).layout for size in sizes]
    assert [layout.activation_checkpointing for layout in found] == ["none", "selective", "full"]
    # never fits
    assert case(activation_ckpt="", micro_batch="999").layout.activation_checkpointing == "none"


def test_memory_counts_what_the_measuring_counts() -> None:
    plain, smi = case(), case(notes="nvidia-smi")
    held = sum(memory.parts(plain.work, plain.layout, plain.step).values())
    assert plain.predicted_bytes() == pytest.approx(measurements.RESERVED * held)
    assert smi.predicted_bytes() - plain.predicted_bytes() == measurements.CONTEXT_BYTES


def test_batches_are_whole_microbatches() -> None:
    assert case(micro_batch="2", global_batch="40").step.n_microbatches == 2  # 40 / 16 = 2.5
    assert case(global_batch="").step.global_batch == 8


def test_a_cell_that_is_no_number_is_named() -> None:
    with pytest.raises(SpecError, match="row r1: gpus must be a number, not 'many'"):
        cases([row(gpus="many")])


# --------------------------------------------------------------------------- published measurements

PUBLIC = Path(os.environ.get("ELASTIC_SHARED") or ROOT.parent / "shared") / "planner" / "public.csv"
NOISY = "bigscience-workshop"  # measurements of one layout differ by up to 44 % there


@cache
def public() -> dict[str, Any]:
    if not PUBLIC.exists():
        pytest.skip(f"the published measurements are not there: {PUBLIC} (set ELASTIC_SHARED)")
    return score(list(csv.DictReader(io.StringIO(PUBLIC.read_text(encoding="utf-8"))))).plain()


def test_published_throughput_is_predicted() -> None:
    found = public()
    assert found["rows_timed"] > 350
    assert found["median_abs_err"] <= 0.12 and found["p90_abs_err"] <= 0.35
    assert found["source_mean_abs_err"] <= 0.12
    assert found["constant_mfu_median_abs_err"] >= 2 * found["median_abs_err"]
    assert found["constant_mfu_source_mean_abs_err"] >= 2 * found["source_mean_abs_err"]


def test_published_memory_is_predicted() -> None:
    found = public()
    assert found["mem_median_abs_err"] <= 0.10
    assert found["fits_accuracy"] >= 0.9


def test_published_layouts_are_ranked() -> None:
    found = public()
    assert found["best_choice_within_5pct"] >= 0.8
    assert found["regret_median"] <= 0.05 and found["regret_p90"] <= 0.15
    orders = found["spearman_by_source"]
    assert len(orders) >= 9
    assert {
        name: order for name, order in orders.items() if order < 0.85 and NOISY not in name
    } == {}
    assert min(orders.values()) >= 0.65  # 0.72 to 0.80 reached on the noisy ones
