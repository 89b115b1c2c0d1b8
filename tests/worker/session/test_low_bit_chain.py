"""Adapters on weights of 4 bits (QLoRA), through a kill, live changes and storage: losses are those
of one process, and the bytes of the weights are never made anew."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference import build, train_alone
from support.worker.chain import job_of, pass_through
from support.worker.peer_recovery import begin, goes_on, recover
from support.worker.plans import plan
from support.worker.worker_pool import Pool

from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import Box, Layout, Resume, StepDone
from elastic.worker.checkpoint import checkpoint_index

pytestmark = pytest.mark.slow
torchao = pytest.importorskip("torchao", reason="it is in the extra 'test'")
CHAINS = [
    [Layout(dp_shard=2, tp=2), Layout(pp=2, activation_checkpointing="full"), Layout(dp_replicate=3)],
    [Layout(pp=4), Layout(dp_replicate=2, tp=2), Layout(dp_shard=3, zero_stage=2)],
    [Layout(dp_shard=4, microbatch_size=1), Layout(tp=2), Layout(pp=2, dp_shard=2)],
    [Layout(offload=True, dp_shard=2), Layout(pp=2, tp=2), Layout(dp_shard=2, dp_replicate=2)],
]  # fmt: skip


def stored_as_made(run: Path, job: dict[str, Any]) -> str:
    """The newest checkpoint, in which a packed weight has 34 bytes where bfloat16 has 128: those
    that it was packed into at the start."""
    uri = checkpoint_index.find(open_storage(str(run)))[0].uri
    checkpoint = checkpoint_index.open_checkpoint(uri)
    program = load_program(job["program"])
    made = build(program, job["seed"]).state_dict()
    assert len(program.packed) == 4 * 7
    n_bytes, n_weights = 0, 0
    for name in program.packed:
        shape, dtype = checkpoint.tensors[f"model.{name}"]
        box = Box(f"model.{name}", (0, 0), shape, dtype)
        assert torch.equal(checkpoint.read(box), made[name]), name
        n_bytes, n_weights = n_bytes + box.n_bytes, n_weights + prod(shape) // 34 * 64
    assert n_bytes * 128 == n_weights * 2 * 34 and n_weights == 4 * (
        3 * 128**2 + 2 * 64 * 128 + 2 * 128**2
    )
    assert not [fqn for fqn in checkpoint.tensors if "optim." in fqn and ".lora_" not in fqn]
    return uri


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: " > ".join(map(str, chain)))
def test_live_changes_and_a_resume(pool: Pool, tmp_path: Path, chain: list[Layout]) -> None:
    job = job_of("tiny_nf4.py", steps=10)
    steps = pass_through(pool, job, tmp_path, chain, every=3)
    alone = train_alone(load_program(job["program"]), job, 12)
    assert [e.train_loss for e in steps] == pytest.approx(alone[:10], abs=1e-4)
    assert alone[-1] < alone[0] - 0.05, "adapters learn"
    uri = stored_as_made(tmp_path, job)
    further = job | {"steps": 12}
    workers = pool.open(further, tmp_path)
    pool.enter(plan(9, Layout(dp_shard=3), workers, 12, resume=Resume("durable", 10, 3, uri=uri)))
    pool.quiesced(9, 3)
    last = [e.train_loss for e in pool.events(StepDone, 9)]
    assert last == pytest.approx(alone[10:], abs=1e-4)


BESIDE = {
    "tiny_nf4_experts.py": [
        Layout(dp_shard=2, ep=2), Layout(pp=2, dp_shard=2, ep=2), Layout(tp=2), Layout(dp_shard=4, ep=4),
    ],
    "tiny_nf4_teacher.py": [
        Layout(dp_shard=2, tp=2), Layout(pp=2), Layout(dp_shard=3, activation_checkpointing="full"),
    ],
}  # fmt: skip


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BESIDE)
def test_beside_experts_over_ranks_and_of_a_teacher(pool: Pool, tmp_path: Path, name: str) -> None:
    """A teacher needs no adapters: what is frozen of it has 4 bits."""
    job, chain = job_of(name, steps=10), BESIDE[name]
    n_blocks = 6 if "teacher" in name else 4
    steps = pass_through(pool, job, tmp_path, chain, every=2, n_blocks=n_blocks)
    program = load_program(job["program"])
    alone = train_alone(program, job, 10)
    assert [e.train_loss for e in steps] == pytest.approx(alone, abs=1e-4)
    assert {e.generation for e in steps} == set(range(1, len(chain) + 1))
    checkpoint = checkpoint_index.find(open_storage(str(tmp_path)))[0].uri
    tensors = checkpoint_index.open_checkpoint(checkpoint).tensors
    assert program.packed and all(tensors[f"model.{n}"][1] == "uint8" for n in program.packed)


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize("after", [Layout(dp_shard=3), Layout(pp=2), Layout(tp=2)], ids=str)
def test_a_kill(pool: Pool, tmp_path: Path, after: Layout) -> None:
    job = job_of("tiny_nf4.py", steps=12)
    first = begin(pool, job, tmp_path, Layout(dp_shard=2, tp=2))
    try:
        goes_on(pool, job, recover(pool, first, after, [first.ranks[3]]))
    finally:
        pool.revive()
