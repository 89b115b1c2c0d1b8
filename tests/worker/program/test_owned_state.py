"""What an optimizer keeps for a whole tensor, as a form and boxes: nested, of any shape, and back."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.errors import ProgramError, SpecError
from elastic.program import Program
from elastic.types import Box, Layout, OwnedEntry, TensorSpec
from elastic.worker.program.element_wise import what_they_keep
from elastic.worker.program.optimizers import Optimizers, class_of
from elastic.worker.program.owned.state_form import BEGUN, StateForm, form_of
from elastic.worker.session.generation import Generation


class Strange(torch.Tensor):
    """Nobody knows what it is made of."""


ONE, TWO = torch.ones(2, 3), torch.full((), 2.0)
STATE: dict[Any, Any] = {
    "step": 3, "beta": 0.5, "on": True, "mode": "fast", "none": None, 7: TWO,
    "GG": [ONE, [], (ONE * 2, 4)], "deep": {"a": {"b": ONE * 3}},
}  # fmt: skip


def boxes_of(form: StateForm, state: dict[Any, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in form.leaves(state).items()}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def test_a_nested_state_comes_back_as_it_was() -> None:
    form, owned = form_of([STATE])
    assert owned[0] == OwnedEntry(BEGUN, (9,), "uint8", on_host=True)
    assert [(e.name, e.shape, e.dtype, e.on_host) for e in owned[1:]] == [
        ("step", (), "int64", True), ("beta", (), "float64", True), ("on", (), "bool", True),
        ("7", (), "float32", True), ("GG/0", (2, 3), "float32", False),
        ("GG/2/0", (2, 3), "float32", False), ("GG/2/1", (), "int64", True),
        ("deep/a/b", (2, 3), "float32", False),
    ]  # fmt: skip
    again = StateForm.parse(form.text())
    assert again == form
    assert equal(again.build(boxes_of(form, STATE).get), STATE)


def test_what_comes_with_the_second_step_is_missing_before_it() -> None:
    """None stays None, and no key stays no key: optimizers ask for either."""
    early: dict[Any, Any] = {"Q": None, "step": 0, "n": None}
    late = {"Q": [ONE, ONE], "step": 1, "n": 3, "momentum": ONE, "deep": {"rate": 0.5}}
    form, owned = form_of([early, late, late])
    names = ["step", "Q/0", "Q/1", "n", "momentum", "deep/rate"]
    assert [entry.name for entry in owned[1:]] == names
    for state in (early, late):
        assert equal(form.build(boxes_of(form, state).get), state)
    other, _ = form_of([late, early, late])
    assert equal(other.build(boxes_of(other, early).get), early)
    with pytest.raises(ProgramError, match="its state 'step' is not what"):
        form.leaves({"Q": None, "n": None})
    with pytest.raises(ProgramError, match="'mode' comes and goes, and holds neither tensor nor"):
        form_of([{}, {"mode": "fast"}])


def test_a_whole_number_may_become_a_fraction() -> None:
    form, owned = form_of([{"rate": 1}, {"rate": 0.5}, {"rate": 1}])
    assert owned[1].dtype == "float64" and form.leaves({"rate": 1}) == {"rate": 1}


@pytest.mark.slow  # imports torchao
def test_tensors_of_few_bits_are_kept_as_their_parts() -> None:
    """The optimizer gets them over the memory of the boxes, and is never asked by its name."""
    low = pytest.importorskip("torchao.optim.subclass_4bit").OptimState4bit
    state = {"step": TWO, "m": low.zeros((64, 128), True, 128, dtype=torch.float32)}
    state["m"].copy_(torch.linspace(-1.0, 1.0, 8192).view(64, 128))
    form, owned = form_of([state])
    assert [(e.name, e.shape, e.dtype) for e in owned[2:]] == [
        ("m/codes", (4096,), "uint8"), ("m/scale", (64,), "float32"), ("m/qmap", (16,), "float32"),
    ]  # fmt: skip
    form, boxes = StateForm.parse(form.text()), boxes_of(form, state)
    again = form.build(boxes.get)["m"]
    assert again.shape == (64, 128) and torch.equal(again.dequantize(), state["m"].dequantize())
    again.copy_(torch.ones(64, 128))
    assert bool((boxes["m/scale"] == 1).all()), "a step writes into the boxes"
    with pytest.raises(ProgramError, match="its state 'm' is not what"):
        form.leaves(state | {"m": torch.ones(64, 128)})


@pytest.mark.slow  # imports torchao
@pytest.mark.parametrize("bits", [8, 4])
def test_an_optimizer_of_few_bits_steps_whole_tensors(bits: int) -> None:
    """On tiny tensors it is element-wise; blocks of large ones are cut by no layout."""
    low = pytest.importorskip("torchao.optim")
    specs = [TensorSpec("w", (64, 128), "float32"), TensorSpec("b", (64,), "float32")]
    program = Program(
        model=torch.nn.Identity,
        loss=lambda output, batch: output.sum(),
        optimizer=lambda named: getattr(low, f"AdamW{bits}bit")([p for _, p in named], lr=1e-3),
    )
    kept = what_they_keep(program, specs)
    large, small = (kept.optimizers[kept.of[name]] for name in "wb")
    assert large.form and small.form and not large.entries
    n_bytes = sum(Box("", (), e.shape, e.dtype).n_bytes for e in large.owned if "codes" in e.name)
    assert n_bytes == 2 * 64 * 128 * bits // 8
    assert [e.dtype for e in small.owned if "exp" in e.name] == ["float32", "float32"]


class Factored(torch.optim.SGD):
    """Keeps sums of rows and columns, instead of a moment, of what has so many of both."""

    least = 32

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state, square = self.state[p], p.grad.square()
                factored = p.ndim == 2 and min(p.shape) >= self.least
                if not state and factored:
                    state["row"], state["column"] = p.new_zeros(len(p)), p.new_zeros(p.shape[1])
                elif not state:
                    state["square"] = torch.zeros_like(p)
                if "row" in state:
                    state["row"].lerp_(square.mean(1), 0.1)
                    state["column"].lerp_(square.mean(0), 0.1)
                    square = state["row"][:, None] * state["column"] / state["row"].mean()
                else:
                    square = state["square"].lerp_(square, 0.1)
                p.sub_(p.grad / (square.sqrt() + 1e-8), alpha=group["lr"])
        return None


class FactoredLate(Factored):
    least = 128


@pytest.mark.parametrize("kind", [Factored, FactoredLate])
def test_one_that_keeps_factors_of_large_matrices_steps_whole_tensors(kind: type[Factored]) -> None:
    """Where the model has none so large, its ranks step their parts."""
    program = Program(
        model=torch.nn.Identity,
        loss=lambda output, batch: output.sum(),
        optimizer=lambda named: kind([p for _, p in named], lr=1e-3),
    )
    small = [TensorSpec("w", (kind.least, 16), "float32"), TensorSpec("b", (256,), "float32")]
    found = what_they_keep(program, [TensorSpec("large", (256, 256), "float32"), *small])
    assert all(one.form and not one.entries for one in found.optimizers)
    large, vector = (found.optimizers[found.of[name]] for name in ("large", "b"))
    assert [(e.name, e.shape) for e in large.owned[1:]] == [("row", (256,)), ("column", (256,))]
    assert [(e.name, e.shape) for e in vector.owned[1:]] == [("square", (256,))]
    assert [one.entries for one in what_they_keep(program, small).optimizers] == [("square",)]


def test_groups_that_differ_in_their_rates_are_tried_as_one() -> None:
    """One for each tensor, as rates by layer are given: no more optimizers are made for more."""
    made: list[int] = []

    def optimizer(named: list[tuple[str, Any]]) -> Factored:
        made.append(len(named))
        return Factored([{"params": [p], "lr": 1e-3 * (1 + i)} for i, (_, p) in enumerate(named)])

    program = Program(
        model=torch.nn.Identity, loss=lambda output, batch: output.sum(), optimizer=optimizer
    )
    counts = []
    for n in (4, 40):
        made.clear()
        what_they_keep(program, [TensorSpec(f"w{i}", (8, 16), "float32") for i in range(n)])
        counts.append(sum(size >= n for size in made))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([{"a": ONE}, {"a": ONE[:1]}], "'a' is float32 .2, 3. after one step and float32 .1, 3."),
        ([{"a": {"b": object()}}], "'a/b' is a object; it may hold tensors, numbers"),
        ([{"a": ONE}, {"a": [ONE]}], "'a' is of one kind after one step, of another after another"),
        ([{"a": "x"}, {"a": "y"}], "'a' is of one kind after one step"),
        ([{"a.b": ONE}], r"has the key 'a\.b'; keys may be numbers and texts without \. and /"),
        ([{"a": ONE.to_sparse()}], "'a' is a tensor of float32, torch.sparse_coo"),
        ([{"a": ONE.to(torch.complex64)}], "'a' is a tensor of complex64"),
        ([{"a": Strange(ONE)}], "'a' is a Strange; of tensors of few bits OptimState8bit and"),
    ],
)
def test_what_cannot_be_kept_is_named(states: list[dict[Any, Any]], said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        form_of(states)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"new": ONE}, "new"),
        ({"step": None}, "step"),
        ({"deep": {"a": {"c": ONE}}}, "deep/a/c"),
        ({"GG": [ONE]}, "GG"),
        ({"mode": "slow"}, "mode"),
        ({"step": "three"}, "step"),
        ({7: 2.0}, "7"),
        ({"deep": [ONE]}, "deep"),
        ({"GG": {}}, "GG"),
    ],
)
def test_another_form_than_in_the_trial_is_refused(state: dict[Any, Any], name: str) -> None:
    form, _ = form_of([STATE])
    with pytest.raises(
        ProgramError, match=f"its state '{name}' is not what the steps of the trial"
    ):
        form.leaves(STATE | state)


@pytest.mark.parametrize(
    ("by_owners", "layout", "step"),
    [
        (False, Layout(dp_replicate=2), 7),
        (True, Layout(dp_replicate=2), -1),
        (True, Layout(pp=2), 7),
    ],
)
def test_a_step_that_needs_the_others_is_not_rolled_forward_to(
    by_owners: bool, layout: Layout, step: int
) -> None:
    generation = SimpleNamespace(
        place=SimpleNamespace(profile=SimpleNamespace(by_owners=by_owners)),
        plan=SimpleNamespace(layout=layout),
        stepper=SimpleNamespace(pending=SimpleNamespace(step=7)),
        device_lost=False,
    )
    assert Generation.pending_step.fget(generation) == step


def test_an_optimizer_of_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(SpecError) as error:
        class_of("torchao.optim.AdamW8bit")
    assert str(error.value) == (
        "job.yaml: key 'optimizer.path': 'torchao.optim.AdamW8bit' cannot be imported: torchao is "
        "not installed: pip install 'elastic-ray[torchao]'"
    )


class Counting(torch.optim.SGD):
    """Counts its steps in its settings, as a script's optimizer may."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
        return super().step(closure)


def test_a_step_in_several_parts_is_one_step() -> None:
    specs = [TensorSpec(name, (2,), "float32") for name in "abc"]
    program = Program(
        model=torch.nn.Identity,
        loss=lambda output, batch: output.sum(),
        optimizer=lambda named: Counting([p for _, p in named], lr=1.0),
    )
    tensors = {name: torch.nn.Parameter(torch.ones(2)) for name in "ab"}
    optimizers = Optimizers(program, specs, tensors, whole={""})
    for tensor in tensors.values():
        tensor.grad = torch.ones(2)
    for step in (1, 2):
        settings = optimizers.values()
        optimizers.step_whole([tensors["a"]], settings)
        assert [float(t.detach()[0]) for t in tensors.values()] == [1.0 - step, 2.0 - step]
        optimizers.step_whole([], settings)
        optimizers.step_whole([tensors["b"]], settings)
        (group,) = optimizers.groups
        assert (group["n"], group["params"]) == (step, list(tensors.values()))
        assert [float(t.detach()[0]) for t in tensors.values()] == [1.0 - step] * 2
