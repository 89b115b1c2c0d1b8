"""What a cluster file should be, beyond what Ray itself asks: each rule gives Problems. Pure: no
network, no credentials.

A problem that costs money or safety without anyone seeing it is an error; what may be meant so is a
warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from elastic import catalog
from elastic.config.clusters import aws_rules, azure_rules, gcp_rules, kuberay_rules
from elastic.config.clusters.cluster_file import (
    CLOUDS,
    MARKETS,
    ClusterNodeType,
    ClusterSpec,
    Place,
    Problem,
)
from elastic.config.clusters.elastic_section import PLACE
from elastic.config.strict_model import listed, mapping
from elastic.text import n_of
from elastic.types.nouns import ACCELERATOR_LABEL, MARKET_LABEL, REGION_LABEL, ZONE_LABEL

Rule = Callable[[ClusterSpec], Iterator[Problem]]
# Syntax of Kubernetes, which Ray's labels follow (ray/_private/label_utils.py).
_WORD = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL_KEY = re.compile(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_WORD}")
_LABEL_VALUE = re.compile(rf"({_WORD})?")
_OBJECT_STORE = re.compile(r"--object-store-memory[= ](\d+)")
PLACEHOLDER = "REPLACE"  # in the files of this repository: what only the user knows
END_SCRIPT = "end_without_head"  # deploy/end_without_head.sh
SCHEDULED = re.compile(r"\bshutdown\s+(-\S+\s+)*\+?\d")


def problems_of(spec: ClusterSpec) -> list[Problem]:
    """All that is wrong in the file, errors and warnings together."""
    rules: list[Rule] = [_head, _labels, _hardware, _markets, _floor, _prices, _placeholders]
    if spec.provider == "kubernetes":
        rules += [*kuberay_rules.RULES]
    else:
        rules += [_commands, _object_store, _orphans, _own_hosts]
    rules += {"aws": aws_rules.RULES, "gcp": gcp_rules.RULES, "azure": azure_rules.RULES}.get(
        spec.provider, ()
    )
    return [problem for rule in rules for problem in rule(spec)]


def _head(spec: ClusterSpec) -> Iterator[Problem]:
    head = spec.head
    if head is None:
        return
    if head.market_type == "spot":
        what = "the head is a spot node: its reclaim ends the whole cluster"
        yield head.problem(what=what, right="make it on-demand")
    known = catalog.instance_type(head.instance_type)
    if spec.provider in ("aws", "gcp", "azure") and (
        head.resources.get("GPU") or (known and known.gpus)
    ):
        what = "the head has GPUs, which are paid also while no one trains"
        yield head.problem(what=what, right="take a type without GPUs", warning=True)
    if head.max_nodes:
        what = f"the head's node type may have {n_of(head.max_nodes, 'worker')}"
        yield head.problem(what=what, right="say max_workers: 0 in its node type", warning=True)


def _labels(spec: ClusterSpec) -> Iterator[Problem]:
    if spec.provider == "local":  # its labels stand in the start commands
        yield from _local_labels(spec)
        return
    signs = "letters, digits, '-', '_' and '.', at most 63, a letter or digit first and last"
    for node_type in spec.node_types:
        for key, value in node_type.labels.items():
            if not _LABEL_KEY.fullmatch(key):
                what = f"'{key}' is no label: Ray refuses the node"
                right = f"the name after an optional prefix/: {signs}"
                yield node_type.problem("labels", key, what=what, right=right)
            if not _LABEL_VALUE.fullmatch(value):
                what = f"'{value}' is no value of a label: Ray refuses the node"
                yield node_type.problem("labels", key, what=what, right=signs)
    for worker in spec.workers:
        for key, right in _wanted(spec, worker):
            if key not in worker.labels:
                yield worker.problem("labels", what=f"the label {key} is missing", right=right)


def _wanted(spec: ClusterSpec, worker: ClusterNodeType) -> Iterator[tuple[str, str]]:
    """Labels that a worker type needs, with what would be right."""
    here = f"; here {worker.bought_as}" if worker.bought_as else ""
    yield MARKET_LABEL, f"one of {', '.join(MARKETS)}{here}"
    known = catalog.instance_type(worker.instance_type)
    if worker.resources.get("GPU") or (known and known.gpus):
        right = f"here {known.gpu}" if known else "as Ray names the GPU: A100, H100 ..."
        yield ACCELERATOR_LABEL, right
    if spec.provider in ("aws", "gcp", "azure"):
        right = "the zone in which all nodes of this type are; one node type for each zone"
        yield REGION_LABEL, f"here {spec.region}"
        yield ZONE_LABEL, right


def _local_labels(spec: ClusterSpec) -> Iterator[Problem]:
    text = " ".join(
        _command_list(spec.data, "worker_start_ray_commands")
        + _command_list(spec.data, "head_start_ray_commands")
    )
    for key in ("elastic-pool", MARKET_LABEL):
        if f"{key}=" not in text:
            name = next((pool.name for pool in spec.pools), "NAME")
            right = f"ray start ... --labels=elastic-pool={name},{MARKET_LABEL}=owned"
            yield Problem(("worker_start_ray_commands",), f"the nodes get no label {key}", right)


def _hardware(spec: ClusterSpec) -> Iterator[Problem]:
    """GPUs, kind and CPUs against the catalog."""
    for node_type in spec.node_types:
        known = catalog.instance_type(node_type.instance_type)
        if known is None:
            continue
        name, gpus = node_type.instance_type, node_type.resources.get("GPU")
        right = f"GPU: {known.gpus}"
        if gpus is not None and int(gpus) != known.gpus:
            what = f"GPU: {gpus:g}, but a {name} has {known.gpus}"
            yield node_type.problem("resources", "GPU", what=what, right=right)
        if gpus is None and known.gpus and spec.provider == "gcp":
            what = f"the {known.gpus} GPUs of a {name} are not named, Ray cannot know them"
            yield node_type.problem("resources", what=what, right=right)
        if node_type.resources.get("CPU", 0) > known.vcpus:
            what, right = f"a {name} has {known.vcpus} vCPUs", f"CPU: {known.vcpus} or less"
            yield node_type.problem("resources", "CPU", what=what, right=right)
        kind = node_type.labels.get(ACCELERATOR_LABEL)
        if kind is not None and known.gpu and kind != known.gpu:
            what = f"{kind}, but a {name} has {known.gpu}"
            yield node_type.problem("labels", ACCELERATOR_LABEL, what=what, right=known.gpu)


def _markets(spec: ClusterSpec) -> Iterator[Problem]:
    ends = {pool.name: pool.ends_at_s for pool in spec.pools}
    for worker in spec.workers:
        market = worker.labels.get(MARKET_LABEL)
        if worker.bought_as is not None and market in MARKETS and market != worker.bought_as:
            what = f"labeled {market}, but its node_config asks for {worker.bought_as} nodes"
            right = f"label it {worker.bought_as}, or ask for {market} nodes in node_config"
            yield worker.problem("labels", MARKET_LABEL, what=what, right=right)
        region = worker.labels.get(REGION_LABEL)
        if region and spec.region and region != spec.region:
            what = f"labeled {region}, but the cluster is in {spec.region}"
            yield worker.problem("labels", REGION_LABEL, what=what, right=spec.region)
        if worker.market_type == "reserved" and worker.name in ends and ends[worker.name] is None:
            what = "the end of the reservation is not known"
            right = f'say metadata.elastic.pools.{worker.name}.ends_at: "2026-12-01T11:30:00Z"'
            yield worker.problem(what=what, right=right, warning=True)


def _floor(spec: ClusterSpec) -> Iterator[Problem]:
    steady = [pool for pool in spec.pools if pool.market_type != "spot"]
    most = sum(pool.max_nodes for pool in steady)
    if spec.on_demand_floor > most:
        have = (
            f"{' + '.join(pool.name for pool in steady)} give {most}"
            if steady
            else "there is no on-demand pool"
        )
        right = (
            "add a node type that is labeled on-demand (max_workers at least the floor), or lower "
            "the floor"
        )
        what = f"a floor of {spec.on_demand_floor} is asked, but {have}"
        yield Problem((*PLACE, "on_demand_floor"), what, right)


def _prices(spec: ClusterSpec) -> Iterator[Problem]:
    for pool in spec.pools:
        if pool.market_type != "owned" and spec.prices_of.get(pool.name) == "not known":
            if spec.provider == "kubernetes":
                right = "annotate its pod template with elastic/usd-per-node-h"
            else:
                right = f"say metadata.elastic.pools.{pool.name}.usd_per_node_h"
            what = "the catalog has no price of its nodes: budgets would count them as free"
            worker = next(worker for worker in spec.workers if worker.name == pool.name)
            yield worker.problem(what=what, right=right, warning=True)


def _placeholders(spec: ClusterSpec) -> Iterator[Problem]:
    found = list(_saying(PLACEHOLDER, spec.data, ()))
    if found:
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        what = f"'{found[0][1]}'{others}: placeholders"
        yield Problem(found[0][0], what, f"put in your own where the file says {PLACEHOLDER}", True)


def _saying(word: str, value: Any, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(value, str) and word in value:
        yield place, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _saying(word, inner, (*place, str(key)))
    elif isinstance(value, list):
        for n, inner in enumerate(value):
            yield from _saying(word, inner, (*place, n))


def _commands(spec: ClusterSpec) -> Iterator[Problem]:
    """How Ray is started."""
    shared = spec.provider != "external" and len(spec.pools) > 0
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [command for command in _command_list(spec.data, key) if "ray start" in command]
        if not starts:
            if spec.provider in CLOUDS or spec.data.get(key):
                what = "no command starts Ray as this package needs it"
                yield Problem((key,), what, "ray start ... with RAY_AUTH_MODE=token")
            continue
        text = " ".join(starts)
        if shared and "RAY_AUTH_MODE=token" not in text:
            right = (
                "RAY_AUTH_MODE=token ray start ..., and ~/.ray/auth_token in file_mounts (`ray "
                "get-auth-token --generate`)"
            )
            what = "Ray runs the code of whoever reaches its ports: no token is asked for"
            yield Problem((key,), what, right)
        if "RAY_USAGE_STATS_ENABLED=0" not in text:
            right = "RAY_USAGE_STATS_ENABLED=0 ray start ..."
            yield Problem((key,), "Ray reports usage statistics", right, True)
        if "0.0.0.0" in text:
            right = (
                "--dashboard-host=127.0.0.1; `ray dashboard FILE` and `ray attach` forward its port"
            )
            yield Problem((key,), "a port is bound to all interfaces (0.0.0.0)", right, True)
    head = " ".join(_command_list(spec.data, "head_start_ray_commands"))
    if head and spec.provider in CLOUDS and "--autoscaling-config" not in head:
        what = "the head starts no autoscaler: no worker would ever come"
        right = "--autoscaling-config=~/ray_bootstrap_config.yaml"
        yield Problem(("head_start_ray_commands",), what, right)
    mounts = spec.data.get("file_mounts")
    if shared and "RAY_AUTH_MODE=token" in head and "auth_token" not in str(mounts):
        right = 'file_mounts: {"~/.ray/auth_token": "~/.ray/auth_token"}'
        yield Problem(("file_mounts",), "nothing brings the token to the nodes", right, True)


def _object_store(spec: ClusterSpec) -> Iterator[Problem]:
    """Above half of a host's memory /dev/shm is too small for it, and Ray falls back to a disk."""
    sizes = [pool.host_memory_bytes for pool in spec.pools if pool.host_memory_bytes]
    found = _OBJECT_STORE.findall(" ".join(_command_list(spec.data, "worker_start_ray_commands")))
    if sizes and found and int(found[0]) > min(sizes) / 2:
        what = (
            f"an object store of {int(found[0]) / 1e9:.0f} GB is more than half of the smallest "
            "node's memory"
        )
        right = f"at most {min(sizes) / 2e9:.0f} GB; this package itself needs 1 GB of it"
        yield Problem(("worker_start_ray_commands",), what, right)


def _orphans(spec: ClusterSpec) -> Iterator[Problem]:
    """Nodes that cost money after their cluster is gone."""
    if spec.provider not in CLOUDS:
        return
    key = "worker_start_ray_commands"
    commands = " ".join(_command_list(spec.data, key))
    if END_SCRIPT not in commands:
        what = "workers outlive a head that is gone, and are paid"
        right = f"start {END_SCRIPT}.sh in {key}: it is installed beside `elastic`"
        yield Problem((key,), what, right, True)
    by_script = END_SCRIPT in commands and not azure_rules.OWN_END.search(commands)
    if not by_script and "shutdown -c" not in commands:
        yield from _never_called_off(spec, key)
    provider = mapping(spec.data.get("provider"))
    if provider.get("cache_stopped_nodes", True) and spec.provider != "azure":
        what = "released nodes are only stopped: their disks are paid"
        yield Problem(("provider",), what, "cache_stopped_nodes: false", True)


def _own_hosts(spec: ClusterSpec) -> Iterator[Problem]:
    if spec.provider != "local":
        return
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        text = " ".join(_command_list(spec.data, key))
        if "ray start" in text and "--temp-dir" not in text:
            what = "Ray opens its folder, /tmp/ray, to every user of the host (mode 0777)"
            right = "ray start --temp-dir=... within a folder of mode 0700, as on_premises.yaml has"
            yield Problem((key,), what, right, True)
    key = "worker_start_ray_commands"
    commands = " ".join(_command_list(spec.data, key))
    if END_SCRIPT in commands and not azure_rules.OWN_END.search(commands):
        what = "hosts of your own switch themselves off once the cluster is gone"
        right = f'END="$HOME/venv/bin/ray stop --force" in front of {END_SCRIPT}.sh'
        yield Problem((key,), what, right)


def _never_called_off(spec: ClusterSpec, key: str) -> Iterator[Problem]:
    """A first boot's shutdown is for machines that nobody makes nodes of the cluster."""
    for worker in spec.workers:
        for place, text in _saying("shutdown", worker.node_config, ("node_config",)):
            if SCHEDULED.search(text):
                what = "its boot schedules a shutdown that nothing calls off: it ends amid a run"
                right = f"start {END_SCRIPT}.sh in {key}, which does, or `sudo shutdown -c`"
                yield worker.problem(*place, what=what, right=right)


def _command_list(data: Mapping[str, Any], key: str) -> list[str]:
    return [*map(str, listed(data.get(key)))]
