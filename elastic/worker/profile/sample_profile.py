"""What one sample asks of a program: its passes are run once on the meta device, where nothing is
computed nor stored.

Products, attention and what the other operations move are counted as they are dispatched, in eager
mode. Of memory counts what autograd keeps, each piece once, without parameters and the batch.
Attention counts as the fused kernels do it (FlashAttention: Dao et al. 2022, section 3.1): queries,
keys, values, output and one float32 per row are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.data.collate import collate
from elastic.errors import ElasticError
from elastic.models.attention import AttentionUse, over
from elastic.program import Program
from elastic.types import Job, SampleProfile
from elastic.worker.parallel.activation_checkpointing import kept_ops
from elastic.worker.parallel.context_parallel import before_cut, check_sum, sequence_length
from elastic.worker.profile.operations import operations_of
from elastic.worker.program.calls import call_model, count_of, loss_of, tensors_in
from elastic.worker.program.loop_program import LoopProgram
from elastic.worker.program.model_profile import block_names, build_meta, cut_dims

log = logging.getLogger(__name__)

Batch = dict[str, Tensor]
POSITIONS = 16  # of a sample, on which its loss is tried
OUTSIDE = -1  # of all blocks
ALIKE = 1.02  # times as much, at most, one block asks as another of its kind
GROUPED = torch.ops.aten._grouped_mm.default  # rows by expert


def sample_profile(program: Program, job: Job, sample: Mapping[str, Any]) -> SampleProfile | None:
    """`sample`: an item of the dataset. None where the program cannot be run on the meta device, a
    script computes its loss, or samples are of unequal length (`microbatch_tokens`)."""
    try:
        return traced_sample(program, job, sample)
    except Exception as error:  # noqa: BLE001 - the user's model on a device that it was not written for
        log.info(
            "what a sample asks of the model is not known: %s", " ".join(str(error).split())[:200]
        )
        return None


def traced_sample(program: Program, job: Job, sample: Mapping[str, Any]) -> SampleProfile | None:
    """The same; raises what the program raises on the meta device."""
    if isinstance(program, LoopProgram) or job.microbatch_tokens:
        return None
    compute = None if job.precision == "float32" else getattr(torch, job.precision)
    return _Run(program, collate([dict(sample)]), compute).profile()


@dataclass
class _Kept:
    """Bytes that stay for the backward pass, by block; each storage counts where it was seen
    first."""

    bytes_at: dict[int, int] = field(default_factory=dict)
    # the tensors are held, so that no two have one address
    seen: dict[int, Tensor] = field(default_factory=dict)

    def without(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.seen[tensor.untyped_storage()._cdata] = tensor

    def add(self, place: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen[storage._cdata] = tensor
            self.bytes_at[place] = self.bytes_at.get(place, 0) + storage.nbytes()

    def per_block(self, n_blocks: int) -> int:
        return -(-sum(self.bytes_at.get(block, 0) for block in range(n_blocks)) // max(1, n_blocks))


class _Run:
    """One forward pass and one loss of one sample."""

    def __init__(self, program: Program, batch: Batch, compute: torch.dtype | None) -> None:
        self.program, self.batch, self.compute = program, batch, compute
        self.place = OUTSIDE
        self.none, self.selective, self.full, self.key_values = _Kept(), _Kept(), _Kept(), _Kept()
        self.called: set[int] = set()  # blocks that have called elastic.attention
        # of each block what it computes and moves, forward and backward
        self.asked: dict[int, tuple[float, float]] = {}
        self.before = 0.0, 0.0
        self.seen = AttentionUse(None)

    def profile(self) -> SampleProfile:
        model = build_meta(self.program).train()
        for parameter in model.parameters() if self.compute else ():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.compute)
        whole = self.batch if self.program.no_cp else before_cut(self.program, self.batch)
        batch = {
            key: x.to("meta", self.compute if self.compute and x.is_floating_point() else x.dtype)
            for key, x in whole.items()
        }
        known = [*model.parameters(), *model.buffers(), *batch.values()]
        for kept in (self.none, self.selective, self.full):
            kept.without(known)
        self.operations = operations_of(model, cut_dims(model, self.program))
        blocks = [model.get_submodule(name) for name in block_names(model, self.program.blocks)]
        with ExitStack() as stack:
            for i, block in enumerate(blocks):
                stack.callback(
                    block.register_forward_pre_hook(self._enters(i), with_kwargs=True).remove
                )
                stack.callback(block.register_forward_hook(self._leaves(i)).remove)
            if not self.program.no_cp:
                self.seen = stack.enter_context(over(None))
            stack.enter_context(saved_tensors_hooks(self._keeps, lambda tensor: tensor))
            stack.enter_context(_Outputs(self))
            stack.enter_context(_Attention(self))
            output = call_model(self.program, model, batch)
            for first in islice(tensors_in(output), 1):
                self._loss(first, batch)
        return self._found(len(blocks), output)

    def _found(self, n_blocks: int, output: Any) -> SampleProfile:
        bytes_of = {"none": self.none, "selective": self.selective, "full": self.full}
        # released, and its gradient
        out_bytes = sum(x.numel() * max(4, x.element_size()) for x in tensors_in(output))
        styles = self.program.tp.values()
        inside, ends, n = self.operations.blocks, self.operations.ends, max(1, n_blocks)
        block_flop, block_moved_bytes = self._of_each(n_blocks)
        found = SampleProfile(
            flop=3.0 * (inside.flop + ends.flop),
            kept_bytes=tuple((mode, kept.per_block(n_blocks)) for mode, kept in bytes_of.items()),
            hidden_bytes=self.full.per_block(n_blocks),
            ends_bytes=self.none.bytes_at.get(OUTSIDE, 0) + 2 * out_bytes,
            key_value_bytes=self.key_values.per_block(n_blocks),
            sequence_parallel=any("scatter" in style for style in styles),
            loss_parallel="sequence_colwise_loss" in styles,
            matmuls=inside.mean_matmuls(n),
            attentions=inside.mean_attentions(n),
            ends_matmuls=ends.mean_matmuls(1),
            moved_bytes=-(-inside.moved_bytes // n),
            ends_moved_bytes=ends.moved_bytes,
            n_ops=-(-inside.n_ops // n),
            block_flop=block_flop,
            block_moved_bytes=block_moved_bytes,
        )
        try:
            sequence = sequence_length(self.program, self.batch)
        except ElasticError as error:
            return replace(found, no_cp=str(error))
        no_cp = self._no_cp(n_blocks, output, sequence)
        return replace(found, sequence=sequence, no_cp=no_cp, tokens=self._tokens(output, sequence))

    def _of_each(self, n_blocks: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """What each block computes and moves; nothing where all are alike, or one is not called
        once."""
        blocks = range(n_blocks)
        if sorted(self.asked) != list(blocks) or not n_blocks:
            return (), ()
        flop, moved = (tuple(self.asked[i][which] for i in blocks) for which in (0, 1))
        if all(max(found) <= ALIKE * min(found) for found in (flop, moved)):
            return (), ()
        return flop, moved

    def _counted(self) -> tuple[float, float]:
        blocks = self.operations.blocks
        return blocks.flop, float(blocks.moved_bytes)

    def _tokens(self, output: Any, sequence: int) -> int:
        """0 where the loss is that of whole samples, as in classification."""
        if not _with_sequence(output, sequence):
            return 0
        try:
            return sequence if count_of(self.program, self.batch) != 1 else 0
        except Exception:  # noqa: BLE001 - the user's count
            return sequence

    # ----------------------------------------------------------------------------------- the passes

    def _enters(self, block: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.place, self.before = block, self._counted()
            self.seen.called = False
            for tensor in (*tensors_in(args), *tensors_in(kwargs)):
                self.full.add(block, tensor)
                self.selective.add(block, tensor)

        return hook

    def _leaves(self, block: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.place = OUTSIDE
            if self.seen.called:
                self.called.add(block)
            passes = _passes(module, args, output)
            flop, moved = (b - a for a, b in zip(self.before, self._counted(), strict=True))
            self.asked[block] = passes * flop, passes * moved

        return hook

    def _keeps(self, tensor: Tensor) -> Tensor:
        self.none.add(self.place, tensor)
        return tensor

    def _loss(self, output: Any, batch: Batch) -> None:
        """What it keeps; a loss that looks at values is not run here, and counts as the log-softmax
        of the output."""
        given = output.float() if output.is_floating_point() else output
        try:
            loss_of(self.program, given, batch)
        except Exception:  # noqa: BLE001 - the user's loss, on a device without values
            self.none.add(OUTSIDE, torch.empty_like(given))
            self.operations.ends.moved_bytes += 2 * given.numel() * given.element_size()

    # --------------------------------------------------------------------- may the sequence be cut?

    def _no_cp(self, n_blocks: int, output: Any, n: int) -> str:
        if self.program.no_cp:
            return self.program.no_cp
        if not self.called:
            return "the model does not call elastic.attention"
        idle = sorted({*range(n_blocks)} - self.called)
        if idle:
            return f"block {idle[0]} does not call elastic.attention"
        if not self.seen.asked and self.program.before_cut is None:
            return "the model does not take positions from elastic.positions"
        cut = _with_sequence(output, n)
        if not cut:
            return "the model's output does not have the sequence as its dim 1"
        m = min(POSITIONS, n - n % 4)
        if not m:
            return f"a sequence of {n} positions is too short"
        chosen = torch.linspace(0, n - 1, m).long()
        batch = {
            key: x[:, chosen] if x.ndim > 1 and x.shape[1] == n else x
            for key, x in self.batch.items()
        }
        torch.manual_seed(0)
        made_up = torch.randn(1, m, *cut[0].shape[2:])
        try:
            check_sum(self.program, made_up, batch, cp=2)
            if not float(loss_of(self.program, made_up, batch)):
                return "the loss of a few positions is 0, which says nothing of its parts"
        except Exception as error:  # noqa: BLE001 - the user's loss
            return " ".join(str(error).split())[:200]
        return ""


def _passes(block: nn.Module, args: Any, output: Any) -> int:
    """Forward, and backward for what came in and for its weights, as far as they have gradients."""
    if not any(x.requires_grad for x in tensors_in(output)):
        return 1
    inputs = any(x.requires_grad for x in tensors_in(args))
    return 1 + inputs + any(p.requires_grad for p in block.parameters())


def _with_sequence(output: Any, n: int) -> list[Tensor]:
    """Tensors of an output with the sequence as their dim 1."""
    return [x for x in tensors_in(output) if x.ndim > 1 and x.shape[1] == n]


class _Outputs(TorchDispatchMode):
    """Operations, and outputs of what `selective` does not compute twice. A value that is asked for
    is 1: there is none."""

    def __init__(self, run: _Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run, self.ops = run, kept_ops()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        # the meta device knows no other
        if func is GROUPED and args[0].is_meta and args[0].dtype != torch.bfloat16:
            out = args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        else:
            out = func(*args, **(kwargs or {}))
        self.run.operations.count(self.run.place != OUTSIDE, func, args, out=out)
        if func in self.ops and self.run.place != OUTSIDE:
            for tensor in tensors_in(out):
                self.run.selective.add(self.run.place, tensor)
        return out


class _Attention(TorchFunctionMode):
    """The meta device has no fused kernel."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, is_causal: bool = False, **__: Any
    ) -> Tensor:
        run = self.run
        out, row_sums = _Fused.apply(query, key, value)  # type: ignore[no-untyped-call]
        run.operations.attend(run.place != OUTSIDE, query, key, value=value, causal=is_causal)
        if run.place != OUTSIDE:
            run.key_values.add(run.place, key)
            run.key_values.add(run.place, value)
            run.selective.add(run.place, out)
            run.selective.add(run.place, row_sums)
        return out  # type: ignore[no-any-return]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.mark_non_differentiable(row_sums)
        ctx.save_for_backward(query, key, value, out, row_sums)
        return out, row_sums
