import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.worker.worker_pool import Pool

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def warm_pool() -> Iterator["Pool"]:
    from support.worker.worker_pool import Pool

    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def pool(warm_pool: "Pool") -> Iterator["Pool"]:
    """Nobody trains on beside the next test."""
    yield warm_pool
    warm_pool.rest()
