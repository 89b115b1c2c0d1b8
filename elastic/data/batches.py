"""Items of a step -> one batch of NumPy arrays; what is wrong with them in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from elastic.data.budget import Microbatch
from elastic.errors import (
    DataUnread,
    ElasticError,
    ProgramError,
    StorageFailed,
    StorageRefused,
    is_of_node,
)
from elastic.text import n_of

NO_TARGET = -100
PAIR = ("input", "target")  # what torch's datasets give without names
SAYS_WHAT_COUNTS = ("target", "labels", "attention_mask", "weight", "weights", "document")
Stack = Callable[[str, list[Any]], Any]
Collate = Callable[[list[Any]], dict[str, Any]]


def collated(items: Sequence[Mapping[str, Any]], stack: Stack) -> dict[str, Any]:
    """`stack`(key, values) for each key of the items. Raises ProgramError where they are no dicts
    of equal keys."""
    if not items:
        raise ProgramError("a batch needs at least one item")
    items = [as_dict(item) for item in items]
    for item in items:
        if item.keys() != items[0].keys():
            raise ProgramError(
                f"items of one batch differ in their keys: {sorted(items[0])} and {sorted(item)}"
            )
    return {key: stack(key, [item[key] for item in items]) for key in items[0]}


def check_shapes(key: str, values: list[Any]) -> None:
    """Raises ProgramError naming the key and the shapes that differ."""
    shapes = {tuple(getattr(value, "shape", ())) for value in values}
    if len(shapes) > 1:
        first, second = sorted(map(list, shapes))[:2]
        raise ProgramError(
            f"items of one batch differ in the shape of '{key}': {first} and {second}"
        )


def stack_arrays(key: str, values: list[Any]) -> Any:
    """[items, *shape]; a copy, since memory maps may be read-only."""
    check_shapes(key, values)
    found = np.stack([np.asarray(value) for value in values])
    if found.dtype.kind not in "biufc":
        kind = next(type(x).__name__ for x in values if np.asarray(x).dtype.kind not in "biufc")
        raise ProgramError(
            f"'{key}' of an item cannot become a tensor: it is a {kind}; give numbers, arrays and "
            "tensors alone, each under a key of its own"
        )
    return found


def batch_of(
    read: Callable[[int, int | None], Any], part: Microbatch, collate: Collate
) -> dict[str, Any]:
    """The batch of these samples; without samples what one would be, of length 0: its keys and
    shapes are needed all the same. `read`: gives a sample, of so many tokens, as `item_of` does.

    Raises Unread, which names the sample that failed.
    """
    sample: int | None = None
    items, ids = [], part.ids
    try:
        for sample in ids if len(ids) else (0,):
            items.append(read(sample, part.length))
        sample = None
        batch = collate(items)
        return batch if len(ids) else {key: value[:0] for key, value in batch.items()}
    except Exception as error:  # a boundary: the user's dataset may raise anything
        raise Unread.of(sample, error) from error


def item_of(dataset: Any, sample: int, length: int | None) -> Any:
    """A sample, filled up to `length` tokens; None = as it is."""
    item = as_dict(dataset[sample])
    return item if length is None else filled(item, dataset.length(sample), length)


def as_dict(item: Any) -> Mapping[str, Any]:
    """An item as a dict: torch's own pairs of input and target become one. Raises ProgramError
    where it is neither."""
    if isinstance(item, Mapping):
        return item
    if isinstance(item, tuple) and hasattr(item, "_asdict"):  # a NamedTuple
        named: Mapping[str, Any] = item._asdict()
        return named
    if isinstance(item, tuple | list) and len(item) == len(PAIR):
        return dict(zip(PAIR, item, strict=True))
    of = f" of {len(item)}" if isinstance(item, tuple | list) else ""
    raise ProgramError(
        f"an item of the dataset must be a dict of tensors, not a {type(item).__name__}{of}: "
        'return {"input": x, "target": y}, or a pair (x, y), from its [sample id]'
    )


def filled(item: Mapping[str, Any], n: int, length: int) -> dict[str, Any]:
    """A sample of `n` tokens with `length` places: every array whose first dimension is `n` is
    filled up at its end, `target` and `labels` with -100, `document` with one more document, others
    with 0. Raises ProgramError where nothing says what is filling, or no array has `n` tokens."""
    along = [
        key for key, value in item.items() if (getattr(value, "shape", None) or (None,))[0] == n
    ]
    if not along:
        shapes = ", ".join(
            f"'{key}' {list(getattr(value, 'shape', ()))}" for key, value in item.items()
        )
        raise ProgramError(
            f"length() says {n} tokens, but no array begins with that dimension: {shapes}"
        )
    if length == n:
        return dict(item)
    if not set(along) & {*SAYS_WHAT_COUNTS}:
        raise ProgramError(
            f"a sample has {', '.join(sorted(along))}: none of {', '.join(SAYS_WHAT_COUNTS)} says "
            "what is filling; add one (attention_mask: ones)"
        )
    return {
        key: _longer(key, value, length) if key in along else value for key, value in item.items()
    }


def _longer(key: str, value: Any, length: int) -> Any:
    shape = (length, *value.shape[1:])
    filling = NO_TARGET if key in ("target", "labels") else 0
    if key == "document":
        filling = int(value[-1]) + 1 if len(value) else 0
    out = (
        value.new_full(shape, filling)
        if hasattr(value, "new_full")
        else np.full(shape, filling, value.dtype)
    )
    out[: len(value)] = value
    return out


class Unread(Exception):
    """`sample` (None: all of them together) could not be read, and why. `kind`: what it means to
    the run."""

    def __init__(
        self, sample: int | None, text: str, kind: type[ElasticError] = ProgramError
    ) -> None:
        super().__init__(sample, text, kind)
        self.sample, self.text, self.kind = sample, text, kind

    @classmethod
    def of(cls, sample: int | None, error: Exception) -> Unread:
        text = str(error) if isinstance(error, ElasticError) else f"{type(error).__name__}: {error}"
        return cls(sample, text, _kind_of(error))

    def at(self, step: int | None) -> ElasticError:
        """`step`: None where it is read for none, as in a validation."""
        sample = f"sample {self.sample}" if self.sample is not None else "the batch"
        where = sample + (f" of step {step}" if step is not None else "")
        return self.kind(f"the dataset failed at {where}: {self.text}")


def _kind_of(error: Exception) -> type[ElasticError]:
    """Storage, and what a system call reports of the node, are no fault of the program."""
    if isinstance(error, StorageFailed | StorageRefused):
        return type(error)
    return DataUnread if is_of_node(error) else ProgramError


def few_samples(n_samples: int, global_batch: int) -> str:
    """What is said where a step takes more samples than there are; '' = it does not."""
    if not 0 < n_samples < global_batch:
        return ""
    return (
        f"the dataset has {n_of(n_samples, 'sample')} and a step takes {global_batch} "
        "(global_batch): each step trains on some of them more than once"
    )
