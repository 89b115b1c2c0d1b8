"""`ray job submit --working-dir . -- python -m elastic run jobs/quickstart --json` against a
running Ray cluster."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.e2e.shell import ROOT, Shell, children, last_line
from support.waiting import until

pytestmark = pytest.mark.e2e
RAY = Path(sys.executable).with_name("ray")


def free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture
def dashboard(shell: Shell) -> Iterator[str]:
    """The address of a Ray cluster of one node of two cores, with a folder and ports of its own."""
    folder = tempfile.mkdtemp(prefix="er-", dir="/tmp")  # paths of sockets must be short
    names = (
        "port",
        "dashboard-port",
        "dashboard-agent-listen-port",
        "ray-client-server-port",
        "metrics-export-port",
    )
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    inherited = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    with Path(folder, "head.log").open("w") as log:
        head = subprocess.Popen(
            [RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1",
            "--dashboard-host=127.0.0.1", "--num-cpus=2",
             f"--temp-dir={folder}", "--disable-usage-stats", *(f"--{name}={port}" for name,
             port in ports.items())],
            start_new_session=True, stdout=log, stderr=log,
            env={**inherited, **shell.environment, "RAY_TMPDIR": folder, "HOME": folder},
        )  # fmt: skip
    try:
        until(
            lambda: "will now block forever" in Path(folder, "head.log").read_text(),
            "the start of Ray",
        )
        yield f"http://127.0.0.1:{ports['dashboard-port']}"
    finally:
        mark = shell.environment["ELASTIC_TEST_MARK"]
        head.kill()
        head.wait()
        until(lambda: not _ended(children(mark)), "the end of Ray")
        shutil.rmtree(folder, ignore_errors=True)


def _ended(pids: list[int]) -> list[int]:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return pids


@pytest.mark.whole
def test_a_submitted_job(shell: Shell, dashboard: str) -> None:
    run = [
        sys.executable,
        "-m",
        "elastic",
        "run",
        "jobs/quickstart",
        "--set",
        "steps=15",
        "--run-name",
        "sent",
        "--json",
    ]
    words = [
        RAY,
        "job",
        "submit",
        "--address",
        dashboard,
        "--working-dir",
        ".",
        "--",
        *run,
        "--storage",
        str(shell.root),
    ]
    done = subprocess.run(
        words,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=600,
        env={**os.environ, "RAY_ADDRESS": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"run"')]
    assert len(lines) == 1, done.stdout
    found = last_line(lines[0])
    assert (found["run"], found["outcome"], found["steps"], found["samples_exact"]) == (
        "sent",
        "succeeded",
        15,
        True,
    )
    assert re.search(r"Job '\w+' succeeded", done.stdout + done.stderr)
    assert (shell.root / "sent" / "loss.png").is_file()
    assert not [pid for pid in children(shell.environment["ELASTIC_TEST_MARK"]) if _is_worker(pid)]


@pytest.mark.whole
def test_a_submitted_script_that_is_restarted(shell: Shell, dashboard: str) -> None:
    (shell.root / "state").mkdir()
    pools = "pools=[{name: all, max_nodes: 1, gpus_per_node: 2}]"
    run = [
        sys.executable,
        "-m",
        "elastic",
        "run",
        "--script",
        "tests/programs/plain_ddp.py",
        "--set",
        pools,
        "--run-name",
        "sent",
    ]
    words = [
        RAY,
        "job",
        "submit",
        "--address",
        dashboard,
        "--working-dir",
        ".",
        "--",
        *run,
        "--json",
    ]
    words += ["--storage", str(shell.root), "--", str(shell.root / "state"), "15"]
    done = subprocess.run(
        words,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=600,
        env={**os.environ, "RAY_ADDRESS": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = last_line(next(line for line in done.stdout.splitlines() if line.startswith('{"run"')))
    assert (found["outcome"], found["steps"]) == ("succeeded", 15)
    assert [t["to_layout"] for t in found["transitions"]] == ["dp_replicate=2"]
    assert (shell.root / "state" / "state.pt").is_file()


def _is_worker(pid: int) -> bool:
    try:
        return b"ray::Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
