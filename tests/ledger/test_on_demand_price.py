"""What GPUs cost on demand, of a pool that is not bought so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.ledger.on_demand_price import on_demand_price
from elastic.types import Pool


def test_the_catalog_has_the_price_of_a_known_instance_type() -> None:
    pool = Pool("s", "A100", 8, "spot", 10.0, instance_type="a2-highgpu-8g", region="us-central1")
    price, source = on_demand_price(pool, ())
    assert price == pytest.approx(29.3871 / 8)
    assert "a2-highgpu-8g in us-central1, the catalog's price" in source


def test_a_pool_of_the_same_gpus_comes_before_the_catalog() -> None:
    spot = Pool("s", "A100", 8, "spot", 10.0, instance_type="a2-highgpu-8g")
    own = Pool("o", "A100", 2, "on-demand", 6.0, instance_type="a2-highgpu-8g")
    assert on_demand_price(spot, (spot, own)) == (3.0, "$3.00 per GPU-hour, pool o of this run")
    other = replace(own, accelerator_type="H100")
    assert on_demand_price(replace(spot, instance_type=""), (spot, other)) == (None, "")
