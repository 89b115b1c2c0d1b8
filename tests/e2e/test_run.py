"""`elastic run` on the embedded cluster, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.e2e.runs import SLOW, plans, slow_until_grown
from support.e2e.shell import PROGRAMS, Shell, last_line
from support.waiting import until

from elastic.ledger.journal import read
from elastic.observe.metrics.step_rows import read_rows

PACED = f"""
import dataclasses, os, time
from elastic.program import load_program
base = load_program({str(PROGRAMS / "tiny.py")!r})
class Slow:  # 0.2 s a step on one worker; ten times that while a node is added
    def __init__(self):
        self.inner = base.dataset()
    def __len__(self):
        return len(self.inner)
    def __getitem__(self, index):
        time.sleep(0.25 if os.path.exists(os.environ.get('{SLOW}', '')) else 0.025)
        return self.inner[index]
program = dataclasses.replace(base, dataset=Slow)
"""
pytestmark = pytest.mark.e2e


@pytest.mark.whole  # test_object_storage.py tells the same story in s3://
def test_a_run_is_driven_by_one_stopped_and_resumed(shell: Shell) -> None:
    """Through a kill and a growth; a second driver is refused; what is stopped continues under the
    same name."""
    drill = [{"at_step": 6, "kill": "any-spot"}, {"at_step": 12, "add": "spot"}]
    name = shell.job(
        steps=100_000, eval_every=10, drill=drill, durable_every=50, program="program.py"
    )
    (shell.root / name / "program.py").write_text(PACED)
    with slow_until_grown(shell.root / "elastic_runs/one/journal.jsonl", shell.root / "slow"):
        first = shell.start("run", name, "--run-name", "one")
        try:
            until(
                lambda: (shell.root / "elastic_runs/one/journal.jsonl").exists(),
                "the first line of the journal",
            )
            until(
                lambda: grown(shell) and shell.status("one")["step"] > 30, "the step after a growth"
            )
            code, _, err = shell.call("run", name, "--run-name", "one")
            assert (code, err.count("\n")) == (2, 1)
            assert f"run 'one' is driven by process {first.pid}" in err
            assert shell.call("stop", "one", "--reason", "enough for today")[0] == 0
            out, err = first.communicate(timeout=300)
        finally:
            first.kill()
    assert first.returncode == 3, err
    assert "drill: kill" in out and "enough for today" in out
    stopped = shell.status("one")
    assert (stopped["phase"], stopped["durable_step"]) == ("stopped", stopped["step"])
    last = stopped["step"] + 5
    code, out, err = shell.call(
        "run", name, "--run-name", "one", "--set", f"steps={last}", "--json"
    )
    assert code == 0, err
    assert out.count("\n") == 1
    found = last_line(out)
    assert (found["run"], found["steps"], found["samples_exact"]) == ("one", last, True)
    assert "durable" in [t["source"] for t in found["transitions"]]
    causes = [t["cause"] for t in found["transitions"]]
    assert causes[0] == "start"
    assert {"loss", "growth"} <= set(causes)
    assert all(t["digest_ok"] for t in found["transitions"] if t["source"] != "fresh")
    assert all(t["steps_lost"] == 0 for t in found["transitions"] if t["cause"] == "growth")
    assert found["validation_loss"] < 4.2
    assert 0 < found["goodput"] <= 1
    _look_at_it(shell, last)


def grown(shell: Shell) -> bool:
    return any(
        plan.cause == "growth"
        for plan in plans(read(shell.root / "elastic_runs/one/journal.jsonl"))
    )


def _look_at_it(shell: Shell, last: int) -> None:
    """The readers agree with the run, and it cannot be run over."""
    folder = shell.root / "elastic_runs" / "one"
    assert (folder / "loss.png").is_file()
    assert json.loads((folder / "report.json").read_text())["steps"] == last
    rows = read_rows((folder / "metrics.csv").read_text())
    assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert shell.status("one")["phase"] == "succeeded"
    code, out, _ = shell.here("replay", "one", "--json")
    assert code == 0
    assert json.loads(out)["identical"] is True
    code, out, _ = shell.here("checkpoint", "verify", "one", "--json")
    assert code == 0
    assert {item["step"] for item in json.loads(out)} >= {last}
    before = shell.files()
    code, out, err = shell.call(
        "run", "tiny", "--run-name", "one", "--set", f"steps={last}", "--json"
    )
    assert (code, err.count("\n")) == (0, 1)
    assert json.loads(out) == {"run": "one", "outcome": "succeeded", "steps": last}
    assert f"run 'one' is done ({last} steps)" in err
    assert shell.files() == before


def test_a_program_that_fails_ends_the_run_at_once(shell: Shell) -> None:
    name = shell.job(program="program.py", global_batch=64)
    tiny = shell.root / name / "program.py"
    tiny.write_text(
        "import dataclasses, elastic\nfrom elastic.program import load_program\n"
        f"base = load_program({str(PROGRAMS / 'tiny.py')!r})\n"
        "def loss(output, batch):\n"
        "    if len(batch['target']) > 16:  # more than what is tried before the start\n"
        "        raise ValueError('this loss is not written yet')\n"
        "    return base.loss(output, batch)\n"
        "program = dataclasses.replace(base, loss=loss)\n"
    )
    code, out, err = shell.here("run", name, "--run-name", "four", "--json")
    assert code == 1, err
    found = last_line(out)
    assert found["outcome"] == "failed"
    assert "this loss is not written yet" in found["reason"]
    assert "\n" not in found["reason"]
    shown = err[err.index("Traceback (most recent call last):") :]
    assert "program.py" in shown.splitlines()[1] and "in loss" in shown.splitlines()[1], (
        "from the program's own frame on"
    )
    said = "ValueError: this loss is not written yet"
    # by rank 0 or, where another one came first, by the driver
    assert any(line.endswith(said) for line in shown.splitlines()), shown
    code, out, _ = shell.here("logs", "four")
    assert code == 0 and "ValueError: this loss is not written yet" in out


# what is masked where: tests/config/test_masking.py; that such a run is resumed:
# tests/api/running/test_start_checks.py
@pytest.mark.whole
def test_a_secret_argument_of_a_script_is_in_no_file_and_the_run_is_resumed(shell: Shell) -> None:
    secret = "zq7-planted"
    text = (
        (PROGRAMS / "loop_tiny.py")
        .read_text()
        .replace("Path(__file__).parent", repr(PROGRAMS.as_posix()))
    )
    text = text.replace(
        'parser.add_argument("--clip"',
        'parser.add_argument("--hf-token")\nparser.add_argument("--clip"',
    )
    name = shell.job(
        steps=4, script="train.py", program=None, args=["--hf-token", secret], layout="dp_shard=1"
    )
    (shell.root / name / "train.py").write_text(text)
    code, _, err = shell.call("run", name, "--run-name", "kept", "--json")
    assert code == 0, err
    code, out, err = shell.call("run", name, "--run-name", "kept", "--set", "steps=6", "--json")
    assert code == 0, err
    assert last_line(out)["steps"] == 6 and "durable" in [
        t["source"] for t in last_line(out)["transitions"]
    ]
    found = shell.files()
    assert {"journal.jsonl", "commit.json", "report.json"} <= {Path(file).name for file in found}
    assert [file for file, data in found.items() if secret.encode() in data] == []
    shell.job(
        steps=8,
        script="train.py",
        program=None,
        args=["--hf-token", "zq8-other"],
        layout="dp_shard=1",
    )
    code, _, err = shell.call("run", name, "--run-name", "kept")
    assert (
        (code, err.count("\n")) == (2, 1)
        and "was started with other values: args (" in err
        and "zq" not in err
    )


@pytest.mark.whole  # each part by itself: tests/ledger/test_journal.py, tests/api/test_api.py
def test_a_damaged_journal_and_marker_are_told_and_the_run_goes_on_from_the_copy_before(
    shell: Shell,
) -> None:
    name = shell.job(steps=6, durable_every=3, layout="dp_shard=1")
    code, _, err = shell.call("run", name, "--run-name", "hurt", "--json")
    assert code == 0, err
    folder = shell.root / "elastic_runs" / "hurt"
    marker = folder / "checkpoints" / "step-00000006.g0001.e0001" / "commit.json"
    marker.write_bytes(marker.read_bytes()[:-9])
    rows = (folder / "journal.jsonl").read_bytes().split(b"\n")
    rows[3] = rows[3].replace(b'"at_s":1', b'"at_s":9', 1)
    (folder / "journal.jsonl").write_bytes(b"\n".join(rows))
    before = shell.files()
    for words in (
        ("run", name, "--run-name", "hurt", "--set", "steps=8"),
        ("status", "hurt"),
        ("replay", "hurt"),
    ):
        code, _, err = shell.call(*words)
        assert (code, err.count("\n")) == (2, 1), err
        assert (
            "journal.jsonl, line 4: it was altered after it was written" in err
            and "--from-checkpoint" in err
        )
    assert shell.files() == before
    code, out, err = shell.call(
        "run", name, "--run-name", "hurt", "--set", "steps=8", "--from-checkpoint", "--json"
    )
    assert code == 0, err
    assert f"a checkpoint cannot be read: {marker}: not readable" in err
    assert (last_line(out)["steps"], last_line(out)["samples_exact"]) == (8, True)
    back = next(t for t in last_line(out)["transitions"] if t["source"] == "durable")
    assert (back["at_step"], back["digest_ok"]) == (3, True)
    assert (folder / "journal-damaged-1.jsonl").read_bytes() == b"\n".join(rows)
    told = shell.here("why", "hurt")[1]
    assert (
        f"a checkpoint cannot be read: {marker}" in told
        and "its journal was damaged: 3 lines before that count" in told
    )
    assert json.loads(shell.here("replay", "hurt", "--json")[1])["identical"] is True
