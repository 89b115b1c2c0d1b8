"""Storage under `s3://bucket/prefix`: Amazon S3 and servers that speak its protocol.

The server is the one of AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, else Amazon's; credentials come
from where boto3 looks. Nothing outside the prefix is read, written or removed. Asked of a server:
strong consistency, `If-None-Match: *` on PUT.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar

from botocore import exceptions as aws

from elastic.storage.objects import ObjectStorage, PartsFile, Patience, WrongBytes, check_whole
from elastic.storage.s3_calls import Calls, status_of
from elastic.storage.s3_upload import CRC32, Upload, put_whole

N_PER_DELETE = 1000  # the most that one request removes


class S3Storage(ObjectStorage):
    """The objects of a bucket whose keys begin with a prefix."""

    scheme: ClassVar[str] = "s3"
    bucket_names: ClassVar[re.Pattern[str]] = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")

    def __init__(self, uri: str, patience: Patience | None = None) -> None:
        super().__init__(uri, patience)
        self._calls = Calls(self.bucket, patience)

    # -------------------------------------------------------------------------------------- reading

    def get(self, key: str) -> bytes:
        name = self._name(key)

        def get(client: Any) -> bytes:
            answer = client.get_object(Bucket=self.bucket, Key=name)
            with closing(answer["Body"]) as body:
                data = bytes(body.read())
            check_whole(data, answer["ContentLength"], answer.get("Metadata", {}).get(CRC32))
            return data

        return self._calls.ask(name, get)

    def folders(self) -> list[str]:
        found = []
        for page in self._pages(self._inside, Delimiter="/"):
            found += [
                item["Prefix"][len(self._inside) : -1] for item in page.get("CommonPrefixes", ())
            ]
        return sorted(name for name in found if name)

    # -------------------------------------------------------------------------------------- writing

    def put(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        return put_whole(self._calls, self._name(key), data, if_absent=if_absent)

    def _upload(self, name: str, if_absent: bool) -> PartsFile:
        return Upload(self._calls, name, if_absent)

    def delete(self, key: str) -> None:
        name = self._name(key)
        self._calls.ask(name, lambda client: client.delete_object(Bucket=self.bucket, Key=name))

    def delete_folder(self, key: str = "") -> None:
        super().delete_folder(key)
        self._abort(f"{self._name(key)}/" if key else self._own(), lambda begun_s, now_s: True)

    def clean_unfinished(self, older_than_s: float) -> int:
        return self._abort(self._own(), lambda begun_s, now_s: now_s - begun_s > older_than_s)

    # ------------------------------------------------------------------------------------- requests

    def _head(self, key: str) -> tuple[int, float]:
        name = self._name(key)

        def head(client: Any) -> tuple[int, float]:
            answer = client.head_object(Bucket=self.bucket, Key=name)
            return int(answer["ContentLength"]), float(answer["LastModified"].timestamp())

        return self._calls.ask(name, head)

    def _range(self, name: str, offset: int, view: memoryview) -> tuple[int, str]:
        def get(client: Any) -> tuple[int, str]:
            wanted = f"bytes={offset}-{offset + len(view) - 1}"
            answer = client.get_object(Bucket=self.bucket, Key=name, Range=wanted)
            expected = _expected(str(answer.get("ContentRange", "")), offset, len(view))
            with closing(answer["Body"]) as body:
                n = _fill(view[:expected], body)
            if n != expected:
                raise WrongBytes(f"{expected} bytes were announced, {n} came")
            return n, str(answer.get("ETag", ""))

        try:
            return self._calls.ask(name, get)
        except aws.ClientError as error:
            if status_of(error) != 416:
                raise
            return 0, ""

    def _listed(self, start: str) -> Iterator[Sequence[tuple[str, int, float]]]:
        for page in self._pages(start):
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
            page, after = self._calls.ask(start, one)
            yield page
            if after is None:
                return
            token = {"ContinuationToken": after}

    def _remove(self, inside: str, names: Sequence[str]) -> None:
        assert all(name.startswith(inside) for name in names)
        for at in range(0, len(names), N_PER_DELETE):
            self._delete(inside, names[at : at + N_PER_DELETE])

    def _delete(self, inside: str, names: Sequence[str]) -> None:
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

        self._calls.ask(inside, delete)

    def _abort(self, inside: str, when: Callable[[float, float], bool]) -> int:
        """Removes unfinished uploads under `inside` for which when(begun_s, now_s), by the server's
        clock."""
        found = [item for item in self._unfinished(inside) if when(item[2], item[3])]

        def job(name: str, upload: str) -> Callable[[], Any]:
            return lambda: self._calls.ask(
                name,
                lambda client: client.abort_multipart_upload(
                    Bucket=self.bucket, Key=name, UploadId=upload
                ),
            )

        self.each([job(name, upload) for name, upload, _, _ in found])
        return len(found)

    def _unfinished(self, inside: str) -> Iterator[tuple[str, str, float, float]]:
        def one(client: Any) -> Any:
            return client.list_multipart_uploads(Bucket=self.bucket, Prefix=inside, **marks)

        marks: dict[str, str] = {}
        while True:
            page = self._calls.ask(inside, one)
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


def _expected(content_range: str, offset: int, length: int) -> int:
    """Bytes that `bytes a-b/total` announces. Raises WrongBytes when it is not the range that was
    asked for."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", content_range)
    if found is None:
        raise WrongBytes(f"a range was asked for, the answer says '{content_range[:40]}'")
    first, last, total = (int(number) for number in found.groups())
    if first != offset or last != min(offset + length, total) - 1:
        raise WrongBytes(
            f"bytes {offset} to {offset + length - 1} were asked for, the answer holds "
            f"{content_range}"
        )
    return last - first + 1


def _fill(view: memoryview, body: Any) -> int:
    n = 0
    while n < len(view):
        got = body.readinto(view[n:])
        if not got:
            break
        n += got
    return n
