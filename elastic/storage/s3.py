"""Storage under `s3://bucket/prefix`: Amazon S3 and servers that speak its protocol.

The server is the one of AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, else Amazon's; credentials come
from where boto3 looks. Nothing outside the prefix is read, written or removed. Asked of a server:
strong consistency, `If-None-Match: *` on PUT. botocore's own retries are off, so that there is one
place.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, ClassVar

import boto3
from botocore import exceptions as aws
from botocore.config import Config
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from elastic.errors import StorageFailed, StorageRefused
from elastic.storage import aws_errors
from elastic.storage.aws_errors import CODES, Meaning, code_of, meaning, status_of
from elastic.storage.objects import (
    N_IN_FLIGHT,
    AlreadyThere,
    Looked,
    ObjectStorage,
    Upload,
    WholeObject,
    settle,
    start,
)
from elastic.storage.storage_faults import (
    BUSY,
    DOWN,
    PASSING_STATUS,
    StorageFault,
    WrongBytes,
    expected,
)

PART_BYTES = 16 << 20
MOST_PART_BYTES = 1 << 30
GROW_EVERY = 1000  # parts, after which the size doubles: S3 allows 10,000 parts and 5 GiB each

CONNECTIONS = 32  # of one process to one server
ENVIRONMENT = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE",
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE", "AWS_CA_BUNDLE",
)  # fmt: skip

PASSING_CODES = {
    *CODES["throttled"], "RequestTimeout", "RequestTimeoutException", "InternalError",
    "ServiceUnavailable", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch", "ConditionalRequestConflict", "OperationAborted",
}  # fmt: skip
ACTIONS = {
    "PutObject": "s3:PutObject", "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject", "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload", "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject (and s3:ListBucket, else a missing key looks forbidden)",
    "ListObjectsV2": "s3:ListBucket", "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "DeleteObject": "s3:DeleteObject", "DeleteObjects": "s3:DeleteObject",
}  # fmt: skip
ADVICE = {
    "NoSuchBucket": "there is no such bucket; create it, or correct the name",
    "InvalidBucketName": "this is no name of a bucket; use s3://bucket/prefix",
    "InvalidAccessKeyId": "the server does not know this access key; set AWS_ACCESS_KEY_ID or "
    "AWS_PROFILE",
    "SignatureDoesNotMatch": "the secret key does not fit the access key; set "
    "AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "InvalidToken": "the session token is not valid; set AWS_SESSION_TOKEN, or remove it",
    "RequestTimeTooSkewed": "the clock of this machine is wrong; set it (NTP)",
    "QuotaExceeded": "the quota of the bucket or its owner is used up; remove old checkpoints or "
    "ask for more",
    "EntityTooLarge": "the server does not take objects of this size",
    "InvalidObjectState": "the object is archived; restore it, and keep lifecycle rules off this "
    "prefix",
}
WRONG_REGION = (
    "PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"
)  # fmt: skip

# what botocore, or who reads its answer, makes of altered XML, and of an error whose body aborts
UNREADABLE = (ResponseParserError, HTTPError, ValueError, KeyError)
FAULTS = (aws.ClientError, aws.BotoCoreError, *UNREADABLE, OSError)
PASSING_KINDS = (
    aws.ConnectionError, aws.HTTPClientError, aws.IncompleteReadError, aws.CredentialRetrievalError,
    aws.MetadataRetrievalError, *UNREADABLE, OSError,
)  # fmt: skip

_MAKING = threading.Lock()  # a client takes 0.1 s to make: one is enough


class S3Storage(ObjectStorage):
    """The objects of a bucket whose keys begin with a prefix."""

    scheme: ClassVar[str] = "s3"
    bucket_names: ClassVar[re.Pattern[str]] = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
    faults: ClassVar[tuple[type[Exception], ...]] = FAULTS
    repeats: ClassVar[bool] = False

    def folders(self) -> list[str]:
        found = []
        for page in self._pages(self._inside, Delimiter="/"):
            found += [
                item["Prefix"][len(self._inside) : -1] for item in page.get("CommonPrefixes", ())
            ]
        return sorted(name for name in found if name)

    def delete_folder(self, key: str = "") -> None:
        super().delete_folder(key)
        self._abort(f"{self._name(key)}/" if key else self._own(), lambda begun_s, now_s: True)

    def clean_unfinished(self, older_than_s: float) -> int:
        return self._abort(self._own(), lambda begun_s, now_s: now_s - begun_s > older_than_s)

    # ------------------------------------------------------------------------------------- requests

    def _client(self) -> Any:
        settings = tuple(os.environ.get(name) for name in ENVIRONMENT)
        try:
            with _MAKING:
                return _client(settings, self.patience.connect_s, self.patience.read_s)
        except (aws.BotoCoreError, ValueError) as error:
            raise self._no_client(str(error)) from error

    def _forget_clients(self) -> None:
        _client.cache_clear()

    def _fault(self, error: Exception, where: str) -> StorageFault:
        means = meaning(error)
        if isinstance(error, aws.ClientError):
            return _answered(error, where, means)
        if isinstance(error, aws.NoCredentialsError | aws.PartialCredentialsError):
            return StorageFault("unasked", aws_errors.ADVICE[means])
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        lasting = isinstance(error, aws.SSLError) and "CERTIFICATE" in str(error).upper()
        if isinstance(error, PASSING_KINDS) and not lasting:
            return StorageFault("unanswered", text, again=True)
        return StorageFault("unasked", text)

    def _head(self, client: Any, name: str) -> Looked:
        return _looked(client.head_object(Bucket=self.bucket, Key=name))

    def _get(self, client: Any, name: str) -> tuple[bytes, Looked]:
        answer = client.get_object(Bucket=self.bucket, Key=name)
        with closing(answer["Body"]) as body:
            return bytes(body.read()), _looked(answer)

    def _fill(self, client: Any, name: str, view: memoryview, *, offset: int) -> tuple[int, str]:
        wanted = f"bytes={offset}-{offset + len(view) - 1}"
        try:
            answer = client.get_object(Bucket=self.bucket, Key=name, Range=wanted)
        except aws.ClientError as error:
            if status_of(error) != 416:
                raise
            return 0, ""  # it ends before
        n_due = expected(
            *_held(str(answer.get("ContentRange", ""))), offset=offset, length=len(view)
        )
        n = 0
        with closing(answer["Body"]) as body:
            while n < n_due and (got := body.readinto(view[n:n_due])):
                n += got
        if n != n_due:
            raise WrongBytes(f"{n_due} bytes were announced, {n} came")
        return n, str(answer.get("ETag", ""))

    def _write(self, client: Any, name: str, whole: WholeObject) -> None:
        wanted = {"IfNoneMatch": "*"} if whole.if_absent else {}
        try:
            client.put_object(
                Bucket=self.bucket, Key=name, Body=whole.data, Metadata=whole.marks, **wanted
            )
        except aws.ClientError as error:
            if status_of(error) != 412:
                raise
            raise AlreadyThere from error

    def _upload(self, name: str, if_absent: bool) -> Upload:
        return S3Upload(self, name, if_absent)

    def _delete(self, client: Any, name: str) -> None:
        client.delete_object(Bucket=self.bucket, Key=name)

    def _listed(self, start: str, after: str = "") -> Iterator[Sequence[tuple[str, int, float]]]:
        for page in self._pages(start, **({"StartAfter": after} if after else {})):
            yield [
                (item["Key"], int(item["Size"]), float(item["LastModified"].timestamp()))
                for item in page.get("Contents", ())
            ]

    def _pages(self, start: str, **more: str) -> Iterator[Any]:
        def one(client: Any) -> tuple[Any, str | None]:
            page = client.list_objects_v2(Bucket=self.bucket, Prefix=start, **token, **more)
            names = [page.get("Prefix", start), *(i["Key"] for i in page.get("Contents", ()))]
            if names[0] != start or not all(name.startswith(start) for name in names):
                raise WrongBytes(f"the list of {start} holds what is not under it")
            return page, page["NextContinuationToken"] if page["IsTruncated"] else None

        token: dict[str, str] = {}
        while True:
            page, after = self._ask(start, "listing", one)
            yield page
            if after is None:
                return
            token = {"ContinuationToken": after}

    def _remove(self, inside: str, names: Sequence[str]) -> None:
        # a page of a list has at most 1,000 names, and so many may one request remove
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}

        def delete(client: Any) -> None:
            answer = client.delete_objects(Bucket=self.bucket, Delete=wanted)
            failed = answer.get("Errors") or ()
            if failed:
                status = 403 if failed[0].get("Code") == "AccessDenied" else 503
                raise aws.ClientError(
                    {"Error": failed[0], "ResponseMetadata": {"HTTPStatusCode": status}},
                    "DeleteObjects",
                )

        self._ask(inside, "removing", delete)

    def _abort(self, inside: str, when: Callable[[float, float], bool]) -> int:
        """Removes unfinished uploads under `inside` for which when(begun_s, now_s), by the server's
        clock."""
        found = [item for item in self._unfinished(inside) if when(item[2], item[3])]

        def job(name: str, upload: str) -> Callable[[], Any]:
            whose = {"Bucket": self.bucket, "Key": name, "UploadId": upload}
            return lambda: self._ask(
                name, "removing", lambda client: client.abort_multipart_upload(**whose)
            )

        self.each([job(name, upload) for name, upload, _, _ in found])
        return len(found)

    def _unfinished(self, inside: str) -> Iterator[tuple[str, str, float, float]]:
        def one(client: Any) -> Any:
            return client.list_multipart_uploads(Bucket=self.bucket, Prefix=inside, **marks)

        marks: dict[str, str] = {}
        while True:
            page = self._ask(inside, "listing", one)
            date = page["ResponseMetadata"]["HTTPHeaders"]["date"]
            now_s = parsedate_to_datetime(date).timestamp()
            for item in page.get("Uploads", ()):
                if item["Key"].startswith(inside):
                    yield item["Key"], item["UploadId"], item["Initiated"].timestamp(), now_s
            if not page.get("IsTruncated"):
                return
            marks = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }


class S3Upload(Upload):
    """Each part is sent anew where it fails."""

    def __init__(self, storage: S3Storage, name: str, if_absent: bool) -> None:
        super().__init__(storage, name, if_absent)
        self._whose = {"Bucket": storage.bucket, "Key": name}
        self._etags: list[str] = []
        self._sending: deque[Future[str]] = deque()

    def abandon(self) -> None:
        settle(self._sending)
        if "UploadId" in self._whose:
            with suppress(StorageFailed, StorageRefused, FileNotFoundError):
                self._ask(lambda client: client.abort_multipart_upload(**self._whose), 3)

    def _part_bytes(self, number: int) -> int:
        return min(MOST_PART_BYTES, PART_BYTES << ((number - 1) // GROW_EVERY))

    def _send(self, part: bytearray) -> None:
        whose, number = self._whose, self._n_parts
        if number == 1:
            begun = self._ask(
                lambda client: client.create_multipart_upload(**whose, Metadata=self._marks)
            )
            whose["UploadId"] = str(begun["UploadId"])
        self._wait(N_IN_FLIGHT - 1)

        def sent() -> str:
            answer = self._ask(
                lambda client: client.upload_part(**whose, PartNumber=number, Body=part)
            )
            return str(answer["ETag"])

        self._sending.append(start(sent))

    def _wait(self, n_left: int = 0) -> None:
        while len(self._sending) > n_left:
            self._etags.append(self._sending.popleft().result())

    def _complete(self, client: Any) -> None:
        parts = [
            {"PartNumber": number, "ETag": etag} for number, etag in enumerate(self._etags, start=1)
        ]
        client.complete_multipart_upload(**self._whose, MultipartUpload={"Parts": parts})


@lru_cache(maxsize=8)
def _client(settings: tuple[str | None, ...], connect_s: float, read_s: float) -> Any:
    """`settings`: the environment it is made from. Path-style addresses where the server is not
    Amazon's."""
    if not (os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")):
        made = _made(connect_s, read_s, {})
        if ".amazonaws.com" in made.meta.endpoint_url:
            return made
    return _made(connect_s, read_s, {"addressing_style": "path"})


def _made(connect_s: float, read_s: float, s3: Mapping[str, str]) -> Any:
    session = boto3.session.Session()
    config = Config(
        connect_timeout=connect_s,
        read_timeout=read_s,
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # each request carries the SHA-256 of what it sends: every server compares it
        s3={**s3, "payload_signing_enabled": True},
    )
    return session.client("s3", config=config)


def _looked(answer: Any) -> Looked:
    return Looked(
        int(answer["ContentLength"]),
        float(answer["LastModified"].timestamp()),
        answer.get("Metadata", {}),
    )


def _held(content_range: str) -> tuple[tuple[int, int], int]:
    """Of `bytes a-b/total`: first and end, total. Raises WrongBytes when it is not that."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", content_range)
    if found is None:
        raise WrongBytes(f"a range was asked for, the answer says '{content_range[:40]}'")
    first, last, total = (int(number) for number in found.groups())
    return (first, last + 1), total


def _answered(error: Any, where: str, means: Meaning) -> StorageFault:
    code, status, operation = code_of(error), status_of(error), error.operation_name
    if code in ("NoSuchKey", "404", "NotFound") and status == 404:
        return StorageFault("absent")
    named = code or str(status)
    if code in PASSING_CODES or status in PASSING_STATUS:
        text = BUSY if means == "throttled" else DOWN
        return StorageFault("failed", text, named, again=True, operation=operation)
    if code == "NoSuchUpload" and operation == "CompleteMultipartUpload":
        text = (
            "its upload was removed while it ran; keep lifecycle rules for unfinished uploads at "
        )
        return StorageFault("failed", f"{text}a day or more", code, operation=operation)
    if code in WRONG_REGION:
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = headers.get("x-amz-bucket-region") or "the region of the bucket"
        text = f"the bucket is in another region; set AWS_REGION={region}"
    elif means == "forbidden":
        allow = ACTIONS.get(operation, operation)
        text = f"the credentials may not do this; allow {allow} on {where}"
    else:
        said = str(error.response.get("Error", {}).get("Message", ""))[:200]
        text = ADVICE.get(code) or aws_errors.ADVICE.get(means) or said or "no reason was given"
    # the answer to a HEAD has no body to say why
    bare = operation == "HeadObject" and named in ("400", "403")
    stale = bare or means in ("expired", "unknown") or code == "InvalidToken"
    return StorageFault("refused", text, named, operation=operation, stale=stale)
