"""Whatever goes wrong, and whenever: the newest whole checkpoint is found and loaded, and nothing
else ever is.

Killed at every system call that a save, a commit, a removal and a load make; every class of bytes
of every file altered, cut off or removed; an S3 server behind a proxy that does harm.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.places import TESTS
from support.worker.kill_everywhere import CUT, MODEL, load_newest, save

from elastic.errors import ElasticError, StorageFailed
from elastic.reshard.rank_boxes import owned_boxes
from elastic.storage import Storage, open_storage
from elastic.worker.checkpoint import checkpoint_index
from elastic.worker.checkpoint.checkpoint_index import find
from elastic.worker.checkpoint.checkpoint_writer import commit, write_shard

pytestmark = pytest.mark.slow


# ------------------------------------------------------------------------------------------- killed


def killed_everywhere(tmp_path: Path, every: int) -> list[tuple[str, int]]:
    """(point, step that is loaded after it) for each point at which a child was killed."""
    before = open_storage(tmp_path / "before")
    for step in (10, 20):
        save(before, step)
    write_shard(before, 15, 1, rank=0, items=[])  # an interrupted save, to be cleaned up
    command = [
        sys.executable,
        str(TESTS / "support" / "worker" / "kill_everywhere.py"),
        str(tmp_path),
        str(every),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = []
    for at, name, killed in json.loads(done.stdout):
        assert killed, f"{name} was not reached"
        storage = open_storage(tmp_path / f"at{at}")
        step, problems = load_newest(storage)
        assert problems == [], (name, problems)
        out.append((name, step))
        goes_on(storage, name, step)
    return out


def goes_on(storage: Storage, name: str, step: int) -> None:
    """The next driver cleans up, saves and commits as if nothing had been."""
    checkpoint_index.clean(storage, 2)
    left = {found.uri for found in find(storage)}
    folders = {storage.uri_of("/".join(key.split("/")[:2])) for key in storage.list("checkpoints/")}
    assert folders == left, name
    save(storage, 30)
    assert load_newest(storage) == (30, []), name
    assert step in (20, 30)


def check_kills(found: list[tuple[str, int]]) -> None:
    phases = [name.split(":")[0] for name, _ in found]
    assert set(phases) == {"save", "commit", "retention", "load"}
    assert all(step == 20 for name, step in found if name.startswith("save"))
    assert all(step == 30 for name, step in found if name.startswith(("retention", "load")))
    commits = [step for name, step in found if name.startswith("commit")]
    # the marker is what makes the difference
    assert commits == sorted(commits) and set(commits) == {20, 30}


@pytest.mark.e2e
def test_killed_at_every_fourth_point(tmp_path: Path) -> None:
    found = killed_everywhere(tmp_path, 4)
    assert len(found) >= 12
    check_kills(found)


@pytest.mark.whole
def test_killed_at_every_point(tmp_path: Path) -> None:
    found = killed_everywhere(tmp_path, 1)
    print(f"killed at {len(found)} points: {found}")
    assert len(found) >= 50
    check_kills(found)


# -------------------------------------------------------------------------------------------- bytes


def places(uri: str) -> dict[str, tuple[str, int]]:
    """A byte of each class: name -> (file, offset)."""
    folder = Path(uri)
    rows = json.loads((folder / "rank-1.json").read_text())["boxes"]
    small = min(rows, key=lambda row: row["length"])
    large = max(rows, key=lambda row: row["length"])
    out = {}
    for kind, row in (("small", small), ("large", large)):
        blob = (folder / "__1_0.distcp").read_bytes()[row["offset"] : row["offset"] + row["length"]]
        directory = blob.rindex(b"PK\x01\x02")
        n_bytes = len(blob) - directory
        for name, at in {
            "zip header": 2, "pickle": blob.index(b"data.pkl") + 80, "padding": row["data"] - 3,
            "memory": row["data"] + 1, "zip directory": directory + n_bytes // 2,
            "end": len(blob) - 1,
        }.items():  # fmt: skip
            out[f"{kind} blob, {name}"] = ("__1_0.distcp", row["offset"] + at)
    for file in ("commit.json", "manifests.json", ".metadata"):
        size = (folder / file).stat().st_size
        out |= {
            f"{file}, {name}": (file, at)
            for name, at in {"first": 0, "middle": size // 2, "last": size - 1}.items()
        }
    return out


NAMES = [
    *(f"{kind} blob, {name}" for kind in ("small", "large") for name in (
        "zip header", "pickle", "padding", "memory", "zip directory", "end")),
    *(f"{file}, {name}" for file in ("commit.json", "manifests.json", ".metadata") for name in (
        "first", "middle", "last")),
]  # fmt: skip


def altered(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x11
    path.write_bytes(data)


def cut_off(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes()[:at])


def zeroed(path: Path, at: int) -> None:
    """A page that was never written, as some file systems leave it after a crash."""
    data = bytearray(path.read_bytes())
    end = min(len(data), at + 4096)
    data[at:end] = bytes(end - at)
    path.write_bytes(data)


def grown(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes() + b"x")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two")
    storage = open_storage(root)
    assert set(places(save(storage, 10))) == set(NAMES)
    save(storage, 20)
    return root


@pytest.mark.sampled(32)
@pytest.mark.parametrize("damage", [altered, cut_off, zeroed, grown])
@pytest.mark.parametrize("name", NAMES)
def test_damage_of_every_class_of_bytes_is_seen_by_loading_alone(
    two: Path, tmp_path: Path, name: str, damage: Callable[[Path, int], None]
) -> None:
    root = Path(shutil.copytree(two, tmp_path / "run"))
    storage = open_storage(root)
    uri = find(storage)[0].uri
    file, at = places(uri)[name]
    before = (Path(uri) / file).read_bytes()
    damage(Path(uri) / file, at)
    changed = (Path(uri) / file).read_bytes() != before
    step, problems = load_newest(storage)
    if changed:
        assert step == 10 and len(problems) == 1 and f"{uri}/{file}" in problems[0], (
            step,
            problems,
        )
        assert checkpoint_index.verify(uri) != []
    else:
        assert step == 20 and problems == []


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", "__1_0.distcp", "manifests.json", ".metadata", "commit.json"]
)
def test_a_file_that_is_gone(two: Path, tmp_path: Path, name: str) -> None:
    storage = open_storage(Path(shutil.copytree(two, tmp_path / "run")))
    (Path(find(storage)[0].uri) / name).unlink()
    assert load_newest(storage)[0] == 10


def test_two_files_that_changed_places(two: Path, tmp_path: Path) -> None:
    """Each whole in itself, and of the right size."""
    storage = open_storage(Path(shutil.copytree(two, tmp_path / "run")))
    new, old = (Path(found.uri) for found in find(storage))
    shutil.copy(old / "__1_0.distcp", new / "__1_0.distcp")
    assert load_newest(storage)[0] == 10


def test_blobs_are_zip_files(two: Path) -> None:
    """The classes of bytes above mean what they say."""
    folder = Path(find(open_storage(two))[0].uri)
    row = json.loads((folder / "rank-1.json").read_text())["boxes"][0]
    data = (folder / "__1_0.distcp").read_bytes()[row["offset"] : row["offset"] + row["length"]]
    (folder / "blob.zip").write_bytes(data)
    with zipfile.ZipFile(folder / "blob.zip") as archive:
        assert any(name.endswith("data/0") for name in archive.namelist())
    (folder / "blob.zip").unlink()


# ----------------------------------------------------------------------------------- object storage

HARM = [
    "unavailable",
    "slow_down",
    "internal",
    "reset",
    "short",
    "hang",
    "lost",
    "wrong",
    "wrong_sent",
]


@pytest.mark.e2e
@pytest.mark.sampled(2)
@pytest.mark.parametrize("harm", HARM)
@pytest.mark.usefixtures("small_parts")
def test_saving_and_loading_through_a_faulty_network(
    s3: Storage, proxy: object, harm: str, request: pytest.FixtureRequest
) -> None:
    """Faults that pass: every second request meets one, and everything comes out right."""
    from support.storage.passing import PASSING

    save(s3, 10)
    fault = PASSING[harm]
    if harm == "hang":
        request.getfixturevalue("impatient_s3")
    for skip in range(0, 24, 2):
        proxy.faults.append(type(fault)(**{**fault.__dict__, "times": 1, "skip": skip}))  # type: ignore[attr-defined]
    try:
        save(s3, 20)
        step, problems = load_newest(s3)
    except StorageFailed:  # it said so itself: nothing was taken for whole
        step, problems = -1, []
    proxy.faults.clear()  # type: ignore[attr-defined]
    assert step in (-1, 10, 20) and len(problems) <= 1
    assert load_newest(s3)[0] in (10, 20)
    save(s3, 20)
    assert load_newest(s3) == (20, [])


@pytest.mark.whole
@pytest.mark.parametrize("phase", ["write_shard", "commit"])
@pytest.mark.usefixtures("small_parts")
def test_credentials_that_expire(s3: Storage, proxy: object, phase: str) -> None:
    from support.storage.faulty_proxy import expired

    save(s3, 10)
    if phase == "commit":
        for rank in range(2):
            mine = owned_boxes(MODEL, *CUT, rank)
            write_shard(
                s3,
                20,
                1,
                rank=rank,
                items=[(b, torch.full(b.sizes, 20, dtype=getattr(torch, b.dtype))) for b in mine],
            )
    proxy.faults.append(expired(times=10_000))  # type: ignore[attr-defined]
    with pytest.raises(ElasticError, match="ExpiredToken"):
        save(s3, 20) if phase == "write_shard" else commit(
            s3, 20, 1, world_size=2, epoch=1, meta={}
        )
    proxy.faults.clear()  # type: ignore[attr-defined]
    assert load_newest(s3) == (10, [])
    save(s3, 20)
    assert load_newest(s3) == (20, [])
