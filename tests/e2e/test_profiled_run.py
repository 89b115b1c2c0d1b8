"""`elastic profile RUN` while it trains: its traces are there, and its losses are what they are
without; Ctrl-C saves it. (Of ranks under torchrun: tests/worker/standalone/test_standalone_run.py.)"""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
from pathlib import Path

import pytest
from support.e2e.shell import PROGRAMS, Shell
from support.reference import train_alone
from support.waiting import until

from elastic.ledger.journal import read
from elastic.program import load_program
from elastic.scenarios.check import TOLERANCE
from elastic.types import StepDone

SLOW = str(PROGRAMS / "tiny_slow.py")
NODE = {"name": "own", "market_type": "owned", "gpus_per_node": 4, "max_nodes": 1}
pytestmark = pytest.mark.e2e


def losses(journal: Path) -> dict[int, float]:
    return {
        event.step: event.train_loss
        for line in read(journal)
        for _, event in line.events
        if isinstance(event, StepDone)
    }


def test_a_run_is_profiled_while_it_trains_its_losses_stay_and_ctrl_c_saves_it(
    shell: Shell,
) -> None:
    name = shell.job(
        steps=100_000, program=SLOW, pools=[NODE], layout={"4": "pp=2,dp_shard=2"}, min_workers=4,
        peer_every=0, durable_every=0,
    )  # fmt: skip
    live = shell.start("run", name, "--run-name", "live", "-q")
    journal = shell.root / "elastic_runs/live/journal.jsonl"
    until(lambda: journal.exists() and len(losses(journal)) > 3, "the third step")
    code, out, err = shell.here("profile", "live", "--steps", "2", "--ranks", "all", "--json")
    assert (code, err) == (0, "")
    profiled = shell.status("live")["step"]
    until(lambda: shell.status("live")["step"] > profiled, "a step behind those")
    _is_saved_by_ctrl_c(shell, live)
    found = json.loads(out)
    assert [one["rank"] for one in found["ranks"]] == [0, 1, 2, 3]
    assert {"compute", "fsdp", "pp", "bubble", "commit", "optimizer"} <= set(
        found["total"]["parts"]
    )
    for one in found["ranks"]:
        assert len(one["steps"]) == 2
        assert sum(one["parts"].values()) == pytest.approx(one["step_s"])
        trace = json.loads(gzip.decompress(Path(one["trace"]).read_bytes()))
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"elastic.commit", "elastic.pp schedule", f"elastic.step {one['steps'][0]}"} <= names
    came = losses(journal)
    alone = train_alone(load_program(SLOW), {"seed": 1, "global_batch": 8}, len(came))
    assert sorted(came) == list(range(1, len(came) + 1))
    assert [came[step] for step in sorted(came)] == pytest.approx(alone, abs=TOLERANCE)
    code, replayed, _ = shell.here("replay", "live", "--json")
    assert (code, json.loads(replayed)["identical"]) == (0, True)
    code, _, err = shell.here("profile", "live")
    assert (code, err) == (2, f"elastic: run 'live' is not running (stopped at step {len(came)})\n")


def _is_saved_by_ctrl_c(shell: Shell, live: subprocess.Popen[str]) -> None:
    live.send_signal(signal.SIGINT)
    said, ended = live.communicate(timeout=300)
    assert (live.returncode, said) == (3, "") and "Traceback" not in ended, ended
    assert "elastic: to resume it: elastic run " in ended and "--run-name live" in ended
    status = shell.status("live")
    assert status["phase"] == "stopped" and status["durable_step"] == status["step"] > 3


@pytest.mark.whole
def test_a_job_runs_at_each_number_of_workers(shell: Shell) -> None:
    name = shell.job(program=SLOW, steps=300, pools=[NODE], layout="auto", durable_every=0)
    code, out, err = shell.call(
        "profile", name, "--local", "--scale", "1,2", "--png", "s.png", "--json"
    )
    assert (code, err) == (0, "")
    rows = json.loads(out)["scale"]
    assert [row["workers"] for row in rows] == [1, 2]
    assert all(row["parts"]["compute"] > 0 and row["steps"] >= 3 for row in rows)
    assert (shell.root / "s.png").read_bytes().startswith(b"\x89PNG")
    for row in rows:  # stopped when enough was measured, and kept
        assert shell.status(row["run"])["phase"] in ("stopped", "succeeded")
