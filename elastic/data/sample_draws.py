"""What a dataset draws while a sample is read (a crop, a flip, masked words): keyed by the run's
seed, the step and the sample, so that it is the same whoever reads the sample and whatever was read
before, in every layout.

A loader process has its generators for itself. In a worker the training thread draws too, and where
its model draws torch's own generator tells: what the dataset asks of that one comes from another.
Of `random` and numpy there is one for all threads: a loop's body that draws from these meets it.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from typing import Any

from elastic.data.batches import item_of
from elastic.data.streams import Stream
from elastic.program import drawing

ALWAYS = -1  # the step of samples that are the same at each reading: of a validation, a probe
TRIED, MOST_S = 4, 1.0  # samples that are read to see whether any draws, and seconds


# by a key: another generator of torch meanwhile, for this thread; names of what is drawn are added
Instead = Callable[[int, list[str]], AbstractContextManager[Any]]


ONE_READS = threading.RLock()  # and draws: of `random` and numpy there is one of each


class SampleDraws:
    """Of all datasets of a run, in one process. `instead`: None where nothing else draws in it.
    `item` and `draws` may be called from any thread."""

    def __init__(self, seed: int, instead: Instead | None = None) -> None:
        self.seed, self.instead = seed, instead
        self._known: dict[int, tuple[Any, bool]] = {}  # by the identity of the dataset

    def item(
        self, dataset: Any, sample: int, length: int | None = None, *, step: int = ALWAYS
    ) -> Any:
        """A sample as `item_of` gives it, read for the step after `step` others. Raises what the
        dataset raises."""
        if not self.draws(dataset):
            return item_of(dataset, sample, length)
        with self._keyed(step, sample):
            return item_of(dataset, sample, length)

    def draws(self, dataset: Any) -> bool:
        """Do samples of it draw from the generators that `random`, numpy and torch share? Of a few
        that are read at the first call. A stream is read but once, in order."""
        known = self._known.get(id(dataset))
        if known is None:
            found = not isinstance(dataset, Stream) and self._try(dataset)
            known = self._known[id(dataset)] = (dataset, found)  # kept: the identity stays its own
        return known[1]

    def _try(self, dataset: Any) -> bool:
        n, began_s = len(dataset), time.monotonic()
        for i in range(min(TRIED, n)):
            with self._keyed(ALWAYS, sample := i * n // TRIED if n > TRIED else i) as drawn:
                before = self._states()
                try:
                    dataset[sample]
                except Exception:  # noqa: BLE001 - the user's dataset: it is told when it is trained on
                    continue
                if drawn or self._states() != before:
                    return True
            if time.monotonic() - began_s > MOST_S:
                break
        return False

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

    def _states(self) -> tuple[Any, ...]:
        """Where the generators are that all threads share."""
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        found: list[Any] = [random.getstate()]
        if numpy is not None:
            found += map(str, numpy.random.get_state())
        if torch is not None and self.instead is None:
            found.append(torch.default_generator.get_state().tolist())
        return tuple(found)
