"""A whole run in s3://, gs:// and az://, through a proxy that does harm now and then: watched, stopped, and resumed
on another machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.e2e.shell import PROGRAMS, Shell, last_line
from support.storage.faulty_proxy import Fault, FaultyProxy, slow_down
from support.waiting import until

from elastic.observe.metrics.step_rows import read_rows
from elastic.storage import Storage
from elastic.storage.s3 import S3Storage

pytestmark = pytest.mark.e2e


# each kind by itself, and under faults: tests/storage; npm brings the server of az://
@pytest.mark.parametrize(
    "scheme", ["s3", *(pytest.param(one, marks=pytest.mark.whole) for one in ("gs", "az"))]
)
def test_a_run_in_object_storage(
    shell: Shell, scheme: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    there: Storage = request.getfixturevalue(scheme)
    proxy: FaultyProxy = request.getfixturevalue("proxy" if scheme == "s3" else f"{scheme}_proxy")
    proxy.faults += [
        slow_down("PUT .*checkpoints", 2),
        Fault("reset", "PUT", 2, skip=9),
        Fault("lost", "PUT .*journal", 2),
    ]
    elsewhere = replace(shell, root=tmp_path / "elsewhere")
    elsewhere.root.mkdir()
    run, again = f"{there.uri}/one", {"program": str(PROGRAMS / "tiny_slow.py")}
    name = shell.job(
        steps=100_000,
        storage=there.uri,
        **again,
        drill=[{"at_step": 6, "kill": "any-spot"}],
        durable_every=20,
        peer_every=0,
    )
    first = shell.start("run", name, "--run-name", "one")
    try:
        until(
            lambda: there.list("one/journal/") or first.poll() is not None,
            "the first segment of the journal",
        )
        assert first.poll() is None, first.communicate()
        until(lambda: bool(there.list("one/checkpoints/")), "the first checkpoint")
        until(lambda: elsewhere.status(run)["step"] > 12, "the twelfth step")
        code, _, err = elsewhere.here(
            "run", elsewhere.job(storage=there.uri, **again), "--run-name", "one"
        )
        assert (code, err.count("\n")) == (
            2,
            1,
        ) and f"run 'one' is driven by process {first.pid}" in err
        # its folder knows where the run is
        assert shell.here("stop", "one", "--reason", "enough for today")[0] == 0
        out, err = first.communicate(timeout=300)
    finally:
        first.kill()
    assert first.returncode == 3, err
    assert "enough for today" in out
    stopped = elsewhere.status(run)
    assert stopped == shell.status("one") and (stopped["phase"], stopped["durable_step"]) == (
        "stopped",
        stopped["step"],
    )

    last = stopped["step"] + 5
    code, out, err = elsewhere.here(
        "run", elsewhere.job(storage=there.uri, **again, steps=last), "--run-name", "one", "--json"
    )
    assert code == 0, err
    found = last_line(out)
    assert (found["steps"], found["samples_exact"]) == (last, True)
    assert {"loss"} <= {t["cause"] for t in found["transitions"]}
    _look_at_it(shell, run, there, last)
    assert not any(fault.times for fault in proxy.faults)


def _look_at_it(shell: Shell, run: str, there: Storage, last: int) -> None:
    assert shell.status(run)["phase"] == "succeeded"
    for words in (("why", run), ("ledger", run), ("report", run), ("checkpoint", "ls", run)):
        code, out, err = shell.here(*words)
        assert (code, err) == (0, "") and len(out) > 100
    code, out, _ = shell.here("ls", "--storage", there.uri, "--json")
    assert [row["run"] for row in json.loads(out)] == ["one"]
    code, out, _ = shell.here("replay", run, "--json")
    assert code == 0 and json.loads(out)["identical"] is True
    code, out, err = shell.here("checkpoint", "verify", run, "--json")
    assert code == 0 and {item["step"] for item in json.loads(out)} >= {last}, err
    rows = read_rows(there.get("one/metrics.csv").decode())
    assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert any(key.startswith("one/tensorboard/events.") for key in there.list())
    assert {"one/report.json", "one/loss.png"} <= set(there.list())
    assert not isinstance(there, S3Storage) or list(there._unfinished(there.prefix)) == []
