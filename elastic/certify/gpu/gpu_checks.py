"""The checks of one GPU by itself: a step, copies, many generations, an error of the device, memory
that runs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from elastic.certify.harness.lab import Lab
from elastic.certify.harness.place import Place
from elastic.certify.reference import bare_runs
from elastic.certify.tasks import Task
from elastic.scenarios.check import Bound, Check, judge
from elastic.scenarios.limit import Limit

NO_GPU = "no GPU here"
ON_A_CLUSTER = "it is tried on this host's own GPU: elastic certify --local"
MODULE = "elastic.certify.gpu.one_gpu"
GROWN = "nothing may grow: 50 generations, 64 MiB and half a descriptor in all of them are noise"
MIB_PER_GENERATION, FDS_PER_GENERATION = 64 / 50, 0.5 / 50


@dataclass(frozen=True)
class Measure:
    """`least_s`: what it takes at least; `most_s`: what ends it."""

    bounds: tuple[Bound, ...]
    least_s: float
    most_s: float
    weight: float


def _slopes() -> tuple[Bound, ...]:
    memory = [
        Bound(f"{of}_mib_growth", GROWN, most=MIB_PER_GENERATION)
        for of in ("allocated", "reserved", "used", "rss")
    ]
    return *memory, Bound("fds_growth", GROWN, most=FDS_PER_GENERATION)


MEASURES: Mapping[str, Measure] = {
    "step": Measure(
        (
            Bound("step_time_ratio",
            "what tests/gpu/one_shot_rows.py expects at most of plain FSDP2's step", most=1.25),
            Bound("syncs_per_step", "docs/gpu.md: one wait per step and pipeline stage", most=1.0),
            Bound("loss_difference", "bfloat16, the same batch and weights", most=5e-2),
        ), 40.0, 240.0, 2.0,
    ),
    "copies": Measure(
        (
            Bound("equal", "the copy is the state", least=1), Bound("pinned_gb_per_s",
            "a fifth of PCIe 5, which tests/gpu/one_shot_rows.py expects at least", least=10.0),
        ), 30.0, 180.0, 1.0,
    ), "generations": Measure((Bound("n", "as many as the slopes are for", least=50), *_slopes()),
    60.0, 400.0, 2.0), "error": Measure(
        (
            Bound("kind_is_device", "it stays until the process ends", least=1),
            Bound("live_offered", "nobody can read what lies on that GPU", most=0),
            Bound("reported_s", "what tests/gpu/one_shot_rows.py expects at most", most=5.0),
        ), 15.0, 120.0, 0.5,
    ),
    "memory": Measure(
        (
            Bound("kind_is_out_of_memory", "the layout is marked, not the device", least=1),
            Bound("smaller_steps", "the same batch in smaller parts", least=1),
            Bound("held_gb", "what the state of 300 M parameters takes, doubled", most=12.0),
        ), 30.0, 240.0, 1.0,
    ),
}  # fmt: skip


def tasks(lab: Lab) -> list[Task]:
    if why_not(lab.place):
        return []
    return [
        Task((f"gpu {name}",), partial(_work, lab, name), least_s=of.least_s, weight=of.weight)
        for name, of in MEASURES.items()
    ]


def why_not(place: Place) -> str:
    """Why none of these can be tried there; '' = they can."""
    return NO_GPU if not place.gpus else ON_A_CLUSTER if place.address else ""


def left_out(place: Place) -> dict[str, str]:
    why = why_not(place)
    return {f"gpu {name}": why for name in MEASURES if why}


def _work(lab: Lab, name: str, limit: Limit) -> Iterator[Check]:
    """In a process of its own on the first GPU, which no warm worker holds meanwhile."""
    lab.drop()
    alone = replace(lab.place, kind="one-gpu", ranks=1, gpus=lab.place.gpus[:1])
    yield judge(
        f"gpu {name}",
        bare_runs.run(alone, (MODULE, name), limit, most_s=MEASURES[name].most_s),
        MEASURES[name].bounds,
    )
