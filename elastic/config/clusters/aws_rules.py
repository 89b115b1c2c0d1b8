"""What a cluster file for AWS should say. node_config is that of EC2's RunInstances, and
`SubnetIds`, which is Ray's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from elastic import catalog
from elastic.config.clusters.cluster_file import ClusterNodeType, ClusterSpec, Problem
from elastic.config.strict_model import listed, mapping

EFA_KINDS = ("efa", "efa-only")


def profile(spec: ClusterSpec) -> Iterator[Problem]:
    """Who may do what."""
    head = spec.head
    if head is None:
        return
    own = head.node_config.get("IamInstanceProfile")
    if own is None:
        what = "Ray gives the head its default profile: all rights on EC2 and S3"
        right = "IamInstanceProfile: {Name: ...} with deploy/iam/aws-head.json"
        yield head.problem("node_config", what=what, right=right, warning=True)
    for worker in spec.workers:
        given = worker.node_config.get("IamInstanceProfile")
        if given is not None and given == own:
            what = "it has the head's profile: it may start instances"
            right = "another profile for workers, with deploy/iam/aws-worker.json: no EC2 rights"
            yield worker.problem("node_config", what=what, right=right, warning=True)
        if given is None:
            what = "it has no profile: no access to checkpoints in S3"
            right = "IamInstanceProfile: {Name: ...} with deploy/iam/aws-worker.json"
            yield worker.problem("node_config", what=what, right=right, warning=True)


def metadata_service(spec: ClusterSpec) -> Iterator[Problem]:
    for node_type in spec.node_types:
        options = mapping(node_type.node_config.get("MetadataOptions"))
        if options.get("HttpTokens") != "required":
            what = (
                "its metadata service answers without a token (IMDSv1): one forwarded request "
                "gives the node's credentials away"
            )
            right = "MetadataOptions: {HttpTokens: required}"
            yield node_type.problem("node_config", "MetadataOptions", what=what, right=right)


def shutdown(spec: ClusterSpec) -> Iterator[Problem]:
    key = "InstanceInitiatedShutdownBehavior"
    for worker in spec.workers:
        if worker.node_config.get(key) != "terminate":
            what = "a node that shuts itself down is only stopped: its disk is paid"
            yield worker.problem("node_config", key, what=what, right=f"{key}: terminate")


def image(spec: ClusterSpec) -> Iterator[Problem]:
    for node_type in spec.node_types:
        if str(node_type.node_config.get("ImageId", "latest_dlami")).lower() == "latest_dlami":
            right = "ImageId: resolve:ssm:/aws/service/deeplearning/ami/... or an image of your own"
            what = "no ImageId: Ray's default is an Ubuntu 18.04 of 2023, whose Python is too old"
            yield node_type.problem("node_config", what=what, right=right)


def subnets(spec: ClusterSpec) -> Iterator[Problem]:
    zones_of: dict[str, set[str]] = defaultdict(set)
    for node_type in spec.node_types:
        named = subnets_of(node_type)
        if node_type.zone and spec.zones and node_type.zone not in spec.zones:
            right = f"add it: availability_zone: {','.join((*spec.zones, node_type.zone))}"
            what = f"its zone {node_type.zone} is not among the cluster's: Ray drops its subnets"
            yield node_type.problem("labels", what=what, right=right)
        if not node_type.head and len(spec.zones) > 1:
            yield from _zone_without_subnet(spec, node_type, named)
        if node_type.zone:
            for subnet in named:
                zones_of[subnet].add(node_type.zone)
        if "" in named:
            what, right = "an interface has no SubnetId", "SubnetId and Groups in each"
            yield node_type.problem("node_config", "NetworkInterfaces", what=what, right=right)
    for subnet, zones in zones_of.items():
        if subnet and len(zones) > 1:
            what = (
                f"{subnet} is named for {' and '.join(sorted(zones))}, but a subnet lies in one "
                "zone"
            )
            yield Problem(("available_node_types",), what, "a subnet of its own for each zone")


def _zone_without_subnet(
    spec: ClusterSpec, worker: ClusterNodeType, named: set[str]
) -> Iterator[Problem]:
    if not named:
        right = f"SubnetIds: [the subnet in {worker.zone or 'each zone'}]"
        what = (
            f"the cluster has {len(spec.zones)} zones and this type no subnet: Ray takes them "
            "in its order"
        )
    elif worker.zone and len(named) > 1:
        right = f"SubnetIds: [the one in {worker.zone}]"
        what = (
            f"{len(named)} subnets, but all nodes are labeled {worker.zone}: some would be "
            "elsewhere"
        )
    else:
        return
    yield worker.problem("node_config", "SubnetIds", what=what, right=right)


def security_groups(spec: ClusterSpec) -> Iterator[Problem]:
    for node_type in spec.node_types:
        config = node_type.node_config
        if not config.get("SecurityGroupIds") and not config.get("NetworkInterfaces"):
            right = "SecurityGroupIds: [a group of your own], see docs/network.md"
            what = "Ray makes a security group that opens SSH to the whole internet"
            yield node_type.problem("node_config", what=what, right=right, warning=True)


def fabric(spec: ClusterSpec) -> Iterator[Problem]:
    """EFA where it pays: on nodes of eight GPUs with NVLink between them."""
    for worker in spec.workers:
        known = catalog.instance_type(worker.instance_type)
        if known is None or known.gpus < 8 or not known.efa:
            continue
        config, place = worker.node_config, ("node_config", "NetworkInterfaces")
        interfaces = map(mapping, listed(config.get("NetworkInterfaces")))
        n_efa = sum(interface.get("InterfaceType") in EFA_KINDS for interface in interfaces)
        chip = catalog.chip(known.chip)
        if n_efa == 0 and chip is not None and chip.nvlink_bytes_per_s:
            what = f"a {known.name} has EFA, which is not used"
            right = f"InterfaceType: efa-only on {known.efa_interfaces} of its NetworkInterfaces"
            yield worker.problem(*place, what=what, right=right, warning=True)
        if n_efa > known.efa_interfaces:
            what = f"{n_efa} EFA interfaces, a {known.name} has {known.efa_interfaces}"
            yield worker.problem(*place, what=what, right="leave out the others")
        if n_efa and len(spec.zones) < 2 and not mapping(config.get("Placement")).get("GroupName"):
            what = "EFA without a placement group"
            right = "Placement: {GroupName: ...} of a cluster placement group"
            yield worker.problem("node_config", "Placement", what=what, right=right, warning=True)


def reservation(spec: ClusterSpec) -> Iterator[Problem]:
    for worker in spec.workers:
        market = mapping(worker.node_config.get("InstanceMarketOptions")).get("MarketType")
        reserved = mapping(worker.node_config.get("CapacityReservationSpecification"))
        target = reserved.get("CapacityReservationTarget")
        if market == "capacity-block" and not target:
            right = (
                "CapacityReservationSpecification: {CapacityReservationTarget: "
                "{CapacityReservationId: cr-...}}"
            )
            what = "a capacity block that is not named"
            yield worker.problem("node_config", what=what, right=right)


def subnets_of(node_type: ClusterNodeType) -> set[str]:
    """The subnets that it names; '' among them: an interface names none."""
    config = node_type.node_config
    interfaces = map(mapping, listed(config.get("NetworkInterfaces")))
    own = {str(interface.get("SubnetId", "")) for interface in interfaces}
    return own | set(map(str, listed(config.get("SubnetIds"))))


RULES = (profile, metadata_service, shutdown, image, subnets, security_groups, fabric, reservation)
