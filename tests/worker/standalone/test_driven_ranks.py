"""Ranks under torchrun have a driver among them: a lost one ends all, the next driver goes on in the
same journal; the policy places peer replicas, removes old checkpoints and keeps the deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.child import reserved_port
from support.waiting import until
from support.worker.torchrun import (
    SLOW,
    command,
    elastic,
    environment,
    job,
    losses,
    ranks_of,
    started,
)

from elastic.config.job import load_job
from elastic.errors import JournalDamaged
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.sim.replay import replay as replayed
from elastic.storage import open_storage
from elastic.types import CopyRemoved, CopyStored, DriverStarted, EnterPlan, Event, RemoveCopy
from elastic.types.gates import gates_of
from elastic.worker.checkpoint import checkpoint_index
from elastic.worker.standalone.standalone_run import StandaloneOptions, StandaloneRun

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def lines_of(folder: Path) -> list[Line]:
    return list(RunFolder.of(open_storage(folder / "runs" / "tiny")).lines())


def events(lines: Sequence[Line]) -> list[Event]:
    return [event for line in lines for _, event in line.events]


def actions(lines: Sequence[Line], kind: type) -> list[Any]:
    made = [line.decision.actions for line in lines if line.decision is not None]
    return [action for found in made for action in found if isinstance(action, kind)]


@pytest.mark.e2e
# rank 1: the driver lives to tell of it; of rank 0 it is lost, too
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.whole), 1])
def test_a_killed_rank_ends_all_and_torchrun_starts_them_anew(rank: int, tmp_path: Path) -> None:
    folder, log = job(tmp_path, program=str(SLOW), steps=24, durable_every=5), tmp_path / "log"
    again = command(2, folder, torchrun=("--standalone", "--max-restarts", "1"))
    held = tmp_path / "held"  # no rank gets further than step 14 before one is killed
    held.touch()
    slow = {"ELASTIC_TEST_SLOW": str(held), "ELASTIC_TEST_SLOW_AFTER": "13"}
    with started(again, log, **slow) as process:
        until(lambda: 12 in losses(log.read_text()) or process.poll() is not None, log.read_text)
        os.kill(ranks_of(process.pid)[rank], signal.SIGKILL)
        held.unlink()
        assert process.wait(300) == 0, log.read_text()
    said = log.read_text()
    assert "resumes from step 10" in said or "resumes from step 5" in said
    lines = lines_of(folder)
    assert [e.epoch for e in events(lines) if isinstance(e, DriverStarted)] == [1, 2]
    assert [plan.plan.generation for plan in actions(lines, EnterPlan)] == [1, 2]
    assert replayed(lines).identical
    why = elastic("why", str(folder / "runs" / "tiny"))
    if rank:  # the driver lives to tell of it
        assert "worker node-0/1 failed (process): its process is gone" in why
        assert "the process of node-0/1 is gone; all ranks end" in said
    assert "all 24 steps finished" in why


@pytest.mark.e2e
def test_ranks_on_two_nodes_keep_each_others_copies_and_stop_as_a_run_does(tmp_path: Path) -> None:
    """Nodes are those of torchrun. `elastic stop` reaches rank 0 through the run's inbox."""
    folder = job(tmp_path, program=str(SLOW), steps=4000, durable_every=0, peer_every=3)
    place = str(folder / "runs" / "tiny")

    def said() -> str:
        return "".join((tmp_path / f"log-{node}").read_text() for node in range(2))

    def stored() -> list[CopyStored]:
        journal = tmp_path / "runs" / "tiny" / "journal.jsonl"
        found = events(lines_of(folder)) if journal.exists() else []
        return [e for e in found if isinstance(e, CopyStored)]

    with ExitStack() as stack:
        port, agents = stack.enter_context(reserved_port()), []
        for node in range(2):
            words = (
                "--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1",
                "--master-port", str(port),
            )  # fmt: skip
            agent = started(command(1, folder, torchrun=words), tmp_path / f"log-{node}")
            agents.append(stack.enter_context(agent))
        until(lambda: stored() or any(a.poll() is not None for a in agents), said)
        elastic("stop", place)
        assert [agent.wait(300) for agent in agents] == [1, 1], said()
    assert said().count("exitcode  : 3") == 2, said()
    lines = lines_of(folder)
    (entered,) = actions(lines, EnterPlan)
    assert [str(worker) for worker in entered.plan.ranks] == ["node-0/0", "node-1/0"]
    assert entered.plan.copies_to == ((1,), (0,)) and entered.plan.peer_every == 3
    assert stored()[0].copy.kind == "peer"
    (found,) = checkpoint_index.find(open_storage(place))
    assert f"saved at step {found.step}" in said() and "stop requested" in elastic("why", place)
    assert json.loads(elastic("replay", place, "--json"))["identical"]


@pytest.mark.e2e
def test_old_checkpoints_are_removed_by_the_policy(tmp_path: Path) -> None:
    folder = job(
        tmp_path,
        program=str(SLOW),
        steps=20,
        durable_every=5,
        keep_last=1,
        keep_every=10,
        verify_copies=False,
    )
    StandaloneRun(
        load_job(folder), StandaloneOptions(storage=str(folder / "runs")), {}
    ).to_the_end()
    lines = lines_of(folder)
    removed = [action.uri for action in actions(lines, RemoveCopy)]
    assert removed and {e.uri for e in events(lines) if isinstance(e, CopyRemoved)} <= {*removed}
    found = checkpoint_index.find(open_storage(folder / "runs" / "tiny"))
    assert [item.step for item in found] == [20, 10]
    assert not {*removed} & {item.uri for item in found} and replayed(lines).identical


@pytest.mark.e2e
def test_the_deadline_of_the_job_ends_it_with_its_state_saved(tmp_path: Path) -> None:
    folder = job(tmp_path, program=str(SLOW), steps=100_000, durable_every=0, deadline_h=0.002)
    ended = StandaloneRun(
        load_job(folder), StandaloneOptions(storage=str(folder / "runs")), {}
    ).to_the_end()
    assert ended.outcome == "stopped" and "the deadline of 0.002 h is over" in ended.reason
    (found,) = checkpoint_index.find(open_storage(folder / "runs" / "tiny"))
    assert found.step == ended.step > 0 and replayed(lines_of(folder)).identical
    (start,) = (e for e in events(lines_of(folder)) if isinstance(e, DriverStarted))
    without = {name for name, there in gates_of(start).items() if not there}
    assert without == {"forms_ahead", "leaves_out", "spares_the_rest"}


@pytest.mark.e2e
def test_a_damaged_journal_is_set_aside_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = job(tmp_path, program=str(SLOW))
    wishes = StandaloneOptions(storage=str(folder / "runs"))
    StandaloneRun(load_job(folder), wishes, {}).to_the_end()
    journal = folder / "runs" / "tiny" / "journal.jsonl"
    text = journal.read_bytes().split(b"\n")
    text[1] = text[1].replace(b":", b";", 1)
    journal.write_bytes(b"\n".join(text))
    more = load_job(folder, ["steps=14"])
    with pytest.raises(JournalDamaged):
        StandaloneRun(more, wishes, {}).to_the_end()
    ended = StandaloneRun(more, replace(wishes, from_checkpoint=True), {}).to_the_end()
    assert (ended.outcome, ended.step, ended.resumed_at) == ("succeeded", 14, 12)
    assert "its journal was damaged" in elastic("why", str(folder / "runs" / "tiny"))


TRAINER = """
import json, os, sys
import torch, torch.distributed as dist
from elastic.config.job import load_job
from elastic.worker.standalone.standalone_run import StandaloneOptions, StandaloneRun

told = []
dist.init_process_group("gloo")
options = StandaloneOptions(storage=sys.argv[2], on_copy=told.append)
ended = StandaloneRun(load_job(sys.argv[1]), options).to_the_end()
ranks = torch.ones(1)
dist.all_reduce(ranks)  # its own group is there again
rank = os.environ["RANK"]
found = {"told": [copy.step for copy in told], "losses": [copy.metrics["train_loss"] for copy in told],
    "ranks": int(ranks), **ended.summary()}
with open(f"{sys.argv[2]}/{rank}.json", "w") as file:
    json.dump(found, file)
"""


# a group that was there, and what is said of copies, in one process: test_standalone_run.py
@pytest.mark.whole
def test_inside_another_trainer_all_ranks_are_told_the_same(tmp_path: Path) -> None:
    folder = job(tmp_path, program=str(SLOW), durable_every=5)
    script, runs = tmp_path / "trainer.py", tmp_path / "runs"
    script.write_text(TRAINER)
    runs.mkdir()
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*words, str(script), str(folder), str(runs)], capture_output=True, text=True,
        env=environment(), timeout=300
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    first, second = (json.loads((runs / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second and first["told"] == [5, 10, 12] and first["ranks"] == 2
    assert (first["outcome"], first["final_loss"]) == ("succeeded", first["losses"][-1])
