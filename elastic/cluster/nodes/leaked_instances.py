"""Machines of a dead cluster: found on EC2 by the tag that Ray gives each of its instances, and
ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import boto3
from botocore import exceptions as aws
from botocore.config import Config

from elastic.errors import CloudFailed, SpecError
from elastic.storage.aws_errors import ADVICE, code_of, meaning

T = TypeVar("T")

CLUSTER_TAG, KIND_TAG, TYPE_TAG = "ray-cluster-name", "ray-node-type", "ray-user-node-type"
STATES = ("pending", "running", "stopping", "stopped")
ENDED = ("shutting-down", "terminated")
AT_ONCE = 100  # ids in one call
ATTEMPTS = 4
PATIENCE = Config(
    connect_timeout=5, read_timeout=20, retries={"mode": "standard", "total_max_attempts": ATTEMPTS}
)


@dataclass(frozen=True)
class Instance:
    """`kind`: head or worker. `since`: when it was launched, in UTC."""

    instance_id: str
    kind: str
    node_type: str
    instance_type: str
    market_type: str
    state: str
    zone: str
    since: str

    def plain(self) -> dict[str, str]:
        return asdict(self)


class Reaper:
    """Of one region. Raises SpecError (credentials, region, permission) and CloudFailed."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._client = _told(
            lambda: boto3.session.Session().client("ec2", region_name=region, config=PATIENCE),
            region,
        )

    def instances(self, cluster: str) -> list[Instance]:
        """All that are not ended, the head first."""
        filters = [
            {"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster]},
            {"Name": "instance-state-name", "Values": list(STATES)},
        ]
        pages = self._client.get_paginator("describe_instances")
        found = _told(lambda: list(pages.paginate(Filters=filters)), self._region)
        entries = [
            entry
            for page in found
            for group in page["Reservations"]
            for entry in group["Instances"]
        ]
        return sorted(
            map(_instance, entries),
            key=lambda instance: (instance.kind != "head", instance.node_type, instance.since),
        )

    def end(self, instance_ids: Iterable[str]) -> list[str]:
        """Ends them; returns those of which EC2 does not say that they end."""
        ids = list(instance_ids)
        left = set(ids)
        for i in range(0, len(ids), AT_ONCE):
            some = ids[i : i + AT_ONCE]
            ask = partial(self._client.terminate_instances, InstanceIds=some)
            answer = _told(ask, self._region)
            ending = answer["TerminatingInstances"]
            left -= {
                entry["InstanceId"] for entry in ending if entry["CurrentState"]["Name"] in ENDED
            }
        return sorted(left)


def _instance(entry: Mapping[str, Any]) -> Instance:
    tags = {tag["Key"]: tag["Value"] for tag in entry.get("Tags", ())}
    launched: datetime | None = entry.get("LaunchTime")
    return Instance(
        entry["InstanceId"], tags.get(KIND_TAG, ""), tags.get(TYPE_TAG, ""),
        entry.get("InstanceType", ""),
        "spot" if entry.get("InstanceLifecycle") == "spot" else "on-demand", entry["State"]["Name"],
        entry.get("Placement", {}).get("AvailabilityZone", ""),
        launched.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if launched else "",
    )  # fmt: skip


def _told(call: Callable[[], T], region: str) -> T:
    """The call's answer, or what a person can do about its fault."""
    try:
        return call()
    except (aws.NoRegionError, aws.InvalidRegionError) as error:
        raise SpecError(
            f"EC2: '{region}' is no region ({error}); correct provider.region in the cluster file"
        ) from error
    except (aws.ClientError, aws.BotoCoreError) as error:
        if (told := _explained(error, region)) is None:
            raise
        raise told from error


def _explained(error: aws.ClientError | aws.BotoCoreError, region: str) -> Exception | None:
    """None: of no fault that a person can do something about."""
    of_server = isinstance(error, aws.ClientError)
    said = code_of(error) if of_server else str(error)
    match meaning(error):
        case "expired" | "unknown" | "no credentials" | "no login" as why:
            return SpecError(f"EC2 in {region}: {ADVICE[why]} ({said})")
        case "forbidden":
            return SpecError(
                f"EC2: the credentials may not call ec2:{error.operation_name} in {region} "
                f"({said}); allow it to this role"
            )
        case "throttled":
            return CloudFailed(
                f"EC2 in {region} asks to slow down ({said}), also after {ATTEMPTS} tries; try "
                "again in a minute"
            )
        case "no answer":
            return CloudFailed(
                f"EC2 in {region} does not answer: {said}; look at the network and at "
                "AWS_ENDPOINT_URL"
            )
    if not of_server:
        return None
    text = error.response["Error"].get("Message", "")
    return CloudFailed(f"EC2 in {region}, {error.operation_name}: {said}: {text}")
