"""What optimizers keep beside the state of their parameters: it is found, goes into new objects,
and is refused where ranks would not agree on it or nobody could move it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from programs import counting_optimizers as own
from programs import odd_optimizers as odd
from programs import whole_optimizers as whole_own
from support.places import PROGRAMS
from support.worker.chain import job_of
from support.worker.owner_steps import gradients, stepping

from elastic.errors import ProgramError, SpecError
from elastic.program import Program, load_program
from elastic.types import Job, Layout, OptimizerSpec, TensorSpec
from elastic.worker.program.element_wise import what_they_keep
from elastic.worker.program.extra_state import ExtraState, decode, encode
from elastic.worker.program.loop_program import Settings
from elastic.worker.program.model_profile import extra_of
from elastic.worker.program.optimizers import Optimizers
from elastic.worker.program.owned.optimizer_counters import (
    COUNTERS,
    OptimizerCounters,
    put_back,
    values_of,
    with_counters,
)
from elastic.worker.state.train_state import TrainState

BARE = load_program(PROGRAMS / "tiny_bare.py")
SPECS = [TensorSpec("a", (4, 3), "float32"), TensorSpec("b", (4,), "float32")]


def program_of(make: Callable[[list[torch.nn.Parameter]], Any]) -> Program:
    return replace(BARE, optimizer=lambda named: make([p for _, p in named]))


def kept(make: Callable[[list[torch.nn.Parameter]], Any]) -> OptimizerSpec:
    return what_they_keep(program_of(make), SPECS).optimizers[0]


@pytest.mark.parametrize(
    ("kind", "names", "whole"),
    [
        (own.GroupStep, ("group.step",), False),
        (own.GroupStepLamb, ("group.step",), True),
        (own.OwnCount, ("self.n_steps",), False),
        (own.StateCount, ("state.k",), True),
        (own.ScheduleFree, ("group.k", "group.weight_sum", "group.lr_max"), True),
        (whole_own.Elsewhere, ("state.all",), True),
        (whole_own.Stateful, ("self.n_steps",), True),
        (odd.Counting, ("group.k", "group.lr"), False),
        (torch.optim.AdamW, (), False),
    ],
)
def test_what_steps_change_is_found(
    kind: type[torch.optim.Optimizer], names: tuple[str, ...], whole: bool
) -> None:
    found = kept(lambda tensors: kind(tensors, lr=0.01))  # type: ignore[call-arg]
    assert (set(found.counters), bool(found.form)) == (set(names), whole)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda tensors: own.Prodigy(tensors, lr=0.01),
            r"optimizer Prodigy: what it counts .*\(group.d\) depends on their gradients",
        ),
        (
            lambda tensors: own.Lookahead(torch.optim.AdamW(tensors, lr=0.01)),
            r"optimizer Lookahead: after some steps a new one with its state and its settings "
            r"steps \w otherwise, so it keeps something elsewhere",
        ),
        (
            lambda tensors: own.Late(tensors, lr=0.01),
            "optimizer Late: its state 'slow' comes later than with its first 3 steps",
        ),
    ],
)
def test_what_cannot_be_counted_alike_or_moved_is_refused(
    make: Callable[[list[torch.nn.Parameter]], Any], said: str
) -> None:
    with pytest.raises(ProgramError, match=f"^{said}") as error:
        kept(make)
    assert "\n" not in str(error.value)


class Elsewhere(torch.optim.SGD):
    """Divides by the norm of the gradient, which is NaN where that is zero, and keeps its momentum
    on the object."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        kept = self.__dict__.setdefault("_m", {})
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                m = kept.setdefault(id(p), torch.zeros_like(p))
                p.sub_(m.mul_(0.9).add_(p.grad / p.grad.norm()), alpha=0.01)


def test_what_is_kept_elsewhere_is_seen_where_a_later_step_leaves_nan() -> None:
    with pytest.raises(ProgramError, match="steps . otherwise, so it keeps something elsewhere"):
        kept(lambda tensors: Elsewhere(tensors, lr=0.01))


class Decaying(torch.optim.SGD):
    """Sets its own learning rate."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


def test_two_that_set_the_learning_rate_are_refused() -> None:
    program = program_of(lambda tensors: Decaying(tensors, lr=0.1))
    assert what_they_keep(program, SPECS).optimizers[0].counters == ("group.lr",)
    with pytest.raises(ProgramError, match="Decaying: a step changes 'lr' .* the schedule of"):
        what_they_keep(replace(program, lr_factor=lambda step: 1.0), SPECS)


class Updating(torch.optim.Optimizer):
    """Makes its state by dict.update, by setdefault, or as a whole."""

    def __init__(self, params: Any, lr: float, way: str) -> None:
        super().__init__(params, {"lr": lr})
        self.way = way

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if self.way == "update" and not self.state[p]:
                self.state[p].update(m=torch.zeros_like(p))
            elif self.way == "whole" and p not in self.state:
                self.state[p] = {"m": torch.zeros_like(p)}
            elif self.way == "or" and not self.state[p]:
                self.state[p] |= {"m": torch.zeros_like(p)}
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            p.sub_(m.lerp_(p.grad, 0.5), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("way", ["update", "setdefault", "whole"])
def test_a_state_may_be_made_in_any_way(way: str) -> None:
    assert kept(lambda tensors: Updating(tensors, 0.1, way)) == OptimizerSpec(("m",))


def test_what_a_state_begins_as_may_be_unknown() -> None:
    assert kept(lambda tensors: Updating(tensors, 0.1, "or")).form, "it steps whole tensors"


def stepped(optimizer: torch.optim.Optimizer, n: int) -> torch.optim.Optimizer:
    for _ in range(n):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.1)
        optimizer.step()
    return optimizer


def made(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.ones(2, 2))], lr=0.01)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(own.GroupStep, "group.step"), (own.OwnCount, "self.n_steps"), (own.StateCount, "state.k")],
)
def test_counts_go_into_a_new_object_and_back_to_nothing(
    kind: type[torch.optim.Optimizer], name: str
) -> None:
    old, new = made(kind), made(kind)
    counters = OptimizerCounters({"x": old}, {"x": (name,)})
    first, size = counters.state_dict(), len(encode(COUNTERS, counters.state_dict()))
    stepped(old, 7)
    assert len(encode(COUNTERS, counters.state_dict())) <= size + 100  # a tensor may come
    box = bytearray(counters_box(counters))
    counters.each = {"x": new}
    counters.load_state_dict(decode(COUNTERS, torch.frombuffer(box, dtype=torch.uint8)))
    assert values_of(new) == values_of(old) != values_of(made(kind))
    counters.load_state_dict(first)
    assert values_of(new) == values_of(made(kind))


def counters_box(counters: OptimizerCounters) -> bytes:
    data = encode(COUNTERS, counters.state_dict())
    return len(data).to_bytes(8, "little") + data


def test_a_step_in_several_parts_counts_once_also_without_tensors() -> None:
    """apex leaves out groups that have no parameters; here it is never called without."""
    program = program_of(lambda ts: own.GroupStepLamb([{"params": [t]} for t in ts]))
    here = {"a": torch.nn.Parameter(torch.ones(4, 3))}
    for counting, wanted in ((("",), [1, 1]), ((), [1, None])):
        optimizers = Optimizers(program, SPECS, here, whole={""}, counting=counting)
        here["a"].grad = torch.ones(4, 3)
        before = optimizers.values()
        optimizers.step_whole([here["a"]], before)
        if counting:
            optimizers.step_whole([], before)
        assert [group.get("step") for group in optimizers.groups] == wanted
        (only,) = optimizers.each.values()
        assert list(only.state) == [here["a"]], "a stand-in leaves nothing behind"
        assert [group["params"] for group in optimizers.groups] == [[here["a"]], []]


def test_settings_are_put_back_as_they_were() -> None:
    optimizer = made(own.ScheduleFree)
    before = values_of(optimizer)
    stepped(optimizer, 2)
    assert values_of(optimizer) != before
    put_back(optimizer, before)
    assert values_of(optimizer) == before


def test_a_script_s_optimizer_takes_its_counts_along() -> None:
    for kind in (own.OwnCount, own.StateCount):
        old, new = stepped(made(kind), 3), made(kind)
        Settings(new).load_state_dict(Settings(old).state_dict())
        assert values_of(new) == values_of(old)
    assert "own" not in Settings(made(own.GroupStep)).state_dict()


def test_a_script_that_goes_back_to_its_start_counts_anew() -> None:
    """Its state before the first step has no counts, and its objects are the same."""
    for kind in (own.OwnCount, own.StateCount):
        optimizer = made(kind)
        first = Settings(optimizer).state_dict()
        fresh = values_of(optimizer)
        stepped(optimizer, 2)
        Settings(optimizer).load_state_dict(first)
        assert values_of(optimizer) == fresh


def test_a_stored_state_without_the_counts_of_a_script_is_refused() -> None:
    specs = [kept(lambda tensors: own.OwnCount(tensors, lr=0.01))]
    settings = Settings(made(own.OwnCount))
    old = settings.state_dict()
    assert "own" not in old
    settings.expect(specs, 0)
    settings.load_state_dict(old)
    settings.expect(specs, 4)
    with pytest.raises(
        ProgramError, match=r"^the state to continue from has no self.n_steps, .*stored"
    ):
        settings.load_state_dict(old)
    counted = Settings(stepped(made(own.OwnCount), 4)).state_dict()
    settings.load_state_dict(counted)
    assert settings.each[""].n_steps == 4  # type: ignore[attr-defined]
    groups = Settings(made(own.GroupStep))  # which stand among the settings anyway
    groups.expect([kept(lambda tensors: own.GroupStep(tensors, lr=0.01))], 4)
    groups.load_state_dict(groups.state_dict())


def test_counters_are_extra_state_of_a_program_but_not_of_a_script() -> None:
    program = program_of(lambda tensors: own.GroupStep(tensors))
    specs = what_they_keep(program, SPECS).optimizers
    assert list(extra_of(program, SPECS, specs).objects) == [COUNTERS]
    settings = Settings(made(own.GroupStep))
    script = replace(program, extra_state={COUNTERS: settings})
    assert extra_of(script, SPECS, specs).objects == {COUNTERS: settings}
    with pytest.raises(SpecError, match="the name is taken by what the optimizers count"):
        with_counters({COUNTERS: settings}, {}, {"": ("group.step",)})


def begun(state: TrainState) -> ExtraState:
    """The extra state, as the generation of `state` has it."""
    extra = extra_of(state.program, state.profile.specs, state.profile.optimizers)
    if state.step == 0:
        extra.fresh(state.tensors)
    extra.count_for(state.optimizers.each)
    extra.load(state.tensors)
    return extra


@pytest.mark.slow
def test_a_generation_goes_on_with_the_counts_of_the_one_before() -> None:
    """Three steps, boxes, three steps of new objects: as six of one."""
    program = load_program(PROGRAMS / "tiny_counting_steps.py")
    job = Job.from_plain(job_of("tiny_counting_steps.py", 6))
    found = {}
    with stepping(program, job, Layout(), 0) as first:
        extra = begun(first)
        for step in range(6):
            if step == 3:
                extra.note(first.tensors)
                boxes = first.snapshot()
            first.apply(gradients(first, step), 1.0)
        wanted = first.snapshot()
    for carried in (True, False):
        with stepping(program, job, Layout(), 0) as second:
            for fqn, (_, tensor) in second.tensors.items():
                tensor.copy_(boxes[fqn][1])
            second.step = 3
            if carried:
                begun(second)
            for step in range(3, 6):
                second.apply(gradients(second, step), 1.0)
            found[carried] = second.snapshot()
    models = [fqn for fqn in wanted if fqn.startswith("model.")]
    assert all(torch.equal(found[True][fqn][1], wanted[fqn][1]) for fqn in models)
    off = {fqn for fqn in models if not torch.equal(found[False][fqn][1], wanted[fqn][1])}
    assert off >= {
        "model.embed.weight",
        "model.layers.0.mlp.w1.weight",
        "model.layers.0.attn.wq.weight",
    }
