"""Constants of software generations: which ones are taken, and what products cost with them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from elastic.planner.cost import compute
from elastic.planner.cost.compute import ComputeTarget
from elastic.planner.cost.kernels import (
    LIKE,
    LOGIT_BYTES,
    PARENT,
    UNFUSED,
    Kernels,
    _table,
    generation,
)
from elastic.types import Attention, HardwareProfile, Layout, Matmul

PLAIN = Kernels(
    matmul=0.5,
    tail=0.0,
    bandwidth=1.0,
    launch_s=0.0,
    moved=1.0,
    attend_forward=0.5,
    attend_backward=0.25,
)
GPU = HardwareProfile("X", 1e12, reached=0.8, units=4, memory_bytes_per_s=1e9)


def test_every_constant_is_one_and_belongs_to_a_known_generation() -> None:
    names, table = {f.name for f in fields(Kernels)}, _table()
    assert {name for constants in table.values() for name in constants} <= names - {
        "fused_attention"
    }
    assert {software for software, _ in table} <= {"", *LOGIT_BYTES} and {
        arch for _, arch in table
    } <= {"", *LIKE, *LIKE.values()}
    shares = {
        "matmul",
        "attend_forward",
        "attend_backward",
        "node",
        "link",
        "bandwidth",
        "tp_hidden",
        "dp_hidden",
        "low8",
        "low4",
    }
    assert all(
        0 < v <= 1
        for constants in table.values()
        for name, v in constants.items()
        if name in shares
    )
    assert set(PARENT) | set(UNFUSED) <= set(LOGIT_BYTES)


def test_the_more_special_constant_counts() -> None:
    table = _table()
    plain, compiled = generation("fsdp2", "Hopper"), generation("fsdp2", "Hopper", compiled=True)
    assert (
        plain.matmul == table["fsdp2", "Hopper"]["matmul"] and plain.crowd == table["", ""]["crowd"]
    )
    assert compiled == generation("fsdp2-compiled", "Hopper")
    assert (
        compiled.matmul == plain.matmul
        and compiled.moved == table["fsdp2-compiled", ""]["moved"] < plain.moved
    )
    assert not generation("megatron-2022", "Ampere").fused_attention and plain.fused_attention


def test_an_architecture_that_nobody_measured_is_like_another() -> None:
    assert (
        generation("fsdp2", "Ada") == generation("fsdp2", "Ampere") != generation("fsdp2", "Hopper")
    )
    assert generation("fsdp2", "Unheard").matmul == Kernels().matmul


def test_a_product_takes_its_flop_unless_its_bytes_take_longer() -> None:
    compute.matmul_s.cache_clear()
    chip = ComputeTarget(GPU, PLAIN)
    assert compute.matmul_s(chip, 1024, 4096, n=1024) == pytest.approx(
        2 * 1024 * 4096 * 1024 / (1e12 * 0.8 * 0.5)
    )
    thin = 2 * (1 * 4096 + 4096 * 1024 + 1024) / 1e9
    assert compute.matmul_s(chip, 1, 4096, n=1024) == pytest.approx(thin)
    assert compute.matmul_s(
        ComputeTarget(GPU, replace(PLAIN, launch_s=1.0)), 1, 4096, n=1024
    ) == pytest.approx(thin + 1)


def test_tiles_that_are_not_full_and_a_last_wave_that_is_not_cost_their_part() -> None:
    rows, k, n = 128 * 5, 4096, 100  # 5 tiles on 4 units: 2 waves of 4; 100 of 128 columns
    gpu, full = replace(GPU, memory_bytes_per_s=1e12), 2 * rows * k * n / (1e12 * 0.8 * 0.5)
    for tail, lost in ((1.0, 128 / 100 * 8 / 5), (0.5, (128 / 100 * 8 / 5) ** 0.5), (0.0, 1.0)):
        assert compute.matmul_s(
            ComputeTarget(gpu, replace(PLAIN, tail=tail)), rows, k, n=n
        ) == pytest.approx(full * lost)


def test_what_cuts_a_product() -> None:
    chip = ComputeTarget(replace(GPU, units=0), PLAIN)
    whole = compute.product_s(chip, Matmul(4096, 4096, 4096, cut="n"), Layout(), n_rows=1)
    for layout, cut, share in (
        (Layout(tp=4), "n", 4),
        (Layout(tp=4), "k", 4),
        (Layout(tp=4), "", 1),
        (Layout(cp=2), "", 2),
    ):
        assert compute.product_s(
            chip, Matmul(4096, 4096, 4096, cut=cut), layout, n_rows=1
        ) == pytest.approx(whole / share)
    assert compute.product_s(
        chip, Matmul(4096, 4096, 4096, 3.0), Layout(), n_rows=2
    ) == pytest.approx(6 * whole)


def test_attention_with_fused_scores_computes_2_5_times_as_much_backward() -> None:
    chip, a = ComputeTarget(GPU, PLAIN), Attention(1024, 1024, 8, 8, 64)
    flop = 4 * 1024 * 512 * 8 * 64
    assert compute.attention_s(chip, a, Layout(), n_rows=1, backward=False) == pytest.approx(
        flop / (1e12 * 0.8 * 0.5)
    )
    assert compute.attention_s(chip, a, Layout(), n_rows=1, backward=True) == pytest.approx(
        2.5 * flop / (1e12 * 0.8 * 0.25)
    )
    written = ComputeTarget(GPU, replace(PLAIN, fused_attention=False))
    # masked too
    assert compute.attention_s(written, a, Layout(), n_rows=1, backward=True) == pytest.approx(
        2 * 2 * flop / (1e12 * 0.8 * 0.5)
    )
    odd = ComputeTarget(GPU, replace(PLAIN, fused_attention=False, odd_heads=0.1))
    assert compute.attention_s(
        odd, replace(a, head_dim=63), Layout(), n_rows=1, backward=False
    ) == pytest.approx(2 * flop * 63 / 64 / (1e12 * 0.8 * 0.5 * 0.1))
    assert compute.attention_s(
        chip, a, Layout(tp=2, cp=2), n_rows=1, backward=False
    ) == pytest.approx(flop / 4 / (1e12 * 0.8 * 0.5))
