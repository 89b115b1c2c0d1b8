"""Every private Ray name that this package uses, each with a compatibility test (tests/cluster/test_ray_private.py)."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from pathlib import Path

import ray

_LEAN_PYTHON = """#!/bin/sh
for word in "$@"; do case "$word" in
--node-id=*) node=${word#*=} ;;
--session-dir=*) session=${word#*=} ;;
*/ray/dashboard/dashboard.py) exit 1 ;;
*/ray/dashboard/agent.py) names="metrics_agent_port metrics_export_port dashboard_agent_listen_port" ;;
*/ray/_private/runtime_env/agent/main.py) names=runtime_env_agent_port ;;
esac; done
test -n "$names" || exec @PYTHON@ "$@"
for name in $names; do
  printf %s -1 >"$session/.$name.$$" && mv "$session/.$name.$$" "$session/${name}_$node"
done
exec sleep infinity
"""


def draining_nodes() -> dict[str, float]:
    """Ray node id -> deadline in epoch seconds (0 = none) of nodes that the cluster is told to give up."""
    import ray._private.state

    deadlines = ray._private.state.state.get_draining_nodes()
    return {node: deadline_ms / 1000 for node, deadline_ms in deadlines.items()}


def drain(ray_id: str, deadline_s: float, why: str) -> bool:
    """Tells the cluster that the node will be preempted at `deadline_s` (epoch seconds); True = accepted."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated import autoscaler_pb2

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # type: ignore[attr-defined]
    accepted, _ = client.drain_node(ray_id, reason, why, int(deadline_s * 1000))
    return bool(accepted)


def mute_errors() -> None:
    """Ends the thread of ray.init that prints what went wrong in workers: the run's journal has it in words of its own."""
    from ray._private.worker import global_worker

    global_worker.threads_stopped.set()
    global_worker.gcs_error_subscriber.close()  # type: ignore[attr-defined]


def lean_python(folder: str) -> str:
    """A Python for a cluster on one machine that needs no dashboard, no metrics and no runtime environments.

    It naps where Ray starts its agents (two processes, 3 s of CPU and 200 MB per node; a raylet ends itself when they are not
    up within 15 s), after saying as they would that they offer nothing (port -1). Where Ray names them otherwise they just run.
    """
    script = Path(folder, "python")
    script.write_text(_LEAN_PYTHON.replace("@PYTHON@", shlex.quote(sys.executable)))
    script.chmod(0o755)
    return str(script) if os.access(script, os.X_OK) else sys.executable


def connect(address: str, namespace: str, host: str) -> None:
    """ray.init to the node on `host`, an address of this machine that is not its outer one (`_node_ip_address`)."""
    ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR, _node_ip_address=host)
