"""A worker node ends itself when its head is gone: the script with short limits; a socket is the head."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.places import ROOT

SCRIPT = ROOT / "deploy" / "end_without_head.sh"


def until(true: Callable[[], bool], most_s: float = 60.0) -> None:
    deadline = time.monotonic() + most_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Host:
    """The machine: a folder for the script, a file that appears when it ends itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended = folder / "ended"

    def start(self, port: int, limit_s: int = 2, raylet: str = "") -> None:
        environment = {
            "PATH": os.environ["PATH"], "FOLDER": str(self.folder), "PORT": str(port), "LIMIT_S": str(limit_s),
            "EVERY_S": "0.1", "RAYLET": raylet, "END": f"touch {self.ended}", "HOME": str(self.folder),
        }  # fmt: skip
        begun_s = time.monotonic()
        subprocess.run(["bash", str(SCRIPT), "127.0.0.1"], env=environment, check=True, capture_output=True, timeout=30)
        assert time.monotonic() - begun_s < 10  # it does not hold up what comes after it
        until(lambda: self.watcher() > 0)

    def watcher(self) -> int:
        """Its process; 0 = none."""
        try:
            pid = int((self.folder / "end_without_head.pid").read_text())
            os.kill(pid, 0)
        except (OSError, ValueError):
            return 0
        return pid


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    if pid := made.watcher():
        os.killpg(pid, signal.SIGKILL)


class Head:
    """A port that answers; `asked` counts how often."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.server.getsockname()[1])
        self.asked = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        self.server.settimeout(0.1)
        while not self._stop.is_set():
            try:
                self.server.accept()[0].close()
            except TimeoutError:
                continue
            self.asked += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.server.close()


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.close()


@pytest.mark.e2e
def test_it_ends_when_the_head_is_gone_and_not_before(host: Host, head: Head) -> None:
    begun_s = time.monotonic()
    host.start(head.port)
    until(lambda: time.monotonic() - begun_s > 2.5 and head.asked > 5)  # longer than the limit
    assert not host.ended.exists()
    head.close()
    until(host.ended.exists)
    until(lambda: host.watcher() == 0)


@pytest.mark.slow
def test_it_does_not_end_at_once(host: Host, head: Head) -> None:
    head.close()
    host.start(head.port, limit_s=600)
    time.sleep(1.0)
    assert host.watcher()
    assert not host.ended.exists()


def test_it_ends_when_no_raylet_runs_here(host: Host, head: Head) -> None:
    host.start(head.port, limit_s=1, raylet="no-such-raylet")
    until(host.ended.exists)


def test_a_second_start_names_the_new_head_to_the_same_watcher(host: Host, head: Head) -> None:
    host.start(head.port, limit_s=600)
    first = host.watcher()
    (host.folder / "head").write_text("an old head")
    host.start(head.port, limit_s=600)
    assert (host.folder / "head").read_text() == "127.0.0.1\n"
    time.sleep(0.3)  # a second watcher would have written its number by now
    assert host.watcher() == first
    with pytest.raises(ChildProcessError):  # it is in a session of its own: not ours, and not that of an SSH connection
        os.waitpid(first, os.WNOHANG)
    assert os.getsid(first) == first
