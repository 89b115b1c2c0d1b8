"""A worker node ends itself when its head is gone: the script with short limits; a socket is the
head."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.e2e.shell import children
from support.places import ROOT
from support.waiting import until

from elastic.cluster.ray import processes

SCRIPT = ROOT / "deploy" / "end_without_head.sh"


COUNTED = """#!/bin/bash
PATH={path} {name} "$@"
code=$?
echo $code >>{folder}/{name}.told
exit $code
"""


class Host:
    """The machine: a folder for the script, a file that appears when it ends itself. It keeps how
    `sleep` and `flock` end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended = folder / "ended"
        (folder / "bin").mkdir()
        for name in ("sleep", "flock"):
            (folder / "bin" / name).write_text(
                COUNTED.format(path=os.environ["PATH"], name=name, folder=folder)
            )
            (folder / "bin" / name).chmod(0o755)

    def told(self, name: str) -> list[str]:
        """The exit codes of the command, as far as it has ended."""
        file = self.folder / f"{name}.told"
        return file.read_text().split() if file.exists() else []

    def start(
        self,
        port: int,
        limit_s: int = 2,
        raylet: str = "",
        *,
        end: str | None = None,
        boot_s: int = 900,
    ) -> None:
        environment = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "FOLDER": str(self.folder),
            "PORT": str(port), "LIMIT_S": str(limit_s), "EVERY_S": "0.1", "RAYLET": raylet,
            "END": f"touch {self.ended}" if end is None else end, "HOME": str(self.folder),
            "SCHEDULED": str(self.folder / "scheduled"), "BOOT_S": str(boot_s),
        }  # fmt: skip
        # Were it to watch itself, and hold up what comes after it, it would not be back in time.
        subprocess.run(
            ["bash", str(SCRIPT), "127.0.0.1"],
            env=environment,
            check=True,
            capture_output=True,
            timeout=60,
        )
        until(lambda: self.watcher() > 0, "the watcher")

    def shorten_timeouts(self) -> None:
        """The script gives each question 5 s, and asks three times."""
        short = self.folder / "bin" / "timeout"
        short.write_text(f'#!/bin/bash\nshift\nPATH={os.environ["PATH"]} timeout 1 "$@"\n')
        short.chmod(0o755)

    def notes(self, name: str, then: str = ":") -> Path:
        """The file with the arguments of each call of this command, which does `then` before."""
        asked = self.folder / f"{name}.asked"
        command = self.folder / "bin" / name
        command.write_text(f'#!/bin/bash\n{then}\nprintf "%s\\n" "$*" >>{asked}\n')
        command.chmod(0o755)
        return asked

    def watchers(self) -> list[int]:
        return [pid for pid in children(str(self.folder)) if "--watch" in processes.command(pid)]

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
    """A port that answers, unless it is mute; `asked` counts how often."""

    def __init__(self) -> None:
        self.mute = False
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.server.getsockname()[1])
        self.asked = 0
        self.held: list[socket.socket] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        self.server.settimeout(0.1)
        while not self._stop.is_set():
            try:
                caller = self.server.accept()[0]
            except TimeoutError:
                continue
            self.asked += 1
            if self.mute:
                self.held.append(caller)
            else:
                with caller:
                    caller.sendall(caller.recv(64)[:1])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for sock in (self.server, *self.held):
            sock.close()


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.close()


@pytest.mark.e2e
def test_it_ends_when_the_head_is_gone_and_not_before(host: Host, head: Head) -> None:
    """The limit is more than a busy machine keeps an answer waiting."""
    begun_s = time.monotonic()
    host.start(head.port, limit_s=6)
    until(
        lambda: time.monotonic() - begun_s > 6.5 and head.asked > 5,
        "more looks than the limit allows without an answer",
    )
    assert not host.ended.exists()
    head.close()
    until(host.ended.exists, "its end")
    until(lambda: host.watcher() == 0, "the end of the watcher")


@pytest.mark.e2e
def test_it_ends_when_the_head_hangs(host: Host, head: Head) -> None:
    """Its kernel continues to accept connections."""
    head.mute = True
    host.shorten_timeouts()
    host.start(head.port, limit_s=2)
    until(host.ended.exists, "its end")
    assert head.asked >= 1


@pytest.mark.slow
def test_it_does_not_end_at_once(host: Host, head: Head) -> None:
    head.close()
    host.start(head.port, limit_s=600)
    until(lambda: len(host.told("sleep")) > 5 or host.ended.exists(), "the fifth look")
    assert host.watcher()
    assert not host.ended.exists()


def test_it_ends_when_no_raylet_runs_here(host: Host, head: Head) -> None:
    host.start(head.port, limit_s=1, raylet="no-such-raylet")
    until(host.ended.exists, "its end")


def test_a_second_start_names_the_new_head_to_the_same_watcher(host: Host, head: Head) -> None:
    host.start(head.port, limit_s=600)
    first = host.watcher()
    (host.folder / "head").write_text("an old head")
    host.start(head.port, limit_s=600)
    assert (host.folder / "head").read_text() == "127.0.0.1\n"
    until(lambda: len(host.told("flock")) == 2, "the second watcher's try to get the lock")
    until(
        lambda: host.watcher() != first or len(host.watchers()) == 1,
        "the end of the second watcher",
    )
    assert host.told("flock") == ["0", "1"] and host.watcher() == first
    # it is in a session of its own: not ours, and not that of an SSH connection
    with pytest.raises(ChildProcessError):
        os.waitpid(first, os.WNOHANG)
    assert os.getsid(first) == first


@pytest.mark.e2e
def test_an_end_that_fails_is_tried_again(host: Host, head: Head) -> None:
    """As where a cloud refuses the deletion of the machine for a while."""
    tried, flaky = host.folder / "tried", host.folder / "flaky.sh"
    flaky.write_text(f"echo >>{tried}; [ $(wc -l <{tried}) = 3 ] && touch {host.ended}\n")
    head.close()
    host.start(head.port, limit_s=1, end=f"bash {flaky}")
    until(host.ended.exists, "its end, at the third try")
    until(lambda: host.watcher() == 0, "the end of the watcher")
    assert tried.read_text() == "\n" * 3


@pytest.mark.e2e
def test_a_scheduled_shutdown_is_called_off_where_a_shutdown_is_its_end(
    host: Host, head: Head
) -> None:
    """The machine's first boot schedules one, for a head that dies before it comes here."""
    asked = host.notes("sudo")
    host.start(head.port, limit_s=600)
    assert not asked.exists(), "of a host that does not end itself"
    os.killpg(host.watcher(), signal.SIGKILL)
    until(lambda: host.watcher() == 0, "the end of the watcher")
    head.close()
    host.start(head.port, limit_s=1, end="")
    until(lambda: asked.exists() and "shutdown -h now" in asked.read_text(), "its shutdown")
    assert asked.read_text().splitlines()[0] == "-n shutdown -c"


def test_a_shutdown_that_is_scheduled_after_the_start_is_called_off_too(
    host: Host, head: Head
) -> None:
    """Ray's SSH may come before the boot's last scripts."""
    scheduled, said = host.folder / "scheduled", host.notes("logger")
    asked = host.notes("sudo", f"rm -f {scheduled}")
    host.start(head.port, limit_s=600, end="")
    until(asked.exists, "what its start calls off")
    scheduled.write_text("USEC=1\nWARN_WALL=1\nMODE=poweroff\n")
    until(lambda: not scheduled.exists(), "its end")
    until(said.exists, "a word of it")
    assert asked.read_text() == "-n shutdown -c\n" * 2
    assert said.read_text() == (
        "-t elastic the shutdown that this machine's boot had scheduled is called off (USEC=1 "
        "WARN_WALL=1 MODE=poweroff )\n"
    )
    scheduled.write_text("USEC=1\nWARN_WALL=1\nMODE=reboot\n")
    looked = head.asked
    until(lambda: head.asked > looked + 2, "two more looks")
    assert scheduled.exists(), "somebody else's"


def test_a_shutdown_that_somebody_schedules_later_stands(host: Host, head: Head) -> None:
    """After the machine's boot, also when a new head is named."""
    scheduled = host.folder / "scheduled"
    asked = host.notes("sudo", f"rm -f {scheduled}")
    host.start(head.port, limit_s=600, end="", boot_s=0)
    until(asked.exists, "what its start calls off")
    scheduled.write_text("USEC=1\nMODE=poweroff\n")
    host.start(head.port, limit_s=600, end="", boot_s=0)
    until(lambda: len(host.told("flock")) == 2, "the second watcher's try to get the lock")
    looked = head.asked
    until(lambda: head.asked > looked + 2, "two more looks")
    assert scheduled.exists() and asked.read_text() == "-n shutdown -c\n"


@pytest.mark.slow
def test_a_shutdown_of_the_boot_is_called_off_when_the_head_answers(host: Host, head: Head) -> None:
    """Which may be after the time in which a boot schedules one."""
    scheduled, runs = host.folder / "scheduled", host.folder / "runs"
    asked = host.notes("sudo", f"rm -f {scheduled}")
    (host.folder / "bin" / "pgrep").write_text(f"#!/bin/bash\ntest -e {runs}\n")
    (host.folder / "bin" / "pgrep").chmod(0o755)
    host.start(head.port, limit_s=600, raylet="raylet", end="", boot_s=2)
    until(asked.exists, "what its start calls off")
    scheduled.write_text("USEC=1\nMODE=poweroff\n")
    begun_s, looked = time.monotonic(), head.asked
    until(
        lambda: time.monotonic() - begun_s > 3.5 and head.asked > looked + 2, "the end of that time"
    )
    assert scheduled.exists()
    runs.touch()
    until(lambda: not scheduled.exists(), "its end")
