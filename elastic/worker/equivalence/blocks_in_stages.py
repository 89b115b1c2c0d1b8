"""May the blocks of a program be spread over pipeline stages?

A pipeline stage is the model with the modules of all other stages passed through (pipeline.py),
called with the hidden state in the place of the model's input. It computes its part of the whole
only where each block is called once, in order, with exactly what the one before returned; where
what else a block takes is the same on every stage or given by `Program.keywords`; and where all
that is done before and behind the blocks is done by modules that the first and the last stage keep
for themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from elastic.program import Program
from elastic.types import ModelProfile
from elastic.user_frames import told
from elastic.worker.equivalence.forward_trace import (
    INPUT,
    KEYWORDS,
    Batch,
    Call,
    Followed,
    Op,
    Tracer,
    shape_of,
)
from elastic.worker.equivalence.small_copy import whole_model
from elastic.worker.parallel.pipeline import cut_stage
from elastic.worker.program.calls import inputs_of, keywords_of, tensors_in
from elastic.worker.program.model_profile import block_names, build_meta

STAGES = 3  # tried: a first one, one in the middle, a last one
OWN_STAGE = "or give Program.stage"
VERBS = {
    "add": "adds to the hidden state", "mul": "multiplies the hidden state",
    "cat": "joins something to the hidden state", "sub": "subtracts from the hidden state",
    "div": "divides the hidden state", "slice": "cuts the hidden state",
    "native_layer_norm": "normalizes the hidden state", "addmm": "projects the hidden state",
    "mm": "projects the hidden state", "convolution": "convolves the hidden state",
    "mean": "takes a mean of the hidden state", "clone": "copies the hidden state",
    "_to_copy": "converts the hidden state",
}  # fmt: skip


def one_weight(profile: ModelProfile) -> tuple[str, str] | None:
    """Two names of one weight that stands in a block and elsewhere. (A tie of what is before and
    what is behind the blocks is kept in every layout.)"""
    block = {spec.fqn: spec.block for spec in profile.specs}
    for spec in profile.specs:
        places = {spec.block, block.get(spec.tied_to or spec.fqn)}
        if spec.tied_to is not None and len(places) > 1 and places != {-1, profile.n_blocks}:
            return spec.tied_to, spec.fqn
    return None


def in_two_stages(profile: ModelProfile) -> str:
    """Of a weight that stages would each train a copy of; '' = there is none."""
    if (names := one_weight(profile)) is None:
        return ""
    return (
        f"{names[0]} and {names[1]} are one weight, which two stages would hold; take pp=1, or two "
        "weights"
    )


class BlocksInStages:
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
        if problem := in_two_stages(self.profile):
            return problem
        checks = [self._order, self._chain, self._others, self._beside, self._tail]
        if self.program.stage is not None:  # it may do with the module what it wants
            checks = []
        return next((text for check in checks if (text := check())), "") or self._stages()

    def _order(self) -> str:
        calls = self.whole.calls
        if inner := next((call for call in calls if call.depth), None):
            outer = next(
                name for name in self.names if self.names[inner.block].startswith(name + ".")
            )
            both = f"{outer} and {self.names[inner.block]} inside of it"
            blocks = f"{self.program.of}blocks='{self.program.blocks}'"
            return f"{blocks} matches {both}; name one of them"
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
                if spec.block == self.profile.n_blocks
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
            whole_model(program, self.device), program, self.profile, layers=layers, stage=stage
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
            done = _said(found.tail[-1]) if found.tail else f"takes a part of the hidden state{at}"
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
        if call.args
        and isinstance(call.args[0], Tensor)
        and int(call.args[0].untyped_storage()._cdata) in op.makes
    ]
    op = made[-1] if made else (call.before[-1] if call.before else None)
    return _said(op) if op is not None else "takes another value than it returned"


def _said(op: Op) -> str:
    verb = VERBS.get(op.name.rstrip("_"), f"changes the hidden state by {op.name}")
    return f"{verb} ({op.where})" if op.where else verb


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def even(total: int, parts: int) -> tuple[int, ...]:
    """The first parts take one more."""
    base, more = divmod(total, parts)
    return tuple(base + (i < more) for i in range(parts))
