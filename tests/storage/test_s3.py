"""s3:// against a real HTTP server: what is its own; its promises are in test_contract.py."""

from __future__ import annotations

import os
import threading

import boto3
import pytest
from support.storage.faulty_proxy import FaultyProxy
from support.storage.s3_server import BUCKET
from support.waiting import is_waiting, until

from elastic.errors import StorageRefused
from elastic.storage import s3 as module
from elastic.storage.s3 import S3Storage

MB = 1 << 20


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
    until(lambda: len(written) >= module.N_IN_FLIGHT and is_waiting(writer), "the writer's wait")
    assert len(written) == module.N_IN_FLIGHT
    go.set()
    writer.join()
    assert s3.size("slow") == 20 * small_parts


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


def test_more_objects_than_one_page(
    s3: S3Storage, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(25):
        s3.put(f"d/{i:02}", b"")
    pages = S3Storage._pages

    def small(self: S3Storage, start: str, **more: str) -> object:
        return pages(self, start, **more, MaxKeys=10)  # type: ignore[arg-type]

    monkeypatch.setattr(S3Storage, "_pages", small)
    assert s3.list() == [f"d/{i:02}" for i in range(25)]
    proxy.clear()
    s3.delete_folder("d")
    assert proxy.count(r"POST .*\?delete") == 3 and s3.list() == []


@pytest.mark.parametrize(
    ("number", "expected"), [(1, 16 * MB), (1000, 16 * MB), (1001, 32 * MB), (10_000, 1 << 30)]
)
def test_parts_grow_so_that_10_000_are_enough(number: int, expected: int) -> None:
    upload = S3Storage("s3://bucket/run")._upload("k", False)
    assert upload._part_bytes(number) == expected
    assert sum(upload._part_bytes(n) for n in range(1, 10_001)) > 4 << 40


def test_no_credentials(s3: S3Storage, monkeypatch: pytest.MonkeyPatch, proxy: FaultyProxy) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    with pytest.raises(StorageRefused, match="there are no credentials; set AWS_ACCESS_KEY_ID"):
        s3.list()
    assert proxy.seen == []


def test_an_endpoint_that_is_none(s3: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "nowhere")
    with pytest.raises(StorageRefused) as raised:
        s3.list()
    said = f"s3://{s3.bucket}: no connection can be set up: Invalid endpoint: nowhere"
    assert str(raised.value) == said
