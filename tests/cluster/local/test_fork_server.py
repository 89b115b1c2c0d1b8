"""Forks in the place of new Python processes: what they inherit, how they end, and when there is
none. No Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.child import child
from support.waiting import until

from elastic.cluster.local import fork_client, fork_server
from elastic.cluster.ray import processes

CLIENT = (
    "-c",
    "import runpy, sys; runpy.run_path(sys.argv[1])['stand_in'](sys.argv[2], sys.argv[3:])",
    fork_client.__file__,
)
SAYS = """
import json, os, signal, sys, time
loaded = "elastic.worker.session.session" in sys.modules
print(json.dumps({"loaded": loaded, "words": sys.argv[1:], "mine": os.environ.get("MINE"), "home": os.environ.get("SERVERS"),
                  "folder": os.getcwd(), "pid": os.getpid(), "parent": os.getppid(), "name": __name__}), flush=True)
print("to the error file", file=sys.stderr, flush=True)
if "sleep" in sys.argv: time.sleep(600)
if "signal" in sys.argv: os.kill(os.getpid(), signal.SIGTERM)
if "raise" in sys.argv: raise ValueError("on purpose")
sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
"""
WITHIN_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    folder = tmp_path_factory.mktemp("f")
    environment = {
        **os.environ,
        "SERVERS": "yes",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    process: Any = subprocess.Popen(
        [sys.executable, "-m", "elastic.cluster.local.fork_server", str(folder), str(os.getpid())],
        env=environment,
    )
    process.folder = folder
    until((folder / fork_server.SOCKET).exists, "its socket")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def client(server: Any, tmp_path: Path, *words: str, address: str = "") -> subprocess.Popen[str]:
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    at = address or str(server.folder / fork_server.SOCKET)
    command = [sys.executable, *CLIENT, at, str(script), *words]
    environment = {"MINE": "this one", "PATH": os.environ["PATH"]}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
    )


@pytest.mark.slow
def test_a_fork_is_what_its_client_was_to_be(server: Any, tmp_path: Path) -> None:
    one = client(server, tmp_path, "7", "two words")
    out, err = one.communicate(timeout=WITHIN_S)
    said = json.loads(out)
    assert said["loaded"], "what the server imported is there"
    assert (said["words"], said["mine"], said["home"]) == (["7", "two words"], "this one", None)
    assert (said["folder"], said["name"], said["parent"]) == (str(tmp_path), "__main__", server.pid)
    assert err == "to the error file\n"
    assert one.returncode == 7
    assert fork_server.forks_of(str(server.folder), [one.pid]) == []


@pytest.mark.parametrize(("word", "status"), [("signal", -signal.SIGTERM), ("raise", 1)])
def test_a_client_ends_as_its_fork_does(
    server: Any, tmp_path: Path, word: str, status: int
) -> None:
    one = client(server, tmp_path, "0", word)
    _, err = one.communicate(timeout=WITHIN_S)
    assert one.returncode == status
    assert ("ValueError: on purpose" in err) == (word == "raise")


def test_the_signal_that_ended_a_fork_is_known(server: Any, tmp_path: Path) -> None:
    one = client(server, tmp_path, "0", "sleep")
    assert one.stdout is not None
    fork = json.loads(one.stdout.readline())["pid"]
    at = str(server.folder)
    until(lambda: fork_server.is_fork(at, fork), "the fork in the server's list")
    assert not fork_server.killed_by(at, fork)
    os.kill(fork, signal.SIGKILL)
    one.communicate(timeout=WITHIN_S)
    assert one.returncode == -signal.SIGKILL
    assert not fork_server.is_fork(at, fork)
    assert fork_server.killed_by(at, fork) == signal.SIGKILL


def test_a_client_that_is_killed_takes_its_fork_along_and_no_other(
    server: Any, tmp_path: Path
) -> None:
    both = [client(server, tmp_path, "0", "sleep") for _ in range(2)]
    forks = []
    for one in both:
        assert one.stdout is not None
        forks.append(json.loads(one.stdout.readline())["pid"])
    until(
        lambda: fork_server.forks_of(str(server.folder), [one.pid for one in both]) == forks,
        "the forks of both",
    )
    both[0].kill()
    until(lambda: processes.started(forks[0]) is None, "its end")
    assert processes.started(forks[1]) is not None
    os.kill(forks[1], signal.SIGKILL)
    both[1].communicate(timeout=WITHIN_S)
    assert both[1].returncode == -signal.SIGKILL
    both[0].communicate()


@pytest.mark.slow
def test_a_fork_that_is_stopped_ends_with_the_parent_of_its_client(
    server: Any, tmp_path: Path
) -> None:
    """As a worker whose raylet is killed while it is stopped: it can see to nothing itself."""
    with client(server, tmp_path, "0", "sleep") as first:  # writes the script
        first.kill()
    text = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    at, script = str(server.folder / fork_server.SOCKET), str(tmp_path / "says.py")
    words = [sys.executable, *CLIENT, at, script, "0", "sleep"]
    starts = [sys.executable, "-c", text, *words]
    with child(starts, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        fork = json.loads(parent.stdout.readline())["pid"]
        os.kill(fork, signal.SIGSTOP)
        parent.kill()
        until(lambda: processes.started(fork) is None, "its end")


def test_without_a_server_a_client_is_the_program_itself(server: Any, tmp_path: Path) -> None:
    one = client(server, tmp_path, "3", address=str(tmp_path / "nobody"))
    said = json.loads(one.communicate(timeout=WITHIN_S)[0])
    assert (said["loaded"], said["pid"], said["words"], said["mine"]) == (
        False,
        one.pid,
        ["3"],
        "this one",
    )
    assert one.returncode == 3


def test_a_server_with_threads_does_not_fork(tmp_path: Path) -> None:
    text = f"""
import os, sys, threading, time
from elastic.cluster.local import fork_client, fork_server
fork_server.PRELOADED = ()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
fork_server.main({str(tmp_path)!r}, os.getppid())
"""
    process: Any = subprocess.Popen([sys.executable, "-c", text])
    process.folder = tmp_path
    try:
        until((tmp_path / fork_server.SOCKET).exists, "its socket")
        one = client(process, tmp_path, "4")
        said = json.loads(one.communicate(timeout=WITHIN_S)[0])
        assert (said["loaded"], said["pid"], one.returncode) == (False, one.pid, 4)
    finally:
        process.kill()
        process.wait()


def test_a_server_ends_with_who_started_it(tmp_path: Path) -> None:
    text = f"""
import os, subprocess, sys
server = subprocess.Popen([sys.executable, "-m", "elastic.cluster.local.fork_server", {str(tmp_path)!r}, str(os.getpid())])
print(server.pid, flush=True)
sys.stdin.read()
"""
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with child([sys.executable, "-c", text], **piped) as starter:
        assert starter.stdout is not None
        server = int(starter.stdout.readline())
        until((tmp_path / fork_server.SOCKET).exists, "its socket")
        starter.kill()
    until(lambda: processes.started(server) is None, "its end")


def test_what_is_no_request_is_not_forked(server: Any, tmp_path: Path) -> None:
    import socket

    for said in (b"\xff" * 8, (5).to_bytes(8, "little") + b"{", (2).to_bytes(8, "little") + b"{}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(server.folder / fork_server.SOCKET))
            socket.send_fds(connection, [said[:8]], [0, 1, 2])
            with suppress(BrokenPipeError):  # it may have hung up already
                connection.sendall(said[8:])
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(2) == b""
    one = client(server, tmp_path, "0")
    assert json.loads(one.communicate(timeout=WITHIN_S)[0])["loaded"]


def test_a_client_that_is_gone_before_its_answer_ends_no_server(
    server: Any, tmp_path: Path
) -> None:
    import socket

    os.kill(server.pid, signal.SIGSTOP)  # so that it finds the client gone
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    said = {
        "pid": 0,
        "words": [str(script)],
        "environment": dict(os.environ),
        "folder": str(tmp_path),
    }
    text = json.dumps(said).encode()
    with (
        open(os.devnull, "w") as nothing,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
    ):
        connection.connect(str(server.folder / fork_server.SOCKET))
        socket.send_fds(connection, [len(text).to_bytes(8, "little")], [nothing.fileno()] * 3)
        connection.sendall(text)
    os.kill(server.pid, signal.SIGCONT)
    one = client(server, tmp_path, "0")
    assert json.loads(one.communicate(timeout=WITHIN_S)[0])["loaded"]
    assert server.poll() is None
