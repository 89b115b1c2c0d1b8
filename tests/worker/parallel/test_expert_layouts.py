"""Experts shared out over ranks (ep), against one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.places import PROGRAMS
from support.worker.chain import check as check_chain
from support.worker.chain import job_of, pass_through
from support.worker.layout_case import Case, check, follow, run
from support.worker.peer_recovery import begin, goes_on, recover
from support.worker.worker_pool import Pool

from elastic.types import Layout, parse_layout

pytestmark = pytest.mark.slow

CASES = [
    Case("tiny_experts.py", "dp_shard=4,ep=2", 13),
    Case("tiny_experts.py", "pp=2,dp_shard=2,ep=2,activation_checkpointing=full"),
]
MORE = [
    Case("tiny_experts.py", "dp_replicate=2,dp_shard=2,ep=2", microbatches=3),
    Case("tiny_experts.py", "dp_shard=2,cp=2,ep=4"),
    Case("tiny_experts.py", "dp_shard=4,ep=4", 13, 20),
    Case("tiny_experts.py", "dp_shard=4,ep=2,zero_stage=1", microbatches=3),
    Case("tiny_experts.py", "dp_shard=2,tp=2,ep=2"),
    Case("tiny_experts.py", "pp=2,dp_shard=2,ep=2,schedule=interleaved1f1b"),
]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.whole) for case in MORE)], ids=str
)
def test_it_trains_as_one_process_does(pool: Pool, tmp_path: Path, case: Case) -> None:
    steps = run(pool, case, tmp_path)
    check(case, steps, 1e-5 if case.steps == 3 else 1e-4)
    assert all(1.0 <= step.expert_load < parse_layout(case.layout).world_size for step in steps)


CHAIN = [
    Layout(dp_shard=2, ep=2), Layout(dp_shard=4, ep=4), Layout(dp_shard=3),
    Layout(pp=2, dp_shard=2, ep=2), Layout(dp_replicate=2, dp_shard=2, ep=2), Layout(tp=2),
    Layout(dp_shard=2, cp=2, ep=4),
]  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("n", [4, pytest.param(len(CHAIN), marks=pytest.mark.whole)])
def test_live_changes_of_ep(pool: Pool, tmp_path: Path, n: int) -> None:
    """Losses, and the weights and the optimizer state of the checkpoint at the end, are those of
    one process."""
    job = job_of("tiny_experts.py", steps=2 * n + 4)
    steps = pass_through(pool, job, tmp_path, CHAIN[:n] + CHAIN[:1], every=2)
    check_chain(job, tmp_path, steps, 1e-4)


@pytest.mark.e2e
def test_a_lost_rank_leaves_its_experts_at_another(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny_experts.py", steps=14)
    first = begin(pool, job, tmp_path, Layout(dp_shard=4, ep=4))
    try:
        new = recover(pool, first, Layout(dp_shard=2, ep=2), [first.ranks[1]])
        goes_on(pool, job, new)
    finally:
        pool.revive()


@pytest.mark.e2e
@pytest.mark.parametrize(
    "program",
    [pytest.param("tiny_balanced_experts.py", marks=pytest.mark.whole), "tiny_biased_experts.py"],
)
def test_what_balances_is_the_same_in_every_layout(
    pool: Pool, tmp_path: Path, program: str
) -> None:
    """It counts no made-up values of a pipeline's first call either."""

    def losses(program: str, layout: str) -> list[float]:
        folder = tmp_path / f"{program} {layout}"
        return [step.train_loss for step in run(pool, Case(program, layout, steps=6), folder)]

    one = losses(program, "dp_shard=1")
    for layout in ("dp_shard=2,ep=2", "pp=2,dp_shard=2"):
        assert losses(program, layout) == pytest.approx(one, abs=1e-5)
    assert one != pytest.approx(losses("tiny_experts.py", "dp_shard=1"), abs=1e-4)


@pytest.mark.whole
@pytest.mark.parametrize("name", ["hf_mixtral.py", "hf_qwen3_moe.py", "hf_gpt_oss.py"])
def test_mixtures_of_transformers(pool: Pool, tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers", reason="it is in the extra 'test'")
    layouts = [Layout(dp_shard=2, ep=2), Layout(pp=2, dp_shard=2, ep=2), Layout(dp_shard=4, ep=4)]
    follow(pool, tmp_path, name, layouts)


LOOKS_AT_OTHERS = """
import dataclasses, sys
sys.path.insert(0, {programs!r})
import tiny_experts
from elastic.models.experts import Experts

def forward(self, hidden, index, weights):
    return own(self, hidden, index, weights) * (1.0 + hidden.mean())

own, Experts.forward = Experts.forward, forward
program = dataclasses.replace(tiny_experts.program, batch_dependent=True)  # else dp is refused for it
"""


@pytest.mark.whole
def test_experts_that_look_at_other_tokens_are_not_shared_out(tmp_path: Path) -> None:
    """Found by the values of a small copy before the start, in a process of its own."""
    (tmp_path / "program.py").write_text(LOOKS_AT_OTHERS.format(programs=str(PROGRAMS)))
    asked = (
        "import sys; from elastic.types import Job; "
        "from elastic.worker.equivalence.layout_check import CheckRequest, check; "
        "found = check(CheckRequest(Job(program=sys.argv[1], global_batch=12), axes=('ep',))); "
        "print(sorted(found.equal or ()), found.structure.no_ep)"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", asked, str(program)],
            capture_output=True, text=True, timeout=300, check=True,
        ).stdout
        for program in (PROGRAMS / "tiny_experts.py", tmp_path / "program.py")
    ]  # fmt: skip
    assert said[0].split() == ["['ep']"]
    assert said[1].startswith("[] dp_shard=2,ep=2: it computes other gradients")
