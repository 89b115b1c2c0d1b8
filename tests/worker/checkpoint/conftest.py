from pathlib import Path

import pytest

from elastic.storage import Storage, open_storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")
