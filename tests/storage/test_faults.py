"""Faults on the way to an S3 server, made by a real HTTP proxy: the result is right, or there is
one clear error."""

from __future__ import annotations

import os
import pickle
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.storage.faulty_proxy import Fault, FaultyProxy, denied, expired, unavailable
from support.storage.passing import PASSING
from support.storage.s3_server import PART_BYTES

from elastic.errors import ElasticError, StorageDamaged, StorageFailed, StorageRefused
from elastic.storage import s3 as module
from elastic.storage.s3 import S3Storage

pytestmark = pytest.mark.slow

SMALL = random.Random(1).randbytes(1000)
LARGE = random.Random(2).randbytes(11 * PART_BYTES // 5)


@dataclass(frozen=True)
class Operation:
    """Something that is done, the requests that it consists of, and how to see that it was done
    rightly."""

    name: str
    match: str
    run: Callable[[S3Storage], object]
    expected: object
    written: bytes | None = None  # what stands under "new" after it


def multipart(s3: S3Storage) -> None:
    with s3.create("new") as file:
        for at in range(0, len(LARGE), PART_BYTES // 5):
            file.write(LARGE[at : at + PART_BYTES // 5])


OPERATIONS = [
    Operation("put", r"PUT .*/new", lambda s3: s3.put("new", SMALL), True, SMALL),
    Operation(
        "conditional put",
        r"PUT .*/new",
        lambda s3: s3.put("new", SMALL, if_absent=True),
        True,
        SMALL,
    ),
    Operation("multipart begin", r"POST .*/new\?uploads", multipart, None, LARGE),
    Operation("multipart part", r"PUT .*/new.*partNumber=2", multipart, None, LARGE),
    Operation("multipart end", r"POST .*/new.*uploadId=", multipart, None, LARGE),
    Operation("get", r"GET .*/old", lambda s3: s3.get("old"), SMALL),
    Operation(
        "ranged get", r"GET .*/old", lambda s3: bytes(s3.read("old", 100, 200)), SMALL[100:300]
    ),
    Operation(
        "parallel get",
        r"GET .*/large",
        lambda s3: bytes(s3.read("large", 5, 9 * PART_BYTES // 5)),
        LARGE[5 : 5 + 9 * PART_BYTES // 5],
    ),
    Operation("size", r"HEAD .*/old", lambda s3: s3.size("old"), len(SMALL)),
    Operation("list", r"GET .*list-type=2", lambda s3: s3.list(), ["large", "old"]),
    Operation("delete", r"DELETE .*/old", lambda s3: s3.delete("old"), None),
    Operation("delete folder", r"POST .*\?delete", lambda s3: s3.delete_folder("d"), None),
]
NO_BODY = ("put", "conditional put", "multipart part", "size", "delete")  # of the answer
SENDS = ("put", "conditional put", "multipart part")
# an upload is begun, and its name does not arrive: only its age tells later
BEGUN = ("reset", "short", "lost", "wrong")
# their bytes are compared by whoever reads: checkpoints hold a CRC-32 per blob
UNCHECKED = ("ranged get", "parallel get")


def makes_sense(fault: str, operation: Operation) -> bool:
    if fault == "wrong":
        return operation.name not in (*NO_BODY, *UNCHECKED)
    if fault == "wrong_sent":
        return operation.name in SENDS
    return not (fault == "short" and operation.name in NO_BODY)


def cases(faults: Iterable[str]) -> list[Any]:
    """Each fault at each operation; those beyond a small cover are in the slow set."""
    found = []
    for fault in faults:
        for operation in (one for one in OPERATIONS if makes_sense(fault, one)):
            quick = fault in ("slow_down", "lost") or operation.name in (
                "conditional put",
                "multipart part",
                "get",
            )
            marks = [] if quick else [pytest.mark.slow]
            found.append(
                pytest.param(fault, operation, id=f"{fault}-{operation.name}", marks=marks)
            )
    return found


@pytest.fixture
def filled(s3: S3Storage, proxy: FaultyProxy, small_parts: int) -> S3Storage:
    s3.put("old", SMALL)
    s3.put("large", LARGE)
    proxy.clear()
    return s3


def prepared(fault: Fault, operation: Operation, times: int) -> Fault:
    # the XML's '<'
    at = (
        0.0
        if operation.name in ("list", "multipart begin", "multipart end", "delete folder")
        else fault.at
    )
    return replace(
        fault, match=operation.match, times=times, at=at if fault.kind == "wrong" else fault.at
    )


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("fault", "operation"), cases(PASSING))
def test_a_passing_fault_changes_nothing(
    filled: S3Storage,
    proxy: FaultyProxy,
    fault: str,
    operation: Operation,
    request: pytest.FixtureRequest,
) -> None:
    if fault == "hang":
        request.getfixturevalue("impatient_s3")
    if operation.name == "delete folder":
        filled.put("d/x", b"")
    n = 1 if fault == "hang" else 2
    proxy.faults.append(prepared(PASSING[fault], operation, times=n))
    assert operation.run(filled) == operation.expected
    n_met = sum(1 for seen in proxy.seen if seen.fault)
    # that was done: the object says so
    assert n_met == n or (operation.name == "multipart end" and n_met == 1)
    proxy.clear()
    if operation.written is not None:
        assert filled.get("new") == operation.written
    assert filled.list("d/") == [] and filled.exists("old") == (operation.name != "delete")
    left = filled.clean_unfinished(-1.0)
    assert left == (2 if operation.name == "multipart begin" and fault in BEGUN else 0)


@pytest.mark.sampled(14)
@pytest.mark.parametrize(
    ("fault", "operation"), cases(["slow_down", "reset", "wrong", "wrong_sent"])
)
def test_a_lasting_fault_is_one_clear_error(
    filled: S3Storage, proxy: FaultyProxy, fault: str, operation: Operation
) -> None:
    if operation.name == "delete folder":
        filled.put("d/x", b"")
    proxy.faults.append(prepared(PASSING[fault], operation, times=1000))
    if operation.name == "multipart end" and fault != "slow_down":
        operation.run(filled)  # it is done at once, and the object says so
        assert filled.get("new") == LARGE
        return
    with pytest.raises(
        StorageFailed, match=r"s3://elastic-tests/team/.*asked 5 times in \d+ s"
    ) as raised:
        operation.run(filled)
    assert "\n" not in str(raised.value) and isinstance(raised.value, OSError | ElasticError)
    assert isinstance(raised.value, StorageDamaged) == (
        fault == "wrong" and operation.name == "get"
    )
    proxy.clear()
    assert operation.name == "delete" or filled.get("old") == SMALL
    if fault == "slow_down":
        assert not filled.exists("new") and list(filled._unfinished(filled.prefix)) == []
    if fault != "reset":  # there the server did it, and only its answers were lost
        assert not filled.exists("new") or filled.get("new") == operation.written


@pytest.mark.sampled(13)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (expired(), "the credentials have expired; renew them"),
        (denied(), r"the credentials may not do this; allow s3:\w+.* on s3"),
    ],
    ids=["expired", "denied"],
)
def test_a_refusal_is_not_repeated(
    filled: S3Storage, proxy: FaultyProxy, fault: Fault, says: str, operation: Operation
) -> None:
    if operation.name == "delete folder":
        filled.put("d/x", b"")
    if operation.name == "size":
        # a HEAD's answer has no body to say why
        says = says.replace("the credentials have expired; renew them", "refused")
    proxy.faults.append(replace(fault, match=operation.match, times=1000))
    with pytest.raises(StorageRefused, match=says) as raised:
        operation.run(filled)
    n_asked = sum(1 for seen in proxy.seen if seen.fault)
    # once more with a new client where the credentials may have been renewed
    renewed = fault.code == "ExpiredToken" or operation.name == "size"
    assert n_asked == 1 + renewed or operation.name == "parallel get"
    text = str(raised.value)
    assert (
        "\n" not in text
        and f"s3://elastic-tests/{filled.prefix}" in text
        and os.environ["AWS_SECRET_ACCESS_KEY"] not in text
    )
    proxy.clear()
    assert (
        not filled.exists("new")
        and list(filled._unfinished(filled.prefix)) == []
        and filled.get("old") == SMALL
    )


@pytest.mark.whole
@pytest.mark.usefixtures("impatient_s3")
def test_a_lasting_hang_ends(filled: S3Storage, proxy: FaultyProxy) -> None:
    proxy.faults.append(Fault("hang", "GET .*/old", times=1000))
    with pytest.raises(StorageFailed, match=r"no whole answer \(asked 5 times.*Read timeout"):
        filled.get("old")


@pytest.mark.parametrize("first", [b"mine", b"theirs"])
def test_a_conditional_put_whose_answer_is_lost(
    s3: S3Storage, proxy: FaultyProxy, first: bytes
) -> None:
    """The retry finds the object there: ours where our first try wrote it, another's where that
    came between."""

    def between(line: str) -> None:
        if "PUT" in line and first == b"theirs":
            proxy.before = None
            s3.put("marker", b"mine", if_absent=True)  # another writer, of the very same bytes

    proxy.faults.append(Fault("lost", "PUT .*/marker", skip=1 if first == b"theirs" else 0))
    proxy.before = between
    assert s3.put("marker", b"mine", if_absent=True) == (first == b"mine")
    assert s3.get("marker") == b"mine"
    assert not s3.put("marker", b"mine", if_absent=True)


def test_an_upload_whose_end_fails_for_good_leaves_the_old_object(
    filled: S3Storage, proxy: FaultyProxy
) -> None:
    filled.put("new", b"as before")
    proxy.faults.append(unavailable(r"POST .*/new.*uploadId=", times=1000))
    with pytest.raises(StorageFailed, match="CompleteMultipartUpload failed"):
        multipart(filled)
    assert filled.get("new") == b"as before" and list(filled._unfinished(filled.prefix)) == []


def test_what_cannot_be_cleaned_up_is_found_later(filled: S3Storage, proxy: FaultyProxy) -> None:
    proxy.faults += [
        denied(r"PUT .*/new.*partNumber=2", times=9),
        unavailable(r"DELETE .*/new", times=1000),
    ]
    with pytest.raises(StorageRefused, match="UploadPart was refused"):
        multipart(filled)
    proxy.faults.clear()
    assert (
        not filled.exists("new")
        and filled.clean_unfinished(-1.0) == 1
        and filled.clean_unfinished(-1.0) == 0
    )


def test_an_object_that_is_replaced_between_two_ranges_is_not_mixed(
    filled: S3Storage, proxy: FaultyProxy
) -> None:
    """The last range is read after the others and finds another object."""
    at = 0

    def replaced(line: str) -> None:
        nonlocal at
        if "GET" in line and "/large" in line:
            at += 1
            if at == 5:
                proxy.before = None
                filled.put("large", bytes(len(LARGE)))

    proxy.before = replaced
    with pytest.raises(StorageFailed, match="replaced while it was read"):
        filled.read("large", 0, len(LARGE))


@pytest.mark.parametrize(
    "code", ["ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", ""]
)
def test_renewed_credentials_are_read_before_a_request_is_given_up(
    filled: S3Storage, proxy: FaultyProxy, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a code: a HEAD, whose answer has no body."""
    made, real = list[object](), module._made
    monkeypatch.setattr(module, "_made", lambda *given: made.append(given) or real(*given))
    fault = Fault("error", "GET" if code else "HEAD", status=403, code=code or "AccessDenied")
    proxy.faults.append(fault)
    assert filled.get("old") == SMALL and filled.size("old") == len(SMALL) and len(made) == 1
    fault.times = 2
    with pytest.raises(StorageRefused, match="refused"):
        filled.get("old") if code else filled.size("old")
    assert module._client.cache_info().currsize == 0 and len(made) == 2
    assert filled.get("old") == SMALL


@pytest.mark.parametrize("at", [i / 23 for i in range(24)])
def test_a_list_with_a_wrong_byte_anywhere_breaks_nothing(
    filled: S3Storage, proxy: FaultyProxy, at: float
) -> None:
    """Asked again, unless the byte is in a name or in what nobody reads: what XML cannot show, TLS
    must."""
    proxy.faults.append(Fault("wrong", "list-type=2", at=at))
    found = filled.list()
    assert (
        len(found) == 2
        and sum(a != b for a, b in zip("".join(found), "largeold", strict=False)) <= 1
    )


def test_nothing_is_written_into_the_buffer_after_a_read_has_failed(
    filled: S3Storage, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first range is refused while the others are on their way; the read ends when they
    have."""
    plain, refused, under_way = S3Storage._range, threading.Event(), set[int]()

    def one(self: S3Storage, name: str, offset: int, view: memoryview) -> tuple[int, str]:
        under_way.add(offset)
        assert not offset or refused.wait(60)
        try:
            return plain(self, name, offset, view)
        finally:
            under_way.remove(offset)
            refused.set()

    monkeypatch.setattr(S3Storage, "_range", one)
    proxy.faults.append(denied(r"GET .*/large", times=1))
    with pytest.raises(StorageRefused):
        filled.read_into("large", 0, memoryview(bytearray(len(LARGE))))
    assert not under_way and proxy.count("GET .*/large") > 1


def test_errors_travel_between_processes() -> None:
    for kind in (StorageRefused, StorageFailed, StorageDamaged):
        error = pickle.loads(pickle.dumps(kind("s3://b/k: no")))
        assert (
            type(error) is kind
            and str(error) == "s3://b/k: no"
            and isinstance(error, OSError | ElasticError)
        )
    assert (StorageRefused.exit_code, StorageFailed.exit_code, StorageDamaged.exit_code) == (
        2,
        4,
        1,
    )
