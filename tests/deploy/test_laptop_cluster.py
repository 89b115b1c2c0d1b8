"""deploy/laptop_cluster.sh: Ray's autoscaler starts a node of the pool that is asked for; nothing is left at the end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "laptop_cluster.sh"
FILE = ROOT / "cluster_configs" / "laptop.yaml"
ASK = """
import sys, time, ray
from ray.autoscaler.sdk import request_resources
from elastic.cluster.nodes import living, pool_of
from elastic.cluster_spec import load_cluster
ray.init(sys.argv[1], log_to_driver=False)
pools = load_cluster(sys.argv[2]).pools
request_resources(bundles=[{"CPU": 2}], bundle_label_selectors=[{"ray.io/market-type": "on-demand"}])
deadline = time.monotonic() + 120
while not (found := [node for node in living() if not node.head]):
    assert time.monotonic() < deadline
    time.sleep(0.1)
assert [pool_of(node, pools).name for node in found] == ["on-demand"], found
"""


def left(folder: Path) -> list[str]:
    """Processes of that cluster."""
    marker = f"ELASTIC_LAPTOP={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_a_node_comes_from_the_pool_that_is_asked_for_and_all_go(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    folder = Path("/tmp") / f"elastic-laptop-{os.getpid()}"  # Ray's sockets want a short path
    environment = os.environ | {
        "PORT": str(port), "FOLDER": str(folder), "RAY": str(Path(sys.executable).parent / "ray"), "HOME": str(tmp_path),
        "RAY_AUTH_MODE": "token",
    }  # fmt: skip
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        environment.pop(name, None)

    def script(word: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(SCRIPT), word]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    try:
        started = script("start")
        assert started.returncode == 0, started.stderr
        assert f"127.0.0.1:{port}" in started.stdout
        again = script("start")
        assert (again.returncode, again.stderr) == (1, f"it runs already, at 127.0.0.1:{port}; stop it first\n")
        asked = [sys.executable, "-c", ASK, f"127.0.0.1:{port}", str(FILE)]
        done = subprocess.run(asked, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert len(left(folder)) > 3
    finally:
        stopped = script("stop")
    assert stopped.returncode == 0
    assert left(folder) == []
    assert not folder.exists()
