"""s3:// against a real HTTP server: the same promises as a folder, and nothing outside the
prefix."""

from __future__ import annotations

import os
import threading

import boto3
import pytest
from support.storage.faulty_proxy import FaultyProxy
from support.storage.s3_server import BUCKET, QUICK
from support.waiting import is_waiting, until

from elastic.errors import InternalError, SpecError, StorageRefused
from elastic.storage import LocalStorage, Storage, open_storage, s3_upload
from elastic.storage import s3 as module
from elastic.storage.s3 import S3Storage

MB = 1 << 20


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest) -> Storage:
    if request.param == "local":
        return LocalStorage(request.getfixturevalue("tmp_path") / "run")
    found: Storage = request.getfixturevalue("s3")
    return found


# --------------------------------------------------------------------------------------------- both


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


# ----------------------------------------------------------------------------------------- s3 alone


def test_a_stream_of_many_parts(s3: S3Storage, proxy: FaultyProxy, small_parts: int) -> None:
    block = os.urandom(small_parts // 5)
    with s3.create("big/stream") as file:
        for i in range(33):
            assert file.tell() == i * len(block) and file.write(memoryview(block)) == len(block)
        assert not s3.exists("big/stream") and s3.list() == []
        file.write(b"the end")
    assert proxy.count("partNumber") == 7 and s3.size("big/stream") == 33 * len(block) + 7
    proxy.clear()
    assert s3.read("big/stream", 0, 40 * len(block)) == block * 33 + b"the end"
    assert proxy.count("GET") == 20 and proxy.count("HEAD") == 0


def test_a_stream_waits_for_its_parts(s3: S3Storage, proxy: FaultyProxy, small_parts: int) -> None:
    """However slow the server, no more than N_IN_FLIGHT parts and the one being filled are in
    memory."""
    go = threading.Event()
    proxy.before = lambda line: go.wait(300) if "partNumber" in line else None  # type: ignore[assignment,return-value]
    written = []

    def write() -> None:
        with s3.create("slow") as file:
            for _ in range(20):
                written.append(file.write(bytes(small_parts)))

    writer = threading.Thread(target=write)
    writer.start()
    until(lambda: len(written) >= s3_upload.N_IN_FLIGHT and is_waiting(writer), "the writer's wait")
    assert len(written) == s3_upload.N_IN_FLIGHT
    go.set()
    writer.join()
    assert s3.size("slow") == 20 * small_parts


def test_nothing_outside_the_prefix_is_seen_or_touched(s3: S3Storage) -> None:
    beside = S3Storage(f"{s3.uri}2", QUICK)
    inside = S3Storage(f"{s3.uri}/deep", QUICK)
    beside.put("k", b"beside")
    inside.put("k", b"inside")
    assert s3.list() == ["deep/k"] and s3.folders() == ["deep"]
    s3.delete_folder("dee")
    s3.clean_unfinished(0.0)
    assert s3.list() == ["deep/k"]
    s3.delete_folder()
    assert s3.list() == [] and beside.get("k") == b"beside"
    bucket = S3Storage(f"s3://{BUCKET}", QUICK)
    for act in (bucket.delete_folder, lambda: bucket.clean_unfinished(0.0)):
        with pytest.raises(SpecError, match="a whole bucket is never emptied or cleaned"):
            act()
    assert bucket.get(f"{beside.prefix}/k") == b"beside"


def test_unfinished_uploads_are_found_and_removed_by_age(s3: S3Storage) -> None:
    client = boto3.session.Session().client("s3")
    beside = f"{s3.prefix}2/k"
    for key in (f"{s3.prefix}/old", beside):
        client.create_multipart_upload(Bucket=BUCKET, Key=key)
    ours = [begun_s for name, _, begun_s, _ in s3._unfinished(f"{s3.prefix}/")]
    assert len(ours) == 1
    age_s = next(now_s for _, _, _, now_s in s3._unfinished(f"{s3.prefix}/")) - ours[0]
    assert s3.clean_unfinished(age_s + 3600.0) == 0
    assert s3.clean_unfinished(age_s - 1.0) == 1
    assert s3.clean_unfinished(age_s - 1.0) == 0
    assert [
        up["Key"] for up in client.list_multipart_uploads(Bucket=BUCKET, Prefix=beside)["Uploads"]
    ] == [beside]


def test_a_folder_is_deleted_with_its_unfinished_uploads(s3: S3Storage) -> None:
    boto3.session.Session().client("s3").create_multipart_upload(
        Bucket=BUCKET, Key=f"{s3.prefix}/a/k"
    )
    s3.put("a/b", b"1")
    s3.delete_folder("a")
    assert s3.list() == [] and list(s3._unfinished(s3.prefix)) == []


def test_more_objects_than_one_page(s3: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(25):
        s3.put(f"d/{i:02}", b"")
    pages = S3Storage._lister

    def small(self: S3Storage, start: str, more: dict[str, object]) -> object:
        return pages(self, start, {**more, "MaxKeys": 10})  # type: ignore[dict-item]

    monkeypatch.setattr(S3Storage, "_lister", small)
    monkeypatch.setattr(module, "N_PER_DELETE", 4)
    assert s3.list() == [f"d/{i:02}" for i in range(25)]
    s3.delete_folder("d")
    assert s3.list() == []


def test_what_must_not_replace_another_is_small(s3: S3Storage, small_parts: int) -> None:
    with pytest.raises(InternalError, match="at most"):
        with s3.create("k", if_absent=True) as file:
            file.write(bytes(small_parts))
    assert not s3.exists("k")


@pytest.mark.parametrize(
    ("number", "expected"), [(1, 16 * MB), (1000, 16 * MB), (1001, 32 * MB), (10_000, 1 << 30)]
)
def test_parts_grow_so_that_10_000_are_enough(number: int, expected: int) -> None:
    assert s3_upload.part_bytes(number) == expected
    assert sum(s3_upload.part_bytes(n) for n in range(1, 10_001)) > 4 << 40


def test_a_bucket_that_is_not_there_is_named(proxy: FaultyProxy) -> None:
    nowhere = S3Storage("s3://no-such-bucket-here/run", QUICK)
    for act in (
        nowhere.list,
        lambda: nowhere.get("k"),
        lambda: nowhere.put("k", b"1"),
        nowhere.delete_folder,
    ):
        proxy.clear()
        with pytest.raises(
            StorageRefused, match="s3://no-such-bucket-here/.* there is no such bucket; create it"
        ):
            act()
        assert len(proxy.seen) == 1


def test_no_credentials(s3: S3Storage, monkeypatch: pytest.MonkeyPatch, proxy: FaultyProxy) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    with pytest.raises(StorageRefused, match="there are no credentials; set AWS_ACCESS_KEY_ID"):
        s3.list()
    assert proxy.seen == []


def test_an_endpoint_that_makes_no_sense(s3: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "not a url")
    with pytest.raises(StorageRefused, match="Invalid endpoint"):
        s3.list()


def test_opening_asks_nothing(proxy: FaultyProxy) -> None:
    found = open_storage(f"s3://{BUCKET}/a/b/")
    assert (
        found.uri == f"s3://{BUCKET}/a/b"
        and found.uri_of("k") == f"s3://{BUCKET}/a/b/k"
        and found.remote
    )
    assert found.free_bytes() is None and proxy.seen == []
