"""`elastic run --script` with a plain DDP script, as a person starts it: restarts, ledger, errors,
Ctrl-C."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.e2e.shell import PROGRAMS, Shell, last_line
from support.waiting import until

from elastic.ledger.journal import Journal, read
from elastic.observe.accounting.accounts import account
from elastic.types import Decision, DriverStarted, ModelProfile, Node, NodeReady, Pool

pytestmark = pytest.mark.e2e
SCRIPT = str(PROGRAMS / "plain_ddp.py")
POOLS = [
    {"name": "spot", "market_type": "spot", "max_nodes": 2, "usd_per_node_h": 3.6},
    {"name": "on-demand", "market_type": "on-demand", "max_nodes": 1, "usd_per_node_h": 7.2},
]
ASKS = """
import json, os, ray.train, signal, time
import torch.distributed as dist
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("gloo")
for step in range(1, 300):
    info = ray.train.get_preemption_info()
    if info is not None:
        break
    time.sleep(0.1)
    if dist.get_rank() == 0:
        print(f"step {step}: loss 1.0")
open(f"{FOLDER}/seen-{dist.get_world_size()}-{dist.get_rank()}", "w").write(json.dumps(info and info.preempted_ranks))
if dist.get_world_size() > 1:
    time.sleep(600)
"""


ONE_OF_EACH = [pool | {"max_nodes": 1} for pool in POOLS]


def words(shell: Shell, *more: str, **job: object) -> list[str]:
    folder = shell.root / "job"
    folder.mkdir(exist_ok=True)
    (folder / "job.yaml").write_text(
        json.dumps({"pools": POOLS, "min_workers": 1, "budget_usd": 1000, **job})
    )
    return ["run", "job", "--local", "--run-name", "r", "--json", *more]


NOTICE = [{"at_step": 12, "notice": "any-spot", "deadline_s": 25}]
KILL_AND_NOTICE = [
    {"at_step": 12, "kill": "any-spot"},
    {"at_step": 32, "notice": "any-spot", "deadline_s": 25},
]


@pytest.mark.parametrize(
    ("steps", "drill"),
    [(30, NOTICE), pytest.param(60, KILL_AND_NOTICE, marks=pytest.mark.whole)],
    ids=["notice", "kill and notice"],
)
def test_losses_are_survived_by_restart_and_the_ledger_is_right(
    shell: Shell, steps: int, drill: list[dict[str, Any]]
) -> None:
    (shell.root / "state").mkdir()
    code, out, err = shell.call(
        *words(
            shell, "--script", SCRIPT, drill=drill, pools=ONE_OF_EACH if drill == NOTICE else POOLS
        ),
        "--",
        str(shell.root / "state"),
        str(steps),
        "--listen",
        *(("--stay-at", "20") if drill == NOTICE else ()),
    )
    assert code == 0, err
    first = err.splitlines()[0]
    assert "this is RESTART, not live" in first
    assert f"[rank 0] step {steps}: loss" in err
    summary = last_line(out)
    assert (summary["outcome"], summary["steps"]) == ("succeeded", steps)
    by_cause = {t["cause"]: t for t in summary["transitions"]}
    asked = {"kill": "loss", "notice": "notice"}
    assert list(by_cause) == [
        "start",
        *(cause for one in drill for kind, cause in asked.items() if kind in one),
    ]
    if "loss" in by_cause:
        # saved every 5 steps; the drill comes some steps behind its own
        assert 0 <= by_cause["loss"]["steps_lost"] <= 8
    assert by_cause["notice"]["steps_lost"] == 0
    layouts = ["dp_replicate=3", "dp_replicate=2", "dp_shard=1"]
    assert [t["to_layout"] for t in summary["transitions"]] == layouts[-len(by_cause) :]
    lines = read(shell.root / "elastic_runs" / "r" / "journal.jsonl")
    books = account(lines)
    assert sum(books.gpu_seconds.values()) == pytest.approx(books.totals.gpu_seconds)
    assert sum(books.usd.values()) == pytest.approx(books.totals.usd)
    # what the steps' own sleep takes, on up to 3 workers; restarts took tens of seconds
    ideal = steps * 0.1
    assert ideal < books.gpu_seconds["productive"] < 0.5 * books.totals.gpu_seconds
    assert books.gpu_seconds["checkpoint_restore"] + books.gpu_seconds["reshard"] > 2
    status = shell.status("r")
    assert (status["phase"], status["step"], status["train_loss"]) == (
        "succeeded",
        steps,
        summary["final_loss"],
    )
    code, out, err = shell.here("why", "r", "--all")
    assert "SIGTERM" in out and ("was lost" in out or "loss" not in by_cause)
    for verb in ("ledger", "report"):
        assert shell.here(verb, "r")[0] == 0
    code, out, err = shell.here(*words(shell, "--script", SCRIPT))
    assert code == 0 and "run 'r' is done" in err
    assert last_line(out) == {"run": "r", "outcome": "succeeded", "steps": steps}


@pytest.mark.whole
def test_a_script_that_never_starts_its_group_and_one_with_an_error_of_its_own(
    shell: Shell,
) -> None:
    state = shell.root / "state"
    state.mkdir()
    code, out, err = shell.call(
        *words(shell, "--script", SCRIPT, max_silence_s=8), "--", str(state), "10", "--alone"
    )
    assert (code, out) == (2, "")
    assert "did not start its process group on 3 ranks within 8 s" in err.splitlines()[-1]
    code, out, err = shell.call(
        *words(shell, "--script", SCRIPT, "--run-name", "e"),
        "--",
        str(state),
        "50",
        "--fail-at",
        "3",
    )
    assert code == 1, err
    assert "the script itself failed" in last_line(out)["reason"]
    assert "ValueError: this script's own error at step 3" in err
    assert len(last_line(out)["transitions"]) == 1


@pytest.mark.whole
def test_ray_trains_own_question_is_answered_and_ctrl_c_leaves_nothing(shell: Shell) -> None:
    script = shell.root / "asks.py"
    script.write_text(ASKS.replace("{FOLDER}", str(shell.root)))
    drill = [{"at_step": 5, "notice": "any-spot", "deadline_s": 12}]
    process = shell.start(*words(shell, "--script", str(script), drill=drill))
    seen = [Path(shell.root / f"seen-3-{rank}") for rank in range(3)]
    until(
        lambda: all(path.is_file() and path.read_text() for path in seen),
        "an answer to get_preemption_info()",
    )
    answers = {path.read_text() for path in seen}
    # all ranks the same; one of them is on the node
    assert len(answers) == 1 and len(json.loads(answers.pop())) == 1
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 3, err
    assert last_line(out)["outcome"] == "stopped"
    # its node is lost before the ranks end: no new one
    assert "the script may use" not in err.partition("asked to stop")[2]


@pytest.mark.parametrize(
    ("said", "script", "job"),
    [
        ("key 'steps' has no meaning for plain_ddp.py", SCRIPT, {"steps": 5}),
        ("unknown key 'max_wokers'", SCRIPT, {"max_wokers": 5}),
        ("min_workers=9; the pools give at most 3", SCRIPT, {"min_workers": 9}),
        ("no such file", "nowhere.py", {}),
    ],
)
def test_bad_input(shell: Shell, said: str, script: str, job: dict[str, Any]) -> None:
    code, out, err = shell.here(*words(shell, "--script", script, **job))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert said in err


def test_what_earlier_drivers_have_paid_counts(shell: Shell) -> None:
    pools = tuple(Pool(**pool) for pool in POOLS)
    job = {"script": SCRIPT, "restarted": True, "budget_usd": 10}
    folder = shell.root / "elastic_runs" / "r"
    folder.mkdir(parents=True)
    journal = Journal(folder / "journal.jsonl", 1)
    began_s = time.time() - 4 * 3600.0
    journal.append(began_s, [(began_s, DriverStarted("r", 1, job, pools, ModelProfile(0, 0, ())))])
    journal.append(began_s, [(began_s, NodeReady(Node("spot-1", "spot")))])
    journal.append(
        began_s + 3 * 3600.0, [], Decision((), "its driver was killed three hours later")
    )
    journal.close()
    (shell.root / "state").mkdir()
    code, out, err = shell.here(
        *words(shell, "--script", SCRIPT, budget_usd=10), "--", str(shell.root / "state"), "60"
    )
    assert code == 3, err
    assert "the budget of $10.00 is spent ($10.80)" in last_line(out)["reason"]
    assert not list((shell.root / "state").iterdir()), "no group was started"
