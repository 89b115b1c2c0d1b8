"""What is read of a checkpoint: only what is needed, and whatever is wrong with it has a name."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker.saved import CUTS, MODEL, find_valid, save
from torch import Tensor

from elastic.errors import SpecError, StorageDamaged
from elastic.reshard.rank_boxes import boxes, state_specs
from elastic.storage import LocalStorage, Storage, open_storage
from elastic.storage.local import PART_BYTES as LOCAL_PART_BYTES
from elastic.types import Box, TensorSpec
from elastic.worker.checkpoint import checkpoint_writer
from elastic.worker.checkpoint.blob import decode_blob, digest_of, find_data
from elastic.worker.checkpoint.checkpoint_format import Damaged
from elastic.worker.checkpoint.checkpoint_index import committed, find, open_checkpoint, verify
from elastic.worker.checkpoint.checkpoint_writer import commit, write_shard
from elastic.worker.hosting.resume_checks import found_copies


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGE: list[Callable[[Path], None]] = [flip, truncate, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGE, ids=["altered", "truncated", "missing"])
@pytest.mark.parametrize(
    "name", ["__0_0.distcp", "__3_0.distcp", "manifests.json", ".metadata", "commit.json"]
)
def test_damage_is_named_and_the_one_before_is_taken(
    storage: Storage, name: str, damage: Callable[[Path], None]
) -> None:
    good = save(storage, CUTS[1], step=10)
    bad = save(storage, CUTS[1], step=20)
    damage(Path(bad) / name)
    found, problems = find_valid(storage)
    assert found is not None and (found.step, found.uri) == (10, good)
    if (name, damage) == ("commit.json", Path.unlink):
        assert problems == []  # then it never was one
    else:
        assert len(problems) == 1 and f"{bad}/{name}" in problems[0]
        assert verify(bad) == problems
    assert verify(good) == []


def test_an_altered_box_is_noticed_while_it_is_read(storage: Storage) -> None:
    uri = save(storage, CUTS[1])
    flip(Path(uri) / "__0_0.distcp")
    checkpoint, bad = open_checkpoint(uri), []
    for box in boxes(MODEL, *CUTS[1], 0):
        try:
            checkpoint.read(box)
        except Damaged as error:
            bad.append(str(error))
    assert len(bad) == 1 and "__0_0.distcp: the blob of" in bad[0] and "altered" in bad[0]
    for box in boxes(MODEL, *CUTS[1], 1):  # in files of others
        if 0 not in box.offsets:
            checkpoint.read(box)


def test_only_the_blobs_that_are_needed_are_read(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(save(storage, CUTS[1]))
    read: list[str] = []
    real = LocalStorage._fill

    def noted(self: LocalStorage, key: str, *how: Any, **named: Any) -> int:
        read.append(key)
        return real(self, key, *how, **named)

    monkeypatch.setattr(LocalStorage, "_fill", noted)
    # rows 1 of rank 0, 2 of rank 1
    checkpoint.read(Box("model.layers.1.up", (1, 0), (2, 4), "float32"))
    assert read == ["__0_0.distcp", "__1_0.distcp"]


def test_another_version_is_not_read(storage: Storage) -> None:
    uri = save(storage, CUTS[1], step=7)

    def change(body: dict[str, Any]) -> None:
        body["version"] = 1

    rewrite(Path(uri) / "commit.json", change)
    assert "version 1 is not known (it would be 2)" in verify(uri)[0]


def test_one_of_a_newer_version_is_refused_and_none_before_it_taken(storage: Storage) -> None:
    save(storage, CUTS[1], step=6)
    uri = save(storage, CUTS[1], step=7)
    rewrite(Path(uri) / "commit.json", lambda body: body.update(version=3))
    said = f"{uri}/commit.json: version 3 is newer than 2, the newest that this elastic reads"
    for look in (
        lambda: find(storage),
        lambda: open_checkpoint(uri),
        lambda: found_copies(storage),
    ):
        with pytest.raises(SpecError, match=said):
            look()


def test_a_marker_that_storage_cannot_give_whole_is_one_damaged_copy(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = save(storage, CUTS[1], step=6), save(storage, CUTS[1], step=7)
    run = open_storage(storage.uri)
    real = run.get

    def get(key: str) -> bytes:
        if "step-00000006" in key:
            raise StorageDamaged(f"{key}: its CRC-32 is another (asked 10 times in 60 s)")
        return real(key)

    monkeypatch.setattr(run, "get", get)
    found = found_copies(run)
    assert [copy.uri for copy in found.copies] == [new]
    assert [one.uri for one in found.damaged] == [old]
    assert [item.step for item in committed(run)] == [7], "commits do not fail by it"


def write_large(storage: Storage) -> tuple[str, Tensor]:
    """One tensor of 12 MB by two ranks, in blobs that are read straight into their place."""
    value = torch.randn(3000, 1000)
    for rank in range(2):
        rows = value[1500 * rank : 1500 * (rank + 1)]
        write_shard(
            storage,
            1,
            1,
            rank=rank,
            items=[(Box("w", (1500 * rank, 0), (1500, 1000), "float32"), rows)],
        )
    return commit(storage, 1, 1, world_size=2, epoch=1, meta={}), value


def test_large_blobs_are_read_straight_into_their_place(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "CHUNK_BYTES", 1 << 20)
    uri, value = write_large(storage)
    checkpoint = open_checkpoint(uri)
    assert torch.equal(checkpoint.read(Box("w", (0, 0), (3000, 1000), "float32")), value)
    assert torch.equal(
        checkpoint.read(Box("w", (700, 0), (1700, 1000), "float32")), value[700:2400]
    )
    assert torch.equal(
        checkpoint.read(Box("w", (100, 250), (2800, 500), "float32")), value[100:2900, 250:750]
    )


@pytest.mark.parametrize("first_row", [0, 1], ids=["straight", "through scratch memory"])
def test_who_reads_is_asked_as_bytes_come_whether_to_read_on(
    storage: Storage, first_row: int
) -> None:
    checkpoint, asked, most = open_checkpoint(write_large(storage)[0]), list[int](), 1 << 30
    rows = Box("w", (first_row, 0), (1500 - first_row, 1000), "float32")

    def tick() -> None:
        asked.append(1)
        if len(asked) >= most:
            raise ConnectionAbortedError("generation 3 was aborted")

    checkpoint.tick = tick
    checkpoint.read(rows)
    assert len(asked) > rows.n_bytes // LOCAL_PART_BYTES, "of each part"
    asked.clear()
    most = 3
    with pytest.raises(ConnectionAbortedError):
        checkpoint.read(rows)
    assert len(asked) == 3


@pytest.mark.parametrize("at", ["head", "memory", "end"])
def test_every_part_of_a_large_blob_is_checked(storage: Storage, at: str) -> None:
    uri, _ = write_large(storage)
    row = json.loads((Path(uri) / "rank-1.json").read_text())["boxes"][0]
    place = {"head": 40, "memory": row["data"] + 999, "end": row["length"] - 3}[at]
    path = Path(uri) / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[row["offset"] + place] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"__1_0\.distcp: the blob of w .* altered"):
        open_checkpoint(uri).read(Box("w", (0, 0), (3000, 1000), "float32"))


BLOBS = [
    (torch.arange(6.0).reshape(2, 3), True),
    (torch.tensor(3), True),
    (torch.zeros(3, dtype=torch.bool), True),
    (torch.ones(4, 5, dtype=torch.bfloat16), True),
    (torch.arange(24.0).reshape(2, 1, 3, 4), True),
    (torch.arange(100.0)[3:5], False),  # a view: its record is the whole storage
    (torch.arange(6.0).reshape(2, 3).t(), False),  # its memory is in another order
    (torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1), False),
]


@pytest.mark.parametrize(("tensor", "as_it_lies"), BLOBS)
def test_blobs_are_read_where_they_lie_else_by_torch(tensor: Tensor, as_it_lies: bool) -> None:
    """Fails when torch.save lays its files out differently: reading is then right, but slower."""
    box = Box(
        "w", (0,) * tensor.ndim, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    )
    file = io.BytesIO()
    torch.save(tensor, file)
    data = memoryview(bytearray(file.getvalue()))
    assert (find_data(data, box) is not None) == as_it_lies
    assert torch.equal(decode_blob(data, box), tensor)
    with pytest.raises(ValueError):
        decode_blob(data, Box("w", (0, 0), (7, 3), "float32"))
    for bad in (
        memoryview(bytearray(data[:-30])),
        memoryview(bytearray(50)),
        memoryview(bytearray(0)),
    ):
        with pytest.raises(ValueError):
            decode_blob(bad, box)


def test_nothing_valid(storage: Storage) -> None:
    truncate(Path(save(storage, CUTS[0])) / "__0_0.distcp")
    found, problems = find_valid(storage, deep=False)
    assert found is None and len(problems) == 1
    assert find_valid(open_storage(storage.uri_of("nowhere"))) == (None, [])


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Alters a marker and mends its digest: the work of somebody who knows the format."""
    body = json.loads(path.read_text())
    change(body)
    body.pop("sha256")
    body["sha256"] = sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["files"].append(
            {"name": "../../../etc/passwd", "n_bytes": 1, "sha256": ""}
        ),
        lambda body: body.update(step=99),
        lambda body: body.update(world_size=-1),
        lambda body: body.update(files={}),
    ],
)
def test_a_marker_that_makes_no_sense_is_refused(
    storage: Storage, change: Callable[[dict[str, Any]], None]
) -> None:
    uri = save(storage, CUTS[0])
    rewrite(Path(uri) / "commit.json", change)
    found, problems = find_valid(storage)
    assert found is None and len(problems) == 1 and "commit.json" in problems[0]


class Boom:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_nothing_of_a_checkpoint_is_executed(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle in .metadata and one in place of a blob, with all digests mended."""
    monkeypatch.chdir(tmp_path)
    uri = Path(save(storage, CUTS[0]))
    (uri / ".metadata").write_bytes(pickle.dumps(Boom()))
    manifest = json.loads((uri / "manifests.json").read_text())
    row = manifest["boxes"][0]
    torch.save(Boom(), tmp_path / "evil")
    evil = (tmp_path / "evil").read_bytes()
    (uri / "__0_0.distcp").write_bytes(evil)
    n_bytes = 4 * prod(row["sizes"])
    digest = digest_of(memoryview(evil))
    row.update(offset=0, length=len(evil), digest=digest, data=len(evil) - n_bytes)
    manifest.update(boxes=[row], n_bytes=len(evil), sha256=sha256(digest.encode()).hexdigest())
    (uri / "manifests.json").write_text(json.dumps(manifest))

    def mend(body: dict[str, Any]) -> None:
        for note in body["files"]:
            data = (uri / note["name"]).read_bytes()
            shard = note["name"].endswith(".distcp")
            note.update(
                n_bytes=len(data), sha256=manifest["sha256"] if shard else sha256(data).hexdigest()
            )

    rewrite(uri / "commit.json", mend)
    assert find_valid(storage)[0] is not None
    checkpoint = open_checkpoint(str(uri))
    assert checkpoint.verify() == []
    with pytest.raises(Damaged, match="is no tensor"):
        checkpoint.read(Box(row["fqn"], tuple(row["offsets"]), tuple(row["sizes"]), row["dtype"]))
    assert not (tmp_path / "executed").exists()
    pickle.loads((uri / ".metadata").read_bytes())
    assert (tmp_path / "executed").exists()  # it would have been


# ---------------------------------------------------------------------------------- the wrong model


def test_another_model_is_named_with_tensor_and_shapes(storage: Storage) -> None:
    checkpoint = open_checkpoint(save(storage, CUTS[1]))
    specs = [spec for spec in state_specs(MODEL) if 0 not in spec.shape]
    for change, says in (
        (TensorSpec("model.new", (2,), "float32"), r"no tensor model\.new .*\[2\] float32"),
        (
            TensorSpec("model.norm", (5,), "float32"),
            r"model\.norm is \[2\] float32 there, the model wants \[5\] float32",
        ),
        (
            TensorSpec("model.norm", (2,), "bfloat16"),
            r"model\.norm is \[2\] float32 there, the model wants \[2\] bfloat16",
        ),
    ):
        with pytest.raises(SpecError, match=says):
            checkpoint.check([*(spec for spec in specs if spec.fqn != change.fqn), change])
    with pytest.raises(SpecError, match=r"the model has no tensor model\.embed \[9, 4\]"):
        checkpoint.check(specs[1:])


@pytest.mark.parametrize(
    ("box", "says"),
    [
        (Box("model.new", (0,), (2,), "float32"), r"no tensor model\.new"),
        (
            Box("model.norm", (1,), (2,), "float32"),
            r"model\.norm is \[2\] float32 there, wanted .* from \[1\]",
        ),
        (Box("model.norm", (0, 0), (1, 1), "float32"), "other model"),
        (Box("model.norm", (0,), (2,), "float16"), "float16"),
    ],
)
def test_a_box_of_another_model_is_refused(storage: Storage, box: Box, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        open_checkpoint(save(storage, CUTS[1])).read(box)
