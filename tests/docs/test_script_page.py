"""docs/script.md, executed: its script, unchanged, by its command, through a kill; and the bare
diff that it ends with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.places import ROOT

from elastic.api.running import restarted_script
from elastic.config.script import enters_loop
from elastic.policy.restarts import START_S

PAGE = (ROOT / "docs" / "script.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMAND = BLOCKS[0][1].strip()
SCRIPT = next(text for kind, text in BLOCKS if kind == "python")
TRAIN_FUNCTION = next(text for _, text in BLOCKS if text.startswith("# train_function.py"))
POOLS = [
    {"name": "spot", "market_type": "spot", "max_nodes": 2},
    {"name": "on-demand", "max_nodes": 1},
]


def test_the_script_needs_no_change(tmp_path: Path) -> None:
    assert "elastic" not in SCRIPT
    (tmp_path / "train.py").write_text(SCRIPT)
    assert not enters_loop(tmp_path / "train.py")
    changed = [
        line for line in next(text for kind, text in BLOCKS if kind == "diff").splitlines() if line
    ]
    assert [line[0] for line in changed] == ["-", "+"]  # the command, and no line of the script
    assert changed[1] == f"+ {COMMAND}"
    assert changed[0].startswith("- torchrun ")


def test_a_trainer_resumes_from_the_newest_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of the page, for an empty folder too; checkpoint-120 was cut off while it was
    saved."""
    (lines,) = (text for kind, text in BLOCKS if kind == "python" and text.startswith("whole = "))
    asked: list[object] = []
    trainer = SimpleNamespace(
        train=lambda resume_from_checkpoint: asked.append(resume_from_checkpoint)
    )
    monkeypatch.chdir(tmp_path)
    for name, whole in (
        ("", False),
        ("checkpoint-80", True),
        ("checkpoint-100", True),
        ("checkpoint-120", False),
    ):
        folder = tmp_path / "out" / name
        folder.mkdir(parents=True, exist_ok=True)
        if whole:
            (folder / "trainer_state.json").touch()
        exec(lines, {"Path": Path, "trainer": trainer})
    assert asked == [None, "out/checkpoint-80", "out/checkpoint-100", "out/checkpoint-100"]


def test_the_page_names_the_keys_and_the_bound() -> None:
    listed = re.search(r"may\s+set\s+(.*?)\.\s+Other\s+keys", PAGE, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == set(restarted_script.KEYS)
    assert f"within {START_S:.0f} s" in PAGE


@pytest.mark.whole
@pytest.mark.parametrize(
    ("script", "printed"),
    [(SCRIPT, "step 60: loss"), (TRAIN_FUNCTION, "ray.train.report 60: ")],
    ids=["script", "train function"],
)
def test_the_command_of_the_page(tmp_path: Path, script: str, printed: str) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "drill.yaml").write_text("- {at_step: 12, kill: any-spot}\n")
    words, arguments = COMMAND.split(" -- ")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            *words.split(),
            "--local",
            "--json",
            "--run-name",
            "page",
            "--drill",
            "drill.yaml",
            "--set",
            f"pools={json.dumps(POOLS)}",
            "--",
            *arguments.split(),
        ],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    try:
        out, err = process.communicate(timeout=1200)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        raise AssertionError(err) from None
    assert process.returncode == 0, err
    assert "this is RESTART, not live" in err.splitlines()[0]
    summary = json.loads(out.strip().splitlines()[-1])
    assert (summary["outcome"], summary["steps"]) == ("succeeded", 60)
    assert [t["cause"] for t in summary["transitions"]] == ["start", "loss"]
    assert f"[rank 0] {printed}" in err
    # a checkpoint each 5 steps, or at each report; the kill comes some steps behind its own
    assert summary["transitions"][1]["steps_lost"] <= (8 if script == SCRIPT else 1)
    assert any((tmp_path / "elastic_runs" / "page" / "logs").iterdir())
