"""What a cluster file for Azure should say. Its azure_arm_parameters are those of Ray's
azure-vm-template.json, which Ray hands to Azure as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator

from elastic.config.clusters.cluster_file import ClusterSpec, Problem
from elastic.config.strict_model import listed, mapping
from elastic.errors import alike, meant

# what a person may give of the parameters of the template, and Ray's own key
ARM_PARAMETERS = (
    "vmSize", "imagePublisher", "imageOffer", "imageSku", "imageVersion", "imageId", "osDiskSize",
    "priority", "evictionPolicy", "billingProfile", "enableAcceleratedNetworking",
    "provisionPublicIp", "adminUsername", "publicKey", "zones", "availability_zone",
)  # fmt: skip
PLACE = ("node_config", "azure_arm_parameters")
# Ubuntu before 24.04 as offers and SKUs spell it: ubuntu-2204, 2204-gen2, 22_04-lts
OLD_UBUNTU = re.compile(r"(?<!\d)(16|18|20|22)[._]?04(?!\d)")
OWN_END = re.compile(r"(?<!\w)END=")  # end_without_head.sh ends with something else than a shutdown


def arm_parameters(spec: ClusterSpec) -> Iterator[Problem]:
    """Azure refuses one that the template has not."""
    for node_type in spec.node_types:
        names = [*map(str, mapping(node_type.node_config.get("azure_arm_parameters")))]
        for name in names:
            if name not in ARM_PARAMETERS:
                near = [known for known in ARM_PARAMETERS if known.lower() == name.lower()]
                near = near or alike(name, ARM_PARAMETERS)
                right = meant(near) if near else f"it has {', '.join(ARM_PARAMETERS)}"
                what = "Ray's template has no such parameter, and Azure refuses it"
                yield node_type.problem(*PLACE, name, what=what, right=right)
        if "vmsize" not in [name.lower() for name in names]:
            right = "name a size, as in Standard_NC24ads_A100_v4"
            yield node_type.problem(*PLACE, what="vmSize is missing", right=right)


def image(spec: ClusterSpec) -> Iterator[Problem]:
    for node_type in spec.node_types:
        given = mapping(node_type.node_config.get("azure_arm_parameters"))
        if given.get("imageId"):
            continue  # counts in place of the others
        for key in ("imageOffer", "imageSku"):
            name = str(given.get(key, ""))
            if OLD_UBUNTU.search(name):
                what = f"'{name}' is an Ubuntu whose Python is too old: 22.04 has 3.10"
                right = (
                    "Python 3.11 or newer: Canonical's ubuntu-24_04-lts, for GPUs microsoft-dsvm's "
                    "ubuntu-hpc 2404, or imageId: an image of your own"
                )
                yield node_type.problem(*PLACE, key, what=what, right=right)
                break


def end(spec: ClusterSpec) -> Iterator[Problem]:
    """A shutdown from inside leaves a machine that is stopped, and paid as one that runs."""
    key = "worker_start_ray_commands"
    commands = " ".join(map(str, listed(spec.data.get(key))))
    if "end_without_head" in commands and not OWN_END.search(commands):
        what = "a worker whose head is gone shuts itself down: Azure bills it as one that runs"
        right = 'END="bash $HOME/venv/bin/delete_azure_vm.sh" in front of end_without_head.sh'
        yield Problem((key,), what, right, True)


RULES = (arm_parameters, image, end)
