"""docs/loop.md, huggingface.md and program.md, executed: their programs train, and their diffs are
those of the files."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.docs.pages import block, blocks, text_of
from support.loop_reference import train_script_alone
from support.places import ROOT, TESTS
from support.reference import train_alone

from elastic.config.job import load_job
from elastic.program import load_program
from elastic.worker.equivalence.structure import structure_of
from elastic.worker.program.model_profile import trace

MOST_CHANGED = 15


def lines_of(text: str) -> list[str]:
    return [
        line for line in text.splitlines() if line.strip() and not line.startswith("# program.py")
    ]


def changed(before: str, after: str) -> list[str]:
    """Lines that go (-) and that come (+); blank ones are not counted."""
    return [
        line
        for line in list(difflib.unified_diff(lines_of(before), lines_of(after), n=0))[2:]
        if line[0] in "+-"
    ]


PAIRS = {
    "loop.md": ("jobs/nanogpt/plain.py", "jobs/nanogpt/train.py"),
    "huggingface.md": ("jobs/huggingface/plain.py", "jobs/huggingface/trainer.py"),
}


@pytest.mark.parametrize("page", PAIRS)
def test_the_diff_at_the_end_is_that_of_the_files(page: str) -> None:
    before, after = ((ROOT / name).read_text() for name in PAIRS[page])
    found = changed(before, after)
    assert blocks(page, "diff")[-1].text.splitlines() == found
    for sign in "+-":
        assert sum(line[0] == sign for line in found) <= MOST_CHANGED
    assert text_of(page).endswith("```\n")


def test_the_diff_of_a_program(tmp_path: Path) -> None:
    before = (TESTS / "support" / "docs" / "plain_program.py").read_text()
    found = changed(before, block("program.md", "python"))
    assert blocks("program.md", "diff")[-1].text.splitlines() == found
    assert len(found) <= 2 * MOST_CHANGED
    assert text_of("program.md").endswith("```\n")


def test_the_loop_of_the_page_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(block("loop.md", "python"))
    losses = train_script_alone(script, [], 1, 40)
    assert losses[-1] < 0.5 * losses[0]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 40 and printed[0].startswith("0 ")


def test_the_loop_over_epochs_of_the_page_trains_as_the_other_one(tmp_path: Path) -> None:
    whole, by_epochs = (
        one.text for one in blocks("loop.md", "python") if "elastic.loop(" in one.text
    )
    head = whole.partition("with elastic.loop(")[0]
    script = tmp_path / "train.py"
    script.write_text(head + "loss_fn = nn.MSELoss()\n" + by_epochs)
    losses = train_script_alone(script, [], 1, 24)
    script.write_text(whole.replace("clip_grad_norm=1.0", "").replace("scheduler.step()", "pass"))
    assert losses == pytest.approx(train_script_alone(script, [], 1, 24), rel=1e-5)


def test_the_trainer_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves the model where it says, trained."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(blocks("huggingface.md", "python")[0].text)
    losses = train_script_alone(script, [], 1, 40)
    assert losses[-1] < 0.9 * losses[0]
    model = transformers.AutoModelForCausalLM.from_pretrained("exported")
    ids = torch.arange(64)[None]
    assert model(input_ids=ids, labels=ids).loss < 0.9 * losses[0]


@pytest.mark.parametrize(("page", "which"), [("program.md", 0), ("huggingface.md", 2)])
def test_the_program_of_the_page_trains(tmp_path: Path, page: str, which: int) -> None:
    (tmp_path / "program.py").write_text(blocks(page, "python")[which].text)
    program = load_program(tmp_path / "program.py")
    job: dict[str, Any] = {"seed": 1, "global_batch": 12}
    losses = train_alone(program, job, 25)
    assert losses[-1] < 0.9 * losses[0]
    assert trace(program).n_blocks in (2, 4)


def test_the_job_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    (tmp_path / "job.yaml").write_text(block("program.md", "yaml"))
    assert load_job(tmp_path).steps == 40


def test_the_table_names_every_field_that_is_there() -> None:
    from elastic.program import Program

    text = text_of("program.md")
    named = set(
        re.findall(
            r"`(\w+)`",
            "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `")),
        )
    )
    assert named <= set(Program.__dataclass_fields__)
    assert {"model", "loss", "dataset", "optimizer", "extra_state", "pipeline"} <= named


def test_what_the_page_warns_of_is_refused_as_it_says(tmp_path: Path) -> None:
    """A residual outside of the block: the line of the page is what a run prints."""
    outside = block("program.md", "python").replace("return x + self.down", "return self.down")
    outside = outside.replace("x = layer(x)", "x = x + layer(x)")
    (tmp_path / "program.py").write_text(outside)
    program = load_program(tmp_path / "program.py")
    batch = {key: value[None] for key, value in program.dataset()[0].items()}
    found = structure_of(program, trace(program), batch)
    said = block("program.md", "text").strip()
    assert re.sub(r"py:\d+", "py:N", f"layout 'pp=2': no pp: {found.no_pp}") == re.sub(
        r"py:\d+", "py:N", said
    )
