"""Workers of the embedded cluster as forks of one process that has imported torch and elastic
already.

Four workers on one machine would import the same for 4 s of CPU each, on cores that others train
on; and a worker that is replaced would take that long to come. `python -m
elastic.cluster.local.fork_server FOLDER` imports once, then forks when asked (by fork_client.py,
which Ray starts in the place of a worker): the fork takes over the client's arguments, environment,
working folder and open files, and becomes a Ray worker as any other. It imports no ray: Ray reads
its environment when it is loaded.

The client waits for the end of its fork and ends with its status; a client that is killed takes its
fork along. Where a fork would not be safe (there are threads, or GPUs) the client hears "no", and
starts Python by itself.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.cluster.local.fork_client import SOCKET
from elastic.cluster.ray import processes
from elastic.worker.process.environment import die_with_parent, settle

log = logging.getLogger(__name__)

# in the cluster's folder: a file per client, with the pid of its fork, and behind the pid of a fork
# that a signal has ended the signal's number
FORKS, SIGNAL = "forks", ".signal"
PRELOADED = ("elastic.worker.session.session", "elastic.worker.program.job_program")
REQUEST_MOST = 1 << 20
N_FILES = 3  # standard input, output and error go over


@dataclass(frozen=True)
class ForkRequest:
    """What a client hands over."""

    pid: int
    words: list[str]
    environment: dict[str, str]
    folder: str
    files: tuple[int, ...]


def forks_of(folder: str, clients: list[int]) -> list[int]:
    """Processes that were forked for these clients."""
    found = []
    for client in clients:
        with suppress(OSError, ValueError):
            found.append(int(Path(folder, FORKS, str(client)).read_text()))
    return found


def is_fork(folder: str, pid: int) -> bool:
    """Of this server, whose end it has not seen yet."""
    clients = (file for file in Path(folder, FORKS).glob("*") if file.suffix != SIGNAL)
    return pid in forks_of(folder, [int(file.name) for file in clients])


def killed_by(folder: str, pid: int) -> int:
    """The number of the signal that has ended the fork; 0 = none has, as far as is known."""
    try:
        return int(Path(folder, FORKS, f"{pid}{SIGNAL}").read_text() or 0)
    except OSError:
        return 0


class _Server:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        Path(folder, FORKS).mkdir()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(f"{folder}/{SOCKET}")
        self.listener.listen(64)
        # fork -> its client's connection and pid
        self.clients: dict[int, tuple[socket.socket, int]] = {}

    def serve(self) -> None:
        """Until it is killed."""
        ended, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while True:
            connections = (connection for connection, _ in self.clients.values())
            watched: list[Any] = [self.listener, ended, *connections]
            ready, _, _ = select.select(watched, [], [])
            if ended in ready:
                os.read(ended, 4096)
                self._reap()
            for fork, (connection, _) in list(self.clients.items()):
                if connection in ready:  # a client says nothing more: it is gone
                    processes.send([fork])
            if self.listener in ready:
                self._accept(self.listener.accept()[0])

    def _accept(self, connection: socket.socket) -> None:
        try:
            request = _received(connection)
        except (OSError, ValueError, KeyError) as error:
            log.warning("not understood, so not forked: %s", error)
            connection.close()
            return
        if len(os.listdir("/proc/self/task")) > 1:
            _close(request.files)
            _say(connection, b"no")
            connection.close()
            return
        fork = os.fork()
        if fork == 0:
            self._become(request, connection)
        _close(request.files)
        Path(self.folder, FORKS, f"{fork}{SIGNAL}").unlink(missing_ok=True)  # of an older one
        Path(self.folder, FORKS, str(request.pid)).write_text(str(fork))
        self.clients[fork] = (connection, request.pid)
        _say(connection, b"ok")

    def _reap(self) -> None:
        while True:
            try:
                fork, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not fork:
                return
            connection, client = self.clients.pop(fork)
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                with suppress(OSError):  # a full disk
                    Path(self.folder, FORKS, f"{fork}{SIGNAL}").write_text(str(-code))
            Path(self.folder, FORKS, str(client)).unlink(missing_ok=True)
            _say(connection, str(code).encode())
            connection.close()

    def _become(self, request: ForkRequest, connection: socket.socket) -> None:
        """In the fork: from here on it is the program that the client was to be."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.listener.close()
        connection.close()
        for other, _ in self.clients.values():
            other.close()
        for number, file in enumerate(request.files):
            os.dup2(file, number)
        _close(request.files)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        sys.argv = request.words
        gc.enable()
        status = 0
        try:
            runpy.run_path(request.words[0], run_name="__main__")
        except SystemExit as leave:
            status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        except BaseException:  # noqa: BLE001 - where a program ends
            sys.excepthook(*sys.exc_info())
            status = 1
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(status)


def _received(connection: socket.socket) -> ForkRequest:
    """Raises OSError, ValueError or KeyError where it is none."""
    head, files, _, _ = socket.recv_fds(connection, 8, N_FILES)
    n_bytes = int.from_bytes(head, "little")
    try:
        if len(head) != 8 or len(files) != N_FILES or n_bytes > REQUEST_MOST:
            raise ValueError(f"a request of {n_bytes} bytes with {len(files)} files")
        text = b""
        while len(text) < n_bytes:
            part = connection.recv(n_bytes - len(text))
            if not part:
                raise ValueError(f"a request that ends after {len(text)} of {n_bytes} bytes")
            text += part
        said: dict[str, Any] = json.loads(text)
        return ForkRequest(
            said["pid"], said["words"], said["environment"], said["folder"], tuple(files)
        )
    except Exception:
        _close(tuple(files))
        raise


def _say(connection: socket.socket, what: bytes) -> None:
    """To a client that may have been killed meanwhile: the others still need this server."""
    try:
        connection.sendall(what)
    except OSError as error:
        log.debug("a client did not wait for %r: %s", what, error)


def _close(files: tuple[int, ...]) -> None:
    for file in files:
        os.close(file)


def main(folder: str, parent: int) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != parent:
        return
    server = _Server(folder)  # who asks from now on waits until all is imported
    settle()
    gc.disable()
    for module in PRELOADED:
        __import__(module)
    gc.freeze()  # what all forks share is never looked at again, and so never copied
    server.serve()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
