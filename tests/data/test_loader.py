"""Reading ahead: right batches in order, a bound, errors with the sample's id, and an end."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.waiting import is_waiting, once_waiting, until

from elastic.data.batches import item_of
from elastic.data.budget import Microbatch
from elastic.data.collate import collate
from elastic.data.loader import Loader
from elastic.errors import ProgramError
from elastic.worker.session.worker_errors import kind_of


class Squares:
    """Item i is {"x": i, "y": [i*i, -i]}; counts what was read; fails at `bad`; waits for `gate`
    where there is one."""

    def __init__(self, bad: int = -1, gate: threading.Event | None = None) -> None:
        self.bad, self.gate, self.read = bad, gate, list[int]()
        self.asked = threading.Event()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.asked.set()
        if self.gate:
            self.gate.wait(300)
        self.read.append(i)
        if i == self.bad:
            raise OSError("disk on fire")
        return {"x": i, "y": torch.tensor([i * i, -i])}


def one(ids: Sequence[int]) -> list[Microbatch]:
    return [Microbatch(ids)]


def three(step: int) -> Sequence[Microbatch]:
    return one(range(3 * step, 3 * step + 3))


@pytest.fixture
def opened() -> Iterator[list[Loader]]:
    loaders: list[Loader] = []
    yield loaders
    for loader in loaders:
        loader.close()


def settle(loader: Loader, dataset: Squares, n: int) -> None:
    """Waits until `n` items are read, and nobody reads on."""
    until(lambda: len(dataset.read) >= n and all(map(is_waiting, loader._threads)), f"{n} items")


def test_batches_come_in_order(opened: list[Loader]) -> None:
    loader = Loader(Squares(), three, first_step=4)
    opened.append(loader)
    for step in range(4, 12):
        (batch,), wait_s = loader.take(step)
        assert (
            batch["x"].tolist() == [3 * step, 3 * step + 1, 3 * step + 2]
            and batch["x"].dtype == torch.int64
        )
        assert batch["y"].shape == (3, 2) and 0 <= wait_s < 10


def test_reading_ahead_is_bounded(opened: list[Loader]) -> None:
    dataset = Squares()
    loader = Loader(dataset, three, first_step=0, ahead=2)
    opened.append(loader)
    settle(loader, dataset, 6)
    assert dataset.read == list(range(6))
    loader.take(0)
    settle(loader, dataset, 9)
    assert dataset.read == list(range(9))


def test_wait_is_measured(opened: list[Loader]) -> None:
    gate = threading.Event()
    loader = Loader(Squares(gate=gate), three, first_step=0)
    opened.append(loader)
    least_s: list[float] = []

    def open_later() -> None:
        seen_s = time.monotonic()
        until(lambda: time.monotonic() > seen_s + 0.05, "a while")
        least_s.append(time.monotonic() - seen_s)
        gate.set()

    began_s = time.monotonic()
    opener = once_waiting("take", open_later)
    waited_s = loader.take(0)[1]
    most_s = time.monotonic() - began_s
    opener.join()
    assert least_s[0] <= waited_s <= most_s


def test_a_step_out_of_turn_and_a_restart(opened: list[Loader]) -> None:
    ids = {"width": 3}
    loader = Loader(
        Squares(), lambda step: one(range(step * 10, step * 10 + ids["width"])), first_step=0
    )
    opened.append(loader)
    assert loader.take(0)[0][0]["x"].tolist() == [0, 1, 2]
    assert loader.take(7)[0][0]["x"].tolist() == [70, 71, 72]
    assert loader.take(8)[0][0]["x"].tolist() == [80, 81, 82]
    assert loader.take(2)[0][0]["x"].tolist() == [20, 21, 22]
    ids["width"] = 1
    loader.restart(3)
    assert loader.take(3)[0][0]["x"].tolist() == [30]


def test_what_was_being_read_when_it_restarted_is_dropped(opened: list[Loader]) -> None:
    gate, ids = threading.Event(), {"from": 0}
    dataset = Squares(gate=gate)
    loader = Loader(dataset, lambda step: one([ids["from"] + step]), first_step=0)
    opened.append(loader)
    assert dataset.asked.wait(60)  # the thread waits in the dataset for sample 0 of step 0
    ids["from"] = 500
    loader.restart(0)
    gate.set()
    assert [loader.take(step)[0][0]["x"].tolist() for step in range(3)] == [[500], [501], [502]]


def test_a_rank_without_samples_gets_tensors_of_length_0(opened: list[Loader]) -> None:
    loader = Loader(Squares(), lambda step: one([]), first_step=0)
    opened.append(loader)
    batch = loader.take(0)[0][0]
    assert (
        batch["x"].shape == (0,) and batch["y"].shape == (0, 2) and batch["y"].dtype == torch.int64
    )


def test_an_error_of_the_dataset_names_the_sample(opened: list[Loader]) -> None:
    loader = Loader(Squares(bad=7), three, first_step=1)
    opened.append(loader)
    loader.take(1)
    with pytest.raises(ProgramError, match=r"sample 7 of step 2: OSError: disk on fire") as caught:
        loader.take(2)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(ProgramError, match="sample 7"):
        loader.take(2)


def test_an_error_of_the_order_comes_out_too(opened: list[Loader]) -> None:
    def broken(step: int) -> Sequence[Microbatch]:
        raise ValueError("no ids")

    loader = Loader(Squares(), broken, first_step=0)
    opened.append(loader)
    with pytest.raises(ProgramError, match="the batch of step 0: ValueError: no ids"):
        loader.take(0)


def test_items_that_differ_are_named(opened: list[Loader]) -> None:
    loader = Loader(
        [{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], lambda step: one([0, 1]), first_step=0
    )
    opened.append(loader)
    with pytest.raises(ProgramError, match=r"batch of step 0: .*'x': \[2\] and \[3\]"):
        loader.take(0)


def test_close_ends_the_thread_and_frees_a_waiting_take() -> None:
    gate = threading.Event()
    loader = Loader(Squares(gate=gate), three, first_step=0)
    closer = once_waiting("take", lambda: loader.close(0.0))
    with pytest.raises(ConnectionAbortedError, match="closed, step 0 was waited for") as caught:
        loader.take(0)
    assert kind_of(caught.value) == "collective", "as of a rank that an abort frees"
    closer.join()
    assert not loader.close(0.05)  # the dataset still hangs
    gate.set()
    assert loader.close(120)
    assert all(thread.name != "elastic-loader" for thread in threading.enumerate())


def test_close_with_full_buffer() -> None:
    dataset = Squares()
    loader = Loader(dataset, three, first_step=0)
    settle(loader, dataset, 6)
    assert loader.close(120) and loader.close()


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
def test_numbers_of_token_files_become_those_that_layers_take(kind: type) -> None:
    rows = np.lib.stride_tricks.sliding_window_view(np.arange(60_000, 60_010, dtype=kind), 5)[::5]
    batch = collate([{"0": rows[0]}, {"0": rows[1]}])
    assert torch.nn.Embedding(60_010, 1)(batch["0"]).shape == (2, 5, 1)
    assert batch["0"][1].tolist() == [60_005, 60_006, 60_007, 60_008, 60_009]


def test_collate_takes_tensors_arrays_and_numbers() -> None:
    fixed = np.arange(3, dtype=np.float32)
    fixed.flags.writeable = False  # as a read-only memory map is
    batch = collate(
        [{"t": torch.ones(2), "a": fixed, "n": 3, "f": 0.5, "b": True, "m": torch.tensor(1)}] * 2
    )
    assert {key: (tuple(v.shape), v.dtype) for key, v in batch.items()} == {
        "t": ((2, 2), torch.float32), "a": ((2, 3), torch.float32), "n": ((2,), torch.int64),
        "f": ((2,), torch.float64), "b": ((2,), torch.bool), "m": ((2,), torch.int64),
    }  # fmt: skip
    assert collate([{"x": torch.tensor(1)}, {"x": 2}])["x"].tolist() == [1, 2]
    pairs = torch.utils.data.TensorDataset(torch.arange(4), torch.arange(4) + 1)
    assert item_of(pairs, 3, None) == {"input": 3, "target": 4}, "as torch's datasets give them"
    assert collate([pairs[0], pairs[2]])["target"].tolist() == [1, 3]
    named = collections.namedtuple("Sample", ("input", "weight", "target"))
    assert collate([named(1, 0.5, 2), named(3, 0.5, 4)])["target"].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([], "at least one item"),
        ([(1, 2, 3)], r"not a tuple of 3: return .*, or a pair \(x, y\), from its \[sample id\]"),
        ([torch.zeros(2)], "a dict of tensors, not a Tensor: return"),
        ([{"x": 1}, {"y": 1}], r"keys: \['x'\] and \['y'\]"),
        ([{"x": np.zeros(2)}, {"x": np.zeros((2, 1))}], r"'x': \[2\] and \[2, 1\]"),
        ([{"x": "text"}], "'x' of an item cannot become a tensor: it is a str; give numbers"),
        ([{"x": 1}, {"x": None}], "'x' of an item cannot become a tensor: it is a NoneType"),
        ([{"x": {"y": 1}}], "it is a dict; give .* alone, each under a key of its own"),
    ],
)
def test_collate_says_what_is_wrong(items: list[Any], says: str) -> None:
    with pytest.raises(ProgramError, match=says):
        collate(items)
