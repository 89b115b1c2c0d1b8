"""What is known of the nodes that a plan is for: the catalog's numbers, prices, and what was
measured on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic import catalog
from elastic.api.planning.model_source import of_model
from elastic.api.planning.plan_nodes import (
    MachineGroup,
    known_of,
    nodes_of,
    of_asked,
    of_pool,
    own_of,
    with_counts,
)
from elastic.api.planning.quantities import gpus_of
from elastic.config.hardware import PLACE, path_of, write_hardware
from elastic.errors import SpecError
from elastic.ledger.journal import built, plain
from elastic.planner.cost.default_hardware import GUESSED_CPU
from elastic.policy.plans import choice_of
from elastic.policy.pools.hazard import RECLAIMS_PER_NODE_H
from elastic.policy.state.fold import State, fold
from elastic.types import DriverStarted, HardwareProfile, Node, Pool


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path))


def asked(text: str, cloud: str = "") -> MachineGroup:
    return of_asked(gpus_of(text)[0], cloud)


def test_gpus_come_in_the_cheapest_nodes_that_they_fill() -> None:
    found = asked("H100:64")
    same = [
        each
        for each in catalog.instance_types().values()
        if each.chip == "H100-80GB-SXM" and each.gpus == 8
    ]
    prices = [
        quote.usd_per_h
        for each in same
        for quote in each.prices.values()
        if quote.usd_per_h is not None
    ]
    assert (found.group.n_nodes, found.group.gpus_per_node) == (8, 8)
    assert found.group.usd_per_node_h == pytest.approx(min(prices))
    assert "table of" in found.price_from
    known = catalog.instance_type(found.instance_type)
    assert known is not None
    assert found.group.hardware.link_bytes_per_s == pytest.approx(known.network_bytes_per_s_per_gpu)


def test_spot_is_cheaper_and_is_taken_more_often() -> None:
    spot, on_demand = asked("H100:8@spot").group, asked("H100:8").group
    assert 0 < spot.usd_per_node_h < on_demand.usd_per_node_h
    assert spot.lost_per_node_h == RECLAIMS_PER_NODE_H["spot"] > on_demand.lost_per_node_h


def test_what_is_said_counts_before_the_catalog() -> None:
    assert asked("H100:8@usd=2").group.usd_per_node_h == 16
    assert asked("H100:8@4x2").group.n_nodes == 4
    assert asked("H100:8@reserved").price_from.endswith("(of on-demand nodes)")
    assert asked("p4d.24xlarge:16").group.hardware.accelerator_type == "A100-40GB-SXM"
    assert asked("A100-80GB:8").group.hardware.memory_bytes == 80 << 30
    assert asked("H100:8", "gcp").price_from.startswith("gcp ")
    # neither its network nor a price is known
    assert [note.split()[0] for note in asked("RTX-4090:4").notes] == ["the", "no"]


@pytest.mark.parametrize(
    ("text", "cloud", "what"),
    [
        ("H1000:8", "", "unknown GPU 'H1000'; did you mean"),
        ("p5.48xlarge:4", "", "do not fill nodes of 8"),
        ("m5.large:4", "", "m5.large has no GPU"),
        ("MI300X:8", "gcp", "--cloud gcp: it has no MI300X; azure has it"),
    ],
)
def test_what_there_is_not(text: str, cloud: str, what: str) -> None:
    with pytest.raises(SpecError, match=what):
        asked(text, cloud)


def test_a_pool_has_the_hardware_of_its_instance_type() -> None:
    pool = Pool(
        "spot",
        "A100",
        8,
        "spot",
        12.0,
        0,
        4,
        memory_bytes_per_gpu=39 << 30,
        instance_type="p4d.24xlarge",
    )
    found = of_pool(pool, 3, "the job")
    assert (found.group.n_gpus, found.group.usd_per_h) == (24, 36.0)
    assert found.group.hardware.memory_bytes == 39 << 30
    assert found.group.hardware.link_bytes_per_s == pytest.approx(6.25e9)  # 400 Gbit/s for 8 GPUs
    assert found.notes == ()
    assert "network of pool" in of_pool(Pool("p", "A100", 8), 1).notes[0]
    assert of_pool(
        Pool("p", "A100", 8, memory_bytes_per_gpu=80 << 30), 1
    ).group.hardware.accelerator_type.startswith("A100-80GB")


def test_unknown_kinds_of_gpus() -> None:
    with pytest.raises(SpecError, match="pool 'p': unknown GPU 'H1000'; did you mean"):
        of_pool(Pool("p", "H1000", 8), 1)
    with pytest.raises(SpecError, match="pool 'p': GPU is no kind of GPU"):
        of_pool(Pool("p", "GPU", 8), 1)


def test_what_was_measured_wins(tmp_path: Path) -> None:
    guessed = of_pool(Pool("p", "CPU", 2), 1)
    assert (guessed.group.hardware, guessed.hardware_from) == (GUESSED_CPU, "guessed")
    assert "elastic profile" in guessed.notes[0]
    cpu = HardwareProfile("CPU", 7e10, flop_per_s=(("float32", 7e10),), measured=("flop_per_s",))
    write_hardware(tmp_path / "CPU.json", cpu, {})
    found = of_pool(Pool("p", "CPU", 2), 1)
    assert (found.group.hardware, found.notes) == (cpu, ())
    gpu = HardwareProfile(
        "A100", 2.4e14, memory_bytes_per_s=1.1e12, measured=("memory_bytes_per_s",)
    )
    write_hardware(tmp_path / "A100.json", gpu, {})
    mixed = of_pool(Pool("p", "A100", 8, instance_type="p4d.24xlarge"), 1).group.hardware
    assert (mixed.memory_bytes_per_s, mixed.peak_flop_per_s) == (1.1e12, 2.4e14)
    assert (mixed.arch, mixed.link_bytes_per_s) == ("Ampere", pytest.approx(6.25e9))


def test_numbers_of_nodes() -> None:
    pools = (Pool("spot", max_nodes=4), Pool("kept", max_nodes=2))
    assert with_counts(pools, {}) == {"spot": 4, "kept": 2}
    assert with_counts(pools, nodes_of(["spot=1"])) == {"spot": 1, "kept": 2}
    for text, what in (
        ("sport=1", "did you mean spot"),
        ("spot=5", "at most 4"),
        ("spot", "POOL=N"),
        ("spot=x", "POOL=N"),
    ):
        with pytest.raises(SpecError, match=what):
            with_counts(pools, nodes_of([text]))
    with pytest.raises(SpecError, match="leaves no node"):
        with_counts(pools, {"spot": 0, "kept": 0})


def test_a_run_knows_the_kinds_of_the_catalog_under_its_pools_names() -> None:
    pools = [
        Pool("a", "H100", 8),
        Pool("b", "H100", 4),
        Pool("c", "CPU"),
        Pool("d", "Nobody-9000", 8),
    ]
    (known,) = known_of(pools)
    assert known.accelerator_type == "H100" and known.peak("bfloat16") == pytest.approx(9.89e14)
    measured = replace(known, accelerator_type="CPU", peak_flop_per_s=7e10)
    write_hardware(path_of("CPU"), measured, {})
    assert known_of(pools) == (known, replace(measured, memory_bytes=0)), "as pool c says: nothing"


def test_a_run_costs_layouts_by_the_network_of_the_pools_that_its_nodes_are_of() -> None:
    """Not by the slowest of their kind; as an older driver did, whose journal does not tell."""
    fast = Pool("fast", "H100", 8, "spot", instance_type="p5.48xlarge")
    slow = Pool("slow", "H100", 8, instance_type="a3-highgpu-8g")
    subject = of_model("8b", 32)
    job = replace(subject.job, steps=10)

    def step_s(*pools: Pool, told: bool = True, of: str = "fast") -> float:
        own = own_of(pools) if told else ()
        known = known_of(pools)
        started = DriverStarted("r", 1, job.plain(), pools, subject.model, known, pool_hardware=own)
        assert built(DriverStarted, plain(started)) == started
        state = fold(State(), started, 0.0)
        return choice_of(state, [Node("n", of, 8), Node("m", of, 8)]).model_step_s

    assert own_of([fast]) == () and [name for name, _ in own_of([fast, slow])] == ["fast"]
    assert step_s(fast, slow) == step_s(fast) < step_s(fast, slow, told=False)
    assert step_s(fast, slow, of="slow") == step_s(fast, slow, told=False)
