"""A stream on its way to one object: parts of bounded size, several at once, and an object only
when all are there."""

from __future__ import annotations

import secrets
import zlib
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from botocore import exceptions as aws

from elastic.errors import InternalError, StorageFailed, StorageRefused
from elastic.storage.objects import PartsFile, settle, start
from elastic.storage.s3_calls import Calls, code_of, status_of

PART_BYTES = 16 << 20
MOST_PART_BYTES = 1 << 30
GROW_EVERY = 1000  # parts, after which the size doubles: S3 allows 10,000 parts and 5 GiB each
N_IN_FLIGHT = 4
# metadata: who wrote the object; the CRC-32 of one put in one piece
WRITER, CRC32 = "elastic-writer", "elastic-crc32"


def part_bytes(number: int) -> int:
    """Size of the n-th part, from 1."""
    return min(MOST_PART_BYTES, PART_BYTES << ((number - 1) // GROW_EVERY))


def put_whole(calls: Calls, key: str, data: bytes | bytearray, *, if_absent: bool) -> bool:
    """One request. False: `if_absent`, and the object was there and is not what an earlier try of
    this call wrote."""
    writer, n_tries = secrets.token_hex(8), 0
    wanted = {"IfNoneMatch": "*"} if if_absent else {}
    metadata = {WRITER: writer, CRC32: f"{zlib.crc32(data):08x}"}

    def put(client: Any) -> None:
        nonlocal n_tries
        n_tries += 1
        try:
            client.put_object(Bucket=calls.bucket, Key=key, Body=data, Metadata=metadata, **wanted)
        except aws.ClientError as error:
            lost = status_of(error) == 412 and n_tries > 1
            if not lost or _writer(client, calls.bucket, key) != writer:
                raise  # else an earlier try went through, and its answer was lost

    try:
        calls.ask(key, put)
    except aws.ClientError as error:
        if status_of(error) != 412:
            raise
        return False
    return True


def _writer(client: Any, bucket: str, key: str) -> str:
    """Who wrote the object; '' = it is not there, or nobody has said so."""
    try:
        found = client.head_object(Bucket=bucket, Key=key)
    except aws.ClientError as error:
        if status_of(error) == 404:
            return ""
        raise
    return str(found.get("Metadata", {}).get(WRITER, ""))


class Upload(PartsFile):
    """Memory: the parts in flight and one more."""

    def __init__(self, calls: Calls, key: str, if_absent: bool) -> None:
        super().__init__()
        self._calls, self._key, self._if_absent = calls, key, if_absent
        self._writer = secrets.token_hex(8)
        self._upload: str | None = None
        self._etags: list[str] = []
        self._sending: deque[Future[str]] = deque()

    def finish(self) -> None:
        if self._upload is None:
            if not put_whole(self._calls, self._key, self._part, if_absent=self._if_absent):
                raise FileExistsError(f"s3://{self._calls.bucket}/{self._key}: it is there already")
            return
        if self._part:
            self._send()
        while self._sending:
            self._etags.append(self._sending.popleft().result())
        self._complete()

    def abandon(self) -> None:
        """Removes the parts that were sent. Where that fails too, `clean_unfinished` finds them
        later."""
        settle(self._sending)
        if self._upload is not None:
            with suppress(StorageFailed, StorageRefused, FileNotFoundError, aws.ClientError):
                self._calls.ask(self._key, self._abort, attempts=3)

    def _part_bytes(self) -> int:
        return part_bytes(self._number)

    @property
    def _number(self) -> int:
        return len(self._etags) + len(self._sending) + 1

    def _abort(self, client: Any) -> None:
        client.abort_multipart_upload(
            Bucket=self._calls.bucket, Key=self._key, UploadId=self._upload
        )

    def _send(self) -> None:
        if self._if_absent:
            raise InternalError(
                f"storage key '{self._key}': what must not replace another is at most "
                f"{PART_BYTES} bytes"
            )
        if self._upload is None:
            self._upload = self._calls.ask(self._key, self._begin)
        while len(self._sending) >= N_IN_FLIGHT:
            self._etags.append(self._sending.popleft().result())
        number, data, self._part = self._number, self._part, bytearray()
        self._sending.append(start(lambda: self._sent(number, data)))

    def _begin(self, client: Any) -> str:
        answer = client.create_multipart_upload(
            Bucket=self._calls.bucket, Key=self._key, Metadata={WRITER: self._writer}
        )
        return str(answer["UploadId"])

    def _sent(self, number: int, data: bytearray) -> str:
        answer = self._calls.ask(
            self._key,
            lambda client: client.upload_part(
                Bucket=self._calls.bucket, Key=self._key, UploadId=self._upload, PartNumber=number,
                Body=data,
            ),
        )  # fmt: skip
        return str(answer["ETag"])

    def _complete(self) -> None:
        """Where the answer to a try was lost, the object itself says whether it went through."""
        parts = [
            {"PartNumber": number, "ETag": etag} for number, etag in enumerate(self._etags, start=1)
        ]
        n_tries = 0

        def complete(client: Any) -> None:
            nonlocal n_tries
            n_tries += 1
            if n_tries > 1 and _writer(client, self._calls.bucket, self._key) == self._writer:
                return
            client.complete_multipart_upload(
                Bucket=self._calls.bucket,
                Key=self._key,
                UploadId=self._upload,
                MultipartUpload={"Parts": parts},
            )

        try:
            self._calls.ask(self._key, complete)
        except StorageRefused as error:
            cause = error.__cause__
            if isinstance(cause, aws.ClientError) and code_of(cause) == "NoSuchUpload":
                raise StorageFailed(
                    f"s3://{self._calls.bucket}/{self._key}: its upload was removed while it ran; "
                    "keep lifecycle rules for unfinished uploads at a day or more"
                ) from error
            raise
