"""What `elastic plan` prints: numbers as words, tables, and bars that read without color at 80
columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic.observe.plans import plan_bars, plan_tables
from elastic.planner.explain import TOLD

GIB = 2**30
OFFER: dict[str, Any] = {
    "n": 1, "layout": "dp_shard=8,tp=4", "n_gpus": 32, "n_idle_gpus": 0, "step_s": 10.0,
    "tokens_per_s": 100_000.0, "mfu": 0.41, "memory_bytes": 60 * GIB, "room_bytes": 80 * GIB,
    "usd_per_h": 64.0, "usd_per_mtoken": 0.18, "efficiency": 0.9, "goodput": 1.0,
    "copy_stall_s": 0.2, "copy_write_s": 12.0, "lost_node_s": 40.0, "moved_s": 0.3, "hours": 0.0,
    "usd": 0.0, "why": "it is the fastest", "warnings": ["memory is tight"],
    "seconds": {"products": 5.0, "tp": 3.0, "fsdp": 2.0}, "memory": {"activations": 45 * GIB,
    "parameters": 15 * GIB}, "parts": [{"pool": "spot", "n_gpus": 32, "samples": 4, "layers": [32],
    "busy": 0.9}],
}  # fmt: skip
DATA: dict[str, Any] = {
    "model": {
        "name": "m", "n_params": 8_030_000_000, "sample_tokens": 4096, "global_batch": 256,
        "step_tokens": 1_048_576, "precision": "bfloat16", "unit": "tokens", "layout": "auto",
    },
    "pools": [
        {
            "pool": "spot", "gpu": "H100-80GB-SXM", "n_gpus": 32, "n_nodes": 4, "gpus_per_node": 8,
            "market_type": "spot", "instance_type": "p5.48xlarge", "usd_per_gpu_h": 2.0,
            "price_from": "table of 2026-01-01", "hardware_from": "catalog",
            "network_bytes_per_s_per_gpu": 5e10, "lost_per_node_h": 0.05, "cloud": "aws",
        }
    ],
    "tokens": 0.0, "budget_usd": 0.0, "asked_for": False, "purpose": "fastest", "prices_at": "2026-01-01", "offers": [OFFER],
    "rejected": {"cp": "slower"}, "n_looked_at": 1234,
    "notes": ["mind"],
}  # fmt: skip


def test_a_plan_answers_in_its_first_lines() -> None:
    lines = plan_tables.plan(DATA)
    assert (
        lines[0]
        == "m: 8.03 B parameters, sequences of 4096, 256 sequences = 1.05 M tokens a step, bfloat16"
    )
    assert lines[1].startswith(
        "  32 x H100-80GB-SXM, spot (4 x 8, p5.48xlarge, 400 Gb/s per GPU between nodes, $2.00 "
        "per GPU-hour"
    )
    assert lines[3:5] == [
        "best: dp_shard=8,tp=4",
        "      10.0 s a step, 100,000 tokens/s, $64.00/h, $0.18 per million tokens",
    ]
    text = "\n".join(lines)
    assert "########.. 60.0 of 80.0 GiB" in text
    assert "left out (the cost of 1,234 layouts was computed):\n  cp  slower" in text
    assert (
        "warning: memory is tight\nnote: mind\nnote: prices are those of the dated table of "
        "2026-01-01" in text
    )
    assert "TIME" not in text


def test_with_tokens_it_says_how_long_and_how_much() -> None:
    timed = {**OFFER, "hours": 600.0, "usd": 2_345_678.0, "goodput": 0.95}
    lines = plan_tables.plan({**DATA, "tokens": 1e12, "offers": [timed]})
    assert (
        "      1 T tokens: 25.0 days and $2.35 M, 5.0% of it lost to preempted nodes (up to 0.05 "
        "a node and hour assumed)"
    ) in lines
    assert any(line.endswith("25.0 days  2,345,678") for line in lines)


def test_the_head_says_what_is_best() -> None:
    assert plan_tables.plan({**DATA, "purpose": "cheapest"})[3] == "cheapest: dp_shard=8,tp=4"
    asked = plan_tables.plan({**DATA, "asked_for": True})
    assert asked[3] == "asked for: dp_shard=8,tp=4"


def test_warnings_name_the_offers_that_they_are_of() -> None:
    second = {**OFFER, "n": 2, "warnings": ["memory is tight", "8 GPUs idle"], "n_idle_gpus": 8}
    lines = plan_tables.plan({**DATA, "offers": [OFFER, second]})
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: memory is tight",
        "warning: offer 2: 8 GPUs idle",
    ]
    assert "   on 32 of spot alone: it is the fastest" in lines


def test_a_bar_of_letters_in_proportion() -> None:
    lines = [text.plain for text in plan_bars.explain(DATA, 1, 52)]
    assert lines[2] == "[" + "P" * 25 + "t" * 15 + "f" * 10 + "]"
    assert lines[3].startswith(" P  50.0%    5.00 s  products")
    memory = next(line for line in lines[3:] if line.startswith("["))
    assert memory == "[" + "W" * 9 + "A" * 29 + "." * 12 + "]"  # 15, 45 and 20 GiB of 80
    assert max(len(line) for line in lines if line.startswith(("[", " "))) == 52


def test_each_part_has_a_letter_of_its_own() -> None:
    assert set(TOLD) <= set(plan_bars.TIME)
    for known in (plan_bars.TIME, plan_bars.MEMORY):
        assert len({letter for letter, _, _ in known.values()}) == len(known)


def test_parts_that_are_not_known_are_shown_all_the_same() -> None:
    strange = {**OFFER, "seconds": {"products": 5.0, "telepathy": 5.0}}
    lines = [text.plain for text in plan_bars.explain({**DATA, "offers": [strange]}, 1, 52)]
    assert lines[2] == "[" + "P" * 25 + "?" * 25 + "]"
    assert any("telepathy" in line for line in lines)


def test_a_picture(tmp_path: Path) -> None:
    file = plan_bars.save(
        {**DATA, "offers": [OFFER, {**OFFER, "n": 2}]}, tmp_path / "deep" / "plan.png"
    )
    assert file.read_bytes().startswith(b"\x89PNG")
