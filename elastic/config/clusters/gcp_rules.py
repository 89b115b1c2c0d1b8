"""What a cluster file for Google Cloud should say. node_config is that of Compute Engine's
instances.insert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic.config.clusters.cluster_file import ClusterSpec, Problem


def project(spec: ClusterSpec) -> Iterator[Problem]:
    provider = spec.data.get("provider")
    given = provider if isinstance(provider, Mapping) else {}
    if not given.get("project_id"):
        yield Problem(
            ("provider", "project_id"),
            "it is missing",
            "the id of the Google Cloud project that pays",
        )
    if len(spec.zones) != 1:
        what = f"availability_zone names {len(spec.zones)} zones, Ray's provider takes one"
        yield Problem(
            ("provider", "availability_zone"),
            what,
            "one zone; a second cluster file for another one",
        )
    for worker in spec.workers:
        if worker.zone and spec.zones and worker.zone not in spec.zones:
            what = f"labeled {worker.zone}, but Ray starts all nodes in {spec.zones[0]}"
            yield Problem((*worker.place, "labels"), what, spec.zones[0])


def account(spec: ClusterSpec) -> Iterator[Problem]:
    head = spec.head
    if head is not None and not head.node_config.get("serviceAccounts"):
        what = (
            "Ray gives the head a service account with compute.admin and storage.objectAdmin on "
            "the whole project"
        )
        yield Problem(
            (*head.place, "node_config"),
            what,
            "serviceAccounts: [{email: ..., scopes: [...]}] of your own",
            True,
        )


def maintenance(spec: ClusterSpec) -> Iterator[Problem]:
    """Machines with GPUs cannot be moved, and are refused without saying so."""
    for worker in spec.workers:
        scheduling = worker.node_config.get("scheduling")
        parts: list[Any] = scheduling if isinstance(scheduling, list) else [scheduling]
        said = {
            key: value for part in parts if isinstance(part, Mapping) for key, value in part.items()
        }
        if (
            worker.market_type == "on-demand"
            and worker.resources.get("GPU")
            and said.get("onHostMaintenance") != "TERMINATE"
        ):
            place = (*worker.place, "node_config", "scheduling")
            yield Problem(
                place,
                "a machine with GPUs cannot be moved",
                "scheduling: {onHostMaintenance: TERMINATE}",
            )


RULES = (project, account, maintenance)
