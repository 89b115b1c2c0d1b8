"""What a dataset draws while a sample is read (a crop, a flip, masked words): keyed by the run's
seed, the step and the sample, so that it is the same whoever reads the sample and whatever was read
before, in every layout.

A loader process has its generators for itself. In a worker the training thread draws too, and where
its model draws torch's own generator tells: what the dataset asks of that one comes from another.
Of `random` and numpy there is one for all threads: a loop's body that draws from these meets it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from hashlib import blake2b
from typing import Any

from elastic.data.batches import Collate, Unread, batch_of, item_of
from elastic.data.budget import Microbatch
from elastic.data.streams import Stream
from elastic.errors import DataUnread
from elastic.program import drawing, generators

ALWAYS = -1  # the step of samples that are the same at each reading: of a validation, a probe
TRIED, MOST_S = 64, 1.0  # samples that are read to see whether any draws, and seconds
FOR_NOTHING = 8  # batches that are read again since another thread has drawn; then all are keyed

# by a key: another generator of torch meanwhile, for this thread; names of what is drawn are added
Instead = Callable[[int, list[str]], AbstractContextManager[Any]]

ONE_READS = threading.RLock()  # and draws: of `random` and numpy there is one of each


class SampleDraws:
    """Of all datasets of a run, in one process. `instead`: None where nothing else draws in it.
    `item` and `draws` may be called from any thread."""

    def __init__(self, seed: int, instead: Instead | None = None) -> None:
        self.seed, self.instead = seed, instead
        self._known: dict[int, tuple[Any, bool]] = {}  # by the identity of the dataset
        self._for_nothing = 0

    def item(
        self, dataset: Any, sample: int, length: int | None = None, *, step: int = ALWAYS
    ) -> Any:
        """A sample as `item_of` gives it, read for the step after `step` others. Raises what the
        dataset raises; of samples that no step reads, what the node did not give as DataUnread."""
        try:
            with self._keyed(step, sample) if self.draws(dataset) else nullcontext():
                return item_of(dataset, sample, length)
        except OSError as error:
            unread = Unread.of(sample, error)
            if step != ALWAYS or unread.kind is not DataUnread:
                raise
            raise unread.at(None) from error

    def batch(
        self, dataset: Any, part: Microbatch, collate: Collate, *, step: int
    ) -> dict[str, Any]:
        """As `batch_of` gives it, of samples that are read for the step after `step` others. Where
        one of them draws though none of those did that were tried, it is read again, keyed, and so
        is what follows. Raises Unread."""
        if self.draws(dataset):
            return batch_of(partial(self.item, dataset, step=step), part, collate)
        before = generators()
        found = batch_of(partial(item_of, dataset), part, collate)
        if generators() == before:
            return found
        drew: list[bool] = []

        def read(sample: int, length: int | None) -> Any:
            item, draws = self._watched(dataset, sample, length, step=step)
            drew.append(draws)
            return item

        again = batch_of(read, part, collate)
        self._for_nothing += not any(drew)  # it was the training thread
        if any(drew) or self._for_nothing >= FOR_NOTHING:
            self._known[id(dataset)] = (dataset, True)
        return again if any(drew) else found

    def of_stream(self, position: int) -> AbstractContextManager[Any]:
        """Around the reading of a stream's item: what it draws is keyed by its position, so that
        every rank reads the same. Always: a stream is read but once, so that nobody can look
        whether it draws."""
        return self._keyed(ALWAYS, position)

    def draws(self, dataset: Any) -> bool:
        """Do samples of it draw from the generators that `random`, numpy and torch share? Of some
        that are read at the first call. A stream is read but once, in order."""
        known = self._known.get(id(dataset))
        if known is None:
            found = not isinstance(dataset, Stream) and self._try(dataset)
            known = self._known[id(dataset)] = (dataset, found)  # kept: the identity stays its own
        return known[1]

    def _try(self, dataset: Any) -> bool:
        n, until_s = len(dataset), time.monotonic() + MOST_S
        others = random.Random(n).sample(range(n), min(TRIED, n))  # what has a period is seen too
        for i, sample in enumerate((0, *others)[:n]):
            if i and time.monotonic() > until_s:
                break
            try:
                if self._watched(dataset, sample)[1]:
                    return True
            except Exception:  # noqa: BLE001 - the user's dataset: it is told when it is trained on
                continue
        return False

    def _watched(
        self, dataset: Any, sample: int, length: int | None = None, *, step: int = ALWAYS
    ) -> tuple[Any, bool]:
        """A sample, keyed, and whether it has drawn."""
        alone = self.instead is None
        with self._keyed(step, sample) as drawn:
            before = generators(in_torch=alone)
            item = item_of(dataset, sample, length)
            return item, bool(drawn) or generators(in_torch=alone) != before

    @contextmanager
    def _keyed(self, step: int, sample: int) -> Iterator[list[str]]:
        """Gives what is drawn from torch meanwhile, by the names of operations; nothing where this
        process draws nothing else."""
        text = f"{self.seed} {step} {sample}".encode()
        key = int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1
        drawn: list[str] = []
        with ONE_READS, drawing(key, in_torch=self.instead is None):
            with self.instead(key, drawn) if self.instead is not None else nullcontext():
                yield drawn
