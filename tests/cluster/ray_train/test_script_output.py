"""What is read out of what a script prints."""

from __future__ import annotations

import pytest

from elastic.cluster.ray_train import script_log
from elastic.cluster.ray_train.script_output import (
    BAR_EVERY_S,
    LOGGED,
    TRACEBACK,
    StepReader,
    error_part,
)
from elastic.errors import ProgramError


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("step 40: loss 2.31", (40, 2.31)),
        ("iter 100: loss 1.5e-2, time 3 ms", (100, 0.015)),
        ("Step=7 | train loss: 0.5", (7, 0.5)),
        ("step 40 begins", None),
        ("a stepping stone 3, loss 1.0", None),
        ("loss 3.0", None),
        ("Iteration:  45%|████▌     | 450/1000 [00:10<00:12, 43.1it/s, loss=2.3]", (450, 2.3)),
        ("step 40 loss 2.31:  45%|████▌     | 450/1000 [00:10<00:12, 43.1it/s]", (40, 2.31)),
        ("Iteration: 45.5% done, loss 2.3", None),
        # as torchtitan prints it
        ("\x1b[31mstep:  1  \x1b[32mloss: 12.2  \x1b[38;2;180;60;0mtps: 9\x1b[39m", (1, 12.2)),
        ("\x1b[1;31mstep: 2\x1b[0m \x1b[2K\x1b[32mloss:\x1b[39m 3.5", (2, 3.5)),
    ],
)
def test_a_line_of_output_names_a_step_and_its_loss(
    line: str, found: tuple[int, float] | None
) -> None:
    assert StepReader().read(line) == found


def steps(reader: StepReader, *lines: str) -> list[int]:
    return [found[0] for line in lines if (found := reader.read(f"{line}: loss 2.0"))]


def test_a_number_that_falls_is_of_a_new_epoch() -> None:
    reader = StepReader()
    assert steps(reader, "step 50", "step 100", "step 100") == [50, 100, 100]
    assert steps(reader, "validation, step 5", "step 50", "step 100") == [150, 200]
    assert steps(reader, "step 1", "eval step 1", "step 2") == [201, 201, 202]
    assert reader.before == [0, 100, 200]


def test_a_number_that_stays_is_of_a_new_epoch_where_its_line_names_another() -> None:
    reader = StepReader()
    assert steps(reader, "epoch 1 step 50", "epoch 1 step 100") == [50, 100]
    assert steps(reader, "epoch 1 step 100", "eval epoch 2 step 100", "step 100") == [100] * 3
    assert reader.note == ""
    assert steps(reader, "Epoch: 2, step 100", "epoch 3 step 100") == [200, 300]
    assert reader.note.startswith(
        "note: step numbers begin again at each epoch: step 100 after step 100 counts as step 200"
    ), "of the first one"


@pytest.mark.parametrize(
    ("resume", "first", "found"), [(230, 40, 240), (230, 10, 210), (230, 60, 160), (0, 1, 1)]
)
def test_the_next_group_continues_in_the_newest_epoch_that_it_may_be_of(
    resume: int, first: int, found: int
) -> None:
    """Not behind the step from which it resumes."""
    before = [0, 100, 200]
    reader = StepReader(before, resume + 10)
    assert steps(reader, f"step {first}", f"step {first + 10}") == [found, found + 10]
    assert before[-1] == found - first, "as the group after it has it"


HF = [
    " 78%|███████▊  | 47/60 [00:01<00:00, 26.31it/s]",
    "                                                ",
    "{'loss': '3.899', 'grad_norm': '0.7537', 'learning_rate': '9.167e-06', 'epoch': '3.125'}",
    "                                                ",
    " 83%|████████▎ | 50/60 [00:01<00:00, 26.31it/s]",
    " 85%|████████▌ | 51/60 [00:01<00:00, 29.07it/s]",
    "{'eval_loss': 3.5, 'eval_runtime': 1.2, 'epoch': 3.5}",
    "{'loss': 3.9, 'grad_norm': 0.7354, 'learning_rate': 8.333e-07, 'epoch': 3.75}",
    "100%|██████████| 60/60 [00:02<00:00, 34.70it/s]",
    "100%|██████████| 60/60 [00:02<00:00, 27.93it/s]",
    "{'train_runtime': '2.15', 'train_loss': '3.904', 'epoch': '3.75'}",
]


def test_what_a_trainer_of_transformers_logs_are_steps() -> None:
    reader = StepReader()
    assert [found for line in HF if (found := reader.read(line))] == [(50, 3.899), (60, 3.9)]
    assert reader.evaluations == [(60, 3.5)], "at the step of the bar behind it"


def test_an_evaluation_is_of_no_step_that_another_bar_shows() -> None:
    """What the script evaluates behind its training is printed before a bar of something else."""
    reader = StepReader()
    for line in (*HF, "{'eval_loss': 3.4, 'eval_runtime': 1.2, 'epoch': 3.75}"):
        reader.read(line)
    reader.read("Writing model shards:   0%|          | 0/1 [00:00<?, ?it/s]")
    assert reader.evaluations == [(60, 3.5)]
    first = StepReader()
    first.read("{'eval_loss': 4.4, 'eval_runtime': 1.2, 'epoch': 0}")
    first.read("  0%|          | 0/60 [00:00<?, ?it/s]")
    assert first.evaluations == [(0, 4.4)], "before any training"


def test_a_person_is_shown_a_bar_now_and_then() -> None:
    shown = StepReader().shown
    assert [line[:4] for line in shown(HF, 0.0)] == [" 78%", "{'lo", "{'ev", "{'lo", "{'tr"]
    assert not shown(HF[4:6], BAR_EVERY_S - 1)


def test_a_person_is_shown_nothing_of_what_wipes_a_bar_out() -> None:
    """The lines come with the rank before them."""
    shown = StepReader().shown
    wiped = [
        "[rank 0] ",
        "[rank 0]",
        "[rank 0]          \x1b[A",
        "[rank 0] \x1b[A{'eval_loss': 3.5}",
    ]
    assert shown(wiped, 0.0) == ["[rank 0] {'eval_loss': 3.5}"]


def test_the_error_is_that_of_the_last_traceback_whatever_was_printed_after_it() -> None:
    tail = f"{TRACEBACK}\n  File a\nKeyError: 1\n\n{TRACEBACK}\n  File b\nValueError: 2\nbye"
    assert error_part(tail) == f"{TRACEBACK}\n  File b\nValueError: 2"
    assert error_part("Connection closed by peer") == "Connection closed by peer"


def test_what_elastic_log_tells_goes_with_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    script_log.log({"lr": 0.1, "share/right": 1})
    script_log.log({"lr": 0.2})
    reader, printed = StepReader(), capsys.readouterr().out.splitlines()
    assert [reader.read(line) for line in printed] == [None, None]
    assert reader.read("step 1: loss 2.0") == (1, 2.0)
    assert reader.taken() == {"lr": 0.2, "share/right": 1.0} and reader.taken() == {}
    assert not reader.shown(printed, 0.0), "a person sees the steps"


REPORTED = 'ray.train.report {}: {{"epoch": 0, "loss": {}, "tokens": 3, "bad name": 1}}'


def test_reports_are_steps_of_a_script_that_prints_none() -> None:
    reader = StepReader()
    assert reader.read('ray.train.report 1: {"epoch": 0}') is None
    assert reader.read(REPORTED.format(2, 1.5)) == (2, 1.5)
    assert reader.taken() == {"epoch": 0.0}
    bar = " 50%|#####     | 1/2 [00:01<00:01, 1it/s]"
    assert reader.read(bar + REPORTED.format(3, 1.25)) == (3, 1.25), "behind a bar without an end"
    assert [reader.read(REPORTED.format(4, one)) for one in ("NaN", "true", "}")] == [None] * 3


def test_a_report_is_of_the_step_that_it_names_or_goes_with_the_next_one() -> None:
    reader = StepReader()
    assert reader.read('ray.train.report 1: {"step": 40, "train_loss": 2.5, "lr": 1}') == (40, 2.5)
    assert reader.taken() == {"lr": 1.0}
    assert reader.read("step 50: loss 2.0") == (50, 2.0)
    assert reader.read(REPORTED.format(2, 1.5)) is None, "it prints steps of its own"
    assert reader.read("step 60: loss 2.0") == (60, 2.0)
    assert reader.taken() == {"epoch": 0.0, "loss": 1.5}


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a b": 1}', '{"a": "b"}', "{1: 2}"])
def test_a_line_that_only_looks_so_tells_nothing(text: str) -> None:
    reader = StepReader()
    assert reader.read(f"{LOGGED}{text}") is None and reader.taken() == {}


def test_other_ranks_tell_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    script_log.log({"lr": 0.1})
    assert not capsys.readouterr().out
    with pytest.raises(ProgramError, match="elastic.log: 'tokens' is reported at every step"):
        script_log.log({"tokens": 1})
