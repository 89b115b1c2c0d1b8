"""Every private Ray name that this package uses, each with a compatibility test
(tests/cluster/ray/test_ray_private.py)."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD

from elastic.cluster.ray import no_agent

# Ray has no switch for its agents. Six nodes on two busy cores: 6 to 8 s, 2.4 s of CPU; with agents
# 17 s, 35 s or, in four of six starts, not within Ray's 30 s; 12 to 15 s of CPU, 900 MB.
AGENT_PORTS = {
    "--dashboard_agent_command": (
        "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"
    ),
    "--runtime_env_agent_command": ("runtime_env_agent_port",),
}  # fmt: skip


def draining_nodes() -> dict[str, float]:
    """Ray node id -> deadline in epoch seconds (0 = none) of nodes that the cluster is told to give
    up."""
    import ray._private.state

    deadlines = ray._private.state.state.get_draining_nodes()
    return {node: deadline_ms / 1000 for node, deadline_ms in deadlines.items()}


def drain(ray_id: str, deadline_s: float, why: str) -> bool:
    """Tells the cluster that the node will be preempted at `deadline_s` (epoch seconds); True =
    accepted."""
    return _drain(ray_id, "PREEMPTION", why, deadline_s=deadline_s)


def _drain(ray_id: str, reason: str, why: str, *, deadline_s: float) -> bool:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated import autoscaler_pb2

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    number = autoscaler_pb2.DrainNodeReason.Value(f"DRAIN_NODE_REASON_{reason}")  # type: ignore[attr-defined]
    accepted, _ = client.drain_node(ray_id, number, why, int(deadline_s * 1000))
    return bool(accepted)


def launcher_problem(data: Mapping[str, Any]) -> tuple[tuple[str | int, ...], str] | None:
    """What `ray up` itself finds wrong in a cluster file: place and text; None = nothing. It tells
    only the first."""
    import click
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    told = logging.getLogger("ray.autoscaler._private.util")
    was, told.disabled = told.disabled, True  # it speaks of keys that it added itself
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            validate_config(prepare_config(copy.deepcopy(dict(data))))
        json.dumps(data)  # as `ray up` does to keep it
    except jsonschema.ValidationError as error:
        return tuple(error.absolute_path), error.message
    except click.ClickException as error:
        return (), error.format_message()
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
        return (), f"{type(error).__name__}: {error}"
    finally:
        told.disabled = was
    return None


def mute_errors() -> None:
    """Ends the thread of ray.init that prints what went wrong in workers: the run's journal has it
    in words of its own."""
    from ray._private.worker import global_worker

    global_worker.threads_stopped.set()
    global_worker.gcs_error_subscriber.close()  # type: ignore[attr-defined]


def leave_agents_out() -> None:
    """Nodes that this process starts from now on have no dashboard, no metrics and no runtime
    environments: none of Ray's agents runs there (two processes, 3 s of CPU and 200 MB per node).
    For a cluster on one machine."""
    from ray._private import services

    services.start_ray_process = partial(_without_agents, services.start_ray_process)


def _without_agents(
    start: Callable[..., Any], command: Sequence[str], kind: str, **more: Any
) -> Any:
    """Ray's start_ray_process. `command`: of a raylet it names those of its agents."""
    if kind == PROCESS_TYPE_DASHBOARD:
        return start(["false"], kind, **more)
    said = dict(word.split("=", 1) for word in command if "=" in word)
    instead = [
        f"{name}={subprocess.list2cmdline(_no_agent(said, ports))}"
        for name, ports in AGENT_PORTS.items()
        if name in said
    ]
    kept = [word for word in command if word.partition("=")[0] not in AGENT_PORTS]
    return start([*kept, *instead], kind, **more)


def _no_agent(said: Mapping[str, str], ports: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-I", "-S", no_agent.__file__, said["--session_dir"], said["--node_id"],
        *ports,
    ]  # fmt: skip


def connect(address: str, namespace: str, host: str = "") -> None:
    """ray.init; to the node on `host`, an address of this machine that is not its outer one
    (`_node_ip_address`), where it is given."""
    own: dict[str, Any] = {"_node_ip_address": host} if host else {}
    with _own_sigterm():
        ray.init(
            address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR, **own
        )


def is_client() -> bool:
    """Has ray.init connected this process as a client (`ray://`), from outside the cluster?"""
    from ray.util.client import ray as client

    return bool(client.is_connected())


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """ray.init takes SIGTERM over, to exit with code 15: whoever listens to it here goes on doing
    so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = signal.getsignal(signal.SIGTERM)
    try:
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, mine)
    except SystemExit as error:
        if error.code == signal.SIGTERM:
            signal.raise_signal(signal.SIGTERM)
        raise


def read_environment_again() -> None:
    """Ray keeps what the environment first said of authentication, and whether there are other
    machines (where there are none, 127.0.0.1 is not replaced by the machine's outer address). To be
    called while no cluster is connected. The mode comes before the token: a thread of Ray that
    still ends must not look for a token that is gone."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    constants: Any = ray_constants
    others = constants.env_bool(
        constants.ENABLE_RAY_CLUSTERS_ENV_VAR, not constants.IS_WINDOWS_OR_OSX
    )
    constants.ENABLE_RAY_CLUSTER = others
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def become_train_worker(worker: Any) -> None:
    """From now on the functions of `ray.train` call the methods of `worker` in this process, which
    is none of Ray Train's."""
    from ray.train.v2._internal.execution.train_fn_utils import set_train_fn_utils

    set_train_fn_utils(worker)


def train_context(run_uri: str, ranks: Mapping[str, int]) -> Any:
    """What `ray.train.get_context()` is to give in such a process. `ranks`: world_rank, world_size,
    local_rank, local_world_size, node_rank."""
    from ray.train.v2.api.context import LocalTrainContext

    folder, _, name = run_uri.rpartition("/")

    class RunOfScript(LocalTrainContext):
        def get_storage(self) -> Any:
            from ray.train.v2._internal.execution.storage import StorageContext

            if "://" in run_uri:
                raise RuntimeError(
                    "ray.train.get_context().get_storage() is there for a script that is restarted "
                    f"where the run lies in a folder; this one is {run_uri}"
                )
            return StorageContext(folder, name, read_only=True)

    return RunOfScript(name, **ranks)


# ----------------------------------------------------------------------------------- the autoscaler


@dataclass(frozen=True)
class Scaling:
    """What the autoscaler (v2) told the head last, by node type. `coming`: instances that exist and
    have not joined. `asked`: launches without an instance yet. `failed`: launches that failed,
    since the autoscaler started. `infeasible`: the sum of what was requested cannot be had, and
    then nothing of it is; bundles by their (resources, labels)."""

    coming: Counter[str]
    asked: Counter[str]
    failed: Counter[str]
    infeasible: Counter[tuple[frozenset[tuple[str, float]], frozenset[tuple[str, str]]]]


def autoscaler_v2() -> bool:
    """Does the cluster that this process is connected to have version 2 of the autoscaler, even one
    that only looks on?"""
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    return bool(is_autoscaler_v2(fetch_from_server=True))


def scaling() -> Scaling:
    """Raises RuntimeError (ray.exceptions.RpcError is one) when the head does not answer."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated import autoscaler_pb2

    reply = autoscaler_pb2.GetClusterStatusReply()  # type: ignore[attr-defined]
    reply.ParseFromString(
        GcsClient(address=ray.get_runtime_context().gcs_address).get_cluster_status()
    )
    state = reply.autoscaling_state
    infeasible: Counter[Any] = Counter()
    for constraint in state.infeasible_cluster_resource_constraints:
        for entry in constraint.resource_requests:
            labels = {
                c.label_key: c.label_values[0]
                for s in entry.request.label_selectors
                for c in s.label_constraints
            }
            key = (frozenset(entry.request.resources_bundle.items()), frozenset(labels.items()))
            infeasible[key] += entry.count
    asked, failed = Counter[str](), Counter[str]()
    for request in state.pending_instance_requests:
        asked[request.ray_node_type_name] += request.count
    for failure in state.failed_instance_requests:
        failed[failure.ray_node_type_name] += failure.count
    return Scaling(
        Counter(i.ray_node_type_name for i in state.pending_instances), asked, failed, infeasible
    )


def end_when_idle(ray_id: str, why: str) -> bool:
    """Ends a node that nobody uses, as the autoscaler does with one that was idle for long; it then
    ends the machine. False: it is in use still."""
    return _drain(ray_id, "IDLE_TERMINATION", why, deadline_s=0.0)
