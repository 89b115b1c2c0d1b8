"""Traces a Program on the meta device: which tensors there are and how they may be cut. Allocates
no weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elastic.errors import ElasticError, ProgramError, SpecError, alike
from elastic.models.experts import COUNTS, expert_modules
from elastic.models.nf4 import PACKED
from elastic.program import Program, pattern_regex, patterns_of
from elastic.types import ModelProfile, OptimizerSpec, TensorSpec
from elastic.user_frames import raised_at
from elastic.worker.program.element_wise import what_they_keep, with_kept
from elastic.worker.program.extra_state import ExtraState
from elastic.worker.program.loop_program import Settings
from elastic.worker.program.norms.batch_norms import StepNorm, chosen, training_norms
from elastic.worker.program.optimizers import Optimizers, attributes_of
from elastic.worker.program.owned.optimizer_counters import with_counters
from elastic.worker.program.weights import check_weights, stored_shape

# tensor-parallel style -> dimension that is cut, per parameter name
CUT = {
    "colwise": {"weight": 0, "bias": 0},
    "colwise_gather": {"weight": 0, "bias": 0},
    "rowwise": {"weight": 1},
    "vocab": {"weight": 0},
    "summed": {},
    "sequence": {},
    "gather": {},
    "scatter": {},
    "rowwise_scatter": {"weight": 1},
    "vocab_scatter": {"weight": 0},
    "sequence_colwise_gather": {"weight": 0, "bias": 0},
    "sequence_colwise_loss": {"weight": 0, "bias": 0},
}

# styles by which a tp rank has a part of the sequence
OF_A_PART = {style for style in CUT if "scatter" in style or "sequence" in style}
NO_PIPELINE = {"LoopProgram": "its script calls the whole model"}
ONE_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


def block_names(model: nn.Module, blocks: str | Sequence[str]) -> list[str]:
    """Names of the repeated blocks, in order of registration; of several groups, group by group."""
    names = [name for name, _ in model.named_modules()]
    return [n for p in patterns_of(blocks) for n in filter(pattern_regex(p).match, names)]


def block_of(fqn: str, blocks: Sequence[str]) -> int | None:
    """Which of the blocks a tensor is in; None: it stands outside of them."""
    return next((i for i, name in enumerate(blocks) if fqn.startswith(name + ".")), None)


def tp_styles(model: nn.Module, program: Program) -> dict[str, str]:
    """Module name -> style, of the modules that are there: a pipeline stage has not all of them."""
    styles: dict[str, str] = {}
    for pattern, style in program.tp.items():
        styles.update(dict.fromkeys(block_names(model, pattern), style))
    return styles


def cut_dims(model: nn.Module, program: Program) -> dict[str, int]:
    """Name of a parameter -> the dimension that tp cuts, of those that it cuts."""
    styles = tp_styles(model, program)
    named = {
        f"{module}.{leaf}": dim
        for module, style in styles.items()
        for leaf, dim in CUT[style].items()
    }
    return {
        name: named[name]
        for name, _ in model.named_parameters(remove_duplicate=False)
        if name in named
    }


def check_patterns(model: nn.Module, program: Program) -> None:
    """Raises ProgramError for a pattern that matches no module of the whole model, with the names
    that are near it."""
    patterns = {pattern: f"{program.of}tp['{pattern}']" for pattern in program.tp}
    # where the default matches nothing the model has no blocks
    if program.blocks != Program.blocks:
        patterns |= {one: f"{program.of}blocks='{one}'" for one in patterns_of(program.blocks)}
    patterns |= {one: f"Program.experts='{one}'" for one in program.experts}
    for pattern, where in patterns.items():
        if not block_names(model, pattern):
            raise ProgramError(
                f"{where}: no module is named like this{near(pattern, model)}; a pattern names "
                "modules"
            )
    names = block_names(model, program.blocks)
    if not isinstance(program.blocks, str) and (both := _overlap(names)):
        raise ProgramError(f"{program.of}blocks={list(program.blocks)} {both}")


def _overlap(names: list[str]) -> str:
    """Of several groups: a block that is in two; '' = none."""
    for i, name in enumerate(names):
        if name in names[:i]:
            return f"matches {name} by two patterns; each block belongs to one group"
        if outer := next((one for one in names if name.startswith(one + ".")), ""):
            return f"matches both {outer} and {name} inside of it; name one of them"
    return ""


def _not_cut(model: nn.Module, styles: dict[str, str], of: str) -> str:
    """A module that the plan for tp would cut and torch cannot; '' = none. `of`: as Program has
    it."""
    for name, style in styles.items():
        module = model.get_submodule(name)
        if CUT.get(style) and not isinstance(module, nn.Linear | nn.Embedding):
            return (
                f"{of}tp names {name}, a {type(module).__name__}; '{style}' cuts nn.Linear "
                "and nn.Embedding only"
            )
    return ""


def near(pattern: str, model: nn.Module) -> str:
    """Module names like the pattern, numbers written as `*`; that of a parameter's module first."""
    names = dict.fromkeys(
        re.sub(r"\.[0-9]+(?=\.|$)", ".*", name) for name, _ in model.named_modules() if name
    )
    owner = pattern.rpartition(".")[0]
    found = [owner] if owner in names else []
    found += [name for name in alike(pattern, names, 3, least=0.5) if name not in found]
    return (
        f"; near it: {', '.join(found)}" if found else f"; there are {', '.join(list(names)[:6])}"
    )


def unit_names(model: nn.Module, blocks: list[str]) -> list[str]:
    """The blocks, and the outermost modules with a forward pass that hold tensors, hold no block
    and lie in none."""
    found = list(blocks)
    for name, module in model.named_modules():
        inside = any(name == one or name.startswith(one + ".") for one in found)
        holds = not name or any(one.startswith(name + ".") for one in blocks)
        tensors = any(True for _ in module.parameters()) or bool(module.state_dict())
        if not inside and not holds and tensors and type(module).forward is not nn.Module.forward:
            found.append(name)
    return found


_built: WeakSet[nn.Module] = WeakSet()  # that are still there


def build_meta(program: Program) -> nn.Module:
    """The program's module on the meta device."""
    with torch.device("meta"):
        model = program.model()
    if not isinstance(model, nn.Module):
        raise ProgramError(f"Program.model must return an nn.Module, not {type(model).__name__}")
    if model in _built:
        raise SpecError(
            f"Program.model returned the same {type(model).__name__} a second time; it must build "
            "a new one in each call, since elastic cuts the one it gets"
        )
    _built.add(model)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise SpecError(
                f"the size of {name} is unknown until the model is called (a lazy module), and "
                "shards are cut before that: say it (nn.Linear(in, out) for nn.LazyLinear(out))"
            )
        if not parameter.is_contiguous():  # as of memory_format=torch.channels_last
            parameter.data = parameter.data.contiguous()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ProgramError(
                f"{name or 'the model'} is compiled by torch.jit, whose forward pass cannot be "
                "followed nor cut; leave torch.jit out (job.yaml has compile: true)"
            )
    return model


def trace(program: Program) -> ModelProfile:
    """Parameters, buffers, blocks, tp cuts and optimizer entries of a Program.

    Raises ProgramError when an optimizer does not step each tensor by itself or a pattern matches
    nothing,
    SpecError when the model cannot be built, a parameter is not in exactly one optimizer or the
    program's weights are not those of its model (their headers are read).
    """
    try:
        model = build_meta(program)
    except ElasticError:
        raise
    except Exception as error:  # a boundary: the user's function may raise anything
        place = raised_at(error)
        at = f"{place.filename}:{place.lineno}: " if place else ""
        text = str(error)
        if "meta tensor" in text and program.of == Program.of:  # a loop has no init
            text += "; it is called without values first: what reads some belongs into Program.init"
        raise SpecError(f"{at}{program.builds} raised {type(error).__name__}: {text}") from error
    check_patterns(model, program)
    _check_memory(model)
    blocks = block_names(model, program.blocks)
    styles = tp_styles(model, program)
    experts = expert_modules(model, program.experts)
    place_of = BlockGroups(model, program.blocks)
    specs = tuple(
        replace(spec, by_expert=spec.fqn.rpartition(".")[0] in experts and not spec.buffer)
        for spec in _specs(model, place_of, styles, program=program)
    )
    check_weights(program, specs)
    kept = what_they_keep(program, specs)
    n_params = sum(
        math.prod(stored_shape(program, s)) for s in specs if not s.buffer and s.tied_to is None
    )
    no_tp = _not_cut(model, styles, program.of)
    limit = program.tp_limit if styles and not no_tp else 1
    for spec in specs:
        if spec.tp_dim is not None:
            size = spec.shape[spec.tp_dim]
            columns = spec.fqn in program.packed and spec.tp_dim == 1
            limit = math.gcd(limit, size // PACKED if columns else size)
    extra = extra_of(program, specs, kept.optimizers).specs()
    no_pp = (
        ""
        if program.pipeline
        else NO_PIPELINE.get(type(program).__name__, "Program.pipeline is False")
    )
    if program.evaluate is not None:
        no_pp = no_pp or "Program.evaluate wants the whole model"
    profile = ModelProfile(
        len(blocks), n_params, with_kept(specs, kept), kept.optimizers, 6.0 * n_params, max(1,
        limit), extra, not no_pp, n_expert_params(model), math.gcd(*experts.values()),
        no_pp=no_pp, no_tp=no_tp,
        notes=getattr(program, "notes", ()),  # of a loop
    )  # fmt: skip
    norms = training_norms(model)
    return _with_norms(profile, program, norms) if norms else profile


def _with_norms(profile: ModelProfile, program: Program, norms: Sequence[StepNorm]) -> ModelProfile:
    """What BatchNorms ask of layouts: whole groups of whole samples."""
    first = norms[0]
    name = f"{first.name} is a {type(first.module).__name__}"
    no_tp, no_pp = profile.no_tp, profile.no_pp
    no_cp = f"{name}: of parts of samples it has other statistics"
    if OF_A_PART & set(program.tp.values()):
        no_tp = no_tp or f"{no_cp}, which {program.of}tp gives it ('sequence', 'scatter' ...)"
    if not first.group:
        no_pp = no_pp or f"{name}, whose statistics are those of a step, not of its micro-batches"
    return replace(
        profile, together=first.group, no_cp=no_cp, no_tp=no_tp, no_pp=no_pp,
        pipeline=profile.pipeline and not no_pp, tp_limit=1 if no_tp else profile.tp_limit,
        notes=(*profile.notes, chosen(norms, program.keys)),
    )  # fmt: skip


def n_expert_params(model: nn.Module) -> int:
    """Parameters of experts, as far as the module tree tells them: tensors of three dimensions, the
    first of which is the `num_experts` of their module (as transformers has them), and what is
    registered under `experts.0`, `experts.1` ... 0 where it does not tell them."""
    n = 0
    for name, module in model.named_modules():
        counts = {getattr(module, attribute, None) for attribute in COUNTS}
        for leaf, parameter in module.named_parameters(recurse=False):
            stacked = parameter.ndim == 3 and parameter.shape[0] in counts
            n += parameter.numel() if stacked or ONE_EXPERT.search(f".{name}.{leaf}") else 0
    return n


def _specs(
    model: nn.Module, place_of: Callable[[str], int], styles: dict[str, str], *, program: Program
) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    first_name: dict[int, str] = {}
    for fqn, tensor, buffer in _named_tensors(model):
        module, _, leaf = fqn.rpartition(".")
        block = place_of(fqn)
        tied_to = first_name.get(id(tensor))
        first_name.setdefault(id(tensor), fqn)
        tp_dim = CUT[styles[module]].get(leaf) if module in styles and not buffer else None
        trainable = not buffer and tensor.requires_grad
        dtype = str(tensor.dtype).removeprefix("torch.")
        # packed weights are in no file
        reread = program.weights is not None and fqn not in program.packed
        frozen = reread and not buffer and not trainable
        attributes = tuple(attributes_of(tensor).items()) if trainable else ()
        specs.append(
            TensorSpec(
                fqn, tuple(tensor.shape), dtype, tp_dim, block, tied_to, trainable, buffer, frozen,
                attributes=attributes,
            )
        )  # fmt: skip
    return tuple(specs)


class BlockGroups:
    """The groups of blocks, numbered through, and where what stands outside of them belongs.

    A module belongs to the group with whose blocks it shares most of its name: what is registered
    before these, to the last block of the group before (-1 = before all blocks); what is behind
    them, to their last one (behind all groups: the number of blocks). It is on the stage of that
    block.
    """

    def __init__(self, model: nn.Module, blocks: str | Sequence[str]) -> None:
        self.groups = [block_names(model, pattern) for pattern in patterns_of(blocks)]
        self.blocks = {name: i for i, name in enumerate(n for g in self.groups for n in g)}
        modules = model.named_modules(remove_duplicate=False)
        self.order = {name: i for i, (name, _) in enumerate(modules)}

    def __call__(self, fqn: str) -> int:
        """Of a tensor or module."""
        parts = fqn.split(".")
        names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        for name in reversed(names):
            if name in self.blocks:
                return self.blocks[name]
        if not self.blocks:
            return -1
        mine = next((self.order[name] for name in names if name in self.order), 0)
        shared = [_shared(parts, group[0].split(".")) for group in self.groups]
        near = [i for i, n in enumerate(shared) if n == max(shared)]
        begins = {i: self.order[self.groups[i][0]] for i in near}
        if behind := [i for i in near if begins[i] < mine]:
            return self._last(max(behind, key=begins.__getitem__))
        return self.blocks[self.groups[min(near, key=begins.__getitem__)][0]] - 1

    def _last(self, group: int) -> int:
        """What stands behind all groups is behind all blocks."""
        if group == len(self.groups) - 1:
            return len(self.blocks)
        return self.blocks[self.groups[group][-1]]


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Parts that two names begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other))
    )


def extra_of(
    program: Program, specs: Sequence[TensorSpec], kept: Sequence[OptimizerSpec]
) -> ExtraState:
    """The program's extra state, and what its optimizers count. Raises SpecError."""
    names = {one.name: one.counters for one in kept if one.counters}
    if not names or any(isinstance(held, Settings) for held in program.extra_state.values()):
        return ExtraState(program.extra_state)
    each = Optimizers(program, specs, {}).each
    return ExtraState(with_counters(program.extra_state, each, names))


def hook_on_weight(model: nn.Module) -> str:
    """Which weight has one: the tensors that are trained are others. '' = none."""
    for name, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            return (
                f"the weight {name} has a hook, which is lost where the model is cut: scale the "
                "gradient in forward instead"
            )
    return ""


def _check_memory(model: nn.Module) -> None:
    """Raises SpecError for a parameter whose memory another tensor of the model has too: one
    process steps both at once, and elastic keeps each in memory of its own."""
    named = {id(x): (n, x) for n, x in (*model.named_buffers(), *model.named_parameters())}
    shared: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named.values():
        storage = tensor.untyped_storage() if tensor.numel() else None
        for other, its in shared.get(storage._cdata, ()) if storage else ():
            ranges = [_range(tensor), _range(its)]
            apart = max(r.start for r in ranges) >= min(r.stop for r in ranges)
            if apart or not (tensor.requires_grad or its.requires_grad):
                continue
            both = isinstance(its, nn.Parameter) and tensor.shape == its.shape
            mend = f"make them one ({name} = {other}), or " if both else ""
            raise SpecError(
                f"{name} and {other} lie in the same memory, but are two tensors of the model: "
                f"{mend}take a copy (.clone())"
            )
        if storage is not None:
            shared.setdefault(storage._cdata, []).append((name, tensor))


def _range(tensor: torch.Tensor) -> range:
    """Of bytes in its storage."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in sizes)
    return range(tensor.storage_offset() * tensor.itemsize, (last + 1) * tensor.itemsize)


def fresh_buffers(program: Program, seed: int, profile: ModelProfile) -> dict[str, torch.Tensor]:
    """Values of the persistent buffers of a model that was just initialized, and of extra_state;
    builds it on the CPU."""
    torch.manual_seed(seed)
    model = program.model()
    if program.init is not None:
        program.init(model)
    buffers = {fqn: tensor.detach() for fqn, tensor, buffer in _named_tensors(model) if buffer}
    extra = extra_of(program, profile.specs, profile.optimizers)
    boxes = {spec.fqn: (None, torch.zeros(spec.shape, dtype=torch.uint8)) for spec in extra.specs()}
    extra.fresh(boxes)
    return buffers | {fqn: tensor for fqn, (_, tensor) in boxes.items()}


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor, bool]]:
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        yield fqn, parameter, False
    kept = set(model.state_dict(keep_vars=True))
    for fqn, buffer in model.named_buffers():
        if fqn in kept:
            yield fqn, buffer, True
