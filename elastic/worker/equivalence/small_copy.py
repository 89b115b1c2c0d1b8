"""What stands for a large model: a few blocks of each kind, with weights drawn at random.

It has the program's own modules (zeros that a fresh model begins with would hide much), and all of
its blocks where it is not large.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elastic.program import Program
from elastic.types import Job, ModelProfile
from elastic.worker.equivalence.forward_trace import Batch, python_random
from elastic.worker.equivalence.no_randomness import Still, quiet
from elastic.worker.equivalence.reference_pass import Pass, one_pass
from elastic.worker.process.free_memory import free_host_bytes
from elastic.worker.program.loop_program import module_factory
from elastic.worker.program.model_profile import block_names, build_meta, trace
from elastic.worker.program.norms.batch_norms import norms_of

ROWS = 4  # samples of the batch
GROUP = 2  # of samples with statistics of their own (BatchNorm)
WHOLE_MOST_PARAMETERS = 30_000_000  # of a model that is copied with all of its blocks
BLOCKS = (3, 2)  # of a copy of a larger one: the first number where so many are not too large
MOST_PARAMETERS = 400_000_000  # of a copy: beyond it nothing is compared
# of memory for each: a model with its gradients, and what two ranks have of it and gather
BYTES = 40
PERTURBED = 0.05  # standard deviation of what is added to each weight, of its own or of 1
NOT_OF_A_LAYOUT = (
    "optimizer", "precision", "reduce_dtype", "compile", "float8", "guards", "noise_scale",
    "microbatch_tokens", "clip_grad_norm", "layout",
)  # fmt: skip


class TooLarge(Exception):
    """The program cannot be compared on this machine."""


class SmallCopy:
    """A small copy of a program: `program` builds it anew with equal weights, `model` is one."""

    def __init__(self, program: Program, profile: ModelProfile) -> None:
        self.n_blocks = profile.n_blocks
        whole = profile.n_params <= WHOLE_MOST_PARAMETERS
        self.model = whole_model(program) if whole else self._cut(program)
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in self.model.parameters()):
            converted(self.model, torch.float32)
        doubled = any(p.dtype is torch.float64 for p in self.model.parameters())
        # what it is compared in: layouts convert nothing here
        self.dtype = torch.float64 if doubled else torch.float32
        perturb(self.model)
        quiet(self.model)
        norms = norms_of([self.model])
        self._source = program.model if whole and not norms else None
        for norm in norms:
            norm.group = min(norm.group, GROUP)
        self.flop = 6.0 * n_multiplied(self.model)  # of a position's passes
        self._passes: list[tuple[Batch, Pass]] = []
        # with sequences of full length, where others are compared with short ones
        self.long_batch: Batch | None = None
        self.program = replace(
            program,
            model=self._build,
            init=None,
            weights=None,
            buffers=None,
            lr_factor=None,
            extra_state={},
            adapter=None,
            # no step is made
            optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.0),
        )
        self.profile = trace(self.program)

    def _cut(self, program: Program) -> nn.Module:
        most = min(MOST_PARAMETERS, free_host_bytes() // BYTES)
        for n in BLOCKS:
            model = build_meta(program)
            self.n_blocks = shorten(model, block_names(model, program.blocks), n)
            if (n_params := sum(p.numel() for p in model.parameters())) <= most:
                break
        else:
            left = f"{n_params / 1e6:.0f} M parameters are left of it with {self.n_blocks} blocks"
            raise TooLarge(f"{left}, {most / 1e6:.0f} M can be compared")
        kept = set(model.state_dict())
        plain = [name for name, _ in model.named_buffers() if name not in kept]
        model.to_empty(device="cpu")
        filled = program.buffers is not None and program.buffers(model)
        if plain and not filled:
            raise TooLarge(f"the values of its buffer {plain[0]} are known to the whole model only")
        fill(model)
        return model

    def one_process(self, batch: Batch, cp: int) -> Pass:
        """What one process makes of a batch. With cp = 1 it is kept, for the next layout."""
        for known, found in self._passes:
            if known is batch and cp == 1:
                return found
        with Still(), python_random(0.999):
            found = self.alone(batch, cp)
        self._passes += [(batch, found)] if cp == 1 else []
        return found

    def alone(self, batch: Batch, cp: int, *, dtype: torch.dtype | None = None) -> Pass:
        """The pass of one process, in other numbers where they are asked for."""
        model = converted(copy.deepcopy(self.model), dtype or self.dtype)
        model.train(not self.program.batch_dependent)
        return one_pass(self.program, model, batch, cp=cp)

    def anew(self, dtype: torch.dtype) -> nn.Module:
        """A model with the copy's weights that the program has built, where that goes: functions
        that it was given as hooks are about this one, which those of a copy are not."""
        if self._source is None:
            return converted(copy.deepcopy(self.model), dtype)
        torch.manual_seed(0)
        model = self._source()
        quiet(model)
        model.load_state_dict(self.model.state_dict())
        return converted(model, dtype)

    def _build(self) -> nn.Module:
        on_meta = torch.get_default_device().type == "meta"
        return module_factory(self.model)() if on_meta else copy.deepcopy(self.model)


def whole_model(program: Program, device: str = "cpu") -> nn.Module:
    """As the program makes it; weights that it reads from files are drawn too."""
    if device == "meta":
        return build_meta(program)
    torch.manual_seed(0)
    model: nn.Module = program.model()
    if program.weights is not None:
        fill(model)
    elif program.init is not None:
        program.init(model)
    return model


def job_of_copy(job: Job) -> Job:
    """The job in plain float32, without what is no mathematics of a layout."""
    plain = {key: getattr(Job, key) for key in NOT_OF_A_LAYOUT}
    return replace(job, **plain, global_batch=ROWS, n_samples=ROWS, steps=1, seed=0)


def n_multiplied(model: nn.Module) -> int:
    """Parameters that are multiplied with at each position, at least 1: all but tables that are
    only looked up in."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    others = {
        id(p)
        for m in model.modules()
        if not isinstance(m, nn.Embedding)
        for p in m.parameters(recurse=False)
    }
    return max(1, sum(p.numel() for p in model.parameters() if id(p) not in tables - others))


def shorten(model: nn.Module, blocks: list[str], n: int) -> int:
    """Leaves about n blocks of each list that they stand in, some of each kind. Returns how many
    there are now."""
    groups: dict[str, list[str]] = {}
    for name in blocks:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    left = 0
    for parent, names in groups.items():
        held = model.get_submodule(parent)
        if (
            len(names) <= n
            or not isinstance(held, nn.ModuleList | nn.Sequential)
            or len(held) != len(names)
        ):
            left += len(names)
            continue
        kept = kept_blocks(list(held), n)
        if len(kept) > BLOCKS[0] + 2:
            raise TooLarge(f"its blocks are of {len(kept)} kinds")
        for i in reversed(range(len(names))):
            if i not in kept:
                del held[i]
        left += len(kept)
    return left


def kept_blocks(blocks: Sequence[nn.Module], n: int) -> list[int]:
    """Indices, in order: the first of each kind, then others from the front, the end and the
    middle, up to `n`.

    Blocks are of one kind whose modules, parameters and settings are of equal classes, shapes and
    values. A setting that is another in each block (its number) makes no kind."""
    settings = [_settings(block) for block in blocks]
    counts: dict[Any, set[Any]] = {}
    for one in settings:
        for key, value in one.items():
            counts.setdefault(key, set()).add(value)
    numbers = {key for key, values in counts.items() if len(values) == len(blocks)}
    first: dict[Any, int] = {}
    for i, (block, mine) in enumerate(zip(blocks, settings, strict=True)):
        kind = (
            _shapes(block),
            frozenset((key, value) for key, value in mine.items() if key not in numbers),
        )
        first.setdefault(kind, i)
    kept = set(first.values())
    last = len(blocks) - 1
    for i in (0, last, last // 2, *range(len(blocks))):
        if len(kept) < n:
            kept.add(i)
    return sorted(kept)


def _shapes(block: nn.Module) -> tuple[Any, ...]:
    tree = tuple((name, type(module)) for name, module in block.named_modules())
    weights = tuple(
        (name, tuple(p.shape), p.requires_grad)
        for name, p in block.named_parameters(remove_duplicate=False)
    )
    return tree, weights, tuple((name, tuple(b.shape)) for name, b in block.named_buffers())


def _settings(block: nn.Module) -> dict[Any, Any]:
    """Plain values that its modules keep."""
    return {
        (name, key): (type(value), value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if key != "training" and isinstance(value, bool | int | float | str | None)
    }


def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Complex numbers stay complex."""
    plural = torch.complex128 if dtype == torch.float64 else torch.complex64
    changed: nn.Module = model._apply(
        lambda x: x.to(plural if x.is_complex() else dtype if x.is_floating_point() else x.dtype)
    )
    return changed


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Weights as fresh modules of their kinds have them, where these say so; else of a usual
    size."""
    torch.manual_seed(0)
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
            continue
        for name, p in module.named_parameters(recurse=False):
            p.normal_(std=p[0].numel() ** -0.5) if p.ndim > 1 else p.fill_(
                1.0 if name.endswith("weight") else 0.0
            )


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """So that no weight is 0 by design and none equals another."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.is_floating_point():
            size = float(p.abs().mean()) or 1.0
            p.add_(
                torch.randn(p.shape, generator=generator).to(p.dtype)
                * (PERTURBED * size if p.ndim else 0.01 * size)
            )
