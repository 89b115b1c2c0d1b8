"""reap(): the machines of a dead cluster, listed and ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from elastic import catalog
from elastic.config.clusters import ClusterSpec, read_cluster
from elastic.errors import SpecError

if TYPE_CHECKING:
    from elastic.cluster.nodes.leaked_instances import Instance


@dataclass(frozen=True)
class Reaped:
    """`ended`: it was asked to end them; `left`: ids that do not end all the same. `usd_per_h`:
    what is known of the prices, on demand."""

    cluster: str
    region: str
    instances: tuple[Instance, ...]
    ended: bool
    left: tuple[str, ...]
    usd_per_h: float

    def plain(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster, "region": self.region,
            "instances": [found.plain() for found in self.instances], "ended": self.ended,
            "left": list(self.left), "usd_per_h": round(self.usd_per_h, 4),
        }  # fmt: skip

    def verdict(self) -> str:
        where = f"cluster {self.cluster} in {self.region}"
        if not self.instances:
            return f"{where}: no instance is left"
        n = f"{len(self.instances)} instance{'s' * (len(self.instances) > 1)}"
        if not self.ended:
            return f"{where}: {n}, up to ${self.usd_per_h:.2f} an hour; --yes ends them"
        return (
            f"{where}: {n} ended"
            if not self.left
            else f"{where}: {', '.join(self.left)} of {n} could not be ended"
        )


def reap(file: str | Path, yes: bool = False, alive: bool = False) -> Reaped:
    """`yes`: end them. `alive`: also where the cluster's head runs. Raises SpecError,
    CloudFailed."""
    from elastic.cluster.nodes.leaked_instances import Reaper

    spec, _ = read_cluster(file)
    if spec.provider != "aws":
        raise SpecError(f"{file}: reap itself knows EC2 only; {_by_hand(spec)}")
    if not spec.name or not spec.region:
        raise SpecError(
            f"{file}: instances are found by cluster_name and provider.region; both must be there"
        )
    reaper = Reaper(spec.region)
    found = reaper.instances(spec.name)
    heads = [
        instance.instance_id
        for instance in found
        if instance.kind == "head" and instance.state == "running"
    ]
    if yes and heads and not alive:
        raise SpecError(
            f"cluster {spec.name} is not dead, its head {heads[0]} runs: use `ray down {file}`, "
            "or add --alive"
        )
    left = reaper.end(instance.instance_id for instance in found) if yes and found else []
    return Reaped(
        spec.name,
        spec.region,
        tuple(found),
        yes,
        tuple(left),
        sum(_usd_per_h(i, spec.region) for i in found),
    )


def _by_hand(spec: ClusterSpec) -> str:
    """How a person finds what is left of a cluster of another provider, and ends it."""
    given = spec.data.get("provider")
    keys: dict[str, Any] = given if isinstance(given, dict) else {}
    name = quote(spec.name or "NAME")
    label = f"ray-cluster-name={name}"
    if spec.provider == "gcp":
        project = quote(str(keys.get("project_id") or "PROJECT"))
        return (
            f"`gcloud compute instances list --project={project} --filter=labels.{label}` lists "
            "this cluster's machines, stopped ones (whose disks are paid for) too, and `gcloud "
            f"compute instances delete NAMES --zone=ZONE --project={project}` ends them"
        )
    if spec.provider == "azure":
        said = str(keys.get("resource_group") or "GROUP")
        group = quote(said)
        # without a filter: network interfaces, addresses and disks have no tag of the cluster's
        found = f"`az resource list --resource-group {group} --output table` lists what is in it"
        if said == spec.name:  # the cluster's own, as `elastic init` writes it
            return f"{found}, disks and addresses too; `az group delete --name {group}` ends it all"
        return (
            f"{found}; the cluster's machines, disks, interfaces and addresses are called "
            f"ray-{name}-..., and `az resource delete --ids IDS` ends them"
        )
    if spec.provider == "kubernetes":
        metadata = spec.data.get("metadata")
        space = str((metadata if isinstance(metadata, dict) else {}).get("namespace") or "default")
        kind = str(spec.data.get("kind", "RayCluster")).lower()
        found = (
            f"pods -n {quote(space)} -l ray.io/cluster={name}"
            if kind == "raycluster"
            else f"rayclusters -n {quote(space)} -l ray.io/originated-from-cr-name={name}"
        )
        return (
            f"`kubectl get {found}` lists what is left, and `kubectl delete {kind} {name} -n "
            f"{quote(space)}` ends it"
        )
    return f"of a provider '{spec.provider}' nothing is known: `ray down` ends its processes"


def _usd_per_h(instance: Instance, region: str) -> float:
    known = catalog.instance_type(instance.instance_type)
    running = instance.state in ("pending", "running")
    return (
        (known.usd_per_h_or_elsewhere(region)[0] or 0.0) if known is not None and running else 0.0
    )
