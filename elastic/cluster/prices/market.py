"""What a run's pools cost now: asked in the background, told as PriceSeen. Without an answer the
catalog's dated table counts.

Spot: the newest price of the pool's zone, or the median of its region's zones. On demand: the price
list. Only AWS is asked; what a user has stated as a price is never looked up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from statistics import median
from typing import Any

from elastic import catalog
from elastic.cluster.prices.aws_prices import AwsPrices, NoAnswer, NoCredentials
from elastic.types import Event, Pool, PriceSeen
from elastic.worker.hosting.thread_boundary import ThreadBoundary, waiting

log = logging.getLogger(__name__)

REFRESH_S = 300.0  # spot prices move within minutes to hours
SCORES_S = 3600.0  # AWS limits how many different questions of it may be asked in a day
ON_DEMAND_S = 86400.0
NEWS = 0.001  # a change by less than this share is none
TABLE = f"table of {catalog.PRICES_AT}"
OF_AWS = "of AWS"  # in the source of a price that was looked up


@dataclass(frozen=True)
class Price:
    """Of a pool. `source`: where it is from, in words; `zones`: spot price by zone; `scores`:
    placement score by zone id; `score`: that of the pool's own zone, of the best one where it has
    none; 0 = not known."""

    pool: Pool
    usd_per_node_h: float | None
    source: str
    zones: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, int] = field(default_factory=dict)
    score: int = 0

    def plain(self) -> dict[str, Any]:
        pool = self.pool
        return {
            "pool": pool.name, "instance_type": pool.instance_type, "market_type": pool.market_type,
            "region": pool.region, "zone": pool.zone, "usd_per_node_h": self.usd_per_node_h,
            "source": self.source, "zones": dict(self.zones), "scores": dict(self.scores),
            "score": self.score,
        }  # fmt: skip


def is_looked_up(pool: Pool) -> bool:
    """A price that is not the table's was stated by the user, who may have a contract."""
    if (
        pool.cloud != "aws"
        or not pool.instance_type
        or not pool.region
        or pool.market_type not in ("spot", "on-demand")
    ):
        return False
    found = from_table(pool)
    return pool.usd_per_node_h == 0.0 or (
        found.source.startswith(TABLE) and pool.usd_per_node_h == found.usd_per_node_h
    )


@dataclass
class Market:
    """Asks for pools; `problems`: why what was not found, in one line each, of the last look."""

    prices: AwsPrices = field(default_factory=AwsPrices)
    problems: list[str] = field(default_factory=list)
    _kept: dict[tuple[str, ...], tuple[float, Any]] = field(default_factory=dict)
    _mute: bool = False

    def look(self, pools: Sequence[Pool]) -> list[Price]:
        """Of each pool. Never raises for what AWS does; takes as long as it takes, at most about a
        minute per pool."""
        self.problems, self._mute = [], False
        return [self._price(pool) if is_looked_up(pool) else given(pool) for pool in pools]

    def _price(self, pool: Pool) -> Price:
        if self._mute:
            return from_table(pool)
        try:
            if pool.market_type == "on-demand":
                key = ("on-demand", pool.instance_type, pool.region)
                ask = partial(self.prices.on_demand, pool.instance_type, pool.region)
                usd = self._keep(key, ON_DEMAND_S, ask)
                return from_table(pool) if usd is None else Price(pool, usd, f"price list {OF_AWS}")
            found = self.prices.spot(pool.instance_type, pool.region)
        except NoAnswer as error:
            self._mute = isinstance(error, NoCredentials)
            self._note(str(error))
            return from_table(pool)
        zones = {spot.zone: spot.usd_per_h for spot in found}
        scores = self._scores(pool)
        ids = {spot.zone: spot.zone_id for spot in found}
        score = (
            scores.get(ids.get(pool.zone, ""), 0) if pool.zone else max(scores.values(), default=0)
        )
        if not zones:
            self._note(f"AWS has no spot price of {pool.instance_type} in {pool.region}")
            return Price(pool, from_table(pool).usd_per_node_h, TABLE, scores=scores, score=score)
        usd = zones[pool.zone] if pool.zone in zones else median(zones.values())
        where = (
            pool.zone if pool.zone in zones else f"median of {len(zones)} zones of {pool.region}"
        )
        return Price(pool, usd, f"spot price {OF_AWS}, {where}", zones, scores, score)

    def _scores(self, pool: Pool) -> dict[str, int]:
        key = ("scores", pool.instance_type, pool.region, str(pool.max_nodes))
        ask = partial(self.prices.scores, pool.instance_type, pool.region, pool.max_nodes)
        try:
            return dict(self._keep(key, SCORES_S, ask))
        except NoAnswer as error:
            self._note(str(error))
            # nor is what was refused asked for at every look
            self._kept[key] = (time.monotonic(), {})
            return {}

    def _keep(self, key: tuple[str, ...], for_s: float, ask: Callable[[], Any]) -> Any:
        """What was found less than `for_s` ago is not asked for again."""
        known = self._kept.get(key)
        if known is None or time.monotonic() - known[0] > for_s:
            known = self._kept[key] = (time.monotonic(), ask())
        return known[1]

    def _note(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)


def given(pool: Pool) -> Price:
    """Of a pool that is not looked up."""
    found = from_table(pool)
    return (
        found
        if pool.usd_per_node_h in (0.0, found.usd_per_node_h)
        else Price(pool, pool.usd_per_node_h, "as stated")
    )


def from_table(pool: Pool) -> Price:
    """Of the catalog; what the pool says already where that does not know it."""
    known = catalog.instance_type(pool.instance_type)
    if pool.market_type == "owned" or known is None:
        return Price(pool, pool.usd_per_node_h, "as stated")
    usd, region = known.usd_per_h_or_elsewhere(pool.region, pool.market_type == "spot")
    if usd is None:
        return Price(
            pool, pool.usd_per_node_h or None, "as stated" if pool.usd_per_node_h else "not known"
        )
    return Price(pool, usd, TABLE if region == pool.region else f"{TABLE} of {region}")


class Ticker:
    """Looks at the market in a thread, and tells what has changed since the pools were read. Does
    nothing where there is nothing to look up."""

    def __init__(
        self, pools: Sequence[Pool], market: Market | None = None, refresh_s: float = REFRESH_S
    ) -> None:
        self._pools = [pool for pool in pools if is_looked_up(pool)]
        self._market, self._refresh_s = market or Market(), refresh_s
        self._told = {pool.name: (pool.usd_per_node_h, 0) for pool in self._pools}
        self._news: SimpleQueue[Event] = SimpleQueue()
        self._said: set[str] = set()
        self._missing: set[str] = set()  # pools whose price AWS did not tell at the last look
        self._ended = threading.Event()
        if self._pools:
            threading.Thread(target=self._run, name="market", daemon=True).start()

    def take(self) -> list[Event]:
        """What has come since the last call."""
        return waiting(self._news)

    def close(self) -> None:
        """Does not wait for an answer that may never come."""
        self._ended.set()

    def _run(self) -> None:
        boundary = ThreadBoundary(log, "prices")
        while not self._ended.is_set():
            boundary.holds(self._look)
            self._ended.wait(self._refresh_s)

    def _look(self) -> None:
        prices = self._market.look(self._pools)
        for price in prices:
            self._tell(price)
        found = {price.pool.name for price in prices if OF_AWS in price.source}
        if self._said and (again := sorted(found & self._missing)):
            self._said.clear()  # what fails after that is said again
            log.warning("prices: AWS answers again for %s", ", ".join(again))
        self._missing = {pool.name for pool in self._pools} - found
        for text in self._market.problems:
            if text not in self._said:
                self._said.add(text)
                log.warning(
                    "prices: %s; where a price is missing, that of the %s counts", text, TABLE
                )

    def _tell(self, price: Price) -> None:
        name, usd = price.pool.name, price.usd_per_node_h
        known_usd, known_score = self._told[name]
        if usd is None or price.source.startswith(TABLE):
            usd = known_usd  # the pool was read from the table, or has a newer price than that
        score = price.score or known_score
        if not self._ended.is_set() and (
            abs(usd - known_usd) > NEWS * known_usd or score != known_score
        ):
            self._told[name] = usd, score
            self._news.put(PriceSeen(name, usd, score))
