"""Prices from AWS, through real boto3 against answers in AWS's own formats, and the faults of those
who are asked."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.retries.standard import ExponentialBackoff
from support.cluster.aws_endpoint import AwsEndpoint
from support.waiting import until

from elastic import catalog
from elastic.cli import command_line
from elastic.cluster.prices import aws_prices
from elastic.cluster.prices.market import (
    TABLE,
    Market,
    Price,
    Ticker,
    from_table,
    given,
    is_looked_up,
)
from elastic.types import Event, Pool, PriceSeen

TYPE, REGION = "g5.4xlarge", "us-east-1"
IN_TABLE = catalog.instance_type(TYPE)
assert IN_TABLE is not None
SPOT_USD, USD = IN_TABLE.spot_usd_per_h or 0.0, IN_TABLE.usd_per_h(REGION) or 0.0
SPOT = Pool(
    "spot", "A10G", 1, "spot", SPOT_USD, max_nodes=4, region=REGION, instance_type=TYPE, cloud="aws"
)
FIXED = Pool("fixed", "A10G", 1, "on-demand", USD, region=REGION, instance_type=TYPE, cloud="aws")
HISTORY = [
    ("us-east-1a", "use1-az1", "0.50", "2026-11-22T04:00:00.000Z"),
    ("us-east-1b", "use1-az2", "0.40", "2026-11-22T04:00:00.000Z"),
    ("us-east-1a", "use1-az1", "0.60", "2026-11-22T04:30:00.000Z"),  # newer
    ("us-east-1c", "use1-az3", "0.70", "2026-11-22T04:10:00.000Z"),
]


MAKE_CLIENT = aws_prices._client  # takes a tenth of a second: most tests share theirs


@pytest.fixture(scope="module")
def clients() -> dict[tuple[str, str], Any]:
    return {}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[AwsEndpoint]:
    with AwsEndpoint() as started:
        yield started


@pytest.fixture
def aws(
    endpoint: AwsEndpoint, clients: dict[tuple[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[AwsEndpoint]:
    """With credentials in the environment, and no other source of them."""

    def client(service: str, region: str) -> Any:
        return clients.setdefault(
            (service, region), clients.get((service, region)) or MAKE_CLIENT(service, region)
        )

    monkeypatch.setattr(aws_prices, "_client", client)
    for _ in endpoint.anew(HISTORY, 1.5, {"use1-az1": 9, "use1-az2": 3}):
        for service in ("EC2", "PRICING"):
            monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", endpoint.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-tests")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(name, "/nonexistent")
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.01)
        waits(60.0, monkeypatch)  # the machine may be busy
        yield endpoint
    until(
        lambda: not any(thread.name == "market" for thread in threading.enumerate()),
        "the last question of this test's tickers",
    )


def waits(read_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    patience = aws_prices.PATIENCE.merge(Config(read_timeout=read_s))
    monkeypatch.setattr(aws_prices, "PATIENCE", patience)


def test_spot_prices_by_zone_and_the_median_of_a_region(aws: AwsEndpoint) -> None:
    aws.page = 2
    market = Market()
    (found,) = market.look([SPOT])
    assert found.zones == {"us-east-1a": 0.6, "us-east-1b": 0.4, "us-east-1c": 0.7}
    assert (found.usd_per_node_h, found.source) == (
        0.6,
        "spot price of AWS, median of 3 zones of us-east-1",
    )
    assert found.scores == {"use1-az1": 9, "use1-az2": 3}
    assert market.problems == []
    (there,) = market.look([Pool(**{**SPOT.__dict__, "zone": "us-east-1b"})])
    assert (there.usd_per_node_h, there.source) == (0.4, "spot price of AWS, us-east-1b")
    assert (found.score, there.score) == (9, 3), "that of the best zone where the pool names none"
    assert aws.asked.count("GetSpotPlacementScores") == 1, "not asked again within the hour"


def test_on_demand_prices_without_reserved_blocks(aws: AwsEndpoint) -> None:
    market = Market()
    assert market.look([FIXED]) == [Price(FIXED, 1.5, "price list of AWS")]
    market.look([FIXED])
    assert aws.asked == ["GetProducts"], "not asked again within the day"
    aws.on_demand = None
    assert Market().look([FIXED]) == [Price(FIXED, USD, TABLE)]


def test_what_is_stated_owned_or_of_another_cloud_is_not_looked_up(aws: AwsEndpoint) -> None:
    stated = Pool(**{**FIXED.__dict__, "usd_per_node_h": 0.9})
    owned = Pool("ours", usd_per_node_h=0.0)
    google = Pool(
        "g",
        "A100",
        1,
        "spot",
        0.0,
        region="us-central1",
        instance_type="a2-highgpu-1g",
        cloud="gcp",
    )
    unlisted = Pool(**{**SPOT.__dict__, "instance_type": "m7i.large", "usd_per_node_h": 0.04})
    assert from_table(unlisted).source == "as stated", (
        "the table knows the type and no spot price of it"
    )
    assert (
        not any(is_looked_up(pool) for pool in (stated, unlisted, owned, google))
        and is_looked_up(SPOT)
        and is_looked_up(FIXED)
    )
    prices = Market().look([stated, owned, google])
    assert [(p.usd_per_node_h, p.source) for p in prices[:2]] == [
        (0.9, "as stated"),
        (0.0, "as stated"),
    ]
    assert prices[2] == given(google) and prices[2].source == TABLE
    assert aws.asked == []


@pytest.mark.parametrize(
    ("code", "said", "tries"),
    [
        ("RequestExpired", "the credentials have expired", 1),
        ("ExpiredToken", "the credentials have expired", 1),
        ("AuthFailure", "AWS does not know these credentials", 1),
        ("UnauthorizedOperation", "these credentials may not ask that", 1),
        ("RequestLimitExceeded", "AWS asks to slow down, also after 4 tries", 4),
        ("InternalError", "AWS refuses (InternalError)", 4),
    ],
)
def test_an_error_is_one_line_and_the_table_counts(
    aws: AwsEndpoint, code: str, said: str, tries: int
) -> None:
    aws.fault = code
    market = Market()
    assert market.look([SPOT]) == [Price(SPOT, SPOT_USD, TABLE)]
    assert (
        len(market.problems) == 1
        and said in market.problems[0]
        and "secret" not in market.problems[0]
    )
    assert len(aws.asked) == tries


def test_throttling_that_passes_is_not_told(aws: AwsEndpoint) -> None:
    aws.fault, aws.faults_left = "RequestLimitExceeded", 2
    market = Market()
    assert market.look([SPOT])[0].usd_per_node_h == 0.6
    assert market.problems == []


def test_prices_are_found_where_only_scores_are_forbidden(
    aws: AwsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> dict[str, int]:
        raise aws_prices.NoAnswer(
            "placement scores in us-east-1: these credentials may not ask that "
            "(UnauthorizedOperation)"
        )

    market = Market()
    monkeypatch.setattr(market.prices, "scores", refuse)
    assert market.look([SPOT])[0].usd_per_node_h == 0.6
    assert len(market.problems) == 1
    assert market.look([SPOT])[0].score == 0
    assert market.problems == [], "not asked again within the hour"


@pytest.mark.slow
def test_an_endpoint_that_hangs(aws: AwsEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    waits(0.2, monkeypatch)
    monkeypatch.setattr(aws_prices, "_client", MAKE_CLIENT)
    aws.hang.set()
    began_s = time.monotonic()
    market = Market()
    assert market.look([SPOT]) == [Price(SPOT, SPOT_USD, TABLE)]
    assert time.monotonic() - began_s < 20
    assert market.problems == [
        f"spot prices of {TYPE} in {REGION}: AWS does not answer (ReadTimeoutError)"
    ]


def test_without_credentials_the_table_counts_and_that_is_said_once(
    aws: AwsEndpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(aws_prices, "_client", MAKE_CLIENT)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with caplog.at_level(logging.WARNING, "elastic"):
        market, looks = Market(), []
        look = market.look
        monkeypatch.setattr(market, "look", lambda pools: (looks.append(pools), look(pools))[1])
        ticker = Ticker([SPOT, FIXED], market, refresh_s=0.01)
        until(lambda: len(looks) > 5, "the sixth look")
        ticker.close()
    assert [record.getMessage() for record in caplog.records] == [
        "prices: there are no AWS credentials here; where a price is missing, that of the "
        f"{TABLE} counts"
    ]
    assert ticker.take() == [] and aws.asked == []


@pytest.mark.slow
def test_an_endpoint_that_hangs_is_said_once_and_the_table_counts(
    aws: AwsEndpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits(0.2, monkeypatch)
    monkeypatch.setattr(aws_prices, "_client", MAKE_CLIENT)
    aws.hang.set()
    with caplog.at_level(logging.WARNING, "elastic"):
        ticker = Ticker([SPOT], refresh_s=0.01)
        until(lambda: len(aws.asked) > 8, "more questions than those of one look")
    assert [record.getMessage() for record in caplog.records] == [
        f"prices: spot prices of {TYPE} in {REGION}: AWS does not answer (ReadTimeoutError); "
        f"where a price is missing, that of the {TABLE} counts"
    ]
    ticker.close()
    assert ticker.take() == [], "the price that the pool was read with stays"


def test_credentials_that_were_renewed_are_read_anew(
    aws: AwsEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """A client has those that it was made with, for good."""
    made: list[str] = []
    valid, now = {"first"}, "first"

    class Client:
        def __init__(self, secret: str) -> None:
            self.secret, self.known = secret, MAKE_CLIENT("ec2", REGION)

        def __getattr__(self, name: str) -> Any:
            if self.secret not in valid:
                code = {"Error": {"Code": "ExpiredToken"}}
                raise ClientError(code, "DescribeSpotPriceHistory")
            return getattr(self.known, name)

    def client(service: str, region: str) -> Client:
        made.append(now)
        return Client(now)

    market = Market(aws_prices.AwsPrices(client))
    ticker = Ticker([])
    ticker._pools, ticker._market, ticker._told = [SPOT], market, {"spot": (SPOT_USD, 0)}
    ticker._look()
    assert ticker.take() == [PriceSeen("spot", 0.6, 9)] and made == ["first"]
    now, valid = "second", {"second"}
    aws.spot = [("us-east-1a", "use1-az1", "0.90", "2026-11-22T05:00:00.000Z")]
    ticker._look()
    assert ticker.take() == [PriceSeen("spot", 0.9, 9)] and made == ["first", "second"]
    assert not caplog.records, "nobody has noticed"
    valid = set()
    for _ in range(3):
        ticker._look()
    assert made == ["first", "second"] + ["second"] * 3, "one for each look"
    valid = {"second"}
    ticker._look()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "the credentials have expired" in said[0]
    assert said[1] == "prices: AWS answers again for spot"


def test_a_profile_that_is_not_there_is_missing_credentials(
    aws: AwsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws_prices, "_client", MAKE_CLIENT)
    monkeypatch.setenv("AWS_PROFILE", "missing")
    market = Market()
    assert market.look([SPOT, FIXED]) == [Price(SPOT, SPOT_USD, TABLE), Price(FIXED, USD, TABLE)]
    assert market.problems == ["there are no AWS credentials here"] and aws.asked == []


def test_the_ticker_tells_what_has_changed(aws: AwsEndpoint) -> None:
    ticker = Ticker([SPOT, FIXED, Pool("ours")], refresh_s=0.01)
    told: list[Event] = []

    def heard(n: int) -> bool:
        told.extend(ticker.take())
        return len(told) >= n

    until(lambda: heard(2), "two prices")
    assert told == [PriceSeen("spot", 0.6, 9), PriceSeen("fixed", 1.5)]
    n = len(aws.asked)
    until(lambda: len(aws.asked) > n + 3, "another look")
    assert ticker.take() == [], "the same price is no news"
    aws.spot = [("us-east-1a", "use1-az1", "0.90", "2026-11-22T05:00:00.000Z")]
    until(lambda: heard(3), "the new price")
    assert told[2:] == [PriceSeen("spot", 0.9, 9)]
    aws.fault = "RequestLimitExceeded"
    ticker.close()


def test_a_ticker_whose_endpoint_hangs_keeps_nobody_waiting(aws: AwsEndpoint) -> None:
    aws.hang.set()
    began_s = time.monotonic()
    ticker = Ticker([SPOT])
    until(lambda: aws.asked, "a question")
    assert ticker.take() == []
    ticker.close()
    assert time.monotonic() - began_s < 30


@pytest.mark.e2e
def test_moto_speaks_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another imitation of EC2 than ours: one price for all."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-tests")
        found = aws_prices.AwsPrices().spot(TYPE, REGION)
        assert {spot.usd_per_h for spot in found} == {0.00001}
        assert all(spot.zone.startswith(REGION) for spot in found)
    finally:
        server.stop()


CLUSTER = """
cluster_name: priced
max_workers: 4
provider: {type: aws, region: us-east-1, availability_zone: "us-east-1a,us-east-1b"}
auth: {ssh_user: ubuntu}
head_node_type: head
available_node_types:
  head: {node_config: {InstanceType: m5.large}, resources: {}, max_workers: 0}
  cheap:
    max_workers: 4
    resources: {}
    labels: {ray.io/market-type: spot, ray.io/accelerator-type: A10G, ray.io/availability-region: us-east-1}
    node_config: {InstanceType: g5.4xlarge, InstanceMarketOptions: {MarketType: spot}}
"""


def test_elastic_prices(
    aws: AwsEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    assert command_line.main(["prices", "--cluster", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (row,) = said["prices"]
    assert (
        row["pool"] == "cheap"
        and row["usd_per_node_h"] == 0.6
        and row["source"].startswith("spot price of AWS")
    )
    assert row["scores"] == {"use1-az1": 9, "use1-az2": 3} and said["problems"] == []
    aws.fault = "ExpiredToken"
    assert command_line.main(["prices", "--cluster", str(file)]) == 0
    text = capsys.readouterr().out
    assert "the credentials have expired" in text and TABLE in text
    assert command_line.main(["prices", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert {row["instance_type"] for row in table["prices"]} >= {TYPE, "p5.48xlarge"} and table[
        "table_at"
    ] == str(catalog.PRICES_AT)
    assert command_line.main(["prices"]) == 0 and "ON DEMAND" in capsys.readouterr().out
    assert command_line.main(["prices", "--cluster", str(tmp_path / "none.yaml")]) == 2
