"""Batches of the coming steps, read ahead by one background thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic.errors import InternalError, ProgramError

Batch = dict[str, Tensor]


def collate(items: Sequence[Mapping[str, Any]]) -> Batch:
    """Stacks items (dicts of tensors, arrays or numbers, equal in keys and shapes) along a new first dimension.

    Raises ProgramError naming the key and the shapes that differ.
    """
    if not items:
        raise ProgramError("a batch needs at least one item")
    for item in items:
        if not isinstance(item, Mapping):
            raise ProgramError(f"an item of the dataset must be a dict of tensors, not {type(item).__name__}")
        if item.keys() != items[0].keys():
            raise ProgramError(f"items of one batch differ in their keys: {sorted(items[0])} and {sorted(item)}")
    return {key: _stack(key, [item[key] for item in items]) for key in items[0]}


def _stack(key: str, values: list[Any]) -> Tensor:
    shapes = {tuple(getattr(value, "shape", ())) for value in values}
    if len(shapes) > 1:
        first, second = sorted(map(list, shapes))[:2]
        raise ProgramError(f"items of one batch differ in the shape of '{key}': {first} and {second}")
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(values)
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([torch.as_tensor(value) for value in values])
    try:
        return torch.from_numpy(np.stack([np.asarray(value) for value in values]))  # a copy: memory maps may be read-only
    except TypeError as error:
        raise ProgramError(f"'{key}' of an item cannot become a tensor: {error}") from error


class Loader:
    """Reads the batches of the steps `first_step`, `first_step` + 1, ... at most `depth` steps ahead.

    dataset: map-style. ids_of_step: step -> the sample ids that this rank reads in it (none: tensors of length 0). What the
    dataset raises comes out of `take` as ProgramError with the sample id. `take` and `restart` belong to one thread; `close`
    may come from any, and frees a `take` that waits.
    """

    def __init__(self, dataset: Any, ids_of_step: Callable[[int], Sequence[int]], first_step: int, depth: int = 2) -> None:
        self._dataset, self._ids_of_step, self._depth = dataset, ids_of_step, max(1, depth)
        self._changed = threading.Condition()
        self._ready: dict[int, Batch | ProgramError] = {}
        self._next, self._round, self._closed = first_step, 0, False
        self._wanted = first_step  # the step that will be taken next
        self._thread = threading.Thread(target=self._run, name="elastic-loader", daemon=True)
        self._thread.start()

    def take(self, step: int) -> tuple[Batch, float]:
        """The batch of `step` and the seconds that it was waited for. A step out of turn starts reading there anew."""
        start = time.monotonic()
        if step != self._wanted:
            self.restart(step)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or step in self._ready)
            if self._closed:
                raise InternalError(f"the loader was closed while step {step} was waited for")
            found = self._ready[step]
            if isinstance(found, ProgramError):
                raise found
            del self._ready[step]
            self._wanted = step + 1
            self._changed.notify_all()
        return found, time.monotonic() - start

    def restart(self, step: int) -> None:
        """Forgets what was read ahead and reads from `step` on: for a rank whose share of the samples has changed."""
        with self._changed:
            self._ready.clear()
            self._next = self._wanted = step
            self._round += 1
            self._changed.notify_all()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Ends the thread; False when the dataset has not come back within `timeout_s` (the thread ends when it does)."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next < self._wanted + self._depth)
                if self._closed:
                    return
                step, current = self._next, self._round
                self._next += 1
            batch = self._load(step)
            with self._changed:
                if current == self._round and not self._closed:
                    self._ready[step] = batch
                    self._changed.notify_all()

    def _load(self, step: int) -> Batch | ProgramError:
        sample: int | None = None
        items = []
        try:
            ids = self._ids_of_step(step)
            for sample in ids if len(ids) else (0,):  # a rank without samples still needs the keys, shapes and dtypes
                items.append(self._dataset[sample])
            sample = None
            batch = collate(items)
            return batch if len(ids) else {key: value[:0] for key, value in batch.items()}
        except Exception as error:  # noqa: BLE001 - a boundary: the user's dataset may raise anything; `take` raises it
            where = f"sample {sample} of step {step}" if sample is not None else f"the batch of step {step}"
            return _named(error, where)


def _named(error: Exception, where: str) -> ProgramError:
    text = str(error) if isinstance(error, ProgramError) else f"{type(error).__name__}: {error}"
    named = ProgramError(f"the dataset failed at {where}: {text}")
    named.__cause__ = error
    return named
