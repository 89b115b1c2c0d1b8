"""Orders to a run: what reaches its inbox, and whom nobody can order."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from pathlib import Path

import pytest
from support.cli.calls import as_json, called
from support.places import ROOT

from elastic.config.drill import ON_NODES
from elastic.ledger.lease import Lease
from elastic.storage import LocalStorage
from elastic.worker.hosting.inbox import Inbox


@pytest.mark.usefixtures("live")
def test_orders_reach_the_inbox(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "stop", "tiny-1", "--reason", "enough")[0] == 0
    assert as_json(capsys, "drill", "tiny-1", "kill=any-spot,partner")["drill"] == {
        "kill": ["any-spot", "partner"]
    }
    assert called(capsys, "drill", "tiny-1", "notice=any", "deadline_s=5", "at_step=9")[0] == 0
    run = LocalStorage(storage / "tiny-1")
    assert [json.loads(run.get(key)) for key in run.list("inbox/")] == [
        {"stop": "enough"},
        {"drill": {"kill": ["any-spot", "partner"]}},
        {"drill": {"notice": "any", "deadline_s": 5.0, "at_step": 9}},
    ]


@pytest.mark.usefixtures("storage", "live")
def test_drills_are_typed_as_the_pages_type_them(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    typed = {
        words: page.name
        for page in pages
        for words in re.findall(r"`elastic drill RUN ([^`]+)`", page.read_text())
    }
    assert {"stall=rank0", "slow=rank0,rank:3 factor=2"} <= typed.keys()
    for words, page in typed.items():
        code, _, err = called(capsys, "drill", "tiny-1", *shlex.split(words))
        assert (code, err) == (0, ""), page


@pytest.mark.usefixtures("storage", "live")
@pytest.mark.parametrize("kind", ON_NODES)
def test_each_kind_takes_several_nodes(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["factor=2"] if kind == "slow" else []
    said = as_json(capsys, "drill", "tiny-1", f"{kind}=any-spot,partner", *more)
    assert said["drill"][kind] == ["any-spot", "partner"]


@pytest.mark.usefixtures("storage", "idle")
@pytest.mark.parametrize("words", [("stop", "tiny-1"), ("drill", "tiny-1", "kill=any")])
def test_orders_to_a_run_that_nobody_drives(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = called(capsys, *words)
    assert (code, err) == (2, "elastic: run 'tiny-1' is not running (succeeded at step 30)\n")


def without_end(journal: Path) -> None:
    """Its driver was killed."""
    journal.write_text("".join(journal.read_text().splitlines(True)[:-1]))


@pytest.mark.usefixtures("idle")
def test_a_run_is_asked_to_stop_between_two_drivers(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that a supervisor starts again obeys, and no start that a person types."""
    run = LocalStorage(storage / "tiny-1")
    without_end(storage / "tiny-1" / "journal.jsonl")
    for began_at_s, stop in ((None, "enough"), (time.time() + 1.0, None)):
        code, out, _ = called(capsys, "stop", "tiny-1", "--reason", "enough")
        assert code == 0 and "nobody drives it now; the next driver that is started again" in out
        assert "(--supervise, torchrun, SLURM) saves and stops" in out
        assert Inbox(run, began_at_s).take().stop == stop
        for key in run.list("inbox/"):
            run.delete(key)
    assert as_json(capsys, "stop", "tiny-1") == {"run": "tiny-1", "asked": "stop", "driven": False}
    code, _, err = called(capsys, "drill", "tiny-1", "kill=any")
    assert code == 2 and "is not running (running at step 30)" in err


@pytest.mark.parametrize("ended", [True, False])
def test_a_driver_that_is_starting_can_be_stopped(
    ended: bool, storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the lease, and no line of it is in the journal yet."""
    run = LocalStorage(storage / "tiny-1")
    Lease(run, "tiny-1").release()  # the driver's, whose journal is there
    if not ended:
        without_end(storage / "tiny-1" / "journal.jsonl")
    starting = Lease(run, "tiny-1")
    try:
        code, _, err = called(capsys, "drill", "tiny-1", "kill=any")
        assert code == 2 and f"process {os.getpid()} on " in err and "is starting" in err
        assert run.list("inbox/") == []
        assert as_json(capsys, "stop", "tiny-1")["driven"] is True
        assert [json.loads(run.get(key)) for key in run.list("inbox/")] == [
            {"stop": "requested on the command line"}
        ]
    finally:
        starting.release()
