"""A CPU as `elastic profile` has measured it: its speed falls with the processes on it, its
collectives take what they took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.planner.cost import catalog_hardware, collectives, step_cost
from elastic.planner.cost.collectives import Links, RankGroup
from elastic.planner.cost.kernels import MEASURED
from elastic.planner.cost.memory import Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.sites import site_of
from elastic.planner.published.decoder import Decoder
from elastic.types import HardwareProfile, Job, Layout

TABLE = (
    ("all_gather", 2, 0.001, 1e-9),
    ("all_gather", 4, 0.003, 2e-9),
    ("all_reduce", 2, 0.002, 1e-9),
    ("send", 2, 5e-4, 1e-9),
)
CPU = HardwareProfile(
    peak_flop_per_s=1e11, flop_per_s=(("float32", 1e11),), memory_bytes_per_s=1e10,
    crowded_passes=((1, 8e10), (2, 8e10), (4, 4e10)), crowded_bytes=((1, 1e10), (4, 5e9)),
    collectives=TABLE,
)  # fmt: skip
MODEL = Decoder(2, 256, 4, 4, 704, 256, 128, compute="float32").profile()
JOB = Job(global_batch=8)


def rate(n: int) -> float:
    return catalog_hardware.among(CPU, n).crowded_passes[-1][1]


def test_what_all_processes_do_together_is_interpolated_and_then_stays() -> None:
    assert [rate(1), rate(2), rate(4)] == [8e10, 8e10, 4e10]
    assert rate(3) * 3 == pytest.approx((2 * 8e10 + 4 * 4e10) / 2)
    assert rate(8) * 8 == pytest.approx(4 * 4e10)
    assert catalog_hardware.among(catalog_hardware.NOMINAL, 8) is catalog_hardware.NOMINAL


def test_gpus_do_not_crowd_each_other() -> None:
    gpu = replace(catalog_hardware.NOMINAL, crowded_passes=((1, 3e14), (8, 3e14)))
    assert (
        site_of(JOB, gpu, 8, world=64).chip
        == site_of(JOB, catalog_hardware.NOMINAL, 8, world=64).chip
    )


def step_s(layout: Layout, gpu: HardwareProfile = CPU) -> float:
    site = site_of(JOB, gpu, 1, world=layout.world_size)
    return step_cost.step_cost(
        site, ModelCost.of(MODEL), layout, step=Step(1, 8 // layout.dp, 8, dtype="float32")
    ).step_s


def test_a_lone_step_takes_its_flop_at_the_measured_rate() -> None:
    assert MODEL.sample is not None
    flop = 8 * MODEL.sample.flop
    assert step_s(Layout()) == pytest.approx(flop / 8e10, rel=0.1)  # and the optimizer
    assert step_s(Layout(dp_shard=4)) > flop / (4 * 4e10) > step_s(Layout()) / 4


def test_measured_collectives_take_what_they_took() -> None:
    links = Links.of(CPU, MEASURED, 4)
    assert collectives.gather_s(links, 1e6, RankGroup(2)) == pytest.approx(0.001 + 1e-3)
    assert collectives.gather_s(links, 1e6, RankGroup(3)) == pytest.approx((0.002 + 0.005) / 2)
    assert collectives.gather_s(Links.of(CPU, MEASURED, 6), 1e6, RankGroup(6)) == pytest.approx(
        0.005 * 6 / 4
    )
    assert collectives.reduce_s(links, 1e6, RankGroup(2)) == pytest.approx(0.003)
    assert collectives.send_s(links, 1e6, 1) == pytest.approx(1.5e-3)
    assert (
        collectives.gather_s(links, 0.0, RankGroup(2))
        == 0.0
        == collectives.reduce_s(links, 1e6, RankGroup(1))
    )


def test_operations_under_tp_cost_the_host_more_the_more_processes_there_are() -> None:
    def tp_s(n: int) -> float:
        site, layout = site_of(JOB, CPU, 1, world=n), Layout(tp=2)
        assert MODEL.sample is not None
        quick = replace(site.chip.kernels, dispatch_s=0.0)
        without = replace(site, chip=replace(site.chip, kernels=quick))
        step = Step(1, 8, 8, dtype="float32")
        return step_cost.tp_s(site, MODEL.sample, layout, step) - step_cost.tp_s(
            without, MODEL.sample, layout, step
        )

    assert tp_s(4) == pytest.approx(2 * tp_s(2)) and tp_s(2) > 0
