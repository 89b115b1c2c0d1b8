"""BatchNorm by groups and by steps, beside plain torch; and what is said of what cannot be so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.places import FOREIGN, PROGRAMS
from torch import Tensor, nn

from elastic.errors import ProgramError, SpecError
from elastic.program import Program, load_program
from elastic.types import Job
from elastic.types.typed_job import default_group
from elastic.worker.equivalence.structure import structure_of
from elastic.worker.parallel.activation_checkpointing import checkpoint_blocks
from elastic.worker.program.calls import ModelCalls
from elastic.worker.program.job_program import with_job
from elastic.worker.program.model_profile import trace
from elastic.worker.program.norms.batch_norms import norms_of
from elastic.worker.program.norms.step_norms import StepNorms
from elastic.worker.state.buffers import StepBuffers

RESNET, BATCH, GROUP = load_program(PROGRAMS / "tiny_resnet.py"), 12, 3
FOUR = Job(global_batch=BATCH, batch_norm={"group": GROUP})
STEP = replace(FOUR, batch_norm="step")


def images(n: int = BATCH) -> Tensor:
    dataset: Any = RESNET.dataset
    return torch.stack([dataset()[i]["input"] for i in range(n)])


def built(program: Program, job: Job | None = None) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = (with_job(program, job) if job is not None else program).model()
    return model


def passed(model: nn.Module, cut: list[int], first: int = 0) -> Tensor:
    """A step: forward and backward passes of micro-batches of these sizes."""
    norms, outputs, at = StepNorms([model], []), [], 0
    norms.begin()
    for x in images(sum(cut)).split(cut):
        with norms.passing(range(at, at + len(x))):
            outputs.append(model(x))
        outputs[-1].square().sum().backward()
        at += len(x)
    norms.update(first, BATCH)
    return torch.cat(outputs)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, atol=1e-6, rtol=1e-6)
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("cut", [[12], [3, 9], [6, 3, 3]], ids=str)
@pytest.mark.parametrize("computed_again", [False, True])
def test_groups_are_as_torch_computes_them_one_after_another(
    cut: list[int], computed_again: bool
) -> None:
    plain, model = built(RESNET), built(RESNET, FOUR)
    wanted = [plain(part) for part in images().split(GROUP)]
    torch.cat(wanted).square().sum().backward()
    if computed_again:
        checkpoint_blocks(list(model.layers), "full")  # type: ignore[arg-type]
    got = passed(model, cut)
    assert torch.equal(got, torch.cat(wanted))  # to the last bit
    assert_same(plain, model)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.eval()(images()), model.eval()(images()))


def test_a_step_is_as_torch_computes_it_at_once() -> None:
    plain, model = built(RESNET), built(RESNET, STEP)
    wanted = plain(images())
    wanted.square().sum().backward()
    assert torch.equal(passed(model, [BATCH]), wanted)
    assert_same(plain, model)


def test_a_step_that_is_not_applied_leaves_no_trace() -> None:
    model = built(RESNET, FOUR)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = StepBuffers(model.buffers())
    buffers.note()
    passed(model, [6, 6])
    assert not torch.equal(model.state_dict()["norm.running_mean"], before["norm.running_mean"])
    buffers.leave_out()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_half_precision_has_statistics_in_float32() -> None:
    layer = nn.Sequential(nn.BatchNorm2d(4))
    program = Program(model=lambda: layer, loss=lambda output, batch: output.sum())
    model = built(with_sgd(program), FOUR)
    output = passed_of(model, torch.randn(6, 4, 2, 2).bfloat16())
    assert output.dtype == torch.bfloat16
    assert norms_of([model])[0].noted[0][1].dtype == torch.float32


def with_sgd(program: Program) -> Program:
    return replace(program, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))


def passed_of(model: nn.Module, x: Tensor, n: int | None = None) -> Tensor:
    norms = StepNorms([model], [])
    with norms.passing(range(n or len(x))):
        output: Tensor = model(x)
    return output


def of(*modules: nn.Module, **more: Any) -> Program:
    return with_sgd(
        Program(
            model=lambda: nn.Sequential(*modules), loss=lambda output, batch: output.sum(), **more
        )
    )


def test_rows_that_are_parts_of_samples_stay_with_them() -> None:
    """Tokens as rows: three of each sample."""
    norm = nn.BatchNorm1d(5)
    x = torch.randn(6 * 3, 5)
    got = passed_of(built(of(norm), FOUR), x, n=6)
    plain = nn.BatchNorm1d(5)
    assert torch.equal(got, torch.cat([plain(part) for part in x.split(9)]))


def test_what_cuts_a_group_is_named() -> None:
    model = built(of(nn.BatchNorm1d(5)), FOUR)
    with pytest.raises(ProgramError, match="0 is called with 4 samples, which are no whole groups"):
        passed_of(model, torch.randn(4, 5))
    with pytest.raises(ProgramError, match="7 rows for 6 samples, so that nobody knows whose"):
        passed_of(model, torch.randn(7, 5), n=6)


def test_what_is_no_batch_norm_is_said() -> None:
    with pytest.raises(SpecError, match="key 'batch_norm': the model has no BatchNorm"):
        trace(with_job(of(nn.Linear(2, 2)), FOUR))
    assert trace(with_job(of(nn.GroupNorm(1, 2)), Job(global_batch=8))).together == 1
    with pytest.raises(ProgramError, match="0 is a LazyBatchNorm2d, whose size is not known"):
        trace(with_job(of(nn.LazyBatchNorm2d()), FOUR))


def test_what_is_asked_of_layouts() -> None:
    found = trace(with_job(RESNET, FOUR))
    assert found.together == GROUP and "SyncBatchNorm: of parts of samples" in found.no_cp
    assert found.notes == (
        "stem.1 is a SyncBatchNorm (and 8 more): statistics of groups of 3 samples in the order of "
        "the step",
    )
    by_default = trace(with_job(RESNET, Job(global_batch=128)))
    assert by_default.together == 16
    assert by_default.notes[0].endswith("by default; batch_norm in job.yaml says another, or step")
    by_step = trace(with_job(RESNET, STEP))
    assert by_step.together == 0 and "not of its micro-batches" in by_step.no_pp
    assert not by_step.pipeline and "all samples of a step" in by_step.notes[0]
    cut = {"0": "sequence"}
    assert "parts of samples" in trace(with_job(of(nn.BatchNorm1d(4), tp=cut), FOUR)).no_tp
    frozen = of(nn.BatchNorm1d(4).eval(), nn.Linear(4, 4))
    assert trace(with_job(frozen, FOUR)).together == 1
    older = trace(with_job(RESNET, Job.from_plain({"global_batch": 8})))
    assert older.together == 1 and not older.notes


def test_statistics_by_hand_are_named_with_their_line() -> None:
    program = load_program(FOREIGN / "batchnorm_by_hand.py")
    dataset: Any = program.dataset
    batch = {key: torch.as_tensor(x)[None] for key, x in dataset()[0].items()}
    found = structure_of(program, trace(program), batch)
    assert found.no_dp.startswith("layers.0 (batchnorm_by_hand.py:18) calls batch_norm, whose")
    assert "take a module (nn.BatchNorm2d)" in found.no_dp and found.no_pp == found.no_dp


@pytest.mark.parametrize(
    ("batch", "group"),
    [(1, 0), (2, 0), (4, 0), (8, 0), (12, 6), (16, 8), (22, 11), (24, 8), (48, 8), (64, 8),
     (100, 10), (128, 16), (256, 32), (4096, 32), (134, 67), (127, 0), (1_000_003, 0)],
)  # fmt: skip
def test_the_group_by_default_follows_from_the_batch(batch: int, group: int) -> None:
    assert default_group(batch) == (group if group <= 64 else 0)


def test_a_model_that_is_called_by_hand_in_a_script() -> None:
    model = built(of(nn.BatchNorm1d(5)), FOUR)
    norms = StepNorms([model], [])
    norms.begin()
    x = torch.randn(6, 5)

    def called(*parts: torch.Tensor) -> None:
        calls = ModelCalls(6, norms.of_call)
        with calls.of(model):
            for part in parts:
                model(part)
        norms.check_all(calls)

    called(x[:3], x[3:], 2 * x)
    norms.update(0, 6)
    plain = nn.BatchNorm1d(5)
    for part in (x[:3], 2 * x[:3], x[3:], 2 * x[3:]):
        plain(part)
    assert_same(nn.Sequential(plain), model)
    with pytest.raises(ProgramError, match="called with 3 of the 6 samples"):
        called(x[:3])
    with pytest.raises(ProgramError, match="called with 6 samples behind 3 of 6"):
        called(x[:3], x)


def test_a_call_in_evaluation_mode_may_have_other_samples() -> None:
    model = built(of(nn.BatchNorm1d(5)), FOUR)
    norms = StepNorms([model], [])
    norms.begin()
    x = torch.randn(6, 5)
    calls = ModelCalls(6, norms.of_call)
    with calls.of(model):
        for n in (4, 9):  # fewer than a step has, and more
            model.eval()
            model(torch.randn(n, 5))
            model.train()
            model(x[:3] if n == 4 else x[3:])
    norms.check_all(calls)
    norms.update(0, 6)
    plain = nn.BatchNorm1d(5)
    for part in (x[:3], x[3:]):
        plain(part)
    assert_same(nn.Sequential(plain), model)


def test_a_sample_alone_behind_a_pooling_is_refused_by_name() -> None:
    """Where each micro-batch has its own statistics; by groups a trial of one sample works."""
    pooled = load_program(FOREIGN / "batchnorm_pooled.py")
    dataset: Any = pooled.dataset
    x = torch.stack([dataset()[i]["input"] for i in range(2)])
    model = built(pooled, replace(FOUR, batch_norm="microbatch"))
    model(x)
    with pytest.raises(ProgramError, match="^norm is a BatchNorm2d that is given one value of"):
        model(x[:1])
    model.eval()(x[:1])
    built(pooled, FOUR)(x[:1])
