"""The checks for one GPU: where they are tried, what breaks them, and a dry run of what they
measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic.certify.gpu import gpu_checks, one_gpu
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.place import Place
from elastic.certify.reference import bare_runs
from elastic.scenarios.limit import Limit
from elastic.worker.step.optimizer_step import Stepper

GPUS = Place("several-gpus", 2, ("3", "5"), ("X", "X"))
GOOD: dict[str, dict[str, Any]] = {
    "step": {"step_time_ratio": 1.02, "syncs_per_step": 1.0, "loss_difference": 0.0},
    "copies": {"equal": 1, "pinned_gb_per_s": 50.0},
    "generations": {"n": 50, "fds_growth": 0.0}
    | {f"{of}_mib_growth": 0.0 for of in ("allocated", "reserved", "used", "rss")},
    "error": {"kind_is_device": 1, "live_offered": 0, "reported_s": 1.0},
    "memory": {"kind_is_out_of_memory": 1, "smaller_steps": 1, "held_gb": 5.0},
}
BAD = {
    "step": {"syncs_per_step": 2.0}, "copies": {"equal": 0},
    "generations": {"used_mib_growth": 2.0}, "error": {"live_offered": 1},
    "memory": {"smaller_steps": 0},
}  # fmt: skip


def test_without_a_gpu_none_is_tried_and_the_reason_says_so() -> None:
    names = {f"gpu {name}" for name in ("step", "copies", "generations", "error", "memory")}
    with Lab(Place("cpu-gloo", 4)) as lab:
        assert gpu_checks.tasks(lab) == [] and gpu_checks.left_out(lab.place) == dict.fromkeys(
            names, "no GPU here"
        )
    there = Place("several-gpus", 2, ("0", "1"), ("X", "X"), True, "10.0.0.1:6379")
    assert (
        set(gpu_checks.left_out(there)) == names
        and "--local" in gpu_checks.left_out(there)["gpu step"]
    )


@pytest.mark.parametrize("good", [True, False])
def test_each_is_tried_on_the_first_gpu_and_held_against_its_bounds(
    good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(place: Place, module: tuple[str, ...], *bounds: Any, **named: Any) -> dict[str, Any]:
        assert (place.ranks, place.gpus, place.environments()[0]["CUDA_VISIBLE_DEVICES"]) == (
            1,
            ("3",),
            "3",
        )
        assert module[0] == one_gpu.__name__
        return GOOD[module[1]] | ({} if good else BAD[module[1]])

    monkeypatch.setattr(bare_runs, "run", run)
    with Lab(GPUS) as lab:
        found = [check for task in gpu_checks.tasks(lab) for check in task.work(Limit.after(60.0))]
    assert [check.name for check in found] == [f"gpu {name}" for name in GOOD]
    assert {check.verdict for check in found} == {"pass" if good else "fail"}


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["step", "copies", "generations", "error"])
def test_what_is_measured_can_be_measured(name: str) -> None:
    """At tiny sizes without a GPU: all figures that the bounds are for, and those that mean
    something there. One of them in a process of its own, as on a GPU."""
    if name == "step":
        of_its_own = (gpu_checks.MODULE, name, "dry")
        found = bare_runs.run(Place("cpu-gloo", 1), of_its_own, Limit.after(600), most_s=600.0)
    else:
        found = getattr(one_gpu, name)(dry=True)
    of_a_gpu = {f"{of}_mib_growth" for of in ("allocated", "reserved", "used")}
    assert {bound.figure for bound in gpu_checks.MEASURES[name].bounds} - of_a_gpu <= found.keys()
    expected = {
        "step": {"syncs_per_step": 0.0}, "copies": {"equal": 1},
        "generations": {"n": one_gpu.DRY_GENERATIONS}, "error": {"kind_is_device": 1,
        "live_offered": 0},
    }[name]  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    assert found.get("loss_difference", 0.0) < 5e-2


@pytest.mark.e2e
def test_memory_that_runs_out_leaves_room_for_smaller_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Made up here: a batch in one part is too large."""
    plain = Stepper.run

    def run(stepper: Stepper, *arguments: Any) -> Any:
        if stepper.plan.n_microbatches == 1:
            raise torch.OutOfMemoryError("CUDA out of memory (put in by the test)")
        return plain(stepper, *arguments)

    monkeypatch.setattr(Stepper, "run", run)
    found = one_gpu.memory(dry=True)
    assert (found["kind_is_out_of_memory"], found["kind"]) == (1, "out_of_memory") and found[
        "smaller_steps"
    ] >= 1
