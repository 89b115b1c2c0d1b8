"""What a cluster file for Google Cloud should say. node_config is that of Compute Engine's
instances.insert."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from elastic.config.clusters.cluster_file import ClusterSpec, Problem
from elastic.config.strict_model import listed, mapping

ZONE_OF_DISK = re.compile(r"zones/([^/]+)/diskTypes/")


def project(spec: ClusterSpec) -> Iterator[Problem]:
    if not mapping(spec.data.get("provider")).get("project_id"):
        right = "the id of the Google Cloud project that pays"
        yield Problem(("provider", "project_id"), "it is missing", right)
    if len(spec.zones) != 1:
        what = f"availability_zone names {len(spec.zones)} zones, Ray's provider takes one"
        right = "one zone; a second cluster file for another one"
        yield Problem(("provider", "availability_zone"), what, right)
    for worker in spec.workers:
        if worker.zone and spec.zones and worker.zone not in spec.zones:
            what = f"labeled {worker.zone}, but Ray starts all nodes in {spec.zones[0]}"
            yield worker.problem("labels", what=what, right=spec.zones[0])


def account(spec: ClusterSpec) -> Iterator[Problem]:
    head = spec.head
    if head is not None and not head.node_config.get("serviceAccounts"):
        what = (
            "Ray gives the head a service account with compute.admin and storage.objectAdmin on "
            "the whole project"
        )
        right = "serviceAccounts: [{email: ..., scopes: [...]}] of your own"
        yield head.problem("node_config", what=what, right=right, warning=True)


def maintenance(spec: ClusterSpec) -> Iterator[Problem]:
    """Machines with GPUs cannot be moved, and are refused without saying so."""
    for worker in spec.workers:
        scheduling = worker.node_config.get("scheduling")
        parts: list[Any] = scheduling if isinstance(scheduling, list) else [scheduling]
        said = {key: value for part in parts for key, value in mapping(part).items()}
        if (
            worker.market_type == "on-demand"
            and worker.resources.get("GPU")
            and said.get("onHostMaintenance") != "TERMINATE"
        ):
            what = "a machine with GPUs cannot be moved"
            right = "scheduling: {onHostMaintenance: TERMINATE}"
            yield worker.problem("node_config", "scheduling", what=what, right=right)


def disks(spec: ClusterSpec) -> Iterator[Problem]:
    """Where nothing is said a disk is pd-standard, and that these machines do not take."""
    for node_type in spec.node_types:
        zone = spec.zones[0] if len(spec.zones) == 1 else "ZONE"
        fitting = _fitting_disk(node_type.instance_type)
        for n, disk in enumerate(listed(node_type.node_config.get("disks"))):
            place = ("node_config", "disks", n, "initializeParams")
            said = str(mapping(mapping(disk).get("initializeParams")).get("diskType", ""))
            named = ZONE_OF_DISK.search(said)
            if named and len(spec.zones) == 1 and named[1] not in (zone, node_type.zone):
                what = f"it is of {named[1]}, but Ray starts all nodes in {zone}"
                right = f"zones/{zone}/diskTypes/{said.rpartition('/')[2]}"
                yield node_type.problem(*place, "diskType", what=what, right=right)
            if not said and fitting:
                what = (
                    "it has no diskType, and Compute Engine takes pd-standard, which a "
                    f"{node_type.instance_type} cannot have"
                )
                right = f"diskType: zones/{zone}/diskTypes/{fitting}"
                yield node_type.problem(*place, what=what, right=right, warning=True)


def _fitting_disk(machine_type: str) -> str:
    """Of a machine type that cannot have Compute Engine's default; '' = it can, or is not known."""
    if machine_type.startswith(("a4-", "a4x-", "a3-ultragpu-")):
        return "hyperdisk-balanced"
    return "pd-balanced" if machine_type.startswith(("a3-", "g2-")) else ""


RULES = (project, account, maintenance, disks)
