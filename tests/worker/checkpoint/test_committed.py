"""What is asked at each save looks at what is new, and at no file of a rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.worker.saved import save

from elastic.storage.local import LocalStorage
from elastic.types import Layout
from elastic.worker.checkpoint import checkpoint_index
from elastic.worker.checkpoint.checkpoint_format import FOLDER, MARKER, Fenced


class Counted(LocalStorage):
    """Counts what is read, and listed by its files."""

    asked: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        self.asked[f"get {key.rpartition('/')[2]}"] += 1
        return super().get(key)

    def list(self, prefix: str = "", after: str = "") -> list[str]:
        self.asked[f"list {prefix}"] += 1
        return super().list(prefix, after)


def test_a_marker_is_read_once_and_files_are_not_listed(tmp_path: Path) -> None:
    run = Counted(tmp_path)
    for step in range(1, 9):
        save(LocalStorage(tmp_path), (Layout(dp_shard=2), ()), step, epoch=step)
    run.asked.clear()
    assert checkpoint_index.newest_epoch(run) == 8 and run.asked[f"get {MARKER}"] == 8
    save(LocalStorage(tmp_path), (Layout(dp_shard=2), ()), 9, epoch=9)
    run.asked.clear()
    assert [found.step for found in checkpoint_index.committed(run)] == list(range(9, 0, -1))
    assert run.asked == {f"get {MARKER}": 1}
    with pytest.raises(Fenced):
        checkpoint_index.remove_copy(run, run.uri_of(f"{FOLDER}/step-00000001.g0001"), epoch=8)
    checkpoint_index.remove_copy(run, run.uri_of(f"{FOLDER}/step-00000001.g0001"), epoch=9)
    assert [found.step for found in checkpoint_index.committed(run)] == list(range(9, 1, -1))


def test_a_folder_that_is_not_committed_yet_is_looked_at_again(tmp_path: Path) -> None:
    run, other = Counted(tmp_path), LocalStorage(tmp_path)
    save(other, (Layout(dp_shard=2), ()), 1)
    key = f"{FOLDER}/step-00000001.g0001/{MARKER}"
    marker = other.get(key)
    other.delete(key)
    assert checkpoint_index.committed(run) == [] == checkpoint_index.find(run)
    other.put(key, marker)
    assert [found.step for found in checkpoint_index.committed(run)] == [1]
    other.put(key, marker[:-9])  # whoever reads a checkpoint, or lists them for a person, sees it
    problems: list[str] = []
    assert checkpoint_index.find(run, problems) == [] and len(problems) == 1
