"""Numbers of rows that a program is called with sooner or later: none in a micro-batch, any number
in a validation. Found before a worker starts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic.errors import ProgramError
from elastic.models.experts import MixtureOfExperts
from elastic.program import Program
from elastic.types import Job, Pool
from elastic.worker.equivalence.loss_is_sum import check_before_start, check_no_rows
from elastic.worker.equivalence.small_batch import batch_of
from elastic.worker.program.model_profile import build_meta
from elastic.worker.step.forward_backward import ForwardBackward

LENGTH = 16
POOLS = (Pool("p", "CPU", 2, "spot", max_nodes=1),)


class Texts:
    def __len__(self) -> int:
        return 40

    def length(self, index: int) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (index + torch.arange(LENGTH + 1)) % 8
        return {"input": ids[:-1], "target": ids[1:]}


class Heads(nn.Module):
    """Cut by a size that torch works out (of 0 rows it cannot), or by `rows`; in evaluation mode
    alone, where `only_there`."""

    def __init__(self, rows: int = 0, *, only_there: bool = False) -> None:
        super().__init__()
        self.rows, self.only_there = rows, only_there
        self.embed, self.layers = nn.Embedding(8, 8), nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.embed(ids))
        if self.only_there and self.training:
            return x  # type: ignore[no-any-return]
        heads = (self.rows, LENGTH, 4, 2) if self.rows else (len(x), LENGTH, -1, 2)
        return x.view(heads).flatten(2)  # type: ignore[no-any-return]


def summed(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(
        output.flatten(0, 1), batch["target"].flatten(), reduction="sum"
    )


HEADS = Program(
    model=Heads,
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    dataset=Texts,
    loss=summed,
)
JOB = Job(seed=7, steps=4, global_batch=5, microbatch_tokens=LENGTH, layout="dp_shard=2")


def before_start(job: Job, **changes: Any) -> str:
    return check_before_start(replace(HEADS, **changes), job, Texts())


AUTO = {"layout": "auto", "pools": POOLS}


@pytest.mark.parametrize("layout", [{"layout": "dp_shard=2"}, {**AUTO, "min_workers": 2}])
def test_micro_batches_without_rows_are_tried(layout: dict[str, Any]) -> None:
    """5 samples on 2 ranks, one in each micro-batch."""
    with pytest.raises(
        ProgramError,
        match=r"RuntimeError: cannot reshape .*\(test_rows_tried\.py:\d+\), over a micro-batch of "
        r"0 rows: of 2 data-parallel ranks one has 2 samples of a step, and another 3 "
        r"micro-batches; let .*microbatch_tokens \(it is 16\) or global_batch \(5\), or fewer ranks",
    ):
        before_start(replace(JOB, **layout))


@pytest.mark.parametrize(
    "changes",
    [
        {"global_batch": 4},
        {"layout": "dp_shard=1"},
        {**AUTO, "max_workers": 1},
        {"microbatch_tokens": 3 * LENGTH},
    ],
)
def test_where_no_rank_has_them_0_rows_are_not_asked_for(changes: dict[str, Any]) -> None:
    assert not before_start(replace(JOB, **changes))


def test_where_only_more_ranks_have_them_it_is_a_note() -> None:
    """It trains on one."""
    note = before_start(replace(JOB, **AUTO))
    assert note.startswith(
        "it cannot train on as many ranks as it may have: RuntimeError: cannot reshape"
    )
    assert "of 2 data-parallel ranks" in note and note.endswith("fewer ranks (max_workers)")


def test_the_length_of_a_sample_is_asked_for_once_while_that_is_found_out() -> None:
    asked: list[int] = []

    class Counted(Texts):
        def length(self, index: int) -> int:
            asked.append(index)
            return LENGTH

    pools = (replace(POOLS[0], max_nodes=4),)
    job = replace(JOB, steps=20, **AUTO | {"pools": pools})
    check_no_rows(HEADS, build_meta(HEADS), job, dataset=Counted())
    assert len(asked) <= len(Counted()) + 2  # the first sample is read with it


def test_no_samples_are_read_in_search_of_a_pair_where_none_has_a_class() -> None:
    read: list[int] = []

    class Counted(Texts):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            read.append(index)
            return super().__getitem__(index)

    batch_of(Counted(), None)
    alone = len(read)
    batch_of(Counted(), None, pair=True)
    assert len(read) == 2 * alone


def test_a_program_that_takes_no_rows_is_right() -> None:
    before_start(JOB, model=lambda: Heads(only_there=True))


class Mixtures(nn.Module):
    def __init__(self, **balanced: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.layers = nn.ModuleList([MixtureOfExperts(8, 8, 4, top_k=2, **balanced)])

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.layers[0](self.embed(ids))
        return found


@pytest.mark.parametrize("by", ["balance", "bias_rate"])
def test_a_mixture_that_would_be_balanced_by_filling_is_refused(by: str) -> None:
    model = partial(Mixtures, **{by: 0.01})
    with pytest.raises(ProgramError) as raised:
        before_start(JOB, model=model)
    assert str(raised.value) == (
        f"layers.0 is balanced by {by}, which counts filling as tokens, and with microbatch_tokens "
        f"each layout has another number of these; leave {by} out, or fill all samples up to one "
        "length (data: pack: pad) without microbatch_tokens"
    )
    before_start(replace(JOB, microbatch_tokens=None), model=model)
    before_start(JOB, model=Mixtures)


def test_at_a_later_step_a_worker_says_it() -> None:
    there: Any = SimpleNamespace(program=HEADS, job=JOB, state=SimpleNamespace(model=Heads()))
    batch = {key: value.unsqueeze(0) for key, value in Texts()[0].items()}
    assert ForwardBackward._output(there, batch, range(1)).shape == (1, LENGTH, 8)
    with pytest.raises(
        ProgramError, match=r"RuntimeError: cannot reshape .*0 rows: this rank has fewer samples"
    ) as caught:
        ForwardBackward._output(there, batch, range(0))
    assert "test_rows_tried.py" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: launch failure")],
)
def test_a_worker_leaves_what_its_device_raises_as_it_is(error: Exception) -> None:
    def called(*_: Any) -> None:
        raise error

    there: Any = SimpleNamespace(program=HEADS, job=JOB, state=SimpleNamespace(model=called))
    with pytest.raises(type(error)) as caught:
        ForwardBackward._output(there, {"input": torch.zeros(1, LENGTH)}, range(0))
    assert caught.value is error


def by_rows(rows: int, reads: bool = False) -> Any:
    def evaluate(model: Any, batch: Any) -> dict[str, Any]:
        output = model(batch["input"])
        if reads:  # which is known with values alone
            output = output[: int(batch["input"].amax())]
        value = summed(output.view(rows or len(output), LENGTH, 8), batch)
        return {"loss": value.item(), "count": batch["target"].numel()}

    return evaluate


PAIRS: dict[str, Any] = {"model": lambda: Heads(2, only_there=True)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluate": by_rows(0)}, ""),
        ({"evaluate": by_rows(2)}, r"Program\.evaluate raised RuntimeError: .*, over 1 row of the"),
        ({"evaluate": by_rows(5)}, r"Program\.evaluate raised RuntimeError: .*, over 2 rows of"),
        ({"evaluate": by_rows(2, reads=True)}, ""),
        (PAIRS, "the model in evaluation mode raised .* 3 rows"),
        (PAIRS | {"global_batch": 4}, ""),
        (PAIRS | {"global_batch": 4, "microbatch_tokens": 8 * LENGTH}, "evaluation .* 1 row"),
        (PAIRS | {"global_batch": 4} | AUTO, "evaluation mode .* 4 rows"),
        (PAIRS | {"global_batch": 4, "evaluate": by_rows(0)}, r"Program\.evaluate .* 1 row"),
        (PAIRS | {"batch_dependent": True}, ""),
        ({"model": lambda: Heads(only_there=True)}, ""),
    ],
)
def test_a_validation_takes_the_rows_that_ranks_have(changes: dict[str, Any], said: str) -> None:
    """The model those of their shares, which are filled up; `evaluate` any number."""
    of_job = {key: changes[key] for key in changes if hasattr(JOB, key)}
    changes = {key: changes[key] for key in changes.keys() - of_job.keys()}
    job = replace(JOB, **{"microbatch_tokens": None} | of_job)
    with pytest.raises(ProgramError, match=said) if said else nullcontext():
        before_start(job, validation=Texts, **changes)
    if not changes.get("evaluate"):
        before_start(job, **changes)  # without one nobody asks
