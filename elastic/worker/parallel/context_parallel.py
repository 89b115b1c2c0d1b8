"""Context parallelism: every sequence of a batch is cut over the ranks of the cp group, with checks
of what that asks for.

The sequence dimension is dim 1 of the model's input. Each tensor of the batch whose dim 1 has that
size is cut too; the model and the loss then see this rank's part only, so the loss must be a sum
over positions with targets that are shifted already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from elastic.errors import ElasticError, ProgramError, SpecError
from elastic.models.attention import AttentionUse, SequenceShard, over
from elastic.program import Program
from elastic.types import Job, Layout, is_auto, parse_layout
from elastic.types.grid import Coordinates
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.calls import call_model, inputs_of, loss_of, tensors_in
from elastic.worker.program.model_profile import build_meta

Batch = dict[str, torch.Tensor]
PARTS_AGREE = 1e-3  # relative difference between the loss of a sequence and the sum over its parts
SAME = 1e-4  # the same between two ways of attention


class Sequence:
    """The part of every sequence that this rank has; the whole of it where cp is 1."""

    def __init__(
        self, program: Program, layout: Layout, at: Coordinates, *, groups: Groups
    ) -> None:
        self.program = program
        self.shard = SequenceShard(at.cp, layout.cp, groups.cp) if layout.cp > 1 else None
        self.checked = False
        sharded = layout.tp > 1 and any("scatter" in style for style in program.tp.values())
        # of this rank's part, between the modules that tp cuts
        self.parts = layout.tp if sharded else 1

    @property
    def multiple(self) -> int:
        """Of which the number of positions of a whole sequence must be one."""
        return self.parts * (2 * self.shard.size if self.shard is not None else 1)

    def cut(self, batch: Batch) -> Batch:
        """This rank's part of the sequences. Raises ProgramError where they cannot be cut."""
        mine = batch if self.shard is None else cut(self.program, batch, self.shard)
        if self.parts > 1 and (n := sequence_length(self.program, mine)) % self.parts:
            raise ProgramError(
                f"tp={self.parts} with sequence parallelism needs a multiple of {self.parts} "
                f"positions, not {n}"
            )
        return mine

    @contextmanager
    def running(self, blocks_here: bool) -> Iterator[None]:
        """Forward and backward passes run inside. Raises ProgramError when the blocks of this rank
        never call `elastic.attention`: each part of a sequence would then see itself only."""
        if self.shard is None:
            yield
            return
        with over(self.shard) as seen:
            yield
        if not self.checked:
            self.checked = True
            if blocks_here and not seen.called:
                raise ProgramError(_no_attention(self.shard.size))


def cut(program: Program, batch: Batch, shard: SequenceShard) -> Batch:
    """Every tensor whose dim 1 is the sequence's, cut."""
    batch = before_cut(program, batch)
    n = sequence_length(program, batch)
    return {key: shard.take(x) if x.ndim > 1 and x.shape[1] == n else x for key, x in batch.items()}


def before_cut(program: Program, batch: Batch) -> Batch:
    """The batch with what the program computes from whole sequences."""
    return dict(program.before_cut(batch)) if program.before_cut is not None else batch


def sequence_length(program: Program, batch: Batch) -> int:
    """Dim 1 of the model's input. Raises ProgramError where there is none."""
    for tensor in tensors_in(inputs_of(program, batch)):
        if tensor.ndim > 1:
            return int(tensor.shape[1])
    raise ProgramError(
        "cp > 1 and sequence parallelism cut dim 1 of the model's input, and there is no tensor "
        "of two dimensions in it"
    )


def _part(output: Any, shard: SequenceShard, n: int) -> Any:
    """The part of a model's output, a tensor or some by name."""
    if isinstance(output, Mapping):
        return type(output)(**{key: _part(value, shard, n) for key, value in output.items()})
    return (
        shard.take(output)
        if isinstance(output, torch.Tensor) and output.ndim > 1 and output.shape[1] == n
        else output
    )


# ------------------------------------------------------------------------------------------ checks


def largest_cp(job: Job) -> int:
    """Of the layouts that a job names; 1 where it leaves cp to the planner."""
    wanted = job.layout
    if is_auto(wanted):
        return int(job.pins.get("cp", 1))
    texts = [wanted] if isinstance(wanted, str) else list(wanted.values())
    return max((parse_layout(text).cp for text in texts), default=1)


def check_calls(program: Program, sample: Batch, cp: int) -> None:
    """Does the model call `elastic.attention`, on sequences that can be cut? Runs it on the meta
    device, with a batch of one sample; what cannot run there is not judged. Raises SpecError."""
    check_possible(program, cp)
    _check_attention(program, sample, cp)
    SequenceShard(0, cp, None).take(torch.empty(1, sequence_length(program, sample), device="meta"))


def _check_attention(program: Program, sample: Batch, cp: int) -> None:
    batch = {key: x.to("meta") for key, x in sample.items()}
    with torch.no_grad(), over(None) as seen:
        try:
            call_model(program, build_meta(program).eval(), before_cut(program, batch))
        except ElasticError:
            raise
        except Exception:  # noqa: BLE001 - the user's model: the workers run it on real numbers, and tell what it raises
            return
    _refuse_plain(seen, cp)


def check_possible(program: Program, cp: int) -> None:
    """Raises SpecError where the program says itself why its sequences stay whole."""
    if cp > 1 and program.no_cp:
        raise SpecError(f"cp={cp}, but {program.no_cp}; take cp=1")


def _refuse_plain(seen: AttentionUse, cp: int) -> None:
    if not seen.called:
        raise SpecError(_no_attention(cp))


def _no_attention(cp: int) -> str:
    return (
        f"cp={cp}, but the model does not call elastic.attention(q, k, v), which alone sees a "
        "sequence that is cut over ranks; "
        "call it in place of scaled_dot_product_attention, or take cp=1"
    )


@torch.no_grad()
def check_loss(program: Program, model: torch.nn.Module, batch: Batch, *, cp: int) -> None:
    """The loss of the whole must be the sum over the parts of the same output, and that with cp =
    1. Raises ProgramError: a mean, a shift of the targets inside the loss, an output without the
    sequence as its dim 1, attention of another kind."""
    with over(None) as seen:
        output = call_model(program, model, before_cut(program, batch))
    _refuse_plain(seen, cp)
    n = sequence_length(program, batch)
    if not any(x.ndim > 1 and x.shape[1] == n for x in tensors_in(output)):
        found = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ProgramError(
            f"cp={cp}: the model must return a tensor with the sequence ({n}) as its dim 1, not "
            f"{found}"
        )
    whole = float(loss_of(program, output, batch))
    own = float(loss_of(program, call_model(program, model, batch), batch))
    if abs(own - whole) > SAME * max(1.0, abs(whole)):
        raise ProgramError(
            f"cp={cp}: Program.loss of one sample is {own:.6g} with the model's own attention, "
            f"{whole:.6g} with elastic.attention; take cp=1"
        )
    check_sum(program, output, batch, cp=cp)


@torch.no_grad()
def check_sum(program: Program, output: Any, batch: Batch, *, cp: int) -> None:
    """The loss of an output must be the sum over its parts. Raises ProgramError."""
    n, whole = sequence_length(program, batch), float(loss_of(program, output, batch))
    shards = [SequenceShard(i, cp, None) for i in range(cp)]
    parts = sum(
        float(loss_of(program, _part(output, shard, n), cut(program, batch, shard)))
        for shard in shards
    )
    if abs(parts - whole) > PARTS_AGREE * max(1.0, abs(whole)):
        raise ProgramError(
            f"cp={cp}: Program.loss of one sample is {whole:.6g}, the sum over the parts of its "
            f"sequence is {parts:.6g}; with cp it must be a sum over positions; targets are "
            "shifted in the dataset (or by Program.before_cut), not in the loss"
        )
