"""What is found of a loss, or an evaluation, without values: is it a mean where a sum is asked for,
and does it take any number of rows?"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from elastic.errors import ElasticError, ProgramError
from elastic.text import n_of
from elastic.user_frames import told

log = logging.getLogger(__name__)

A_MEAN = (
    "a mean over the batch; it must be the sum (reduction='sum', or the mean times the samples or "
    "tokens it was taken of), which elastic divides by the step's global count"
)
MEAN = 1  # torch's number of reduction="mean"
# the scale stays
SAME = ("ToCopy", "View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "Alias", "Neg")
MOST_NODES = 32
MOST_READS = 1000  # of numbers that are none: a loop that waits for one would never end
SAME_VALUE = [  # the same, as operations
    getattr(torch.ops.aten, name)
    for name in ("_to_copy", "view", "squeeze", "unsqueeze", "clone", "alias", "detach", "neg")
]
ROWS_TRIED = (2, 1, 3)
# what a program may raise here and not where it is trained
ELSEWHERE = (AssertionError, ImportError, MemoryError, NotImplementedError, OSError)
DEVICES = re.compile(
    r"cuda|gpu|nvidia|hip|rocm|triton|device|driver|kernel|backend|\bcpu\b|\bmeta\b|'NoneType'|"
    r"dtype|scalar type|bfloat16|\bhalf\b|not implemented|not supported|unsupported",
    re.IGNORECASE,
)
# what torch says of a size that is written down, whatever the values are
SIZES = re.compile(r"is invalid for input of size|must match the (existing )?size")


def is_mean(loss: torch.Tensor, count: int) -> bool:
    """Whether the last thing done to the loss was to average it: by a reduction of torch,
    `.mean()`, or a division by `count`, the samples or tokens of the batch; a mean that is made
    smaller still, as by the number of micro-batches, is one too. What cannot be seen (a compiled
    function, another scale) counts as a sum."""
    return count > 1 and loss.grad_fn is not None and _averages(loss.grad_fn, count, MOST_NODES)


def _averages(node: Any, count: int, left: int) -> bool:
    kind = node.name().removesuffix("Backward0").removesuffix("Backward1")
    below = [further for further, _ in node.next_functions if further is not None]
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is not None:
        return bool(reduction == MEAN)
    if kind == "Mean":
        return True
    by = _number(getattr(node, "_saved_other", None)) if kind in ("Div", "Mul") else None
    if kind == "Div" and by == count:
        return True
    smaller = by is not None and (by >= 1 if kind == "Div" else 0 < by < 1) and len(below) == 1
    if left and (smaller or kind in SAME and len(below) == 1 or kind in ("Add", "Sub") and below):
        return all(_averages(further, count, left - 1) for further in below)
    return False


def _number(value: Any) -> float | None:
    """What is known of a factor: a number, or a tensor of one value."""
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.numel() != 1:
            return None
        with _disable_current_modes():  # below one `float` fails over what was a number of Python
            return float(value)
    return float(value) if isinstance(value, int | float) else None


class Means(TorchDispatchMode):
    """Notes what is averaged meanwhile, with or without gradients, and of which values at all. What
    is read of a tensor without values (`.item()`) is a number that nothing else is, so that a mean
    is known by it: of a product of it nothing is known."""

    def __init__(self, count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count, self._found = count, list[torch.Tensor]()
        self._read, self._n_reads = list[float](), 0

    @property
    def reads(self) -> bool:
        """Was a value asked for that is not there?"""
        return self._n_reads > 0

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return any(value is one for one in self._found)
        return value in self._read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = func.overloadpacket is torch.ops.aten._local_scalar_dense and args[0].is_meta
        if reads and self._n_reads < MOST_READS:
            self._n_reads += 1
            return self._number(args[0])
        out = func(*args, **(kwargs or {}))
        if self._averages(func, args, kwargs or {}):
            self._found.append(out[0] if isinstance(out, tuple) else out)
        return out

    def _number(self, tensor: torch.Tensor) -> float | int | bool:
        if tensor.dtype == torch.bool or not tensor.is_floating_point():
            return tensor.dtype == torch.bool or 1
        if tensor not in self:
            return 1.0
        self._read.append(0.5 + (len(self._read) + 1) / 1024 / 1024)
        return self._read[-1]

    def _averages(self, func: Any, args: Any, kwargs: Any) -> bool:
        if self._count < 2:
            return False
        asked = func._schema.arguments
        given = {one.name: kwargs.get(one.name, one.default_value) for one in asked}
        given |= dict(zip(given, args, strict=False))
        packet = func.overloadpacket
        if packet is torch.ops.aten.mean or given.get("reduction") == MEAN:
            return True
        if packet in (torch.ops.aten.div, torch.ops.aten.mul):
            by, divided = _number(given["other"]), packet is torch.ops.aten.div
            smaller = by is not None and (by >= 1 if divided else 0 < by < 1)
            return divided and by == self._count or smaller and args[0] in self
        return packet in SAME_VALUE and bool(args) and args[0] in self


def is_own(error: Exception) -> bool:
    """Would it be raised on any device, in any precision?"""
    return not isinstance(error, ELSEWHERE) and DEVICES.search(str(error)) is None


def check_any_rows(
    where: str, call: Callable[[int, Means], object], rows: Collection[int] = ROWS_TRIED
) -> None:
    """`call`: with so many rows of the validation set, without values, under that mode. Raises
    ProgramError where it goes with some of these numbers of rows and not with others, or ends at a
    size; what raises for another reason, or once it has read a value, is left to the workers."""
    raised: dict[int, Exception] = {}
    for n in rows:
        means = Means(n)
        try:
            call(n, means)
        except ElasticError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's own code, which may want values
            raised[n] = NotImplementedError(str(error)) if means.reads else error
    some = len(raised) < len(rows)
    for n, found in raised.items():
        if is_own(found) and (some or SIZES.search(str(found))):
            raise ProgramError(
                f"{where} raised {told(found)}, over {n_of(n, 'row')} of the validation set; a "
                "rank has its share of global_batch in each batch, and an `evaluate` less in the "
                "last one: let it take any number of rows (x.shape[0] in place of a fixed size)"
            ) from found
    for found in list(raised.values())[:1]:
        log.info("%s was not looked at: %s", where, " ".join(str(found).split())[:200])
