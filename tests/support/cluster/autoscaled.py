"""A cluster that the real autoscaler runs, in namespaces of its own, and scenes on it. `python
autoscaled.py FOLDER`: inside.

It reads names of scenes from its input, a line each, and answers each by a JSON line: {"scene",
"error", "told"}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from support.places import IMPORTS

PORT = 6379
HEAD_ID = "f" * 51 + "00000"  # as the fake provider calls it
INSIDE = """
ip link set lo up && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"
"""
SETTINGS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}


def not_allowed() -> str:
    """Why there can be no namespaces here; '' = there can."""
    try:
        done = subprocess.run(
            [*NAMESPACES, "ip", "link", "set", "lo", "up"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"namespaces: {error}"
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else ""


NAMESPACES = [
    "unshare",
    "--net",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount",
    "--mount-proc",
    "--ipc",
]


class Inside:
    """From outside: a script in namespaces of its own, and `play` for a scene. `setup`: shell lines
    before it. `failed`: the scene that did."""

    def __init__(
        self, script: str, folder: Path, environment: Mapping[str, str], setup: str = INSIDE
    ) -> None:
        self.log, self.failed = folder / "inside.log", ""
        own = {**environment, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": IMPORTS}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*NAMESPACES, "sh", "-c", setup, "sh", sys.executable, script, str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=own,
            )  # fmt: skip

    def play(self, scene: str) -> Any:
        """What the scene returned."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(scene + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the cluster ended: {self.log.read_text()[-3000:]}"
        answer = json.loads(line)
        self.failed = scene if answer["error"] else ""
        assert not answer["error"], answer["error"]
        return answer["told"]

    def close(self) -> None:
        with self.process:
            self.process.kill()  # and with the namespace's first process all in it


class Autoscaled(Inside):
    """The cluster that this file starts."""

    def __init__(self, folder: Path) -> None:
        own = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        super().__init__(__file__, folder, {**os.environ, **own})


# ------------------------------------------------------------------------------------------ inside


def kind(market: str, name: str) -> dict[str, Any]:
    return {
        "resources": {"CPU": 2, "object_store_memory": 80 << 20}, "node_config": {},
        "min_workers": 0, "max_workers": 3, "labels": {"ray.io/market-type": market,
        "ray.io/node-group": name},
    }  # fmt: skip


def configuration(folder: Path) -> dict[str, Any]:
    """No idle node ends by itself in the time of a test."""
    provider = {
        "type": "external", "module": "support.cluster.scarce_provider.ScarceProvider",
        "folder": str(folder), "head_node_id": HEAD_ID,
        "gcs_address": f"127.0.0.1:{PORT}", "launch_multiple": True, "use_node_id_as_ip": True,
        "disable_node_updaters": True, "disable_launch_config_check": True,
    }  # fmt: skip
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    lists = ["initialization_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter"]
    lists += [f"{who}setup_commands" for who in ("", "head_", "worker_")]
    lists += [f"{who}_start_ray_commands" for who in ("head", "worker")]
    return {
        "cluster_name": "scarce", "max_workers": 5, "provider": provider,
        "idle_timeout_minutes": 60, "upscaling_speed": 100,
        "available_node_types": {"spot": kind("spot", "spot"), "safe": kind("on-demand", "safe"),
        "ray.head.default": head}, "head_node_type": "ray.head.default",
        "file_mounts_sync_continuously": False, **{name: {} for name in ("auth", "docker",
        "file_mounts")}, **{name: [] for name in lists},
    }  # fmt: skip


def start_head(folder: Path) -> None:
    path = folder / "cluster.json"
    path.write_text(json.dumps(configuration(folder)))
    words = [
        "start", "--head", f"--port={PORT}", "--node-ip-address=127.0.0.1",
        f"--autoscaling-config={path}", "--num-cpus=0", "--num-gpus=0",
        "--object-store-memory=80000000", "--include-dashboard=False", "--disable-usage-stats",
        f"--system-config={json.dumps(SETTINGS, separators=(',', ':'))}",
    ]  # fmt: skip
    text = (
        f"import sys; sys.argv = ['ray', *{words!r}]\n"
        "from elastic.cluster.ray._ray_private import leave_agents_out; leave_agents_out()\n"
        "from ray.scripts.scripts import main; main()"
    )
    own = {
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    }
    own["RAY_NODE_TYPE_NAME"] = "ray.head.default"
    subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, **own}, check=True, stdout=sys.stderr
    )


def main(folder: Path) -> None:
    import ray
    from support.cluster.scenes import SCENES, Stagehand

    answers, began = own_output(), time.monotonic()
    start_head(folder)
    ray.init(f"127.0.0.1:{PORT}", namespace="tests", log_to_driver=False)
    print(f"head up after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    hand = Stagehand(folder)
    answer_scenes(answers, lambda name: SCENES[name](hand), hand.state)


def own_output() -> TextIO:
    """For answers alone; all else that is printed goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer_scenes(answers: TextIO, play: Callable[[str], Any], state: Callable[[], str]) -> None:
    """Plays what is asked for, one after the other. `state`: for a person, where one has failed."""
    for line in sys.stdin:
        name, began, error, told = line.strip(), time.monotonic(), "", None
        try:
            told = play(name)
        except Exception:  # noqa: BLE001 - told to the test
            error = traceback.format_exc() + state()
        print(f"{name}: {time.monotonic() - began:.1f} s {error}", file=sys.stderr, flush=True)
        print(json.dumps({"scene": name, "error": error, "told": told}), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
