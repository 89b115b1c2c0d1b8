"""What AWS says of prices: three calls that read and change nothing, bounded in time.

They need ec2:DescribeSpotPriceHistory, ec2:GetSpotPlacementScores and pricing:GetProducts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import boto3
from botocore import exceptions as aws
from botocore.config import Config

from elastic.storage import aws_errors
from elastic.storage.aws_errors import Meaning, code_of, meaning

T = TypeVar("T")

ATTEMPTS = 4
PATIENCE = Config(
    connect_timeout=3, read_timeout=8, retries={"mode": "standard", "total_max_attempts": ATTEMPTS}
)
PRICING_REGION = "us-east-1"  # the price list service is in few regions and knows the prices of all
LINUX = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
# history begins with the price that was in force then; clocks may differ
SPOT_LOOK = timedelta(hours=1)
# what may be otherwise with credentials that were renewed
STALE: tuple[Meaning, ...] = ("expired", "unknown", "no credentials", "no login")
ADVICE = {
    **aws_errors.ADVICE,
    "forbidden": "these credentials may not ask that",
    "throttled": f"AWS asks to slow down, also after {ATTEMPTS} tries",
}


class NoAnswer(Exception):
    """Why AWS could not be asked, in one line without a secret."""


class NoCredentials(NoAnswer):
    """Nothing else needs to be tried."""


@dataclass(frozen=True)
class SpotPrice:
    zone: str
    usd_per_h: float
    zone_id: str = ""


@dataclass
class AwsPrices:
    """`client`: makes one, given service and region."""

    client: Callable[[str, str], Any] = field(default_factory=lambda: _client)
    _made: dict[tuple[str, str], Any] = field(default_factory=dict)

    def spot(self, instance_type: str, region: str) -> tuple[SpotPrice, ...]:
        """The newest price of each zone that has it, by zone."""
        since = datetime.now(UTC) - SPOT_LOOK
        ask = partial(_history, instance_type=instance_type, since=since)
        rows = self._ask("ec2", region, ask, what=f"spot prices of {instance_type} in {region}")
        newest: dict[str, tuple[str, SpotPrice]] = {}
        for row in rows:
            zone, at = str(row["AvailabilityZone"]), str(row["Timestamp"])
            found = SpotPrice(zone, float(row["SpotPrice"]), str(row.get("AvailabilityZoneId", "")))
            if zone not in newest or at >= newest[zone][0]:
                newest[zone] = (at, found)
        return tuple(newest[zone][1] for zone in sorted(newest))

    def scores(self, instance_type: str, region: str, nodes: int) -> dict[str, int]:
        """Zone id -> how likely it is, 1 to 10, that so many spot nodes are to be had there at
        once."""
        request = {
            "InstanceTypes": [instance_type], "TargetCapacity": max(1, nodes),
            "RegionNames": [region], "SingleAvailabilityZone": True,
        }  # fmt: skip
        answer = self._ask(
            "ec2",
            region,
            lambda ec2: ec2.get_spot_placement_scores(**request),
            what=f"placement scores in {region}",
        )
        return {
            str(row.get("AvailabilityZoneId", region)): int(row["Score"])
            for row in answer["SpotPlacementScores"]
        }

    def on_demand(self, instance_type: str, region: str) -> float | None:
        """Dollars per hour, Linux, shared tenancy; None = the price list has no such thing."""
        wanted = {
            "instanceType": instance_type, "regionCode": region, "operatingSystem": "Linux",
            "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used",
        }  # fmt: skip
        filters = [
            {"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()
        ]
        answer = self._ask(
            "pricing", PRICING_REGION, lambda c: c.get_products(ServiceCode="AmazonEC2",
            Filters=filters, MaxResults=100), what=f"the price of {instance_type} in {region}",
        )  # fmt: skip
        found = [usd for text in answer["PriceList"] for usd in _hourly(json.loads(text))]
        return min(found, default=None)

    def _ask(self, service: str, region: str, request: Callable[[Any], T], *, what: str) -> T:
        """A client keeps the credentials that it was made with: where they do not count any more, a
        new one asks once more. Raises NoAnswer."""
        kept = (service, region) in self._made
        try:
            client = self._made.get((service, region)) or self.client(service, region)
            self._made[service, region] = client
            return request(client)
        except (aws.ClientError, aws.BotoCoreError) as error:
            means = meaning(error)
            if means in STALE:
                self._made.clear()
                if kept:
                    return self._ask(service, region, request, what=what)
            if means == "no credentials":
                raise NoCredentials("there are no AWS credentials here") from error
            if isinstance(error, aws.ClientError):
                why = f"{ADVICE.get(means, 'AWS refuses')} ({code_of(error)})"
            else:
                why = ADVICE.get(means, f"AWS does not answer ({type(error).__name__})")
            raise NoAnswer(f"{what}: {why}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise NoAnswer(
                f"{what}: an answer that cannot be read ({type(error).__name__})"
            ) from error


def _client(service: str, region: str) -> Any:
    return boto3.session.Session().client(service, region_name=region, config=PATIENCE)


def _history(ec2: Any, instance_type: str, since: datetime) -> list[dict[str, Any]]:
    """All pages of it; few, since it goes back an hour."""
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=[instance_type], ProductDescriptions=list(LINUX), StartTime=since
    )
    rows: list[dict[str, Any]] = [row for page in pages for row in page["SpotPriceHistory"]]
    return [row for row in rows if row["InstanceType"] == instance_type]


def _hourly(product: dict[str, Any]) -> list[float]:
    """Of an entry of the price list; nothing where it is of reserved blocks of capacity, or
    free."""
    if product["product"]["attributes"].get("marketoption", "OnDemand") != "OnDemand":
        return []
    dimensions: Sequence[dict[str, Any]] = [
        row
        for term in product["terms"].get("OnDemand", {}).values()
        for row in term["priceDimensions"].values()
    ]
    prices = [
        float(row["pricePerUnit"].get("USD", 0)) for row in dimensions if row["unit"] == "Hrs"
    ]
    return [usd for usd in prices if usd > 0]
