"""prices(): what the pools of a cluster file cost now, or what the catalog's table says of all instance types."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic import catalog
from elastic.cluster_spec import load_cluster


@dataclass(frozen=True)
class Prices:
    """`rows`: plain data, one per pool or instance type. `problems`: what could not be asked, and why."""

    rows: tuple[dict[str, Any], ...]
    problems: tuple[str, ...] = ()
    file: str = ""

    def plain(self) -> dict[str, Any]:
        return {
            "file": self.file, "table_at": str(catalog.PRICES_AT), "prices": list(self.rows), "problems": list(self.problems)
        }  # fmt: skip


def prices(cluster: str | Path | None = None) -> Prices:
    """With a cluster file AWS is asked for the price of each of its pools there, if there are credentials. Raises SpecError."""
    if cluster is None:
        return Prices(tuple(row for found in catalog.instance_types().values() for row in _of_table(found)))
    from elastic.cluster.market import Market

    market, spec = Market(), load_cluster(cluster)
    found = market.look(spec.pools)
    return Prices(tuple(price.plain() for price in found), tuple(market.problems), str(cluster))


def _of_table(found: catalog.InstanceType) -> list[dict[str, Any]]:
    """A row for each region in which the table has a price of it."""
    gpus = f"{found.gpus} {found.gpu}" if found.gpus else "-"
    return [
        {
            "instance_type": found.name,
            "cloud": found.cloud,
            "gpus": gpus,
            "region": region,
            "usd_per_h": usd,
            "spot_usd_per_h": spot,
        }
        for region, (usd, spot) in sorted(found.prices.items())
    ]
