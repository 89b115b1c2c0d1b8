"""Files of Ray's cluster launcher (`ray up`) as a ClusterSpec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.config.clusters.cluster_file import (
    MARKETS,
    ClusterNodeType,
    ClusterSpec,
    Place,
    Problem,
)
from elastic.config.clusters.elastic_section import Own, own_section
from elastic.config.clusters.pools import head_usd_per_h, pools_of
from elastic.config.strict_model import finite, listed, mapping, whole
from elastic.types import MarketType
from elastic.types.nouns import MARKET_LABEL, REGION_LABEL, ZONE_LABEL

TYPES: Place = ("available_node_types",)
LOCAL_TYPE = "local.cluster.node"  # what Ray calls the one node type of provider `local`
DEFAULT_MAX_WORKERS = 2  # Ray's default for the whole cluster


def spec_of(file: str, data: dict[str, Any]) -> tuple[ClusterSpec, list[Problem]]:
    own, problems = own_section(data)
    provider = mapping(data.get("provider"))
    kind, region = str(provider.get("type", "")), str(provider.get("region", ""))
    zones = tuple(
        zone.strip()
        for zone in str(provider.get("availability_zone") or "").split(",")
        if zone.strip()
    )
    node_types = (
        _local_types(data, own) if kind == "local" else _node_types(data, kind, region, zones=zones)
    )
    problems += _kinds(data) + _wrong_markets(node_types)
    pools, sources, more = pools_of(kind, node_types, own)
    spec = ClusterSpec(
        file, str(data.get("cluster_name", "")), kind, region, zones, node_types, pools, data,
        own.on_demand_floor, sources,
        head_usd_per_h=head_usd_per_h(next((found for found in node_types if found.head), None),
        own.head_usd_per_h),
    )  # fmt: skip
    return spec, problems + more


def _node_types(
    data: Mapping[str, Any], provider: str, region: str, *, zones: Sequence[str]
) -> tuple[ClusterNodeType, ...]:
    most = whole(data.get("max_workers"), DEFAULT_MAX_WORKERS)
    head = str(data.get("head_node_type", ""))
    found = []
    for name, given in mapping(data.get("available_node_types")).items():
        entry, is_head = mapping(given), str(name) == head
        labels = {str(key): str(value) for key, value in mapping(entry.get("labels")).items()}
        config = mapping(entry.get("node_config"))
        bought_as = market_of(provider, config)
        market = labels.get(MARKET_LABEL)
        zone = mapping(config.get("Placement")).get("AvailabilityZone") or config.get("zone")
        found.append(
            ClusterNodeType(
                str(name),
                (*TYPES, str(name)),
                instance_type_of(provider, config),
                next((m for m in MARKETS if m == market), bought_as or "owned"),
                bought_as,
                labels.get(REGION_LABEL, region),
                labels.get(ZONE_LABEL) or str(zone or (zones[0] if len(zones) == 1 else "")),
                labels,
                {
                    str(k): float(v)
                    for k, v in mapping(entry.get("resources")).items()
                    if isinstance(v, int | float) and finite(v) is not None
                },
                config,
                whole(entry.get("min_workers")),
                min(most, whole(entry.get("max_workers"), 0 if is_head else most)),
                is_head,
            )
        )
    return tuple(found)


def _local_types(data: Mapping[str, Any], own: Own) -> tuple[ClusterNodeType, ...]:
    """Provider `local` has hosts instead of node types: all of one kind, named by the section for
    this package. In a cluster of one host it is head and worker at once."""
    n_hosts = len(listed(mapping(data.get("provider")).get("worker_ips")))
    most = min(whole(data.get("max_workers"), n_hosts), n_hosts) if n_hosts else 1
    name = next(iter(own.pools), LOCAL_TYPE)
    bought = own.pools[name].market_type if name in own.pools else None
    return (
        ClusterNodeType(LOCAL_TYPE + " (head)", ("provider", "head_ip"), head=True),
        ClusterNodeType(
            name, ("provider", "worker_ips"), market_type=bought or "owned", max_nodes=most
        ),
    )


def instance_type_of(provider: str, config: Mapping[str, Any]) -> str:
    if provider == "azure":
        return str(mapping(config.get("azure_arm_parameters")).get("vmSize", ""))
    return str(config.get({"aws": "InstanceType", "gcp": "machineType"}.get(provider, ""), ""))


def market_of(provider: str, config: Mapping[str, Any]) -> MarketType | None:
    """How the cloud is asked for a node of this node_config; None = that is not said there."""
    if provider == "aws":
        market = str(mapping(config.get("InstanceMarketOptions")).get("MarketType", ""))
        if market == "spot":
            return "spot"
        reserved = mapping(config.get("CapacityReservationSpecification"))
        named = reserved.get("CapacityReservationTarget")
        return "reserved" if market == "capacity-block" or named else "on-demand"
    if provider == "gcp":
        scheduling = config.get("scheduling")
        parts = scheduling if isinstance(scheduling, list) else [scheduling]
        if any(
            part.get("preemptible") or part.get("provisioningModel") == "SPOT"
            for part in map(mapping, parts)
        ):
            return "spot"
        return "reserved" if config.get("reservationAffinity") else "on-demand"
    if provider == "azure":
        priority = str(mapping(config.get("azure_arm_parameters")).get("priority", ""))
        return "spot" if priority.lower() == "spot" else "on-demand"
    return None


def _wrong_markets(node_types: Sequence[ClusterNodeType]) -> list[Problem]:
    right = f"it is one of {', '.join(MARKETS)}"
    return [
        one.problem("labels", MARKET_LABEL, what=f"no market type '{market}'", right=right)
        for one in node_types
        if (market := one.labels.get(MARKET_LABEL)) is not None and market not in MARKETS
    ]


def _kinds(data: Mapping[str, Any]) -> list[Problem]:
    """What has to be keys and values, and is not."""
    places: list[tuple[Place, Any]] = [
        ((key,), data.get(key)) for key in ("provider", "available_node_types", "metadata")
    ]
    for name, entry in mapping(data.get("available_node_types")).items():
        places.append(((*TYPES, str(name)), entry if entry is not None else ""))
        for key in ("labels", "resources", "node_config"):
            places.append(((*TYPES, str(name), key), mapping(entry).get(key)))
    return [
        Problem(place, f"it is {value!r}", "it must hold keys and values")
        for place, value in places
        if value is not None and not isinstance(value, dict)
    ]
