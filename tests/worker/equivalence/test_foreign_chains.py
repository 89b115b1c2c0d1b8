"""Programs that people write, through layouts drawn by chance: a loss without notice, then a live
move; the losses are those of one process, and the probe says the same on both sides of each
transition."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.foreign import subjects
from support.reference import collate, train_alone
from support.worker.peer_recovery import recover
from support.worker.plans import N_BLOCKS, live, plan
from support.worker.worker_pool import Pool

from elastic.types import (
    COMPUTES_IN,
    CopyStored,
    Job,
    Layout,
    Plan,
    Probed,
    StepDone,
    WorkerFailed,
    agree,
    tolerance,
)
from elastic.types.grid import axes_of
from elastic.worker.equivalence.structure import structure_of
from elastic.worker.program.model_profile import trace

pytestmark = pytest.mark.slow
STEPS, BATCH = 14, 12
IN_CI = 12  # of the programs; all of them are a product
AXES = {"dp": "dp_shard", "tp": "tp", "pp": "pp"}  # cp wants lengths of its own
# what is drawn differs; three heads; other numbers of blocks than the plans here have; no backward
# pass on the CPU; groups that the plans here cut (session/test_batch_norm_chain.py has theirs)
NOT_HERE = re.compile(
    "drop|stochastic|hf_gpt2$|tp_three_heads$|albert_loop|pyramid_conv|flex_attention|gumbel_gate"
    "|batchnorm|towards_drawn"
)


@cache
def chained() -> list[str]:
    """Names of those that may move between layouts, in an order of no meaning."""
    found = []
    for path in sorted(subjects.FOLDER.glob("*.py")):
        expect = re.search(r"^EXPECT = \{(.*?)\}", path.read_text(), re.MULTILINE | re.DOTALL)
        assert expect is not None
        same = [axis for axis in AXES if f'"{axis}": "equal"' in expect[1]]
        if "dp" in same and len(same) > 1 and not NOT_HERE.search(path.stem):
            found.append(path.stem)
    return sorted(found, key=lambda name: random.Random(name).random())


def layouts_of(expect: dict[str, str], world: range) -> list[Layout]:
    same = [axis for axis in AXES if expect[axis] == "equal"]
    sizes = [(1, 2) if axis != "dp" else (1, 2, 3, 4) for axis in same]
    drawn = (
        Layout(**{AXES[axis]: n for axis, n in zip(same, chosen, strict=True)})
        for chosen in product(*sizes)
    )
    return [layout for layout in drawn if layout.world_size in world]


def params() -> list[Any]:
    names = chained()
    return [
        pytest.param(name, marks=() if i < IN_CI else pytest.mark.whole)
        for i, name in enumerate(names)
    ]


@pytest.mark.e2e
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", params())
def test_a_chain_of_layouts(pool: Pool, tmp_path: Path, name: str) -> None:
    program, expect = subjects.load(name)
    profile = trace(program)
    found = structure_of(program, profile, collate(program.dataset(), [0]))
    assert profile.n_blocks == N_BLOCKS and not found.draws
    chance = random.Random(name)
    first, second = (
        chance.choice(layouts_of(expect, range(2, 5))),
        chance.choice(layouts_of(expect, range(1, 2)) or [Layout()]),
    )
    others = [layout for layout in layouts_of(expect, range(2, 4)) if layout != first] or [first]
    third = chance.choice(others)
    job: dict[str, Any] = {
        "name": "test", "program": str(subjects.path_of(name)), "steps": STEPS,
        "global_batch": BATCH, "seed": 7, "eval_every": 0, "eval_samples": 0, "clip_grad_norm": 1.0,
        COMPUTES_IN: found.computes_in,
    }  # fmt: skip
    most = tolerance(Job.from_plain(job))
    workers = pool.open(job, tmp_path)
    one = plan(1, first, workers, BATCH, peer_every=2)
    pool.enter(one)
    pool.wait(lambda: any(e.copy.step >= 2 for e in pool.events(CopyStored)), "a peer replica")
    try:
        two = recover(pool, one, second, [one.ranks[-1]])
        pool.wait(
            lambda: any(e.generation == 2 for e in pool.events(StepDone)), "a step of generation 2"
        )
        survivors = [worker for worker in workers if worker != one.ranks[-1]]
        three: Plan = plan(3, third, survivors, BATCH, resume=live(two))
        pool.enter(three)
        pool.wait(lambda: any(e.step == STEPS for e in pool.events(StepDone)), "the last step")
    finally:
        pool.revive()
    assert not [e for e in pool.events(WorkerFailed) if e.kind in ("layout", "program")]
    alone = train_alone(program, job, STEPS)
    losses = {
        e.step: e.train_loss for e in sorted(pool.events(StepDone), key=lambda e: e.generation)
    }
    wrong = {
        step: (loss, alone[step - 1])
        for step, loss in losses.items()
        if not agree(loss, alone[step - 1], most)
    }
    assert not wrong, f"{first} {second} {third}: {wrong}"
    told = {e.step for e in pool.events(StepDone)}
    assert set(range(1, STEPS + 1)) - told <= {two.resume.step}
    compared = [e for e in pool.events(Probed) if e.expected is not None]
    assert all(agree(e.loss, e.expected, most) for e in compared)
    assert 3 in {e.generation for e in compared} or 3 not in {
        e.generation for e in pool.events(StepDone)
    }
    assert axes_of(first) | axes_of(third)
