"""What keeps a run's durable copies from a driver that was replaced, and from markers that somebody has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.worker.saved import CUTS, save

from elastic.storage import open_storage
from elastic.worker.durable import Damaged, Fenced, clean, find, open_checkpoint
from elastic.worker.durable_format import MARKER


def test_a_marker_that_was_changed_is_not_believed(tmp_path: Path) -> None:
    """It still is JSON, and says what a marker may say."""
    storage = open_storage(tmp_path / "run")
    first, second = save(storage, CUTS[1], step=1), save(storage, CUTS[1], step=2, epoch=3)
    marker = Path(second) / MARKER
    text = marker.read_text()
    assert '"epoch": 3' in text
    marker.write_text(text.replace('"epoch": 3', '"epoch": 9'))
    problems: list[str] = []
    assert [found.uri for found in find(storage, problems)] == [first] and "its own digest does not fit" in problems[0]
    with pytest.raises(Damaged, match="its own digest does not fit"):
        open_checkpoint(second)


def test_a_driver_that_was_replaced_cleans_nothing_up(tmp_path: Path) -> None:
    """What looks like the rest of an interrupted save may be what its successor is writing."""
    storage = open_storage(tmp_path / "run")
    save(storage, CUTS[1], step=1, epoch=5)
    storage.put("checkpoints/step-00000002.g0003/__0_0.distcp", b"half")
    with pytest.raises(Fenced, match="epoch 5 has taken over"):
        clean(storage, 4)
    assert storage.exists("checkpoints/step-00000002.g0003/__0_0.distcp")
    assert clean(storage, 5) == [storage.uri_of("checkpoints/step-00000002.g0003")]
