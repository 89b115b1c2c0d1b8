import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def pool() -> Iterator["object"]:
    from support.worker.worker_pool import Pool

    pool = Pool(4)
    yield pool
    pool.close()
