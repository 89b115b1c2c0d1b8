"""A frozen teacher beside a student: what is taken of both programs, and the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.docs.pages import block
from support.models.small_hf import made, small
from support.places import PROGRAMS
from torch import nn
from torch.nn import functional as F

from elastic.data.collate import collate
from elastic.errors import ProgramError, SpecError
from elastic.models import distillation
from elastic.models.distillation import distilled, divergence
from elastic.models.experts import TokenCounts, expert_modules
from elastic.models.lora import lora
from elastic.program import Program, Weights, load_program
from elastic.types import Job, Layout
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.model_profile import trace
from elastic.worker.state.train_state import TrainState

FILE = PROGRAMS / "tiny_distilled.py"
PROGRAM = load_program(FILE)
STUDENT = load_program(PROGRAMS / "tiny.py")


def teacher(**more: Any) -> Program:
    import sys

    module = next(m for n, m in sys.modules.items() if getattr(m, "__file__", "") == str(FILE))
    return replace(module.teacher, **more)  # type: ignore[no-any-return]


def test_the_divergence_is_that_of_the_two_at_a_temperature() -> None:
    says, wanted = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)
    p, q = F.softmax(wanted / 2, -1), F.softmax(says / 2, -1)
    torch.testing.assert_close(divergence(says, wanted, 2.0), 4 * (p * (p / q).log()).sum(-1))
    assert divergence(wanted, wanted).abs().max() < 1e-6


def test_the_loss_is_a_share_of_each_over_positions_that_have_a_target() -> None:
    dataset: Any = PROGRAM.dataset and PROGRAM.dataset()
    batch = collate([dataset[0], dataset[1]])
    model = PROGRAM.model()
    says, wanted = model(batch["input"])
    where = batch["target"] != -100
    assert 0 < where.sum() < where.numel()
    apart = divergence(says[where], wanted[where], 2.0).sum()
    whole = 0.7 * apart + 0.3 * STUDENT.loss(says, batch)
    torch.testing.assert_close(PROGRAM.loss((says, wanted), batch), whole)


def test_rows_of_causal_lm_are_distilled_where_their_next_token_is_learned() -> None:
    """Padding and the last place are not, as in the count that the step divides by."""
    program = made(small("LlamaConfig"))
    both = distilled(program, program, share=1.0)
    ids = torch.arange(12).view(2, 6)
    labels, mask = ids.clone(), torch.ones(2, 6, dtype=torch.int64)
    labels[0, :3], mask[1, 4:] = -100, 0
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    where = torch.zeros(2, 6, dtype=torch.bool)
    where[0, 2:5] = where[1, :3] = True
    says, wanted = torch.randn(2, 2, 6, 64)
    torch.testing.assert_close(
        both.loss((says, wanted), batch), divergence(says[where], wanted[where], 2.0).sum()
    )
    assert both.count is not None and int(both.count(batch)) == int(where.sum())
    with pytest.raises(SpecError, match="a sample has 'labels' and no 'target': .* give counts="):
        distilled(replace(program, count=lambda batch: 1), program).loss((says, wanted), batch)


def test_rows_of_a_classifier_are_distilled_where_they_have_a_label() -> None:
    says, wanted = torch.randn(2, 3, 5)
    each = divergence(says, wanted, 2.0)
    both = distilled(replace(STUDENT, loss=lambda output, batch: output.sum() * 0), STUDENT)
    labels = torch.tensor([1, -100, 4])
    for more, rows in (
        ({"labels": labels}, labels != -100),
        ({"labels": labels, "attention_mask": torch.ones(3, 4)}, labels != -100),
        ({"labels": torch.rand(3, 5)}, ...),
        ({"attention_mask": torch.ones(3, 4)}, ...),
    ):
        batch = {"pixel_values": torch.ones(3, 2), **more}
        torch.testing.assert_close(both.loss((says, wanted), batch), each[rows].sum() / 2)


def test_the_teacher_is_frozen_evaluates_and_is_no_part_of_the_state() -> None:
    model = PROGRAM.model().train()
    assert model.student.training and not model.teacher.training
    specs = trace(PROGRAM).specs
    assert {s.reread for s in specs if s.fqn.startswith("teacher.")} == {True}
    assert {s.trainable for s in specs if s.fqn.startswith("student.")} == {True}
    kept = distilled(STUDENT, teacher(weights=None))
    assert not any(s.reread or (s.trainable and "teacher" in s.fqn) for s in trace(kept).specs)


def test_experts_of_a_teacher_are_shared_out_and_its_router_stays_as_it_is() -> None:
    """What balances the student's experts by a bias leaves the frozen ones alone."""
    names = ("layers.*.mlp.experts",)
    experts = load_program(PROGRAMS / "tiny_biased_experts.py")
    for student in (experts, replace(experts, experts=names)):
        both = distilled(student, experts)
        assert trace(both).n_experts == 8
        model = both.model()
        found = expert_modules(model, both.experts)
        assert len(found) == 8 and {one.split(".")[0] for one in found} == {"teacher", "student"}
        assert TokenCounts([model]).mixtures == [block.mlp for block in model.student.layers]
    with pytest.raises(ProgramError, match="Program.experts='layers.*.experts': no module is nam"):
        trace(replace(experts, experts=("layers.*.experts",)))


def test_the_student_begins_as_it_would_alone_and_the_teacher_as_its_file_says() -> None:
    groups = Groups(0, Layout(), torch.device("cpu"))
    profile = trace(PROGRAM)
    state = TrainState(PROGRAM, profile, groups, layout=Layout(), layers=(6,), rank=0, job=Job())
    state.fill_fresh(7)
    state.read_frozen()
    torch.manual_seed(7)
    alone = STUDENT.model()
    torch.manual_seed(7)
    assert STUDENT.init is not None and PROGRAM.weights is not None
    STUDENT.init(alone)
    stored = load_file(PROGRAM.weights.path)
    for name, parameter in state.model.named_parameters():
        which, _, own = name.partition(".")
        wanted = stored[own] if which == "teacher" else alone.get_parameter(own)
        assert torch.equal(parameter, wanted), name
    assert not any("teacher" in fqn for fqn in state.tensors)


@pytest.mark.parametrize(
    ("student", "more", "why"),
    [
        (STUDENT, {"temperature": 0.0}, "temperature=0, share=0.5; a temperature is above 0"),
        (STUDENT, {"share": 1.5}, "a share from 0 to 1"),
        (replace(STUDENT, weights=Weights("/there")), {}, "first values come from /there"),
        (lora(STUDENT, ("wq",)), {}, "a program with adapters is neither teacher nor student"),
        (
            replace(STUDENT, tp={"head": "sequence_colwise_loss"}),
            {},
            "'sequence_colwise_loss' leaves logits cut",
        ),
    ],
)
def test_what_cannot_be_distilled_is_one_line(
    student: Program, more: dict[str, Any], why: str
) -> None:
    with pytest.raises(SpecError, match="^distilled: ") as raised:
        distilled(student, teacher(), **more)
    assert why in str(raised.value)


def test_a_teacher_beside_a_student_that_somebody_forgot_to_freeze_is_named() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(2, 2), nn.Linear(2, 2)

    program = Program(
        model=Both,
        optimizer=lambda named: torch.optim.SGD([p for n, p in named if "student" in n], 0.1),
        loss=lambda output, batch: output.sum(),
    )
    with pytest.raises(SpecError, match="parameter teacher.weight .*requires_grad False in the"):
        trace(program)


def test_logits_of_what_models_give() -> None:
    class Output:
        logits = torch.ones(2)

    assert distillation.logits_of((torch.zeros(1), None)).shape == (1,)
    assert distillation.logits_of(Output()).shape == (2,)
    with pytest.raises(SpecError, match="no logits in what a model gives, a dict"):
        distillation.logits_of({"out": 1})


def test_logits_that_were_computed_once_are_a_field_like_any_other() -> None:
    """models.md: among the k likeliest classes of the teacher."""
    found = block("models.md", "python", 4).partition("def loss")
    names: dict[str, Any] = {"divergence": divergence}
    exec(f"def loss{found[2]}", names)
    says, wanted = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    best = wanted.topk(4)
    batch = {
        "top": best.indices,
        "teacher": best.values,
        "target": torch.tensor([[1, 2, -100]] * 2),
    }
    each = divergence(says.gather(-1, best.indices), best.values, 2.0)
    torch.testing.assert_close(names["loss"](says, batch), each[:, :2].sum())


def test_the_call_of_the_page() -> None:
    names: dict[str, Any] = {"student": STUDENT, "teacher": teacher()}
    exec(block("models.md", "python", 3), names)
    assert names["program"].blocks == ("teacher.layers.*", "student.layers.*")
