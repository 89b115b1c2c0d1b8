"""How a Program's functions are called, with what they return checked, and how a script calls its
model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elastic.errors import ProgramError
from elastic.program import Program

Batch = dict[str, torch.Tensor]


class Arguments(tuple[Any, ...]):
    """What `inputs` gives where the model is called with none or several arguments; not for a model
    that is cut into stages."""


def inputs_of(program: Program, batch: Batch) -> Any:
    """What the model is called with."""
    if program.inputs is not None:
        return program.inputs(batch)
    for key in ("input", "input_ids"):
        if key in batch:
            return batch[key]
    raise ProgramError(
        f"a sample has the keys {sorted(batch)}; name one of them 'input', or give Program.inputs"
    )


def keywords_of(program: Program, batch: Batch) -> dict[str, Any]:
    """What it is called with besides, on every pipeline stage."""
    return dict(program.keywords(batch)) if program.keywords is not None else {}


def call_model(program: Program, model: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch."""
    given = inputs_of(program, batch)
    arguments = given if isinstance(given, Arguments) else (given,)
    return model(*arguments, **keywords_of(program, batch))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Of a tensor, a mapping or a sequence, nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):  # first: a Mapping is slow to recognize
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def mapped(value: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """The same lists, tuples and mappings (a library's own ones too) with every `kind` in them
    changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: mapped(item, change, kind) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change, kind) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change, kind) for item in value)
    return value


def length_of(value: Any) -> int:
    """Positions of the sequences among these tensors; 0 = they have none."""
    return next((int(x.shape[1]) for x in tensors_in(value) if x.ndim > 1), 0)


def cut_rows(n_rows: int, n: int, unit: int = 1) -> list[range]:
    """The rows of each of `n` microbatches, as `torch.tensor_split` cuts them: the first ones have
    one more; or, where so many rows stay together, one `unit` more."""
    base, more = divmod(n_rows // unit, n)
    starts = [(i * base + min(i, more)) * unit for i in range(n + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def rows_in(batch: Batch, rows: range) -> Batch:
    """Copies of these rows of each tensor."""
    return {key: x[rows.start : rows.stop].clone() for key, x in batch.items()}


def first_rows(output: Any, n: int) -> Any:
    """The first `n` rows of each tensor of a model's output."""
    return mapped(output, lambda x: x[:n] if x.ndim else x)


def count_of(program: Program, batch: Batch) -> int:
    """Tokens (or samples) that the loss sums over. The host waits where the batch is on a
    device."""
    return int(count_there(program, batch))


def count_there(program: Program, batch: Batch) -> int | torch.Tensor:
    """The same, where it has to be computed as a scalar tensor on the batch's device, which nobody
    waits for."""
    if program.count is not None:
        found = program.count(batch)
        return found if isinstance(found, torch.Tensor) and found.numel() == 1 else int(found)
    if "target" in batch:
        return targets_in(batch["target"])
    return int(next(iter(batch.values())).shape[0])


def targets_in(target: torch.Tensor) -> int | torch.Tensor:
    """How many there are: of tokens or classes those that are not -100, else the samples."""
    return int(target.shape[0]) if target.is_floating_point() else (target != -100).sum()


def loss_of(program: Program, output: Any, batch: Batch) -> torch.Tensor:
    """The program's loss, a scalar. Raises ProgramError when it is none."""
    value = program.loss(output, batch)
    # of logits that are cut over tp: the same on each of these ranks
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, torch.Tensor) or value.ndim:
        found = (
            f"a tensor of shape {list(value.shape)}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        raise ProgramError(
            f"Program.loss returned {found}; it must return the sum over the batch, a scalar tensor"
        )
    return value


# --------------------------------------------------------------------------------- in a user's loop


@dataclass(frozen=True)
class ModelCall:
    """A call of a script's model in a step, with `n` rows. Its batch has `n_rows`, of which row
    `first` comes next; `again`: how often all of them were passed before."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    n: int
    n_rows: int
    first: int = 0
    again: int = 0
    evaluates: bool = False  # in evaluation mode
    graph: bool = True  # with gradients

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """What it is called with, by number, as far as it has these rows."""
        found = enumerate(tensors_in([*self.args, *self.kwargs.values()]))
        return {str(i): x for i, x in found if x.ndim and len(x) == self.n}

    @property
    def rows(self) -> range | None:
        """Of the batch; None: it has not so many left."""
        last = self.first + self.n
        return range(self.first, last) if last <= self.n_rows else None


class ModelCalls:
    """Follows a script in a step, which calls the model by itself: with all samples of its batch,
    as often as it likes, or with some after others. `around` each call. What is passed in
    evaluation mode, as other samples are, is counted by itself."""

    def __init__(
        self, n_rows: int, around: Callable[[ModelCall], AbstractContextManager[None]]
    ) -> None:
        self.n_rows, self.around = n_rows, around
        # by `evaluates`: the row that comes next, and how often all of them were passed
        self._passed = {False: (0, 0), True: (0, 0)}
        self._inside = ExitStack()

    @property
    def first(self) -> int:
        """Row of the batch that is passed next, not in evaluation mode; 0 = all were."""
        return self._passed[False][0]

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        # before FSDP, which casts what it is called with
        hooks = [
            model.register_forward_pre_hook(self.enters, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._leaves, always_call=True),
        ]
        try:
            yield
        finally:
            self._leaves()
            for hook in hooks:
                hook.remove()

    def enters(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (x for x in tensors_in([*args, *kwargs.values()]) if x.ndim)
        n = len(next(given, range(self.n_rows)))
        mode = not model.training
        first, again = self._passed[mode]
        how = {"evaluates": mode, "graph": torch.is_grad_enabled()}
        call = ModelCall(args, kwargs, n, self.n_rows, first, again, **how)
        self._inside.enter_context(self.around(call))
        if call.rows is not None:
            more, first = divmod(call.rows.stop, self.n_rows)
            self._passed[mode] = first, again + more

    def _leaves(self, *_: Any) -> None:
        self._inside.close()
