"""The comparison of layouts finds what is broken in the product itself: each case takes one thing
away from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.foreign import subjects

JOB = {"steps": 10, "global_batch": 4, "seed": 1, "n_samples": 64}
WHOLE = ""
NOT_ADDED_UP = (
    "from elastic.worker.step.optimizer_step import Stepper; Stepper._add_tied = lambda self, "
    "gradients: None"
)
NOT_TIED = """
from torch import nn
from elastic.worker.parallel import parallelize
from elastic.worker.state import train_state

def copied(model, profile):
    present = dict(model.named_parameters(remove_duplicate=False))
    for spec in profile.specs:
        if spec.tied_to and spec.fqn in present:
            module, _, leaf = spec.fqn.rpartition(".")
            setattr(model.get_submodule(module), leaf, nn.Parameter(present[spec.fqn].detach().clone()))

parallelize.tie_again = train_state.tie_again = copied
"""
ONE_BLOCK_LESS = """
from elastic.worker.parallel import pipeline
whole = pipeline.stage_blocks
pipeline.stage_blocks = lambda layers, stage: whole(layers, stage)[1:] if stage else whole(layers, stage)
"""
NOT_SUMMED = (
    "from elastic.worker.parallel import parallelize; parallelize.STYLES['rowwise'] = "
    "parallelize.ColwiseParallel"
)


LARGE = "from elastic.worker.equivalence import small_copy; small_copy.WHOLE_MOST_PARAMETERS = 1000"


def asked(name: str, axes: list[str], most_s: float = 300.0) -> dict[str, Any]:
    job = JOB | {"program": str(subjects.path_of(name))}
    return {"job": job, "tps": [2], "axes": axes, "most_s": most_s}


NO_TIME = asked("prenorm_rope", ["dp", "tp", "pp"], most_s=-1.0)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What it says of the programs of this file where nothing is broken, and without the time."""
    folder = tmp_path_factory.mktemp("right")
    programs = (asked("tied_head", ["tp", "pp"]), asked("prenorm_rope", ["tp", "pp"]))
    return subjects.found_with(WHOLE, folder, *programs, NO_TIME)


@pytest.mark.sampled(2)
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("broken", "name", "axis", "says"),
    [
        (NOT_ADDED_UP, "tied_head", "pp", "that of embed.weight differs"),
        (NOT_TIED, "tied_head", "tp", "embed.weight|head"),
        (ONE_BLOCK_LESS, "prenorm_rope", "pp", "layers"),
        (NOT_SUMMED, "prenorm_rope", "tp", "layers"),
    ],
    ids=[
        "tie not added up",
        "weight copied, not tied",
        "a stage without its first block",
        "a style that does not sum",
    ],
)
def test_what_is_broken_is_found(
    right: list[dict[str, Any]], tmp_path: Path, broken: str, name: str, axis: str, says: str
) -> None:
    assert axis in right[name == "prenorm_rope"]["equal"]
    (wrong,) = subjects.found_with(broken, tmp_path, asked(name, [axis]))
    why = str(wrong.get("error") or wrong["structure"][f"no_{axis}"])
    assert axis not in (wrong.get("equal") or {}) and re.search(says, why), why


# which blocks are left out: tests/worker/equivalence/test_small_copy.py
@pytest.mark.whole
def test_a_large_model_is_compared_on_a_copy_with_fewer_blocks(tmp_path: Path) -> None:
    """On every axis; and a plan for tp that is wrong is found there."""
    (whole,) = subjects.found_with(LARGE, tmp_path, asked("prenorm_rope", ["dp", "tp", "cp", "pp"]))
    assert set(whole["equal"]) == {"dp", "tp", "cp", "pp"} and not whole["skipped"]
    (wrong,) = subjects.found_with(
        f"{LARGE}\n{NOT_SUMMED}", tmp_path, asked("prenorm_rope", ["dp", "tp"])
    )
    assert set(wrong["equal"]) == {"dp"} and re.search("layers", wrong["structure"]["no_tp"]), wrong


@pytest.mark.e2e
def test_what_the_time_does_not_suffice_for_is_not_compared(right: list[dict[str, Any]]) -> None:
    """One line for each such axis; the answer is not kept."""
    found = right[-1]
    said = "was not compared: comparing takes at most -1 s, which are spent"
    assert found["structure"]["notes"] == [f"{axis} {said}" for axis in ("dp", "tp", "pp")]
    assert (found["equal"], found["steady"]) == ({}, False)
