"""What is found before a step is paid for: a loss that is a mean, a loss that is no scalar. And
rehearsals of coming plans."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.places import PROGRAMS
from torch import nn
from torch.nn.functional import cross_entropy

from elastic.errors import ProgramError
from elastic.program import Program, load_program
from elastic.types import Job, Layout, Rehearsal, WorkerId
from elastic.worker.equivalence.loss_is_sum import check_before_start
from elastic.worker.program.model_profile import trace
from elastic.worker.session.rehearsal import rehearse, rehearse_plan

TINY = load_program(PROGRAMS / "tiny.py")


def place(loss: Callable[[Any, Any], Any] | None = None) -> Any:
    program: Program = TINY if loss is None else replace(TINY, loss=loss)
    profile = trace(program)
    job = Job(seed=7, global_batch=4, clip_grad_norm=1.0)
    me = WorkerId("node0", 0)
    return SimpleNamespace(
        script=None,
        me=me,
        program=program,
        profile=profile,
        job=job,
        dataset=program.dataset(),
        device=torch.device("cpu"),
        block_inputs=[],
        device_lost=False,
    )


def reduced(how: str) -> Callable[[Any, Any], Any]:
    return lambda output, batch: cross_entropy(
        output.flatten(0, 1), batch["target"].flatten(), reduction=how
    )


def test_a_sum_passes() -> None:
    rehearse(place())
    rehearse(place(reduced("sum")))


def test_a_mean_is_refused() -> None:
    with pytest.raises(ProgramError, match="a mean, it seems; it must return the sum"):
        rehearse(place(reduced("mean")))


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_a_mean_is_known_where_one_sample_fills_a_micro_batch(how: str) -> None:
    there = place(reduced(how))
    there.dataset = load_program(PROGRAMS / "tiny_unequal.py").dataset()
    there.job = replace(there.job, microbatch_tokens=there.dataset.length(0))
    refused = pytest.raises(ProgramError, match="a mean, it seems")
    with refused if how == "mean" else nullcontext():
        rehearse(there)
    with refused if how == "mean" else nullcontext():
        check_before_start(replace(there.program, validation=None), there.job, there.dataset)


def test_a_loss_per_token_is_refused_with_its_shape() -> None:
    with pytest.raises(
        ProgramError, match=r"a tensor of shape \[16\]; it must return the sum over the batch"
    ):
        rehearse(place(reduced("none")))


def test_a_loss_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(ProgramError, match="Program.loss returned float"):
        rehearse(place(lambda output, batch: 1.0))


def test_a_big_model_is_not_built_whole() -> None:
    big = place()
    big.profile = replace(big.profile, n_params=1 << 40)
    model = TINY.model

    def on_meta() -> Any:
        assert torch.get_default_device().type == "meta", "it was built"
        return model()

    big.program = replace(TINY, model=on_meta)
    rehearse(big)
    assert [tuple(t.shape) for t in big.block_inputs] == [(1, 16, 32)] * 4
    big.program = replace(big.program, loss=reduced("mean"))
    with pytest.raises(ProgramError, match="a mean, it seems"):
        rehearse(big)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout(dp_shard=4), (4,)), (Layout(dp_shard=2, tp=2), (4,)), (Layout(dp_replicate=2,
        dp_shard=2), (4,)), (Layout(pp=2, tp=2), (2, 2)), (Layout(pp=2, dp_shard=2), (3, 1)),
    ],
)  # fmt: skip
def test_every_rank_can_rehearse_alone(layout: Layout, layers: tuple[int, ...], rank: int) -> None:
    """No other rank is there, and no group is left behind."""
    there = place()
    rehearse(there)
    assert [tuple(t.shape) for t in there.block_inputs] == [(1, 16, 32)] * 4
    assert rehearse_plan(there, Rehearsal(layout, layers, 2, 4, (rank,)))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("layout", "layers"),
    [(Layout(dp_shard=4, ep=2), (4,)), (Layout(pp=2, dp_shard=2, ep=2), (2, 2))],
)
def test_tokens_of_experts_go_nowhere_in_a_rehearsal(
    layout: Layout, layers: tuple[int, ...]
) -> None:
    there = place()
    there.program = load_program(PROGRAMS / "tiny_biased_experts.py")
    there.profile = trace(there.program)
    assert there.profile.n_experts == 8
    assert rehearse_plan(there, Rehearsal(layout, layers, 2, 4, (3,)))


def test_a_worker_without_a_part_rehearses_nothing() -> None:
    there = place()
    there.program = replace(TINY, model=lambda: pytest.fail("it was built"))
    assert not rehearse_plan(there, Rehearsal(Layout(dp_shard=2), (4,), 1, 2, (-1,)))


def before_start(**changes: Any) -> None:
    program = replace(TINY, **changes)
    check_before_start(program, Job(seed=7, global_batch=4), program.dataset())


def test_before_a_worker_starts_a_mean_and_a_sample_without_input_are_found_on_shapes() -> None:
    drawn = torch.get_rng_state()
    before_start()
    before_start(loss=reduced("sum"))
    with pytest.raises(ProgramError, match="a mean, it seems"):
        before_start(loss=reduced("mean"))
    unnamed = [{"x": torch.zeros(8, dtype=torch.int64), "y": torch.zeros(8)}]
    with pytest.raises(ProgramError, match="a sample has the keys"):
        before_start(dataset=lambda: unnamed)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("cross_entropy(out, want).item()", "Program.evaluate['loss'] is a mean over the batch"),
        ("nothing", "Program.evaluate raised NameError"),
        ("cross_entropy(out, want, reduction='sum').item()", ""),
        ("dist.get_rank()", ""),
    ],
)
def test_before_a_worker_starts_a_mean_of_its_own_evaluation_is_found(
    returned: str, said: str
) -> None:
    def evaluate(model: Any, batch: Any) -> dict[str, Any]:
        out, want = model(batch["input"]).flatten(0, 1), batch["target"].flatten()
        names = {**globals(), "out": out, "want": want}
        return {"loss": eval(returned, names), "count": want.numel()}

    assert TINY.dataset is not None
    changes = {"evaluate": evaluate, "validation": TINY.dataset, "pipeline": False}
    with pytest.raises(ProgramError, match=re.escape(said)) if said else nullcontext():
        before_start(**changes)


def test_what_cannot_run_on_shapes_is_left_to_the_workers() -> None:
    def wants_values(output: Any, batch: Any) -> Any:
        if float(output.double().std()) > 0.5:  # of one that was made up
            raise RuntimeError("not on these")
        return reduced("sum")(output, batch)

    before_start(loss=wants_values)

    class OnGpus(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("expected a CUDA tensor")

    before_start(model=OnGpus)
    with pytest.raises(ProgramError, match="unexpected keyword argument 'nobody'"):
        before_start(keywords=lambda batch: {"nobody": 1})


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(33, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_before_a_worker_starts_what_the_program_raises_is_told_with_file_and_line() -> None:
    """A layer of the wrong size, a key that the dataset has not."""
    with pytest.raises(
        ProgramError,
        match=r"RuntimeError: mat1 and mat2 shapes cannot be multiplied .* \(test_rehearsal.py:\d+\)"
        r", over the first sample: input \[1, 16\], target \[1, 16\]",
    ):
        before_start(model=Narrow, init=None)
    with pytest.raises(ProgramError, match=r"KeyError: 'labels' \(test_rehearsal.py:\d+\)"):
        before_start(loss=lambda output, batch: output.sum() + batch["labels"].sum())
