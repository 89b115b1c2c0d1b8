"""What Ray Train's elastic TorchTrainer needs when a node is killed, announced to leave, or added:
for comparison.

The same model on the same kind of nodes as recovery.py: real raylets on this machine, one worker
each, plus a head. Ray Train and Ray with their defaults. Each cause is a run of its own, in a
process of its own; nothing of it is left afterwards.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray_train_figures
import report
from ray_train_figures import WORLDS
from trial import LEFT_OUT, LOOK_S, ROOT, Clock, Failed, Tree

from elastic.cluster.local.cluster_token import ON_THIS_MACHINE
from elastic.cluster.ray import processes

MOST_S = 240.0  # of one cause; 100 to 150 on a machine with nothing else to do
END_S = 15.0  # beyond that, for the process to take its run down
NEEDED = ("pandas", "pyarrow")  # ray.train does not start without them
SCRIPT = Path(__file__).resolve()
SMOKE = "growth"  # a kill and a notice take a minute: Ray Train's own start timeout


def measure(clock: Clock, smoke: bool = False) -> dict[str, Any]:
    """All causes (in the smoke size SMOKE alone), one after another. One that could not be measured
    has no figures: `ray_train_failed` says why."""
    found: dict[str, Any] = {"ray_train_failed": {}, "ray_train_load": {}}
    for cause in [SMOKE] if smoke else WORLDS:
        try:
            figures = _measured(cause, clock, smoke)
        except Failed as error:
            found["ray_train_failed"][cause] = str(error)
            continue
        found["ray_train_load"][cause] = figures.pop("load")
        found |= {name: value for name, value in figures.items() if name.startswith("ray_train_")}
    return found


def _measured(cause: str, clock: Clock, smoke: bool) -> dict[str, Any]:
    """This script in a process of its own. Raises Failed."""
    clock.look(f"Ray Train, {cause}")
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise Failed(f"Ray Train needs {', '.join(missing)}: pip install -c constraints.txt -e .")
    with (
        tempfile.TemporaryDirectory(prefix="el-peer-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile("w+") as log,
    ):
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--cause", cause, "--json",
            *(["--smoke"] if smoke else [])], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, "TMPDIR": folder},
        )  # fmt: skip
        tree, own = Tree(process.pid), Clock(MOST_S + END_S)
        try:
            while process.poll() is None:
                tree.look()
                for bound in (clock, own):
                    bound.look(f"Ray Train, {cause}")
                clock.loads.append(round(os.getloadavg()[0], 2))
                time.sleep(LOOK_S)
        finally:
            process.kill()
            process.wait()
            left = tree.gone(2.0)
        log.seek(0)
        text = log.read()
    if process.returncode:
        raise Failed(f"Ray Train, {cause}: {text[-1000:].strip()}")
    if left:
        raise Failed(f"Ray Train, {cause}: {len(left)} processes did not end: {left}")
    figures: dict[str, Any] = json.loads(text.strip().splitlines()[-1])["figures"]
    return figures


def run(cause: str, clock: Clock, smoke: bool) -> dict[str, Any]:
    """One cause, here: this process starts the cluster, and its end is the end of everything."""
    for name in LEFT_OUT:
        os.environ.pop(name, None)
    os.environ |= {**ON_THIS_MACHINE, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    known = [
        str(ROOT),
        str(SCRIPT.parent),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(known))  # what the workers import from
    processes.adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="el-rt-"))
    # before Ray is imported: other clusters here are not seen
    os.environ["RAY_TMPDIR"] = str(folder)
    try:
        from ray_train_peer import Peer
        from ray_train_peer import run as run_peer

        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("ended by a signal"))
        length = ray_train_figures.SMOKE if smoke else ray_train_figures.WHOLE
        return ray_train_figures.figures(cause, run_peer(Peer(folder, clock), cause, length))
    finally:
        processes.end_tree(os.getpid(), with_root=False)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--cause", choices=sorted(WORLDS), required=True, help="what happens to a node"
    )
    parser.add_argument(
        "--most-s", type=float, default=MOST_S, help=f"bound of the whole (default {MOST_S:.0f})"
    )
    given = parser.parse_args()

    def measured(clock: Clock) -> dict[str, Any]:
        found = run(given.cause, clock, given.smoke)
        if left := processes.descendants(os.getpid()):
            raise Failed(f"{len(left)} processes are left: {left}")
        return found

    return report.finish("ray_train", given, measured)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # Ray's own clean-up at the exit of a process has nothing left to end
