"""Every axis, pairs of axes and products of three against one process, in one warm set of
processes.

CI runs a cover: each axis, each pair of axes, each schedule and each kind of program come up; `make
bench` runs the product.
"""

from __future__ import annotations

from itertools import combinations
from itertools import product as cross
from pathlib import Path

import pytest
from support.worker.chain import job_of
from support.worker.layout_case import Case, check, run
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool

from elastic.types import Evaluated, StepDone, parse_layout

pytestmark = pytest.mark.slow  # one reference in one process for each program and batch

COVER = [
    Case("tiny.py", "dp_shard=2,cp=2,activation_checkpointing=full"),
    Case("tiny.py", "dp_shard=2,cp=2,activation_checkpointing=selective"),
    Case("tiny.py", "cp=2", steps=20),
    Case("tiny.py", "dp_shard=2,cp=2", 13),
    Case("tiny_packed.py", "dp_replicate=2,cp=2"),
    Case("tiny_packed.py", "cp=2,tp=2", microbatches=3),
    Case("tiny_tied.py", "pp=2,cp=2"),
    Case("tiny_tied.py", "tp=2", microbatches=3),  # nothing but tp: no FSDP that keeps the tie
    Case("tiny_sequence.py", "dp_shard=2,tp=2", 13),
    Case("tiny_sequence.py", "cp=2,tp=2", microbatches=2),
    Case("tiny_sequence_lora.py", "dp_shard=2,tp=2", 13),
    Case("tiny_loss_lora.py", "cp=2,tp=2"),
    Case("tiny_few_lora.py", "pp=4"),
    Case("tiny_rslora.py", "dp_shard=2,tp=2"),
    Case("tiny_few_lora.py", "pp=2,dp_shard=2,schedule=interleaved1f1b"),
    Case("tiny_loss_parallel.py", "pp=2,tp=2", steps=20),
    Case("tiny.py", "pp=2,schedule=gpipe", steps=20),
    Case("tiny_tied.py", "pp=2,dp_replicate=2", 14, microbatches=2),
    Case("tiny_tied.py", "pp=2,dp_shard=2,schedule=interleaved1f1b"),
    Case("tiny_packed.py", "pp=2,cp=2,schedule=interleaved1f1b"),
    Case("tiny_vocab.py", "pp=2,tp=2,schedule=interleaved1f1b"),
]


AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b")
PROGRAMS = (
    "tiny.py",
    "tiny_tied.py",
    "tiny_packed.py",
    "tiny_vocab.py",
    "tiny_sequence.py",
    "tiny_loss_parallel.py",
)


def product() -> list[Case]:
    """Every axis and pair of axes for six steps: each program, unequal batch shares, accumulation;
    each schedule meets each of these axes and each program."""
    sets = [(a,) for a in AXES] + list(combinations(AXES, 2))
    out = []
    for (i, axes), (j, program) in cross(enumerate(sets), enumerate(PROGRAMS)):
        text = ",".join(f"{axis}=2" for axis in axes)
        cut = f"{text},schedule={SCHEDULES[(i + j) % 3]}" if "pp" in axes else text
        out.append(Case(program, cut, steps=6, microbatches=0 if "pp" in axes else 3))
    for axes in sets:
        text = ",".join(f"{axis}=2" for axis in axes)
        if {"dp_replicate", "dp_shard"} & set(axes):
            out.append(
                Case(
                    "tiny.py",
                    text,
                    14 if "pp" in axes else 13,
                    6,
                    microbatches=2 if "pp" in axes else 1,
                )
            )
    return out


TRIPLES = [
    Case("tiny_tied.py", "pp=2,dp_shard=2,tp=2", steps=20),
    Case("tiny_packed.py", "pp=2,dp_shard=2,cp=2,schedule=interleaved1f1b", 20, 20, 4),
    Case("tiny_vocab.py", "pp=2,cp=2,tp=2,schedule=gpipe", steps=20),
]


@pytest.mark.e2e
@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", COVER, ids=str)
def test_it_trains_as_one_process_does(pool: Pool, tmp_path: Path, case: Case) -> None:
    check(case, run(pool, case, tmp_path))


@pytest.mark.e2e
def test_numbers_of_logits_that_are_cut_are_added_up_by_all_tp_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    found = []
    for layout in ("tp=2", "dp_shard=2"):
        run(pool, Case("tiny_numbers.py", layout, steps=1), tmp_path / layout)
        found.append(pool.events(Evaluated)[-1].metrics)
    assert set(found[0]) == {"validation_loss", "squares", "own"}
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.whole
@pytest.mark.parametrize("case", product(), ids=str)
def test_product(pool: Pool, tmp_path: Path, case: Case) -> None:
    check(case, run(pool, case, tmp_path))


@pytest.mark.whole
def test_three_axes(tmp_path: Path) -> None:
    """On eight processes."""
    pool = Pool(8)
    try:
        for i, case in enumerate(TRIPLES):
            check(case, run(pool, case, tmp_path / str(i)))
    finally:
        pool.close()


@pytest.mark.e2e
def test_live_to_and_from_parts_of_sequences(pool: Pool, tmp_path: Path) -> None:
    """And to and from several pipeline stages per rank."""
    layouts = [
        "dp_shard=4",
        "dp_shard=2,cp=2",
        "pp=2,cp=2,schedule=interleaved1f1b",
        "cp=2,tp=2",
        "dp_shard=3",
    ]
    case = Case("tiny.py", "", steps=30)
    workers = pool.open(
        job_of(case.program, case.steps) | {"layout": dict.fromkeys("4", layouts[1])}, tmp_path
    )
    last = None
    for number, text in enumerate(layouts, 1):
        resume = {"resume": live(last)} if last is not None else {}
        last = plan(number, parse_layout(text), workers, case.batch, **resume)
        pool.enter(last)
        pool.entered(number)
        pool.wait(
            lambda: any(e.step >= 3 * number for e in pool.events(StepDone)),  # noqa: B023
            f"step {3 * number}",
        )
    pool.quiesced(len(layouts), 3)
    check(case, pool.events(StepDone))
