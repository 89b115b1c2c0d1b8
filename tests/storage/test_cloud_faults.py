"""Faults on the way to Google Cloud Storage and to Azure Blob Storage, made by a real HTTP proxy:
the result is right, or there is one clear error."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.storage.faulty_proxy import Fault, FaultyProxy, denied, unavailable
from support.storage.passing import PASSING
from support.storage.s3_server import PART_BYTES

from elastic.errors import SpecError, StorageDamaged, StorageFailed, StorageRefused
from elastic.storage import Storage, open_storage

pytestmark = pytest.mark.slow

SMALL = random.Random(1).randbytes(1000)
LARGE = random.Random(2).randbytes(11 * PART_BYTES // 5)
SCHEMES = ["gs", pytest.param("az", marks=pytest.mark.whole)]  # npm brings the server of az://


@dataclass(frozen=True)
class CloudOperation:
    """Something that is done, and the request of it that meets the fault: at Google, at Azure."""

    name: str
    gs: str
    az: str
    run: Callable[[Storage], object]
    expected: object
    written: bytes | None = None  # what stands under "new" after it

    def match(self, storage: Storage) -> str:
        return str(getattr(self, storage.uri[:2]))


def stream(storage: Storage) -> None:
    with storage.create("new") as file:
        for at in range(0, len(LARGE), PART_BYTES // 5):
            file.write(LARGE[at : at + PART_BYTES // 5])


def put(storage: Storage) -> object:
    return storage.put("new", SMALL)


def put_if_absent(storage: Storage) -> object:
    return storage.put("new", SMALL, if_absent=True)


BLOCK = "PUT .*comp=block&"
WRITES = [
    CloudOperation("put", "PUT .*/new$", "PUT .*/new$", put, True, SMALL),
    CloudOperation("conditional put", "PUT .*/new$", "PUT .*/new$", put_if_absent, True, SMALL),
    CloudOperation("part", "PUT .*partNumber=2", BLOCK, stream, None, LARGE),
    CloudOperation("end", "POST .*uploadId=", "PUT .*comp=blocklist", stream, None, LARGE),
]
READS = [
    CloudOperation("get", "GET .*/old", "GET .*/old", lambda s: s.get("old"), SMALL),
    CloudOperation(
        "ranges", "GET .*/large", "GET .*/large", lambda s: bytes(s.read("large", 5, 90_000)),
        LARGE[5:90_005],
    ),
    CloudOperation("size", "HEAD .*/old", "HEAD .*/old", lambda s: s.size("old"), len(SMALL)),
    CloudOperation(
        "list", "GET .*list-type=2", "GET .*comp=list", lambda s: s.list(), ["large", "old"]
    ),
]  # fmt: skip
DELETE = CloudOperation(
    "delete", "DELETE .*/old", "POST .*comp=batch", lambda s: s.delete("old"), None
)
OPERATIONS = [*WRITES, *READS, DELETE]
NO_BODY = ("put", "conditional put", "part", "size", "delete")  # of the answer


def cases(faults: list[str]) -> list[Any]:
    return [
        pytest.param(fault, operation, id=f"{fault}-{operation.name}")
        for fault in faults
        for operation in OPERATIONS
        if not (fault == "short" and operation.name in (*NO_BODY, "end"))
    ]


@pytest.fixture(params=SCHEMES)
def filled(request: pytest.FixtureRequest, small_parts: int) -> Storage:
    storage: Storage = request.getfixturevalue(request.param)
    storage.put("old", SMALL)
    storage.put("large", LARGE)
    request.getfixturevalue(f"{request.param}_proxy").clear()
    return storage


@pytest.fixture
def between(request: pytest.FixtureRequest, filled: Storage) -> FaultyProxy:
    """What stands in front of the server of `filled`."""
    found: FaultyProxy = request.getfixturevalue(f"{filled.uri[:2]}_proxy")
    return found


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    ("fault", "operation"),
    cases(["unavailable", "slow_down", "internal", "bad_gateway", "reset", "short", "lost"]),
)
def test_a_passing_fault_changes_nothing(
    filled: Storage, between: FaultyProxy, fault: str, operation: CloudOperation
) -> None:
    between.faults.append(replace(PASSING[fault], match=operation.match(filled), times=2))
    assert operation.run(filled) == operation.expected
    assert any(seen.fault for seen in between.seen)
    between.clear()
    if operation.written is not None:
        assert filled.get("new") == operation.written
    assert filled.exists("old") == (operation.name != "delete")


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("fault", "operation"), cases(["slow_down", "reset"]))
def test_a_lasting_fault_is_one_clear_error(
    filled: Storage, between: FaultyProxy, fault: str, operation: CloudOperation
) -> None:
    between.faults.append(replace(PASSING[fault], match=operation.match(filled), times=1000))
    if operation.name == "end" and fault == "reset":
        operation.run(filled)  # it is done at once, and the object says so
        assert filled.get("new") == LARGE
        return
    with pytest.raises(StorageFailed, match=rf"{filled.uri}/.*asked \d+ times in \d+ s") as raised:
        operation.run(filled)
    text = str(raised.value)
    assert "\n" not in text and "://127" not in text and "devstore" not in text
    if operation.name != "size":  # a HEAD's answer has no body to say why
        assert ("asks to slow down" in text) == (fault == "slow_down")
    between.clear()
    assert operation.name == "delete" or filled.get("old") == SMALL
    assert not filled.exists("new") or filled.get("new") == operation.written


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_not_repeated(
    filled: Storage, between: FaultyProxy, status: int, operation: CloudOperation
) -> None:
    code = "AuthenticationRequired" if status == 401 else "AccessDenied"
    fault = Fault("error", operation.match(filled), times=1000, status=status, code=code)
    between.faults.append(fault)
    with pytest.raises(StorageRefused, match=r"was refused \(\w+\): the credentials ") as raised:
        operation.run(filled)
    text = str(raised.value)
    assert "\n" not in text and filled.uri in text
    # once more with a new client: they may have been renewed; not what an upload was given
    n_asked = 1 + (status == 401 and operation.name != "end")
    assert sum(1 for seen in between.seen if seen.fault) == n_asked or operation.name in (
        "ranges",
        "part",
    )
    for name in ("GOOGLE_BEARER_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY"):
        assert os.environ.get(name, "?" * 9) not in text
    between.clear()
    assert not filled.exists("new") and filled.get("old") == SMALL


@pytest.mark.parametrize("times", [2, 1000])
def test_a_wrong_byte_is_seen(filled: Storage, between: FaultyProxy, times: int) -> None:
    between.faults.append(Fault("wrong", "GET .*/old", times=times))
    if times == 2:
        assert filled.get("old") == SMALL
        return
    with pytest.raises(StorageDamaged, match=r"its CRC-32 is \w+, .*asked 5 times in \d+ s"):
        filled.get("old")


@pytest.mark.usefixtures("impatient_s3")
@pytest.mark.parametrize("operation", [WRITES[1], READS[0]], ids=["conditional put", "get"])
def test_a_server_that_hangs_is_asked_again(
    filled: Storage, between: FaultyProxy, operation: CloudOperation
) -> None:
    between.faults.append(Fault("hang", operation.match(filled)))
    assert operation.run(filled) == operation.expected
    assert sum(1 for seen in between.seen if seen.fault) == 1


@pytest.mark.parametrize("first", [b"mine", b"theirs"])
def test_a_conditional_put_whose_answer_is_lost(
    filled: Storage, between: FaultyProxy, first: bytes
) -> None:
    """The retry finds the object there: ours where our first try wrote it, another's where that
    came between."""

    def other(line: str) -> None:
        if "PUT" in line and first == b"theirs":
            between.before = None
            filled.put("marker", b"mine", if_absent=True)  # another writer, of the very same bytes

    between.faults.append(Fault("lost", "PUT .*/marker", skip=1 if first == b"theirs" else 0))
    between.before = other
    assert filled.put("marker", b"mine", if_absent=True) == (first == b"mine")
    assert filled.get("marker") == b"mine"
    assert not filled.put("marker", b"mine", if_absent=True)


def test_an_upload_whose_end_fails_for_good_leaves_the_old_object(
    filled: Storage, between: FaultyProxy
) -> None:
    filled.put("new", b"as before")
    between.faults.append(unavailable(WRITES[3].match(filled), times=1000))
    with pytest.raises(StorageFailed, match="writing failed"):
        stream(filled)
    between.clear()
    assert filled.get("new") == b"as before"


def test_an_object_that_is_replaced_between_two_ranges_is_not_mixed(
    filled: Storage, between: FaultyProxy
) -> None:
    at = 0

    def replaced(line: str) -> None:
        nonlocal at
        if "GET" in line and "/large" in line:
            at += 1
            if at == 5:
                between.before = None
                filled.put("large", bytes(len(LARGE)))

    between.before = replaced
    with pytest.raises(StorageFailed, match="replaced while it was read"):
        filled.read("large", 0, len(LARGE))


def test_a_folder_that_may_not_be_removed_says_so(filled: Storage, between: FaultyProxy) -> None:
    filled.put("d/x", b"")
    between.faults.append(denied(DELETE.match(filled).replace("old", ""), times=1000))
    with pytest.raises(StorageRefused, match="removing was refused"):
        filled.delete_folder("d")


# ------------------------------------------------------------------------------------- who may ask


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without credentials, on a machine of no cloud."""
    pytest.importorskip("obstore")
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "AZURE_", "GCE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    from elastic.storage import cloud

    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setattr(cloud, "METADATA", free.getsockname())


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("gs://bucket/run", "set GOOGLE_APPLICATION_CREDENTIALS, run `gcloud auth"),
        ("az://container/run", "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"),
    ],
)
def test_no_credentials(uri: str, says: str) -> None:
    with pytest.raises(StorageRefused, match=f"there are no credentials; {says}"):
        open_storage(uri).list()


@pytest.mark.usefixtures("nobody")
def test_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    said = "az://container: no connection can be set up: set AZURE_STORAGE_ACCOUNT_NAME"
    with pytest.raises(StorageRefused, match=said):
        open_storage("az://container/run").list()


@pytest.mark.whole
def test_a_wrong_key_is_not_shown(az: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3JvbmctYW5kLXNlY3JldA==")
    with pytest.raises(StorageRefused, match="the credentials are wrong") as raised:
        az.list()
    assert "d3Jvbmct" not in str(raised.value)


@pytest.mark.whole
def test_a_connection_string_is_enough(az: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    az.put("k", b"1")
    names = {"AccountName": "AZURE_STORAGE_ACCOUNT", "AccountKey": "AZURE_STORAGE_ACCOUNT_KEY",
             "BlobEndpoint": "AZURE_STORAGE_ENDPOINT"}  # fmt: skip
    text = ";".join(f"{part}={os.environ[name]}" for part, name in names.items())
    for name in names.values():
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert az.get("k") == b"1"


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("az", "azure")])
def test_a_client_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, scheme: str, extra: str
) -> None:
    monkeypatch.delitem(sys.modules, "elastic.storage.cloud", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(SpecError, match=rf"pip install 'elastic-ray\[{extra}\]', on every node"):
        open_storage(f"{scheme}://bucket/run")


def test_who_does_not_use_a_cloud_does_not_wait_for_its_client() -> None:
    code = (
        "import sys; from elastic.storage import open_storage; open_storage('/tmp/x')\n"
        "sys.exit(any(name in sys.modules for name in ('obstore', 'boto3')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
