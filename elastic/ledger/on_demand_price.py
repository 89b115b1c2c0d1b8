"""What a pool's GPUs cost on demand."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.types import Pool


def on_demand_price(pool: Pool, pools: Sequence[Pool]) -> tuple[float | None, str]:
    """USD per GPU-hour, and where that is from: the pool's own price, that of an on-demand pool of
    the same GPUs in the run, the catalog's."""
    alike = [
        other
        for other in (pool, *pools)
        if other.market_type == "on-demand"
        and other.usd_per_node_h > 0
        and (other.accelerator_type, other.instance_type)
        == (pool.accelerator_type, pool.instance_type)
    ]
    if alike:
        usd = alike[0].usd_per_gpu_h
        return usd, f"${usd:,.2f} per GPU-hour, pool {alike[0].name} of this run"
    if not pool.instance_type:
        return None, ""
    from elastic import catalog  # brings what most runs that are looked at have no need of

    kind = catalog.instance_type(pool.instance_type)
    price, region = kind.usd_per_h_or_elsewhere(pool.region) if kind is not None else (None, "")
    if price is None:
        return None, ""
    usd = price / max(1, pool.gpus_per_node)
    where = f"{pool.instance_type} in {region}, the catalog's price (docs/catalog.md)"
    return usd, f"${usd:,.2f} per GPU-hour, {where}"
