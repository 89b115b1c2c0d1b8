"""prices(): what the pools of a cluster file cost now, or what the catalog says of all instance
types. gpus(): its GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic import catalog
from elastic.catalog import gpu_names
from elastic.catalog.schema import suggestion
from elastic.config.clusters import load_cluster
from elastic.errors import SpecError
from elastic.types import Pool


@dataclass(frozen=True)
class PriceQuery:
    """What is asked for, '' = all; `gpu` in any spelling, `own`: catalog files besides those of
    ELASTIC_CATALOG."""

    gpu: str = ""
    cloud: str = ""
    region: str = ""
    own: tuple[str | Path, ...] = ()


@dataclass(frozen=True)
class Prices:
    """`rows`: plain data, one per pool, or per instance type and region. `problems`: what could not
    be asked, and why."""

    rows: tuple[dict[str, Any], ...]
    problems: tuple[str, ...] = ()
    file: str = ""

    def plain(self) -> dict[str, Any]:
        return {
            "file": self.file, "table_at": str(catalog.PRICES_AT), "prices": list(self.rows),
            "problems": list(self.problems)
        }  # fmt: skip


def prices(cluster: str | Path | None = None, wanted: PriceQuery = PriceQuery()) -> Prices:
    """With a cluster file AWS is asked for the price of each of its pools there, if there are
    credentials, and for the placement scores of its zones: all that is known of availability.
    Raises SpecError."""
    known = catalog.read(wanted.own).instances
    if cluster is None:
        _check(wanted, known.values(), ())
        return Prices(
            tuple(_chosen((row for found in known.values() for row in _of_table(found)), wanted))
        )
    if wanted.own:
        raise SpecError(
            "--catalog is for the table alone; for the pools of a cluster file set "
            f"{catalog.VARIABLE}"
        )
    from elastic.cluster.prices.market import Market

    market, spec = Market(), load_cluster(cluster)
    _check(wanted, known.values(), spec.pools)
    rows = []
    for price in market.look(spec.pools):
        pool, hardware = (
            price.pool,
            _hardware_of_pool(price.pool, known.get(price.pool.instance_type)),
        )
        usd = {
            "usd_per_gpu_h": None
            if hardware["gpus"] == "-"
            else _each(price.usd_per_node_h, pool.gpus_per_node)
        }
        rows.append({**price.plain(), "cloud": pool.cloud, **hardware, **usd})
    return Prices(tuple(_chosen(rows, wanted)), tuple(market.problems), str(cluster))


def gpus(wanted: PriceQuery = PriceQuery()) -> list[dict[str, Any]]:
    """The GPUs of the catalog, with peaks and sources. Raises SpecError."""
    if wanted.cloud or wanted.region:
        raise SpecError(
            "--chips lists GPUs, which are the same everywhere: leave --cloud and --region out"
        )
    found = (
        catalog.find_chips(wanted.gpu, wanted.own)
        if wanted.gpu
        else catalog.chips(wanted.own).values()
    )
    return [dataclasses.asdict(chip) for chip in found]


def _of_table(found: catalog.InstanceType) -> list[dict[str, Any]]:
    """A row for each region in which the table has a price of it; one without a region where it has
    none."""
    quotes = found.prices or {"": catalog.Quote()}
    return [
        {
            "instance_type": found.name,
            "cloud": found.cloud,
            **_hardware(found),
            "region": region,
            "usd_per_h": quote.usd_per_h,
            "spot_usd_per_h": quote.spot_usd_per_h,
            "usd_per_gpu_h": _each(quote.usd_per_h, found.gpus),
            "spot_usd_per_gpu_h": _each(quote.spot_usd_per_h, found.gpus),
            "available": None,
            "at": quote.at,
            "source": quote.source,
        }
        for region, quote in sorted(quotes.items())
    ]


def _hardware(found: catalog.InstanceType | None) -> dict[str, Any]:
    """Of an instance type; of one that the catalog does not have, nothing is known."""
    return {
        "gpus": f"{found.gpus} {found.gpu}" if found and found.gpus else "-",
        "chip": found.chip if found else "",
        "gpu_memory_bytes": found.gpu_memory_bytes if found else 0,
        "link": found.link if found else "",
        "link_bytes_per_s": found.link_bytes_per_s if found else 0.0,
        "network_gbps": found.network_gbps if found else 0.0,
        "network_bytes_per_s_per_gpu": found.network_bytes_per_s_per_gpu if found else 0.0,
        "hardware_source": found.source if found else "",
    }


def _hardware_of_pool(pool: Pool, found: catalog.InstanceType | None) -> dict[str, Any]:
    """What the file says of its GPUs counts, since a pool may use fewer of them, or machines that
    the catalog does not have."""
    known = _hardware(found)
    if pool.accelerator_type == "CPU":
        return {**known, "gpus": "-"}
    same = gpu_names.matching(pool.accelerator_type, catalog.chips())
    chip = known["chip"] or (same[0].name if same else "")
    memory = pool.memory_bytes_per_gpu or known["gpu_memory_bytes"]
    return {
        **known,
        "gpus": f"{pool.gpus_per_node} {pool.accelerator_type}",
        "chip": chip,
        "gpu_memory_bytes": memory,
    }


def _each(usd: float | None, gpus: int) -> float | None:
    return None if usd is None or not gpus else round(usd / gpus, 6)


def _chosen(rows: Iterable[dict[str, Any]], wanted: PriceQuery) -> Iterator[dict[str, Any]]:
    chips = (
        {chip.name for chip in catalog.find_chips(wanted.gpu, wanted.own)} if wanted.gpu else None
    )
    for row in rows:
        here = wanted.cloud in ("", row["cloud"]) and wanted.region in ("", row["region"])
        if here and (chips is None or row["chip"] in chips):
            yield row


def _check(
    wanted: PriceQuery, types: Iterable[catalog.InstanceType], pools: Sequence[Pool]
) -> None:
    """A word that nothing has is a slip of the pen: an empty table would not tell that."""
    found = list(types)
    clouds = ({each.cloud for each in found} | {pool.cloud for pool in pools}) - {""}
    if wanted.cloud and wanted.cloud not in clouds:
        raise SpecError(
            f"--cloud {wanted.cloud}: no such cloud in the "
            f"catalog{suggestion(wanted.cloud, sorted(clouds))}"
        )
    priced = {
        region for each in found if wanted.cloud in ("", each.cloud) for region in each.prices
    }
    priced |= {pool.region for pool in pools}
    if wanted.region and wanted.region not in priced:
        of = f" of {wanted.cloud}" if wanted.cloud else ""
        near = suggestion(wanted.region, sorted(priced - {""}))
        raise SpecError(
            f"--region {wanted.region}: the catalog has no price in such a region{of}{near}"
        )
    if wanted.gpu:
        catalog.find_chips(wanted.gpu, wanted.own)
