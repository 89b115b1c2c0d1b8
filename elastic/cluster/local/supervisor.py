"""The supervisor of the embedded cluster: ends every process of it when the driver ends, however
that comes about.

`python -m elastic.cluster.local.supervisor` starts `elastic.cluster.local.local_cluster` and adopts
whatever that leaves behind. It imports no ray and does nothing but wait: for end of file on its
input (the driver has closed it or is gone), for a new parent (the driver was killed), for SIGTERM,
or for the end of the cluster process. Then it kills all processes below it and removes their
folder. The cluster process does the same when the keeper itself is killed. It stands in a session
of its own: Ctrl-C does not reach it. (Not PR_SET_PDEATHSIG: that fires when the *thread* that
started the process ends.)
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile

from elastic.cluster.local import cluster_token
from elastic.cluster.ray import processes

LOOK_S = 0.1
SOCKET_PATH_MOST = 40  # bytes of the folder's name: paths of sockets below it must stay under 108


def main() -> None:
    parent = os.getppid()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.adopt_orphans()
    folder = new_folder()
    cluster_token.write(folder)
    module = "elastic.cluster.local.local_cluster"
    cluster = subprocess.Popen(
        [sys.executable, "-P", "-m", module, folder, str(os.getpid())],
        env={**os.environ, **cluster_token.environment(folder)},
    )
    try:
        wait(cluster.pid, parent, asked)
    finally:
        processes.end_tree(os.getpid(), with_root=False)
        shutil.rmtree(folder, ignore_errors=True)


def new_folder() -> str:
    """A folder for sockets and logs with a name short enough for sockets."""
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(
        prefix="elastic-", dir=base if len(base) <= SOCKET_PATH_MOST - 17 else "/tmp"
    )


def wait(cluster: int, parent: int, asked: list[int]) -> None:
    """Returns when the cluster is to go."""
    poll = select.poll()
    poll.register(0, 0)  # only hang-ups: the cluster process reads the orders
    while not asked and os.getppid() == parent and not poll.poll(LOOK_S * 1000):
        if cluster in processes.reap():
            return


if __name__ == "__main__":
    main()
