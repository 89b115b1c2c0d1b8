"""Iterable datasets with state_dict(): read from the front by every rank, each keeping its own
share of a step.

The state of the stream behind the last committed step travels with the model, so a change of the
workers neither reads a sample twice nor passes one over, as long as the dataset resumes from its
own state exactly. What it gave has no sample ids: nobody can check that afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from elastic.errors import ProgramError, SpecError
from elastic.program import Program
from elastic.types import Job

STATE = "dataset"  # the name of the stream's state among the extra state
N_POSITIONS = 1 << 40  # a stream says of itself
OF_NO_SEED = 1 << 64  # numpy draws 128 bits where it is given none
END = object()
SENTENCE = (
    "the dataset is a stream: its state travels with the model, but its samples have no ids, so "
    "that each came up exactly once "
    "is not checked (samples_exact: null); every rank reads all of it"
)


def is_stream(dataset: Any) -> bool:
    return all(
        callable(getattr(dataset, name, None))
        for name in ("__iter__", "state_dict", "load_state_dict")
    )


def has_items(dataset: Any) -> bool:
    """Has it [sample id]? An IterableDataset of torch has that of its base, which only raises."""
    found = getattr(dataset, "__getitem__", None)
    base = getattr(found, "__qualname__", "") == "Dataset.__getitem__"
    of_torch = getattr(found, "__module__", "") == "torch.utils.data.dataset"
    return found is not None and not (base and of_torch)


def refuse_loader(dataset: Any, what: str) -> None:
    """Raises SpecError for a DataLoader of torch, also one with a state: its batches are none
    here."""
    kinds = ((kind.__module__, kind.__name__) for kind in type(dataset).__mro__)
    if ("torch.utils.data.dataloader", "DataLoader") in kinds:
        raise SpecError(
            f"{what}: it is a {type(dataset).__name__}; give its dataset: order, batches and "
            "reading ahead are elastic's"
        )


def check_shuffles(source: Any, what: str) -> None:
    """Raises SpecError for a stream of the library `datasets` that is shuffled in a buffer, which
    its state does not hold, or mixed without a seed. The library has no public name for either."""
    for part in _parts(getattr(source, "_ex_iterable", None)):
        if hasattr(part, "buffer_size"):
            raise SpecError(
                f"{what}: a stream of `datasets` with shuffle(), whose state does not hold the "
                f"{part.buffer_size} samples of its buffer: they would be lost at each change; "
                "shuffle the list of its files (data_files), or take a dataset that is no stream, "
                "which is shuffled here"
            )
        bits = getattr(getattr(part, "generator", None), "bit_generator", None)
        entropy = getattr(getattr(bits, "seed_seq", None), "entropy", 0)
        # of a copied generator numpy 1 does not know it
        if isinstance(entropy, int) and entropy >= OF_NO_SEED and np.__version__ >= "2":
            raise SpecError(
                f"{what}: a stream of `datasets` that is mixed without a seed, in another order on "
                "each rank; give interleave_datasets() a seed"
            )


def _parts(part: Any) -> Iterator[Any]:
    """What a stream of `datasets` is made of, the last step first."""
    if part is not None:
        yield part
        for inner in (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())):
            yield from _parts(inner)


class FromTheStart:
    """An `IterableDataset` of the library `datasets` begins each iteration where the last loaded
    state was; this one begins there once."""

    def __init__(self, source: Any) -> None:
        self.source, self._start = source, deepcopy(source.state_dict())

    def __iter__(self) -> Iterator[Any]:
        yield from self.source
        self.source.load_state_dict(deepcopy(self._start))

    def state_dict(self) -> Any:
        return self.source.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.source.load_state_dict(state)


class Stream:
    """An iterable dataset by positions, which must rise; position 0 can always be looked at. At its
    end it starts over.

    The training thread calls `taken`, `state_dict` and `load_state_dict`, another one reads,
    through `reader()`: loading a state waits for the item that is being read, and cuts off whoever
    reads for an older generation. `keyed`: around the reading of the item at a position.
    """

    def __init__(self, source: Any, global_batch: int) -> None:
        library = type(source).__module__.partition(".")[0]
        self.source = FromTheStart(source) if library == "datasets" else source
        self.global_batch = global_batch
        self.keyed: Callable[[int], AbstractContextManager[Any]] = lambda position: nullcontext()
        self._lock = threading.Lock()
        self._items: Any = None
        self._first: Any = None
        self._at = self._boundary = 0
        self._n_loads = 0
        # at the boundaries between steps
        self._states: dict[int, Any] = {0: deepcopy(source.state_dict())}

    def __len__(self) -> int:
        return N_POSITIONS

    def __getitem__(self, position: int) -> Any:
        return self.read(position, None)

    def reader(self) -> StreamReader:
        """For one loader: of no more use once another state is loaded."""
        with self._lock:
            return StreamReader(self, self._n_loads)

    def read(self, position: int, n_loads: int | None) -> Any:
        """The item at `position`. Raises ProgramError where it was passed already, or where
        `n_loads` (None: whatever it is) is not how often a state has been loaded."""
        with self._lock:
            if n_loads not in (None, self._n_loads):
                raise ProgramError(
                    f"sample {position} of a stream was asked for by a generation that is over"
                )
            if position == 0 and self._first is not None and self._at != 0:
                return self._first
            if position < self._at:
                raise ProgramError(
                    f"sample {position} of a stream was asked for, which is at {self._at} already"
                )
            while self._at < position:
                self._next()
            item = self._next()
            self._first = item if position == 0 else self._first
            return item

    def positions(self, step: int) -> range:
        return range(step * self.global_batch, (step + 1) * self.global_batch)

    def taken(self, step: int) -> None:
        """The batch of `step` is what is trained on now: `state_dict` is then that behind it."""
        self._boundary = (step + 1) * self.global_batch

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            while self._at < self._boundary:  # what other ranks keep of the step
                self._next()
            self._states = {at: state for at, state in self._states.items() if at >= self._boundary}
            return {"at": self._boundary, "state": self._states[self._boundary]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._n_loads += 1
            self.source.load_state_dict(deepcopy(state["state"]))
            self._items, self._at = None, int(state["at"])
            self._boundary, self._states = self._at, {self._at: state["state"]}

    def _next(self) -> Any:
        item = self._given(anew=self._items is None)
        if item is END:
            item = self._given(anew=True)
        if item is END:
            raise ProgramError("the dataset is a stream that gives nothing when it starts over")
        self._at += 1
        if self._at % self.global_batch == 0:
            # it may be the very one that reading changes
            self._states[self._at] = deepcopy(self.source.state_dict())
        return item

    def _given(self, *, anew: bool) -> Any:
        with self.keyed(self._at):
            self._items = iter(self.source) if anew else self._items
            return next(self._items, END)


@dataclass(frozen=True)
class StreamReader:
    """A stream as one generation reads it."""

    stream: Stream
    n_loads: int

    def __len__(self) -> int:
        return N_POSITIONS

    def __getitem__(self, position: int) -> Any:
        return self.stream.read(position, self.n_loads)


def with_stream(program: Program, dataset: Any, job: Job) -> Program:
    """The program with the stream's state as extra state, where its dataset is one. Raises
    SpecError where that cannot be."""
    if not isinstance(dataset, Stream):
        return program
    if job.script:
        raise SpecError(
            "elastic.loop: a stream cannot be the dataset of a script; give one with len() and "
            "[sample id]"
        )
    if job.data.loader_workers:
        raise SpecError("data.loader_workers: a stream is read by its worker alone; leave it out")
    if STATE in program.extra_state:
        raise SpecError(
            f"extra_state['{STATE}']: the name is taken by the dataset, which is a stream; choose "
            "another"
        )
    return replace(program, extra_state={**program.extra_state, STATE: dataset})
