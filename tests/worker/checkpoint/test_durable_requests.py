"""What a checkpoint of many ranks asks of storage: to commit it one request for each manifest, and a
few for all files; to open it a few, however many ranks it is of."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.storage.faulty_proxy import FaultyProxy

from elastic.storage import Storage, open_storage
from elastic.storage.local import LocalStorage
from elastic.storage.s3 import S3Storage
from elastic.types import Box
from elastic.worker.checkpoint import checkpoint_index, checkpoint_reader, checkpoint_writer
from elastic.worker.checkpoint.checkpoint_format import (
    MANIFESTS,
    MARKER,
    Damaged,
    decode_manifests,
    decode_marker,
    encode_manifests,
    encode_marker,
    note_of,
)

N_RANKS = 6


@pytest.mark.slow
def test_sizes_are_asked_once_for_all_files(s3: S3Storage, proxy: FaultyProxy) -> None:
    for rank in range(N_RANKS):
        checkpoint_writer.write_shard(
            s3,
            5,
            1,
            rank=rank,
            items=[(Box("model.w", (2 * rank, 0), (2, 3), "float32"), torch.ones(2, 3))],
        )
    proxy.clear()
    uri = checkpoint_writer.commit(s3, 5, 1, world_size=N_RANKS, epoch=1, meta={})
    assert proxy.count("^HEAD") == 0 and proxy.count(r"^GET .*rank-\d+\.json") == N_RANKS
    assert proxy.count("list-type=2") <= 5, "twice for the fence, once for the sizes"
    proxy.clear()
    assert checkpoint_index.open_checkpoint(uri).tensors == {
        "model.w": ((2 * N_RANKS, 3), "float32")
    }
    assert proxy.count("^HEAD") == 0 and proxy.count("list-type=2") == 1
    assert len(proxy.seen) == 4, "marker, list, index and manifests"


def written(storage: Storage, n: int) -> str:
    for rank in range(n):
        box = Box("model.w", (2 * rank, 0), (2, 3), "float32")
        checkpoint_writer.write_shard(storage, 5, 1, rank=rank, items=[(box, torch.ones(2, 3))])
    return checkpoint_writer.commit(storage, 5, 1, world_size=n, epoch=1, meta={})


def test_each_rank_asks_as_often_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are threads that open it at once; so one more rank costs what each does."""
    asked: Counter[str] = Counter()
    asked_by: dict[int, int] = {}
    for name in ("get", "sizes"):
        real = getattr(LocalStorage, name)

        def counted(*given: Any, name: str = name, real: Any = real) -> Any:
            asked[name] += 1
            return real(*given)

        monkeypatch.setattr(LocalStorage, name, counted)
    for n in (4, 16, 64):
        uri = written(open_storage(tmp_path / str(n)), n)
        asked.clear()
        with ThreadPoolExecutor(n) as ranks:
            found = list(ranks.map(checkpoint_index.open_checkpoint, [uri] * n))
        assert {len(checkpoint.tensors) for checkpoint in found} == {1}
        assert asked == {"get": 3 * n, "sizes": n}, "marker, index, manifests; one list"
        asked_by[n] = asked.total() // n
    assert set(asked_by.values()) == {4}


def as_at_first(uri: str) -> None:
    """The marker names each manifest, and nothing has them together."""
    folder = Path(uri)
    (folder / MANIFESTS).unlink()
    marker = decode_marker((folder / MARKER).read_bytes(), MARKER)
    files = [note for note in marker.files if note.name != MANIFESTS]
    names = [f"rank-{rank}.json" for rank in range(marker.world_size)]
    files += [note_of(name, (folder / name).read_bytes()) for name in names]
    (folder / MARKER).write_bytes(encode_marker(replace(marker, files=tuple(files))))


def test_those_of_markers_that_name_each_manifest_are_read_and_checked(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    uri = written(storage, 3)
    new = checkpoint_index.open_checkpoint(uri)
    as_at_first(uri)
    old = checkpoint_index.open_checkpoint(uri)
    box = Box("model.w", (0, 0), (6, 3), "float32")
    assert old.tensors == new.tensors and torch.equal(old.read(box), new.read(box))
    assert old.verify() == []
    again = checkpoint_writer.commit(storage, 5, 1, world_size=3, epoch=1, meta={})
    assert again == uri, "as it is"
    assert not (Path(uri) / MANIFESTS).exists()
    (Path(uri) / "rank-1.json").write_bytes((Path(uri) / "rank-2.json").read_bytes())
    with pytest.raises(Damaged, match=r"rank-1\.json: altered"):
        checkpoint_index.open_checkpoint(uri)


def test_other_shards_are_not_taken_for_those_of_the_marker(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    uri = written(storage, 3)
    marker = Path(uri) / MARKER
    known = decode_marker(marker.read_bytes(), MARKER)
    for name in (MANIFESTS, "__1_0.distcp"):
        files = tuple(
            replace(note, sha256="0" * 64) if note.name == name else note for note in known.files
        )
        marker.write_bytes(encode_marker(replace(known, files=files)))
        with pytest.raises(Damaged, match="it does not describe the files that are"):
            checkpoint_writer.commit(storage, 5, 1, world_size=3, epoch=1, meta={})


def test_manifests_that_are_not_as_many_as_ranks_are_refused() -> None:
    texts = [b"{}", b"[]"]
    assert decode_manifests(encode_manifests(texts), "m", 2) == texts
    with pytest.raises(Damaged, match="^m: it has 2 lines where 3 ranks have one each$"):
        decode_manifests(encode_manifests(texts), "m", 3)


@pytest.mark.parametrize(("remote", "most"), [(True, 6), (False, 40)])
def test_reading_back_asks_object_storage_for_many_blobs_at_once(
    remote: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is read a blob at a time, as it is hashed."""
    monkeypatch.setattr(checkpoint_writer, "CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr(checkpoint_reader, "VERIFY_BYTES", 64 << 10)
    monkeypatch.setattr(checkpoint_reader, "VERIFY_REMOTE_BYTES", 512 << 10)
    storage, box = open_storage(tmp_path), Box("w", (0,), (1 << 19,), "float32")
    checkpoint_writer.write_shard(storage, 5, 1, rank=0, items=[(box, torch.ones(box.sizes))])
    uri = checkpoint_writer.commit(storage, 5, 1, world_size=1, epoch=1, meta={})
    monkeypatch.setattr(LocalStorage, "remote", remote)
    asked, paced = list[int](), list[int]()
    real = LocalStorage.read

    def read(self: LocalStorage, key: str, offset: int, length: int) -> bytearray:
        asked.append(length)
        assert offset + length <= Path(self.uri_of(key)).stat().st_size, key
        return real(self, key, offset, length)

    monkeypatch.setattr(LocalStorage, "read", read)
    assert checkpoint_index.verify(uri, paced=paced.append) == []
    shard = Path(uri) / "__0_0.distcp"
    assert sum(paced) >= shard.stat().st_size
    assert most / 2 < len(asked) <= 2 * most
    data = bytearray(shard.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    shard.write_bytes(data)
    (problem,) = checkpoint_index.verify(uri)
    assert "the blob of w [16384] float32 from [393216]" in problem and "is altered" in problem
