"""What Ray starts in the place of a worker of the embedded cluster: it asks the fork server for one
and waits for its end.

A raylet runs it (RayParams.worker_path) with the words of Ray's own worker script; one of them
names the cluster's folder, in which the server listens. Where the server says no, or is gone, it
becomes that script itself. It ends with its parent, the raylet, and its fork with it: a fork that
is stopped could not see to that by itself. It runs once per worker, so it imports little; the
meaning of what it sends is in fork_server.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import socket
import sys

SOCKET = "fork-server"  # in the cluster's folder
LOOK_S = 1.0


def asked(connection: socket.socket, words: list[str], parent: int) -> int | None:
    """How the fork ended: its exit code, or minus a signal's number; None = there is none. Raises
    OSError."""
    said = {
        "pid": os.getpid(),
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }
    text = json.dumps(said).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(text)
    if connection.recv(2) != b"ok":
        return None
    while not select.select([connection], [], [], LOOK_S)[0]:
        if os.getppid() != parent:
            os._exit(1)
    ended = connection.recv(16)
    # the server is gone and says nothing of the fork, which may live
    return int(ended) if ended else 1


def stand_in(address: str, words: list[str]) -> None:
    """For a process of Python with these words, at the server at `address`; does not return."""
    parent, status = os.getppid(), None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(address)
            status = asked(connection, words, parent)
        except OSError:
            status = None
    if status is None:
        os.execv(sys.executable, [sys.executable, *words])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


def main() -> None:
    """Ray's folder, --temp-dir, is one in the cluster's."""
    (temporary,) = (word for word in sys.argv if word.startswith("--temp-dir="))
    folder = os.path.dirname(temporary.partition("=")[2])
    ray = importlib.util.find_spec("ray")
    assert ray is not None and ray.origin is not None
    script = os.path.join(os.path.dirname(ray.origin), "_private", "workers", "default_worker.py")
    stand_in(os.path.join(folder, SOCKET), [script, *sys.argv[1:]])


if __name__ == "__main__":
    main()
