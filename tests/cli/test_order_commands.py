"""Orders to a run: what reaches its inbox, and whom nobody can order."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from support.cli.calls import as_json, called
from support.places import ROOT

from elastic.config.drill import ON_NODES
from elastic.ledger.lease import Lease
from elastic.storage import LocalStorage


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


def test_who_trains_without_a_driver_takes_no_orders(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = LocalStorage(storage / "tiny-1")
    Lease(run, "tiny-1").release()  # the driver's, whose journal is there
    by_torchrun = Lease(run, "tiny-1")
    try:
        code, _, err = called(capsys, "stop", "tiny-1")
        assert (
            code == 2
            and f"process {os.getpid()} on " in err
            and "takes no orders" in err
            and not run.list("inbox/")
        )
    finally:
        by_torchrun.release()
