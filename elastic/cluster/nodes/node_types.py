"""The node types of a cluster that Ray's autoscaler runs, as its head knows them, and how nodes of
a pool are requested there.

The autoscaler launches by what its file says of a node type: labels that Ray gives a node when it
starts (ray.io/node-group) do not count. A request that two types could answer would be answered by
either: it is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from elastic.cluster.ray import processes
from elastic.types import Pool
from elastic.types.nouns import ACCELERATOR_LABEL, MARKET_LABEL, POOL_LABEL, POOL_LABELS

MONITOR = "/autoscaler/v2/monitor.py"
KUBERNETES = "KUBERNETES_SERVICE_HOST"  # set in each pod


@dataclass(frozen=True)
class NodeType:
    """`labels`, `resources`: as in the cluster file. The autoscaler never goes below `least` nodes
    of it, nor above `most`."""

    name: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]
    least: int = 0
    most: int = 0


@dataclass(frozen=True)
class Monitor:
    """The autoscaler's process on this machine: its configuration file ('' = it has none: it only
    looks on) and its log."""

    config: str
    log: Path


@dataclass(frozen=True)
class ResourceBundle:
    """One node of a pool as `request_resources` takes it: so much that one fills a node."""

    resources: tuple[tuple[str, float], ...]
    selector: tuple[tuple[str, str], ...]


def monitor_here() -> Monitor | None:
    """The autoscaler (v2) that runs on this machine."""
    for name in os.listdir("/proc"):
        words = processes.command(int(name)) if name.isdigit() else []
        if any(word.endswith(MONITOR) for word in words):
            told = dict(
                word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word
            )
            return Monitor(
                os.path.expanduser(told.get("autoscaling-config", "")),
                Path(told.get("logs-dir", ""), "monitor.log"),
            )
    return None


def types_here() -> dict[str, NodeType] | None:
    """Those that the cluster's autoscaler can start, where this is its head; none where there is no
    autoscaler; None = they cannot be read (as on Kubernetes, where it runs in a container of its
    own)."""
    monitor = monitor_here()
    if monitor is None:
        return None if KUBERNETES in os.environ else {}
    try:
        return read_types(monitor.config) if monitor.config else {}
    except (OSError, ValueError, yaml.YAMLError):
        return None


def read_types(path: str) -> dict[str, NodeType]:
    """The worker types of an autoscaler's file. Raises OSError, ValueError (yaml.YAMLError is none)
    for a file that is none."""
    data: Any = yaml.safe_load(Path(path).read_text())
    types: Mapping[str, Any] = data.get("available_node_types") or {}
    head = data.get("head_node_type")
    return {
        name: NodeType(
            name, kind.get("labels") or {}, kind.get("resources") or {},
            int(kind.get("min_workers") or 0), int(kind.get("max_workers") or 0),
        )
        for name, kind in types.items()
        if name != head
    }  # fmt: skip


def bundle_of(pool: Pool, types: Mapping[str, NodeType] | None) -> ResourceBundle | str:
    """How a node of the pool is asked for; a text says why it cannot be. `types` None = not known
    (Kubernetes)."""
    resource = "CPU" if pool.accelerator_type == "CPU" else "GPU"
    if types is None:
        return ResourceBundle(
            ((resource, float(pool.gpus_per_node)),), tuple(_by_kind(pool).items())
        )
    kind = type_of(pool, types)
    if kind is None:
        names = ", ".join(sorted(types)) or "none"
        return (
            f"no node type of the cluster is named or labeled '{pool.name}', or the only one of "
            f"its kind; it has {names}"
        )
    amount = float(kind.resources.get(resource) or pool.gpus_per_node)
    same = [
        other.name
        for other in types.values()
        if other.name != kind.name
        and other.most > 0
        and kind.labels.items() <= other.labels.items()
        and float(other.resources.get(resource) or 0) >= amount
    ]
    if same:
        label = f"{POOL_LABEL}: {kind.name}"
        return (
            f"node types '{kind.name}' and '{same[0]}' have the same labels in the cluster file; "
            f"give each its own ({label})"
        )
    return ResourceBundle(((resource, amount),), tuple(sorted(kind.labels.items())))


def type_of(pool: Pool, types: Mapping[str, NodeType]) -> NodeType | None:
    """By its name, by a label that names the pool, or as the only one of its market type and
    accelerator."""
    if pool.name in types:
        return types[pool.name]
    named = [
        kind
        for kind in types.values()
        if any(kind.labels.get(label) == pool.name for label in POOL_LABELS)
    ]
    alike = [kind for kind in types.values() if _by_kind(pool).items() <= kind.labels.items()]
    found = named or alike
    return found[0] if len(found) == 1 else None


def _by_kind(pool: Pool) -> dict[str, str]:
    market = {MARKET_LABEL: pool.market_type} if pool.market_type in ("spot", "on-demand") else {}
    return market | (
        {}
        if pool.accelerator_type in ("CPU", "GPU")
        else {ACCELERATOR_LABEL: pool.accelerator_type}
    )
