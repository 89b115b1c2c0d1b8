"""Which layouts a program's structure allows, found without values and before anything starts.

A pipeline stage is the model with the modules of all other stages passed through (pipeline.py),
called with the hidden state in the place of the model's input. It computes its part of the whole
only where each block is called once, in order, with exactly what the one before returned; where
what else a block takes is the same on every stage or given by `Program.keywords`; and where all
that is done before and behind the blocks is done by modules that the first and the last stage keep
for themselves.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from elastic.errors import ElasticError
from elastic.program import Program
from elastic.types import ModelProfile, coarsest
from elastic.worker.equivalence.forward_trace import (
    FAR,
    INPUT,
    INTERNAL,
    KEYWORDS,
    MORE_OPERATIONS,
    PYTHON,
    Batch,
    Call,
    Followed,
    Op,
    Tracer,
    follow,
    shape_of,
)  # fmt: skip
from elastic.worker.equivalence.static_plan import even
from elastic.worker.parallel.context_parallel import tensors_in
from elastic.worker.parallel.pipeline import cut_stage
from elastic.worker.program.calls import inputs_of, keywords_of
from elastic.worker.program.model_profile import block_names, build_meta

STAGES = 3  # tried: a first one, one in the middle, a last one
# of a model that is followed with values where it cannot be without
REAL_MOST_PARAMETERS = 100_000_000
OWN_STAGE = "or give Program.stage"
VERBS = {
    "add": "adds to the hidden state", "mul": "multiplies " "the hidden " "state",
    "cat": "joins something to the hidden state", "sub": "subtracts from the hidden state",
    "div": "divides " "the hidden " "state", "slice": "cuts the hidden state",
    "native_layer_norm": "normalizes the hidden state", "addmm": "projects the hidden state",
    "mm": "projects the hidden state", "convolution": "convolves the hidden state",
    "mean": "takes " "a " "mean " "of " "the hidden state", "clone": "copies the hidden state",
    "_to_copy": "converts the hidden state",
}  # fmt: skip


@dataclass(frozen=True)
class Structure:
    """Why an axis is closed to a program, '' = its structure allows it; and what a person should
    know of it."""

    no_dp: str = ""
    no_tp: str = ""
    no_cp: str = ""
    no_pp: str = ""
    draws: bool = False
    computes_in: str = ""
    notes: tuple[str, ...] = ()

    def close(self, profile: ModelProfile) -> ModelProfile:
        """The profile of a model that has this structure."""
        no_tp, no_pp = profile.no_tp or self.no_tp, profile.no_pp or self.no_pp
        return replace(
            profile,
            no_dp=profile.no_dp or self.no_dp,
            no_tp=no_tp,
            no_cp=profile.no_cp or self.no_cp,
            no_pp=no_pp,
            tp_limit=1 if no_tp else profile.tp_limit,
            pipeline=profile.pipeline and not no_pp,
            draws=profile.draws or self.draws,
            computes_in=coarsest((profile.computes_in, self.computes_in)),
            notes=(*profile.notes, *self.notes),
        )


def structure_of(program: Program, profile: ModelProfile, batch: Batch) -> Structure:
    """`batch`: of one sample, on the CPU. Raises what the model raises where it cannot be called at
    all."""
    batch, found = _one_or_two(program, profile, batch)
    if isinstance(found, str):
        why = (
            "" if profile.no_pp else f"its forward pass cannot be followed without values: {found}"
        )
        norm, sees = _norm(build_meta(program))
        no_dp = f"{sees}; {_mend(norm)}" if norm and not program.batch_dependent else ""
        return Structure(no_dp=no_dp, no_cp=no_dp, no_pp=why)
    device, one, others = found
    shares = _of_shares(program, one, _other(one, others))
    shares = replace(shares, no_dp=shares.no_dp or _shared_by_blocks(profile))
    if why := _of_weights(program, one):
        shares = replace(shares, no_dp=why, no_tp=why, no_cp=why, no_pp=why)
    no_pp = profile.no_pp or shares.no_pp
    if not no_pp and profile.n_blocks > 1:
        no_pp = _Pipelines(
            program, profile, {key: x.to(device) for key, x in batch.items()}, whole=one
        ).problem()
    return replace(shares, no_pp=no_pp)


def _one_or_two(
    program: Program, profile: ModelProfile, batch: Batch
) -> tuple[Batch, tuple[str, Followed, list[Followed]] | str]:
    """The passes of one sample, or of two where the model does not take one alone (BatchNorm over
    single values)."""
    try:
        found = _passes(program, profile, batch)
    except ValueError:
        found = ""
    if not isinstance(found, str):
        return batch, found
    two = {key: torch.cat([x, x]) for key, x in batch.items()}
    return two, _passes(program, profile, two)


def _norm(model: nn.Module) -> tuple[str, str]:
    """The first module that computes with the statistics of a batch, and what is said of it; '' =
    none."""
    norm = next(
        (name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training), ""
    )
    kind = type(model.get_submodule(norm)).__name__
    return (
        norm,
        f"{norm} is a {kind}: its statistics are those of the samples of one rank" if norm else "",
    )


def _mend(norm: str) -> str:
    take = "take GroupNorm or LayerNorm" if norm else "leave that out"
    return f"{take}, or say Program.batch_dependent=True to train on all the same"


def _passes(
    program: Program, profile: ModelProfile, batch: Batch
) -> tuple[str, Followed, list[Followed]] | str:
    """A pass of the whole model, and others, and the device; truth values that Python asks for are
    others there, and numbers too where the program asks for some. A text: why not."""
    problem = ""
    for device in ("meta", "cpu"):
        if device == "cpu" and (
            profile.n_params > REAL_MOST_PARAMETERS or program.weights is not None
        ):
            return problem
        error: Exception | None = None
        # a guard may raise where a value is true
        for truth in (None, False) if device == "meta" else (None,):
            try:
                one = _pass(program, device, batch, truth=truth)
            except ElasticError:
                raise
            except Exception as raised:  # noqa: BLE001 - the user's model
                error = error or raised
                continue
            return device, one, _others(program, device, batch, one=one)
        assert error is not None
        if device == "cpu":
            raise error
        problem = told(error)
    return problem


def _others(program: Program, device: str, batch: Batch, *, one: Followed) -> list[Followed]:
    """Passes with other values; a model may well refuse a value that it can never have."""
    tries: list[tuple[bool | None, int | None]] = [(None if one.truth is False else False, None)]
    if any(
        op.own and op.name == "a value" and op.labels & {INPUT, KEYWORDS, *one.blocks}
        for op in one.branches
    ):
        tries += [(one.truth, FAR), (one.truth, -FAR)]
    most = 2 * len(one.names) + MORE_OPERATIONS
    others = []
    for truth, far in tries:
        try:
            others.append(_pass(program, device, batch, truth=truth, far=far, most=most))
        except Exception:  # noqa: BLE001 - see above
            continue
    return others


def _other(one: Followed, others: list[Followed]) -> Followed:
    """That which differs most."""
    by_modules = [other for other in others if other.modules != one.modules]
    by_names = [other for other in others if other.names != one.names]
    return next(iter((*by_modules, *by_names, *others)), one)


def _pass(
    program: Program,
    device: str,
    batch: Batch,
    *,
    truth: bool | None,
    far: int | None = None,
    most: int = sys.maxsize,
) -> Followed:
    model = _built(program, device)
    given = {key: x.to(device) for key, x in batch.items()}
    return follow(
        program,
        Tracer(program, model, block_names(model, program.blocks), truth=truth, far=far),
        given,
        most_operations=most,
    )


def _built(program: Program, device: str) -> nn.Module:
    if device == "meta":
        return build_meta(program)
    torch.manual_seed(0)
    model: nn.Module = program.model()
    if program.init is not None:
        program.init(model)
    return model


# ------------------------------------------------------------------------------------------ what
# every layout must allow


def _of_shares(program: Program, one: Followed, other: Followed) -> Structure:
    """What makes results depend on which samples stand together, or ranks call different
    modules."""
    notes = []
    no_dp = no_tp = no_cp = no_pp = ""
    norm, sees = _norm(build_meta(program))
    written = next((name for name, labels in one.written.items() if labels), None)
    if not norm and written is not None:
        sees = f"forward writes the buffer {written} from the samples of one rank"
    if sees and program.batch_dependent:
        notes.append(
            f"{sees}, taken as it is (Program.batch_dependent): losses differ between layouts"
        )
        no_pp = (
            "a pipeline stage is first called with made-up values, and "
            f"{sees.replace(':', ',', 1)}; take pp=1"
        )
    elif sees:
        no_dp = no_cp = no_pp = f"{sees}; {_mend(norm)}"
    chosen = [
        op for op in one.branches if any(not label.startswith("the weight ") for label in op.labels)
    ]
    mine = [op for op in chosen if op.own]
    if one.python_random:
        no_dp = no_tp = no_cp = (
            f"forward draws from {one.python_random}, which gives other numbers on each rank; "
            "draw with torch instead"
        )
    if one.modules != other.modules:
        no_dp = no_cp = _branch(one, other)
        no_tp = no_dp if one.python_random else no_tp
    elif mine and one.names != other.names and not program.batch_dependent:
        place = f"{mine[0].inside or 'forward'} ({mine[0].where})"
        no_dp = no_cp = no_pp = (
            f"{place} branches on a value of the whole batch, which each rank and microbatch sees "
            "a part of: compute both and choose for each sample with torch.where, or say "
            "Program.batch_dependent=True to train on all the same"
        )
    elif chosen and one.names != other.names:
        notes.append(
            f"{chosen[0].inside or 'forward'} ({chosen[0].where}) branches on a value of the "
            "samples of one rank"
        )
    for name, labels in one.written.items():
        if not labels and not norm:
            notes.append(
                f"each forward pass writes the buffer {name}: how many there are in a step "
                "depends on the layout"
            )
    if one.keeps:
        more = f" (and {len(one.keeps) - 1} more)" if len(one.keeps) > 1 else ""
        notes.append(
            f"{one.keeps[0]}{more} keeps a value of the samples of one rank: if a later pass "
            "reads it, layouts differ"
        )
    draws = [op for op in one.draws if op.where]
    if draws or one.python_random:
        at = f" ({draws[0].where})" if draws else f" ({one.python_random})"
        place = f"{draws[0].inside or 'forward'}{at}" if draws else f"forward{at}"
        notes.append(
            f"{place} draws random numbers: each layout draws others, so losses differ a little "
            "between layouts"
        )
    return Structure(
        no_dp, no_tp, no_cp, no_pp, bool(draws or one.python_random), one.computes_in, tuple(notes)
    )


def _of_weights(program: Program, one: Followed) -> str:
    """What is done to weights that only a whole model has."""
    for name, p in build_meta(program).named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            return (
                f"the weight {name} has a hook, which is lost where the model is cut: scale the "
                "gradient in forward instead"
            )
    for name, where in one.weights_written.items():
        at = f" ({where})" if where else ""
        return (
            f"forward writes the weight {name}{at}: what it writes is lost where the weight is "
            "cut; compute a value from the weight and use that"
        )
    return ""


def _one_weight(profile: ModelProfile) -> tuple[str, str] | None:
    """Two names of one weight that stands in a block and elsewhere. (A tie of what is before and
    what is behind the blocks is kept in every layout.)"""
    block = {spec.fqn: spec.block for spec in profile.specs}
    for spec in profile.specs:
        places = {spec.block, block.get(spec.tied_to or spec.fqn)}
        if spec.tied_to is not None and len(places) > 1 and places != {-1, profile.n_blocks}:
            return spec.tied_to, spec.fqn
    return None


def _shared_by_blocks(profile: ModelProfile) -> str:
    """FSDP shards each block by itself, and one weight once."""
    if (names := _one_weight(profile)) is None:
        return ""
    return (
        f"{names[0]} and {names[1]} are one weight in two blocks, and FSDP shards each block by "
        "itself: put it "
        "outside of the blocks, or choose Program.blocks so that one block holds both"
    )


def _branch(one: Followed, other: Followed) -> str:
    """Ranks that see other values call other modules, and wait for each other's parameters."""
    first = next((op for op in (*one.branches, *other.branches)), None)
    more = sorted({*one.modules} ^ {*other.modules})
    what = f"whether {more[0]} is called" if more else f"how often {one.modules[-1]} is called"
    if first is None:
        source = one.python_random or other.python_random or PYTHON
        return (
            f"{what} depends on {source}, which draws other numbers on each rank; the ranks would "
            "wait for each other's weights: multiply by a mask that is 0 instead"
        )
    return (
        f"{what} depends on a value ({first.where}) that ranks see differently; they would wait "
        "for each other's weights: compute both and choose with torch.where"
    )


# ------------------------------------------------------------------------------------------
# pipelines


class _Pipelines:
    """May the blocks be spread over stages? `whole`: a pass of the whole model."""

    def __init__(
        self, program: Program, profile: ModelProfile, batch: Batch, *, whole: Followed
    ) -> None:
        self.program, self.profile, self.whole = program, profile, whole
        self.names = block_names(build_meta(program), program.blocks)
        self.batch = batch
        self.device = next(iter(batch.values())).device.type

    def problem(self) -> str:
        """'' = they may."""
        checks = [self._shared, self._order, self._chain, self._others, self._beside, self._tail]
        if self.program.stage is not None:  # it may do with the module what it wants
            checks = checks[:1]
        return next((text for check in checks if (text := check())), "") or self._stages()

    def _shared(self) -> str:
        """Weights that stages would each train a copy of."""
        names = _one_weight(self.profile)
        return (
            (
                f"{names[0]} and {names[1]} are one weight, which two stages would hold; take "
                "pp=1, or two weights"
            )
            if names
            else ""
        )

    def _order(self) -> str:
        calls = self.whole.calls
        if inner := next((call for call in calls if call.depth), None):
            outer = next(
                name for name in self.names if self.names[inner.block].startswith(name + ".")
            )
            both = f"{outer} and {self.names[inner.block]} inside of it"
            return f"Program.blocks='{self.program.blocks}' matches {both}; name one of them"
        order = [call.block for call in calls]
        for i, name in enumerate(self.names):
            if (n := order.count(i)) != 1:
                times = "never" if not n else "twice" if n == 2 else f"{n} times"
                return f"forward calls {name} {times}; each block must be called once"
        late = next((i for i, block in enumerate(order) if block != i), None)
        if late is not None:
            early = self.names[order[late]]
            return (
                f"forward calls {early} where {self.names[late]} should come: blocks are called "
                "in their order"
            )
        return ""

    def _chain(self) -> str:
        for before, call in zip(self.whole.calls, self.whole.calls[1:]):
            one, two = self.names[before.block], self.names[call.block]
            if not isinstance(before.output, Tensor):
                kind = type(before.output).__name__
                return (
                    f"{one} returns a {kind}; a block returns the hidden state alone, a tensor, "
                    f"{OWN_STAGE}"
                )
            if not call.args:
                return (
                    f"{two} is called with its hidden state by keyword; give it as the first "
                    "positional argument"
                )
            if call.args[0] is not before.output:
                return (
                    f"between {one} and {two} `forward` {_done(call)}: put it into the block, "
                    f"{OWN_STAGE}"
                )
        first = self.whole.calls[0]
        if not first.args or not isinstance(first.args[0], Tensor):
            return (
                f"{self.names[0]} is not called with a tensor as its first positional argument, "
                f"{OWN_STAGE}"
            )
        return ""

    def _others(self) -> str:
        """What blocks take besides the hidden state must be there on every stage."""
        for call in self.whole.calls:
            block, found = call.block, call.others - {KEYWORDS}
            where = f"{self.names[block]} takes more than the hidden state, made from"
            if INPUT in found:
                return (
                    f"{where} the model's input, which later stages do not have: give it by "
                    f"Program.keywords, {OWN_STAGE}"
                )
            if found:
                return (
                    f"{where} {min(found)}, which another stage has: compute it inside of each "
                    f"block, {OWN_STAGE}"
                )
        return ""

    def _beside(self) -> str:
        """What blocks read that was not given to them."""
        for op in self.whole.beside:
            at = f" ({op.where})" if op.where else ""
            return (
                f"{op.inside} reads {min(op.labels)}{at} beside its arguments, which another "
                f"stage has: give it by Program.keywords, {OWN_STAGE}"
            )
        return ""

    def _tail(self) -> str:
        last = self.names[-1]
        allowed = {
            last,
            KEYWORDS,
            *(
                f"the weight {spec.fqn}"
                for spec in self.profile.specs
                if self._is_behind(spec.fqn, spec.block)
            ),
        }
        tied = {spec.fqn: spec.tied_to for spec in self.profile.specs if spec.tied_to}
        allowed |= {f"the weight {a}" for fqn, a in tied.items() if f"the weight {fqn}" in allowed}
        for op in self.whole.tail:
            strange = sorted(op.labels - allowed)
            if strange:
                what = f"{strange[0]} ({op.where})"
                return (
                    f"behind the blocks `forward` uses {what}, which the last stage does not "
                    f"have, {OWN_STAGE}"
                )
        return ""

    def _is_behind(self, fqn: str, block: int | None) -> bool:
        return block == self.profile.n_blocks

    def _stages(self) -> str:
        """Each stage is called as it would be."""
        n = min(self.profile.n_blocks, STAGES)
        layers = even(self.profile.n_blocks, n)
        start = 0
        for stage, n_blocks in enumerate(layers):
            mine = self.names[start : start + n_blocks]
            try:
                problem = self._stage(layers, stage, mine)
            except Exception as error:  # noqa: BLE001 - the user's model
                hidden = "with the hidden state " if stage else ""
                where = (
                    f"as a pipeline stage ({mine[0]} to {mine[-1]}), called {hidden}without the "
                    "other blocks"
                )
                return f"{where}, it raises {told(error)}"
            if problem:
                return problem
            start += n_blocks
        return ""

    def _stage(self, layers: tuple[int, ...], stage: int, mine: list[str]) -> str:
        program = self.program
        model = cut_stage(
            _built(program, self.device), program, self.profile, layers=layers, stage=stage
        )
        if program.stage is not None:
            model = program.stage(model, stage, len(layers))
        by_name = {self.names[call.block]: call for call in self.whole.calls}
        given = inputs_of(program, self.batch)
        if stage:
            if mine[0] not in by_name or not by_name[mine[0]].args:
                return ""  # called in a way of its own: values must tell
            first = by_name[mine[0]].args[0]
            given = torch.zeros(first.shape, dtype=first.dtype, device=self.device)
        tracer = Tracer(
            program, model, [name for name in mine if _has(model, name)], truth=self.whole.truth
        )
        found = tracer.run(given, keywords_of(program, self.batch))
        if stage == len(layers) - 1 and _forms(found.output, program) != _forms(
            self.whole.output, program
        ):
            return (
                f"as the last pipeline stage it returns {_form(found.output)} in the place of "
                f"{_form(self.whole.output)}"
            )
        if program.stage is not None:
            return ""
        if stage and (not found.calls or found.calls[0].args[0] is not given):
            done = _done(found.calls[0]) if found.calls else "does not call its blocks"
            return (
                f"before the blocks `forward` {done}, and every pipeline stage would do so again: "
                f"put it into a module that is registered before the blocks, {OWN_STAGE}"
            )
        if stage < len(layers) - 1 and found.output is not found.calls[-1].output:
            at = f" ({found.viewed})" if found.viewed else ""
            done = (
                _said(found.tail[-1], found.tail)
                if found.tail
                else f"takes a part of the hidden state{at}"
            )
            return (
                f"behind the blocks `forward` {done}, and every pipeline stage would do so: put "
                f"it into a module that is registered behind the blocks, {OWN_STAGE}"
            )
        for name, call in zip(mine, found.calls, strict=True):
            if shape_of((call.args[1:], call.kwargs)) != shape_of(
                (by_name[name].args[1:], by_name[name].kwargs)
            ):
                what = "something else on a later stage than in the whole model"
                return f"{name} takes {what}: give it by Program.keywords, {OWN_STAGE}"
        return ""


def _forms(output: Any, program: Program) -> Any:
    """A stage of the program's own may give the logits alone, where the whole model gives them with
    something else."""
    if program.stage is None:
        return shape_of(output)
    return next((shape_of(x) for x in tensors_in(output) if x.ndim), None)


def _has(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _done(call: Call) -> str:
    """What was done before a call, in words."""
    made = [
        op
        for op in call.before
        if call.args and isinstance(call.args[0], Tensor) and _makes(op, call.args[0])
    ]
    op = made[-1] if made else (call.before[-1] if call.before else None)
    return _said(op, call.before) if op is not None else "takes another value than it returned"


def _makes(op: Op, tensor: Tensor) -> bool:
    return int(tensor.untyped_storage()._cdata) in op.makes


def _said(op: Op, ops: list[Op]) -> str:
    verb = VERBS.get(op.name.rstrip("_"), f"changes the hidden state by {op.name}")
    return f"{verb} ({op.where})" if op.where else verb


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def told(error: BaseException) -> str:
    """An error of the user's code in one line, with its place there."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(INTERNAL)
    ]
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{at}"
