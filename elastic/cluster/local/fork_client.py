"""What Ray starts in the place of a worker of the embedded cluster: it asks the fork server for one
and waits for its end.

`python -I -S fork_client.py SOCKET PYTHON words...`. Where the server says no, or is gone, it
becomes `PYTHON words...` itself. It ends with its parent, the raylet, and its fork with it: a fork
that is stopped could not see to that by itself. It runs once per worker, so it imports little; the
meaning of what it sends is in fork_server.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

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


def main() -> None:
    parent, (address, python, *words) = os.getppid(), sys.argv[1:]
    status = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(address)
            status = asked(connection, words, parent)
        except OSError:
            status = None
    if status is None:
        os.execv(python, [python, *words])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


if __name__ == "__main__":
    main()
