"""What the host does for one more micro-batch, counted beside plain FSDP2: a step of many small
ones is bound by it on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.counting import calls_by_name
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.certify.gpu.one_rank_steps import Ours, Plain
from elastic.certify.gpu.solo import sized
from elastic.types import Layout
from elastic.worker.parallel.model_options import begin_microbatch

ROWS, FEW, MANY = 8, 2, 8
N_BLOCKS = 2
# copies of the batch's two tensors for the model and for the loss, where plain FSDP2 has views
OPERATIONS_MORE = 4
CALLS_MORE = 75  # for each block: its hooks, four marks, their events
OTHERS_MORE = 50  # besides, which do not grow with the model


class Event:
    """Of a GPU that has passed it at once."""

    def __init__(self, **_: Any) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(work: Callable[[], Any]) -> Counter[str]:
    with Operations() as counted:
        work()
    return counted.seen


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Ours, Plain]]:
    """Elastic's steps with the marks of a GPU, plain FSDP2's."""
    monkeypatch.setenv("CERTIFY_SIZE", "tiny")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    program, job = sized("tiny", ROWS)
    device = torch.device("cpu")
    ours = Ours(program, job, device, rows=ROWS)
    try:
        ours.cut(FEW)
        monkeypatch.setattr(ours.stepper.spans.marks, "_on", True)
        yield ours, Plain(program, job, device, rows=ROWS)
    finally:
        ours.close()


def of_one_more(
    one: Ours | Plain, count: Callable[[Callable[[], Any]], Counter[str]]
) -> Counter[str]:
    """What a step of MANY micro-batches has more than one of FEW, MANY - FEW times too much."""
    found = []
    for n in (MANY, FEW):
        one.cut(n)
        one.steps(2)  # caches fill
        found.append(count(lambda: one.steps(1)))
    found[0].subtract(found[1])
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "most"),
    [(operations, OPERATIONS_MORE), (calls_by_name, CALLS_MORE * N_BLOCKS + OTHERS_MORE)],
    ids=["operations", "calls"],
)
def test_a_micro_batch_costs_hardly_more_than_plain_fsdp2(
    both: tuple[Ours, Plain], count: Any, most: int
) -> None:
    mine, plain = (of_one_more(one, count) for one in both)
    assert plain.total() > (MANY - FEW) * 100, "nothing was counted"
    more = (mine.total() - plain.total()) / (MANY - FEW)
    mine.subtract(plain)
    assert more <= most, mine.most_common(20)


class Told(FSDPModule, torch.nn.Module):  # type: ignore[misc]
    """Notes what a model is told of its gradients."""

    def __new__(cls) -> Any:
        return object.__new__(cls)

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, bool]] = []

    def set_requires_gradient_sync(self, on: bool, **_: Any) -> None:
        self.said.append(("sync", on))

    def set_reshard_after_backward(self, on: bool, **_: Any) -> None:
        self.said.append(("reshard", on))

    def set_requires_all_reduce(self, on: bool, **_: Any) -> None:
        self.said.append(("all-reduce", on))


@pytest.mark.parametrize(
    ("layout", "n", "said"),
    [
        (Layout(dp_shard=2), 4, []),
        (Layout(dp_replicate=2, dp_shard=2), 1, []),
        (Layout(dp_replicate=2, dp_shard=2), 4, [("all-reduce", False), ("all-reduce", True)]),
        (Layout(dp_shard=2, zero_stage=1), 4,
         [("sync", False), ("reshard", False), ("sync", True), ("reshard", True)]),
    ],
    ids=["shards", "one", "replicas", "zero 1"],
)  # fmt: skip
def test_a_model_is_told_of_its_gradients_where_that_changes(
    layout: Layout, n: int, said: list[tuple[str, bool]]
) -> None:
    model = Told()
    for number in range(1, n + 1):
        begin_microbatch(model, layout, number, of=n)
    assert model.said == said
