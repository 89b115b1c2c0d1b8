"""The labels by which nodes of a cluster are told apart: Ray's, and those of ours that name a
pool."""

from __future__ import annotations

MARKET_LABEL, ACCELERATOR_LABEL = "ray.io/market-type", "ray.io/accelerator-type"
REGION_LABEL, ZONE_LABEL = "ray.io/availability-region", "ray.io/availability-zone"
POOL_LABEL = "elastic-pool"  # where Ray itself cannot name the pool
# that name a pool, the first that is there counts
POOL_LABELS = (POOL_LABEL, "pool", "ray.io/node-group")
