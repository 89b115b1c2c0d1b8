"""Of a program with several groups of blocks: which module is called with what another gave.

The model is followed through one pass, without values where it can be. Its units are the blocks and
the outermost modules beside them that have tensors; what is done between units is done again on
each stage that needs it (elastic/worker/parallel/stages/carried_values.py), so it may use nothing
but what units gave, the model's input and `Program.keywords`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from elastic.program import Program
from elastic.types import ModelProfile, UnitFlow
from elastic.user_frames import told
from elastic.worker.equivalence.forward_trace import (
    INPUT,
    KEYWORDS,
    Batch,
    Followed,
    Labels,
    Tracer,
    follow,
)
from elastic.worker.equivalence.small_copy import whole_model
from elastic.worker.parallel.stages.carried_values import carries
from elastic.worker.program.model_profile import BlockGroups, block_names, build_meta, unit_names

INTO_A_MODULE = "put it into a module, which one stage then has"


def with_flow(program: Program, profile: ModelProfile, batch: Batch) -> ModelProfile:
    """The profile of a program whose stages hand on whatever is needed, with what that is; as it
    was where that is not known. `batch`: of one sample, on the CPU."""
    if not carries(program) or profile.no_pp:
        return profile
    found = flow_of(program, profile, batch)
    return profile if isinstance(found, str) else replace(profile, flow=found)


def flow_of(program: Program, profile: ModelProfile, batch: Batch) -> tuple[UnitFlow, ...] | str:
    """What each unit is called with; a text: why stages cannot hand it on."""
    problem = ""
    for device in ("meta", "cpu"):
        if device == "cpu" and (profile.n_params > 1 << 26 or program.weights is not None):
            break
        try:
            return _Flow(program, profile, batch, device=device).found()
        except Exception as error:  # noqa: BLE001 - the user's model
            problem = problem or told(error)
    return f"its forward pass cannot be followed without values: {problem}"


class _Flow:
    def __init__(
        self, program: Program, profile: ModelProfile, batch: Batch, *, device: str
    ) -> None:
        self.program, self.n_blocks = program, profile.n_blocks
        meta = build_meta(program)
        self.place_of = BlockGroups(meta, program.blocks)
        self.blocks = block_names(meta, program.blocks)
        self.units = unit_names(meta, self.blocks)
        self.n_rows = len(next(iter(batch.values())))
        self.tracer = Tracer(program, whole_model(program, device), self.units)
        self.pass_: Followed = follow(
            program, self.tracer, {key: x.to(device) for key, x in batch.items()}
        )

    def found(self) -> tuple[UnitFlow, ...] | str:
        flow = [
            self._unit(self.units[call.block], call.given, call.output)
            for call in self.pass_.calls
            if not call.depth
        ]
        output = self.pass_.output
        given = self.tracer.labels_of(output)
        end = UnitFlow("", self.n_blocks, self._needs(given), (), "")
        problem = self._calls() or self._given(given) or self._order([*flow, end])
        if not problem and not _tensors(output):
            problem = (
                f"the model gives a {type(output).__name__}; pipeline stages give a tensor or a "
                "tuple of tensors, or give Program.stage"
            )
        return problem or (*flow, end)

    def _unit(self, name: str, given: Labels, output: Any) -> UnitFlow:
        place, needs = self.place_of(name), self._needs(given)
        if not isinstance(output, Tensor):
            return UnitFlow(name, place, needs, (), "", batched=False)
        dtype = str(output.dtype).removeprefix("torch.")
        batched = output.ndim > 0 and len(output) == self.n_rows
        return UnitFlow(name, place, needs, tuple(output.shape), dtype, batched)

    def _needs(self, given: Labels) -> tuple[str, ...]:
        return tuple(name for name in self.units if name in given)

    def _calls(self) -> str:
        """Each block once, each other unit at most once."""
        called = [self.units[call.block] for call in self.pass_.calls]
        for name in self.units:
            n = called.count(name)
            if n == 0 and name in self.blocks:
                return f"forward calls {name} never; each block must be called once"
            if n > 1:
                times = "twice" if n == 2 else f"{n} times"
                return f"forward calls {name} {times}; a pipeline stage calls it once"
        return ""

    def _given(self, output: Labels) -> str:
        """What is used outside of modules, or read beside a module's arguments."""
        for op in self.pass_.beside:
            at = f" ({op.where})" if op.where else ""
            return (
                f"{op.inside} reads {min(op.labels)}{at} beside its arguments; give it as an "
                "argument"
            )
        uses = [(self.units[call.block], call.given) for call in self.pass_.calls]
        for name, labels in [*uses, ("the model's output", output)]:
            strange = sorted(labels - {INPUT, KEYWORDS, *self.units})
            if strange:
                return (
                    f"{name} is made from {strange[0]}, which `forward` uses outside of modules: "
                    f"{INTO_A_MODULE}"
                )
        return ""

    def _order(self, flow: list[UnitFlow]) -> str:
        by_name = {unit.name: unit for unit in flow}
        for unit in flow:
            for name in unit.needs:
                needed = by_name[name]
                what = unit.name or "the model's output"
                if needed.place > unit.place:
                    return (
                        f"{what} needs what {name} gives, which comes behind it: list the patterns "
                        "of `blocks` in the order in which they run, and register modules "
                        "there where they are called"
                    )
                if needed.place < unit.place and not needed.dtype:
                    return f"{name} gives no tensor, which {what} needs on another stage"
        return ""


def _tensors(output: Any) -> bool:
    return isinstance(output, Tensor) or (
        isinstance(output, tuple) and all(isinstance(one, Tensor) for one in output)
    )
