"""Optimizers that look at whole tensors: in every layout, through changes and a loss, what one
process computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.places import PROGRAMS
from support.reference import Reference, train
from support.worker.chain import job_of, pass_through
from support.worker.plans import from_copies, live, plan
from support.worker.worker_pool import Pool

from elastic.models.llama import init_weights
from elastic.policy.copies.recovery import covered
from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import (
    Abort,
    Box,
    CopyStored,
    Job,
    Layout,
    NumbersChecked,
    Plan,
    Quiesced,
    Resume,
    ShardStored,
    StepDone,
    WrongNumbers,
)
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.program.job_program import with_job
from elastic.worker.program.owned.low_bit_state import is_low_bit
from elastic.worker.program.owned.state_form import form_of

STEPS, EVERY = 9, 3
OWN = "programs.whole_optimizers"
ADAMW = {"path": "torch.optim.AdamW", "lr": 4e-3, "no_decay": ["*norm*"]}
OPTIMIZERS: dict[str, Any] = {
    "muon": {"path": "muon+adamw", "lr": 4e-3, "weight_decay": 0.1, "no_decay": ["*norm*"]},
    "adafactor": {"path": "torch.optim.Adafactor", "lr": 1e-2, "weight_decay": 0.01},
    "lamb": {
        "matrices": {"path": f"{OWN}.Lamb", "parameters": ["layers.*.w?.weight"]},
        "rest": ADAMW,
    },
    "shampoo": {"path": f"{OWN}.Shampoo"},
    "lars": {"path": f"{OWN}.Lars"},
    "soap": {"path": f"{OWN}.Soap"},
    "adamw8bit": {"path": "torchao.optim.AdamW8bit", "lr": 1e-3, "weight_decay": 0.1},
    "adam4bit": {"path": "torchao.optim.Adam4bit", "lr": 3e-4, "no_decay": ["*norm*"]},
}
WIDE = ("adamw8bit", "adam4bit")  # what they keep of tiny tensors has all of its bits
CASES = [
    pytest.param(
        name, marks=[] if name in ("muon", "shampoo", "adamw8bit") else [pytest.mark.whole]
    )
    for name in OPTIMIZERS
]
CHAINS = {  # at first, after a loss, after a notice or growth
    "muon": (Layout(dp_replicate=2, dp_shard=2), Layout(dp_replicate=3), Layout(dp_shard=2, tp=2)),
    "adafactor": (Layout(dp_shard=4), Layout(tp=2), Layout(pp=2, tp=2)),
    "lamb": (Layout(pp=4), Layout(dp_shard=3), Layout(dp_replicate=2, tp=2)),
    "shampoo": (Layout(dp_replicate=4), Layout(pp=2), Layout(pp=2, dp_shard=2)),
    "lars": (Layout(dp_shard=2, tp=2), Layout(dp_shard=3), Layout(pp=2, dp_replicate=2)),
    "soap": (Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=3), Layout(pp=2, tp=2)),
    "adamw8bit": (Layout(dp_shard=2, tp=2), Layout(dp_shard=3), Layout(pp=2, dp_replicate=2)),
    "adam4bit": (Layout(dp_replicate=2, dp_shard=2), Layout(pp=2), Layout(dp_shard=2, tp=2)),
}


def without_one(pool: Pool, old: Plan) -> Resume:
    """Back to the newest step that the others hold where the first worker is lost."""
    for worker in old.ranks:
        pool.order(worker, Abort(old.generation))
    pool.quiesced(old.generation, len(old.ranks))
    every = [h for e in pool.events(Quiesced, old.generation) for h in e.holdings]
    left = [h for h in every if h.worker != old.ranks[0] and h.kind == "peer"]
    steps = {h.step for h in left}
    whole = [s for s in steps if covered(old, [h for h in left if h.step == s], alone=True)]
    live = [h for h in every if h.worker != old.ranks[0] and h.kind == "live"]
    assert not covered(old, live, alone=True), "no replica has what an owner keeps"
    return from_copies(old, max(whole), tuple(h for h in left if h.step == max(whole)))


def digests_agree(pool: Pool, generation: int) -> bool:
    parts = pool.digests(generation)
    before = sum(p.before for p in parts if p.before is not None)
    return before % 2**64 == sum(p.after for p in parts if p.after) % 2**64


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_through_a_loss_and_a_live_change(pool: Pool, tmp_path: Path, name: str) -> None:
    if name in WIDE:
        pytest.importorskip("torchao")
    file = "tiny_wide.py" if name in WIDE else "tiny_bare.py"
    job = job_of(file, STEPS) | {"optimizer": OPTIMIZERS[name], "check_numbers_every": 2}
    workers, (first, lossy, last) = pool.open(job, tmp_path), CHAINS[name]
    one = plan(1, first, workers, 12, peer_every=1, alone=True)
    pool.enter(one)
    pool.wait(lambda: any(e.copy.step >= EVERY for e in pool.events(CopyStored)), "copies")
    two = plan(2, lossy, workers[1:], 12, resume=without_one(pool, one))
    pool.enter(two)
    pool.entered(2)
    pool.wait(lambda: any(e.step >= 2 * EVERY for e in pool.events(StepDone, 2)), "some steps")
    three = plan(3, last, workers, 12, resume=live(two))
    pool.enter(three)
    pool.entered(3)
    n = last.world_size
    pool.quiesced(3, n)
    pool.wait(lambda: len(pool.events(ShardStored)) == n, "the last checkpoint")
    digest = sum(int(e.digest) for e in pool.events(ShardStored)) % (1 << 64)
    storage = open_storage(str(tmp_path))
    checkpoint_writer.commit(storage, STEPS, 3, world_size=n, epoch=1, meta={"digest": digest})
    assert digests_agree(pool, 2) and digests_agree(pool, 3)
    assert pool.events(NumbersChecked) and not pool.events(WrongNumbers)
    done = {e.step: e for e in sorted(pool.events(StepDone), key=lambda e: e.generation)}
    alone = alone_of(job, STEPS)
    assert sorted(done) == list(range(1, STEPS + 1))
    losses = [done[step].train_loss for step in sorted(done)]
    assert losses == pytest.approx(alone.losses, abs=1e-4)
    assert alone.losses[-1] < alone.losses[0] - 0.02, "the optimizer does something"
    check_stored(checkpoint_index.find(storage)[0].uri, alone)
    goes_on_from_storage(pool, tmp_path, job, alone)


def alone_of(job: dict[str, Any], steps: int) -> Reference:
    """One process, plain torch (torchao's compile their step: not here)."""
    given = Job(steps=steps, global_batch=12, optimizer=job["optimizer"], seed=job["seed"])
    with torch.compiler.set_stance("force_eager"):
        return train(with_job(load_program(job["program"]), given), job, steps)


def changed_by(optimizer: dict[str, Any], relative: float) -> float:
    """How far the losses of one process move where its weights begin changed by so little."""
    bare = load_program(PROGRAMS / "tiny_bare.py")

    def init(model: torch.nn.Module, more: float) -> None:
        init_weights(model)
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + more * torch.randn(parameter.shape, generator=draw))

    given, losses = Job(steps=STEPS, global_batch=12, optimizer=optimizer), []
    for more in (0.0, relative):
        program = with_job(replace(bare, init=partial(init, more=more)), given)
        losses.append(train(program, job_of("tiny_bare.py", STEPS), STEPS).losses)
    return max(abs(one - other) for one, other in zip(*losses, strict=True))


@pytest.mark.whole
def test_where_rounding_decides_one_process_differs_as_much() -> None:
    """The bases of an eigenspace of equal eigenvalues: no layout can be held to them."""
    assert changed_by(OPTIMIZERS["soap"] | {"apart": 0.0}, 1e-7) > 1e-3
    assert changed_by(OPTIMIZERS["soap"], 1e-7) < 1e-5
    assert changed_by(OPTIMIZERS["lars"], 1e-7) < 1e-5


def check_stored(uri: str, alone: Reference) -> None:
    checkpoint = checkpoint_index.open_checkpoint(uri)

    def read(fqn: str) -> torch.Tensor:
        shape, dtype = checkpoint.tensors[fqn]
        return checkpoint.read(Box(fqn, (0,) * len(shape), shape, dtype))

    for name, parameter in alone.model.named_parameters():
        state = alone.state_of(parameter)
        form, _ = form_of([state])
        for entry, value in form.leaves(state).items():
            fqn, value = f"optim.{entry}.{name}", torch.as_tensor(value)
            got = read(fqn).to(value.dtype)
            assert got.shape == value.shape
            if entry.startswith("bases/"):  # an eigenvector's sign is free
                got, value = (got.T @ value).abs(), torch.eye(len(value))
            if not entry.endswith("/codes"):
                torch.testing.assert_close(
                    got, value, atol=2e-3, rtol=1e-2, msg=lambda m, fqn=fqn: f"{fqn}: {m}"
                )
        stored = form.build(lambda entry, name=name: read(f"optim.{entry}.{name}"))
        for key, kept in state.items():
            if is_low_bit(kept):  # a sum in another order may round to the code beside
                apart = (stored[key].dequantize() - kept.dequantize()).norm()
                assert apart < 0.1 * kept.dequantize().norm(), f"{key} of {name}"


def goes_on_from_storage(pool: Pool, run: Path, job: dict[str, Any], alone: Reference) -> None:
    """What was stored is read back into a layout that nobody had."""
    stored = checkpoint_index.find(open_storage(str(run)))[0]
    further = job | {"steps": STEPS + 2}
    workers = pool.open(further, run)
    resume = Resume("durable", STEPS, 3, uri=stored.uri)
    pool.enter(plan(4, Layout(dp_replicate=3), workers, 12, resume=resume))
    pool.quiesced(4, 3)
    losses = alone_of(further, STEPS + 2).losses
    assert losses[:STEPS] == alone.losses
    assert [e.train_loss for e in pool.events(StepDone, 4)] == pytest.approx(
        losses[STEPS:], abs=1e-4
    )


TIED = f"""
from dataclasses import replace
import torch
from elastic.program import load_program
tied = load_program({str(PROGRAMS / "tiny_tied.py")!r})
def optimizer(named):
    return torch.optim.Adafactor([p for _, p in named], lr=1e-2)
program = replace(tied, optimizer=optimizer, lr_factor=None)
"""


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_tied_matrix_has_an_owner_on_each_of_its_stages(pool: Pool, tmp_path: Path) -> None:
    program = tmp_path / "tied.py"
    program.write_text(TIED)
    job = job_of("tiny_tied.py", 6) | {"program": str(program)}
    chain = [Layout(pp=2, dp_shard=2), Layout(tp=2)]
    done = pass_through(pool, job, tmp_path / "run", chain, 3)
    alone = train(load_program(program), job, 6)
    assert [e.train_loss for e in done] == pytest.approx(alone.losses, abs=1e-4)
    assert digests_agree(pool, 2)
    storage = open_storage(str(tmp_path / "run"))
    check_stored(checkpoint_index.find(storage)[0].uri, alone)
