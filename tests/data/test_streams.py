"""Iterable datasets with a state: by rising positions, from a state on, whatever part of a step is
wanted."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from elastic.data.budget import Microbatch
from elastic.data.loader import Loader
from elastic.data.open_datasets import dataset_of, validation_of
from elastic.data.sample_draws import SampleDraws
from elastic.data.streams import N_POSITIONS, Stream, with_stream
from elastic.errors import ProgramError, SpecError
from elastic.program import Program, generators
from elastic.types import Job
from elastic.worker.parallel.keyed_draws import from_another

BATCH = 4


class Letters:
    """Eleven items, then again."""

    def __init__(self, n: int = 11) -> None:
        self.n, self.at = n, 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self.at < self.n:
            self.at += 1
            yield {"x": self.at - 1}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def opened(job: dict[str, Any] | None = None) -> Stream:
    found: Stream = dataset_of(
        program_of(Letters), Job.from_plain({"global_batch": BATCH, **(job or {})})
    )
    assert isinstance(found, Stream)
    return found


def program_of(dataset: Any) -> Program:
    return Program(
        model=lambda: None,
        optimizer=lambda named: None,
        dataset=dataset,
        loss=lambda output, batch: None,
    )


def read(stream: Stream, step: int, share: slice) -> list[int]:
    return [stream[position]["x"] for position in stream.positions(step)[share]]


def test_shares_of_steps_read_ahead_are_those_of_one_reader() -> None:
    """Two ranks, then three from the state of any of the two, while both had read two steps
    further."""
    ranks = [opened(), opened()]
    found = []
    for step in range(5):
        found += sum(
            (read(rank, step, share) for rank, share in zip(ranks, (slice(0, 1), slice(1, 4)))), []
        )
    states = []
    for rank in ranks:
        rank.taken(2)
        states.append(rank.state_dict())
    assert states[0] == states[1] == {"at": 12, "state": {"at": 1}}
    more = [opened() for _ in range(3)]
    again = []
    for rank in more:
        assert rank[0]["x"] == 0  # a rehearsal looks at it
        rank.load_state_dict(states[0])
        assert rank.state_dict() == states[0]
    for step in range(3, 9):
        again += sum(
            (
                read(rank, step, share)
                for rank, share in zip(more, (slice(0, 2), slice(2, 2), slice(2, 4)))
            ),
            [],
        )
    assert found == [i % 11 for i in range(20)] and again == [i % 11 for i in range(12, 36)]
    assert len(more[0]._states) < 20


def test_a_state_is_never_that_of_a_step_that_was_only_read_ahead() -> None:
    stream = opened()
    assert stream.state_dict() == {"at": 0, "state": {"at": 0}}
    read(stream, 0, slice(0, 4))
    read(stream, 1, slice(0, 4))
    assert stream.state_dict() == {"at": 0, "state": {"at": 0}}
    stream.taken(0)
    assert stream.state_dict() == {"at": 4, "state": {"at": 4}}
    with pytest.raises(
        ProgramError, match="sample 3 of a stream was asked for, which is at 8 already"
    ):
        stream[3]
    assert stream[0] == {"x": 0} and len(stream) == N_POSITIONS


class OneDict(Letters):
    """Gives away the very dict that it changes while it is read."""

    def __init__(self) -> None:
        self.state = {"n": 11, "at": 0}

    def __iter__(self) -> Iterator[dict[str, int]]:
        for n in range(self.state["at"], 11):
            self.state["at"] = n + 1
            yield {"x": n}

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def test_a_state_stays_what_it_was_though_the_dataset_changes_it_in_place() -> None:
    stream = Stream(OneDict(), BATCH)
    read(stream, 0, slice(0, 4))
    read(stream, 1, slice(0, 4))
    stream.taken(0)
    kept = stream.state_dict()
    assert kept == {"at": 4, "state": {"n": 11, "at": 4}}
    stream.load_state_dict(kept)
    assert stream[4] == {"x": 4} and kept["state"]["at"] == 4


def test_a_reader_of_an_older_generation_moves_nothing() -> None:
    """Its batch was half read when the state was loaded."""
    stream = opened()
    begun, old = stream.state_dict(), stream.reader()
    assert [old[position]["x"] for position in range(6)] == [0, 1, 2, 3, 4, 5]
    stream.load_state_dict(begun)
    new = stream.reader()
    assert new[0] == {"x": 0}
    with pytest.raises(
        ProgramError, match="sample 6 of a stream was asked for by a generation that is over"
    ):
        old[6]
    assert [new[position]["x"] for position in range(1, 9)] == [1, 2, 3, 4, 5, 6, 7, 8]


class Slow(Letters):
    """An item takes until it is let through; `waiting` says that one is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.waiting = threading.Semaphore(0), threading.Semaphore(0)

    def __iter__(self) -> Iterator[dict[str, int]]:
        for item in super().__iter__():
            self.waiting.release()
            assert self.passes.acquire(timeout=20)
            yield item


def test_a_thread_that_could_not_be_ended_in_time_takes_nothing_from_the_next_loader() -> None:
    source = Slow()
    stream = Stream(source, BATCH)
    begun = stream.state_dict()
    old = Loader(stream.reader(), lambda step: [Microbatch(stream.positions(step))], first_step=0)
    assert source.waiting.acquire(timeout=20)  # it is in the middle of the first step
    assert not old.close(0.0)
    load = threading.Thread(target=stream.load_state_dict, args=(begun,))
    load.start()
    load.join(0.2)
    assert load.is_alive()  # waits for the item
    source.passes.release(100)
    load.join(20)
    new = Loader(stream.reader(), lambda step: [Microbatch(stream.positions(step))], first_step=0)
    assert [new.take(step)[0][0]["x"].tolist() for step in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert old.close() and new.close()


class Drawn(Letters):
    """In an order that is drawn at its beginning, and with a number that is drawn for each item."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = random.sample(range(self.n), self.n)
        while self.at < self.n:
            self.at += 1
            yield {"x": order[self.at - 1], "drawn": float(self.draw())}
        self.at = 0


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(()), lambda: 0.0]
)
def test_what_a_stream_draws_is_the_same_on_every_rank(draw: Callable[[], Any]) -> None:
    found = []
    for rank in range(2):
        stream = Stream(Drawn(draw), BATCH)
        stream.keyed = SampleDraws(7, from_another).of_stream
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        before = generators()
        found.append([stream[position] for position in range(22)])
        assert generators() == before
    assert found[0] == found[1]
    xs = [item["x"] for item in found[0]]
    assert sorted(xs[:11]) == sorted(xs[11:]) == [*range(11)] and xs[:11] != xs[11:]


def test_what_a_stream_draws_late_is_the_same_on_every_rank() -> None:
    """However many of its items have drawn nothing."""
    found = []
    for rank in range(2):
        source = Drawn(lambda: random.random() if source.at > 200 else 0.0)  # noqa: B023
        source.n = 300
        stream = Stream(source, BATCH)
        stream.keyed = SampleDraws(7, from_another).of_stream
        random.seed(rank)
        found.append([stream[position]["drawn"] for position in range(300)])
    assert found[0] == found[1] and not any(found[0][:200]) and all(found[0][200:])


def test_what_cannot_be() -> None:
    with pytest.raises(ProgramError, match="gives nothing"):
        Stream(Letters(0), BATCH)[0]
    with pytest.raises(SpecError, match="loader_workers: a stream is read by its worker alone"):
        with_stream(program_of(Letters), opened(), Job.from_plain({"data": {"loader_workers": 1}}))
    with pytest.raises(SpecError, match=r"extra_state\['dataset'\]: the name is taken"):
        taken = Program(
            model=len, optimizer=len, dataset=None, loss=len, extra_state={"dataset": Letters()}
        )
        with_stream(taken, opened(), Job())
    with pytest.raises(SpecError, match=r"list_iterator has no \[sample id\]"):
        dataset_of(program_of(lambda: iter([1])), Job())
    plain = program_of(Letters)
    assert with_stream(plain, [1, 2], Job()) is plain
    stream = opened()
    assert with_stream(plain, stream, Job()).extra_state == {"dataset": stream}


class Counted(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Of torch, it says how many items there are; none has a number."""

    def __init__(self) -> None:
        self.letters = Letters()

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter(self.letters)


class Resumed(Counted):
    def state_dict(self) -> dict[str, int]:
        return self.letters.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.letters.load_state_dict(state)


class Loaded(torch.utils.data.DataLoader):  # type: ignore[type-arg]
    """As torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_an_iterable_dataset_that_has_a_length_is_a_stream_or_refused() -> None:
    job = Job.from_plain({"global_batch": BATCH})
    found = dataset_of(program_of(Resumed), job)
    assert isinstance(found, Stream) and read(found, 0, slice(0, 4)) == [0, 1, 2, 3]
    with pytest.raises(
        SpecError, match=r"dataset: a Counted has no \[sample id\]; a dataset is map"
    ):
        dataset_of(program_of(Counted), job)
    both = replace(program_of(Resumed), validation=Resumed)
    with pytest.raises(SpecError, match=r"validation: a Resumed has no \[sample id\]"):
        validation_of(both, job)


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, Loaded])
def test_a_data_loader_is_no_dataset(kind: Any) -> None:
    for data in (TensorDataset(torch.ones(8, 2)), Resumed()):
        program = program_of(lambda data=data: kind(data, batch_size=4))
        with pytest.raises(SpecError, match=rf"dataset: it is a {kind.__name__}; give its dataset"):
            dataset_of(program, Job.from_plain({"global_batch": BATCH}))
        program = replace(program, validation=program.dataset)
        with pytest.raises(SpecError, match=rf"validation: it is a {kind.__name__}; give its data"):
            validation_of(program, Job())


def rows(shard: list[int]) -> Iterator[dict[str, int]]:
    for one in shard:
        for n in range(5):
            yield {"x": 10 * one + n}


def of_the_library(change: Callable[[Any], Any]) -> Stream:
    """With eight shards of five rows."""
    library = pytest.importorskip("datasets").IterableDataset
    made = change(library.from_generator(rows, gen_kwargs={"shard": [*range(8)]}))
    found: Stream = dataset_of(program_of(lambda: made), Job.from_plain({"global_batch": BATCH}))
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.shuffle(seed=1),
        lambda made: made.shuffle(seed=1, buffer_size=20).map(lambda row: row),
        lambda made: made.take(20).shuffle(buffer_size=1),
    ],
)
def test_a_shuffle_in_a_buffer_is_refused(change: Callable[[Any], Any]) -> None:
    """After a load the library fills it anew: what it held is lost."""
    with pytest.raises(
        SpecError, match=r"^Program\.dataset: .* whose state does not hold the \d+ s"
    ):
        of_the_library(change)


def mixed(made: Any, seed: int | None) -> Any:
    from datasets import interleave_datasets

    return interleave_datasets([made, made], probabilities=[0.5, 0.5], seed=seed)


def test_a_mixture_without_a_seed_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^Program\.dataset: .* mixed without a seed"):
        of_the_library(lambda made: mixed(made, None).map(lambda row: row))


def test_a_mixture_with_a_seed_goes_on_where_it_was() -> None:
    whole, stopped, goes_on = (of_the_library(lambda made: mixed(made, 1)) for _ in range(3))
    wanted = [read(whole, step, slice(0, 4)) for step in range(8)]
    assert [read(stopped, step, slice(0, 4)) for step in range(4)] == wanted[:4]
    stopped.taken(2)
    goes_on.load_state_dict(stopped.state_dict())
    assert [read(goes_on, step, slice(0, 4)) for step in range(3, 8)] == wanted[3:]
