"""What every storage promises: a folder, s3://, gs:// and az://, each against a real server over
HTTP."""

from __future__ import annotations

import os
import threading
import time

import pytest
from support.storage.faulty_proxy import FaultyProxy
from support.storage.s3_server import BUCKET

from elastic.errors import InternalError, SpecError, StorageFailed, StorageRefused
from elastic.storage import LocalStorage, Storage, open_storage
from elastic.storage.objects import ObjectStorage

CLOUDS = [
    "s3",
    "gs",
    pytest.param("az", marks=pytest.mark.whole),  # npm brings its server
]


@pytest.fixture(params=["local", *CLOUDS])
def storage(request: pytest.FixtureRequest) -> Storage:
    if request.param == "local":
        return LocalStorage(request.getfixturevalue("tmp_path") / "run")
    found: Storage = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> Storage:
    found: Storage = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def seen(request: pytest.FixtureRequest, cloud: Storage) -> FaultyProxy:
    """The proxy in front of `cloud`."""
    scheme = cloud.uri[:2]
    found: FaultyProxy = request.getfixturevalue("proxy" if scheme == "s3" else f"{scheme}_proxy")
    return found


def test_put_get_list_delete(storage: Storage) -> None:
    assert storage.list() == [] and storage.folders() == [] and not storage.exists("a/b")
    assert storage.put("a/b", b"one") and storage.put("a/b", b"two")
    assert storage.put("a/b2/c", b"three") and storage.put("z", b"")
    assert (
        storage.get("a/b") == b"two"
        and storage.size("a/b") == 3
        and storage.exists("a/b")
        and storage.get("z") == b""
    )
    assert storage.list() == ["a/b", "a/b2/c", "z"] and storage.folders() == ["a"]
    assert (
        storage.list("a/") == ["a/b", "a/b2/c"]
        and storage.list("a/b2") == ["a/b2/c"]
        and storage.list("q/") == []
    )
    storage.delete("a/b")
    storage.delete("a/b")
    assert storage.list("a") == ["a/b2/c"]
    storage.delete_folder("a")
    storage.delete_folder("a")
    assert storage.list() == ["z"]
    for missing in (
        storage.get,
        storage.size,
        storage.modified_s,
        lambda key: storage.read(key, 0, 3),
    ):
        with pytest.raises(FileNotFoundError):
            missing("a/b")
    storage.delete_folder()
    assert storage.list() == []


def test_a_list_begins_behind_a_key(storage: Storage) -> None:
    keys = ["a/1", "a/2", "a/3", "a2", "b"]
    for key in keys:
        storage.put(key, b"")
    assert storage.list("a/", "a/1") == ["a/2", "a/3"]
    assert storage.list("a/", "a/15") == ["a/2", "a/3"], "one that is not there"
    assert storage.list("a/", "a/3") == [] == storage.list("a/", "b")
    assert storage.list("", "a/3") == ["a2", "b"] and storage.list("b", "a") == ["b"]
    assert storage.list("a/", "") == keys[:3]


def test_names_that_need_quoting(storage: Storage) -> None:
    keys = sorted(["a b", "a+b", "a%20b", "ü/ß", "x=1&y=2", "q?", "h#1", "(1)'", "日本"])
    for key in keys:
        storage.put(key, key.encode())
    assert storage.list() == keys and [storage.get(key).decode() for key in keys] == keys


def test_ranges(storage: Storage) -> None:
    storage.put("k", bytes(range(100)))
    storage.put("empty", b"")
    assert storage.read("k", 10, 5) == bytes(range(10, 15))
    assert storage.read("k", 95, 50) == bytes(range(95, 100))
    assert (
        storage.read("k", 200, 5) == b""
        and storage.read("k", 5, 0) == b""
        and storage.read("empty", 0, 5) == b""
    )
    buffer = bytearray(b"." * 10)
    assert storage.read_into("k", 98, memoryview(buffer)) == 2 and buffer == b"bc" + b"." * 8


@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\\b", "a\0b", "a/.tmp-1-2"],
)
def test_keys_cannot_leave(storage: Storage, key: str) -> None:
    for act in (
        storage.get,
        storage.delete,
        storage.exists,
        storage.size,
        lambda k: storage.put(k, b""),
    ):
        with pytest.raises(SpecError, match="relative path"):
            act(key)
    with pytest.raises(SpecError, match="relative path"), storage.create(key) as file:
        file.write(b"")
    if key:
        with pytest.raises(SpecError, match="relative path"):
            storage.delete_folder(key)


def test_an_interrupted_write_leaves_the_old_file(storage: Storage) -> None:
    storage.put("k", b"old")
    with pytest.raises(OSError, match="disk full"):
        with storage.create("k") as file:
            file.write(b"half of the n")
            raise OSError("disk full")
    assert storage.get("k") == b"old" and storage.list() == ["k"]


@pytest.mark.slow
def test_of_16_racing_writers_one_wins(storage: Storage) -> None:
    start = threading.Barrier(16)
    won: list[int] = []

    def write(i: int) -> None:
        start.wait()
        if storage.put("marker", b"the same bytes", if_absent=True):
            won.append(i)

    writers = [threading.Thread(target=write, args=(i,)) for i in range(16)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(won) == 1 and storage.get("marker") == b"the same bytes"
    with pytest.raises(FileExistsError), storage.create("marker", if_absent=True) as file:
        file.write(b"other")


# ----------------------------------------------------------------------------------- object storage


def test_a_large_read_goes_by_ranges(cloud: Storage, seen: FaultyProxy, small_parts: int) -> None:
    data = os.urandom(3 * small_parts)
    cloud.put("k", data)
    seen.clear()
    buffer = bytearray(len(data))
    assert cloud.read_into("k", 7, memoryview(buffer)) == len(data) - 7
    assert buffer[:-7] == data[7:] and len(seen.seen) == 8


def test_a_stream_of_many_parts(cloud: Storage, small_parts: int) -> None:
    block = os.urandom(small_parts // 5)
    with cloud.create("big/stream") as file:
        for i in range(33):
            assert file.tell() == i * len(block) and file.write(memoryview(block)) == len(block)
        assert not cloud.exists("big/stream") and cloud.list() == []
        file.write(b"the end")
    assert cloud.size("big/stream") == 33 * len(block) + 7
    assert cloud.read("big/stream", 0, 40 * len(block)) == block * 33 + b"the end"


def test_an_interrupted_stream_leaves_the_old_object(cloud: Storage, small_parts: int) -> None:
    cloud.put("k", b"old")
    with pytest.raises(RuntimeError, match="no more"):
        with cloud.create("k") as file:
            file.write(bytes(3 * small_parts))
            raise RuntimeError("no more")
    assert cloud.get("k") == b"old" and cloud.list() == ["k"]


def test_what_a_writer_uses_again_does_not_change_what_was_written(
    cloud: Storage, small_parts: int
) -> None:
    buffer, expected = bytearray(small_parts), b""
    with cloud.create("k") as file:
        for i in range(6):
            buffer[:] = bytes([i]) * small_parts
            expected += buffer
            file.write(buffer)
    assert cloud.get("k") == expected


def test_what_must_not_replace_another_is_small(cloud: Storage, small_parts: int) -> None:
    with pytest.raises(InternalError, match="at most"):
        with cloud.create("k", if_absent=True) as file:
            file.write(bytes(small_parts))
    assert not cloud.exists("k")


def test_a_folder_is_deleted_with_names_that_nobody_may_write(cloud: ObjectStorage) -> None:
    for name in ("d/k", "d/.tmp-1"):
        cloud._put(f"{cloud.prefix}/{name}", b"1", False)
    assert cloud.list() == ["d/k"]
    cloud.delete_folder("d")
    assert [name for page in cloud._listed(f"{cloud.prefix}/") for name in page] == []


def test_an_object_is_as_old_as_its_server_says(cloud: Storage) -> None:
    before_s = time.time()
    cloud.put("k", b"1234")
    n_bytes, modified_s = cloud.sizes()["k"]
    assert n_bytes == 4 and before_s - 2.0 < modified_s < time.time() + 2.0
    assert cloud.modified_s("k") == pytest.approx(modified_s, abs=1.0)


def test_nothing_outside_the_prefix_is_seen_or_touched(cloud: Storage) -> None:
    beside, inside = open_storage(f"{cloud.uri}2"), open_storage(f"{cloud.uri}/deep")
    beside.put("k", b"beside")
    inside.put("k", b"inside")
    assert cloud.list() == ["deep/k"] and cloud.folders() == ["deep"]
    cloud.delete_folder("dee")
    cloud.clean_unfinished(0.0)
    assert cloud.list() == ["deep/k"]
    cloud.delete_folder()
    assert cloud.list() == [] and beside.get("k") == b"beside"
    scheme, _, path = beside.uri.partition("://")
    whole = open_storage(f"{scheme}://{BUCKET}")
    for act in (whole.delete_folder, lambda: whole.clean_unfinished(0.0)):
        with pytest.raises(SpecError, match="a whole .* is never emptied or cleaned"):
            act()
    assert whole.get(f"{path.partition('/')[2]}/k") == b"beside"


def test_a_bucket_that_is_not_there_is_named(cloud: Storage, seen: FaultyProxy) -> None:
    scheme = cloud.uri[:2]
    nowhere = open_storage(f"{scheme}://no-such-bucket-here/run")
    says = f"{scheme}://no-such-bucket-here/.* there is no such (bucket|container); create it"
    for act in (
        nowhere.list,
        lambda: nowhere.get("k"),
        lambda: nowhere.put("k", b"1"),
        nowhere.delete_folder,
    ):
        seen.clear()
        with pytest.raises(StorageRefused, match=says):
            act()
        assert len(seen.seen) == 1


def test_an_endpoint_that_makes_no_sense(cloud: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"s3": "AWS_ENDPOINT_URL_S3", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}
    monkeypatch.setenv(name[cloud.uri[:2]], "not a url")
    with pytest.raises(StorageRefused, match="Invalid endpoint"):
        cloud.list()


def test_a_server_that_is_gone(cloud: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"s3": "AWS_ENDPOINT_URL_S3", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}
    monkeypatch.setenv(name[cloud.uri[:2]], "http://127.0.0.1:9")
    with pytest.raises(StorageFailed, match=r"no whole answer \(asked 5 times in \d+ s\)"):
        cloud.get("k")
    with pytest.raises(StorageFailed, match="no whole answer"):
        cloud.hasty(1.0).put("k", b"", if_absent=True)


def test_opening_asks_nothing(cloud: Storage, seen: FaultyProxy) -> None:
    found = open_storage(f"{cloud.uri}/a/b/")
    assert found.uri == f"{cloud.uri}/a/b" and found.uri_of("k") == f"{cloud.uri}/a/b/k"
    assert found.remote and found.free_bytes() is None and seen.seen == []
