"""What `elastic doctor` says of the place where runs go."""

from __future__ import annotations

from pathlib import Path

from storage.faulty_proxy import FaultyProxy, expired

from elastic.observe.doctor import Check, machine
from elastic.storage.s3 import S3Storage


def of_storage(uri: str) -> Check:
    return next(check for check in machine(uri) if check.name.startswith(("disk free", "storage")))


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    found = of_storage(str(tmp_path / "a" / "b"))
    assert found.name == f"disk free at {tmp_path}/a/b" and found.verdict in ("ok", "look")


def test_object_storage(s3: S3Storage, proxy: FaultyProxy) -> None:
    s3.put("one/k", b"")
    assert of_storage(s3.uri) == Check(f"storage {s3.uri}", "answers; holds 1 folders")
    proxy.faults.append(expired())
    refused = of_storage(s3.uri)
    assert refused.verdict == "bad" and "the credentials have expired" in refused.found
