"""Storage under `gs://bucket/prefix` (Google Cloud Storage) and `az://container/prefix` (Azure Blob
Storage).

Credentials and endpoint come from the environment, as obstore and the clouds' own tools read them.
Asked of a server: strong consistency, and a write that never replaces another object
(`x-goog-if-generation-match: 0`, `If-None-Match: *`). Parts of interrupted uploads are removed by
the cloud: Azure does so after a week, Google by a lifecycle rule.
"""

from __future__ import annotations

import re
import secrets
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from elastic.errors import InternalError
from elastic.storage.cloud_calls import CloudCalls, is_status
from elastic.storage.objects import ObjectStorage, PartsFile, Patience, WrongBytes, check_whole

PART_BYTES = 32 << 20  # Google takes 10,000 parts
N_IN_FLIGHT = 4
# metadata: who wrote the object; the CRC-32 of one put in one piece (Azure allows no '-' in names)
WRITER, CRC32 = "elastic_writer", "elastic_crc32"


class CloudStorage(ObjectStorage):
    """The objects of a bucket, or of a container, whose keys begin with a prefix."""

    def __init__(self, uri: str, patience: Patience | None = None) -> None:
        super().__init__(uri, patience)
        self._calls = CloudCalls(self.scheme, self.bucket, lambda: self.patience)

    # -------------------------------------------------------------------------------------- reading

    def get(self, key: str) -> bytes:
        name = self._name(key)

        def get(store: Any) -> bytes:
            answer = obstore.get(store, name)
            data = bytes(answer.bytes())
            check_whole(data, answer.meta["size"], answer.attributes.get(CRC32))
            return data

        return self._calls.ask(name, "reading", get)

    def folders(self) -> list[str]:
        found = self._calls.ask(
            self._inside,
            "listing",
            lambda store: obstore.list_with_delimiter(store, self.prefix or None),
        )
        names = (path.strip("/")[len(self._inside) :] for path in found["common_prefixes"])
        return sorted(name for name in names if name)

    # -------------------------------------------------------------------------------------- writing

    def put(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        return self._put(self._name(key), data, if_absent)

    def _put(self, name: str, data: bytes | bytearray, if_absent: bool) -> bool:
        writer = secrets.token_hex(8)
        marks = {WRITER: writer, CRC32: f"{zlib.crc32(data):08x}"}

        def put(store: Any) -> bool:
            try:
                obstore.put(
                    store, name, data, attributes=marks, use_multipart=False,
                    mode="create" if if_absent else "overwrite",
                )  # fmt: skip
            except AlreadyExistsError:
                if not if_absent:
                    raise
                # an earlier try may have gone through, and its answer was lost
                return _writer(store, name) == writer
            return True

        return self._calls.ask(name, "writing", put)

    def _upload(self, name: str, if_absent: bool) -> PartsFile:
        return CloudUpload(self, name, if_absent)

    def delete(self, key: str) -> None:
        self._delete(self._name(key))

    def clean_unfinished(self, older_than_s: float) -> int:
        self._own()
        return 0

    # ------------------------------------------------------------------------------------- requests

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._calls.ask(name, "removing", lambda store: obstore.delete(store, name))

    def _remove(self, inside: str, names: Sequence[str]) -> None:
        assert all(name.startswith(inside) for name in names)
        self.each([lambda name=name: self._delete(name) for name in names])  # type: ignore[misc]

    def _head(self, key: str) -> tuple[int, float]:
        name = self._name(key)
        found = self._calls.ask(name, "looking", lambda store: obstore.head(store, name))
        return int(found["size"]), float(found["last_modified"].timestamp())

    def _range(self, name: str, offset: int, view: memoryview) -> tuple[int, str]:
        def get(store: Any) -> tuple[int, str]:
            wanted = (offset, offset + len(view))
            try:
                answer = obstore.get(store, name, options={"range": wanted})
            except BaseError as error:
                if not is_status(error, 416):
                    raise
                return 0, ""  # it ends before
            n = min(len(view), int(answer.meta["size"]) - offset)
            if tuple(answer.range) != (offset, offset + n):
                raise WrongBytes(f"bytes {wanted} were asked for, the answer holds {answer.range}")
            data = memoryview(answer.bytes())
            if len(data) != n:
                raise WrongBytes(f"{n} bytes were announced, {len(data)} came")
            view[:n] = data
            return n, str(answer.meta["e_tag"])

        return self._calls.ask(name, "reading", get)

    def _listed(self, start: str) -> Iterator[Sequence[tuple[str, int, float]]]:
        folder = start.rpartition("/")[0] or None
        pages = self._calls.ask(
            start, "listing", lambda store: [*obstore.list(store, folder, chunk_size=1000)]
        )
        for page in pages:
            yield [
                (item["path"], int(item["size"]), float(item["last_modified"].timestamp()))
                for item in page
                if item["path"].startswith(start)
            ]


class GoogleStorage(CloudStorage):
    """Google Cloud Storage."""

    scheme: ClassVar[str] = "gs"
    bucket_names: ClassVar[re.Pattern[str]] = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


class AzureStorage(CloudStorage):
    """Azure Blob Storage; its account is in the environment."""

    scheme: ClassVar[str] = "az"
    named: ClassVar[str] = "container"
    bucket_names: ClassVar[re.Pattern[str]] = re.compile(r"[a-z0-9](?:-?[a-z0-9]){2,62}")


def _writer(store: Any, name: str) -> str:
    """Who wrote the object; '' = it is not there, or nobody has said so."""
    try:
        return str(obstore.get(store, name, options={"head": True}).attributes.get(WRITER, ""))
    except FileNotFoundError:
        return ""


class CloudUpload(PartsFile):
    """Through a writer of obstore, which sends the parts."""

    def __init__(self, storage: CloudStorage, name: str, if_absent: bool) -> None:
        super().__init__()
        self._storage, self._name, self._if_absent = storage, name, if_absent
        self._mark = secrets.token_hex(8)
        self._parts: Any = None

    def finish(self) -> None:
        if self._parts is None:
            if not self._storage._put(self._name, self._part, self._if_absent):
                raise FileExistsError(f"{self._storage.uri}: {self._name} is there already")
            return
        if self._part:
            self._send()
        self._ask(self._complete)

    def abandon(self) -> None:
        if self._parts is not None:
            with suppress(BaseError, OSError):
                self._parts.__exit__(InternalError, None, None)

    def _part_bytes(self) -> int:
        return PART_BYTES

    def _send(self) -> None:
        if self._if_absent:
            raise InternalError(
                f"storage key '{self._name}': what must not replace another is at most "
                f"{PART_BYTES} bytes"
            )
        self._ask(self._write)
        self._part = bytearray()

    def _ask(self, request: Any) -> None:
        """Once: what a writer of obstore was given is never given to it again."""
        self._storage._calls.ask(self._name, "writing", request, once=True)

    def _write(self, store: Any) -> None:
        if self._parts is None:
            self._parts = obstore.open_writer(
                store, self._name, attributes={WRITER: self._mark}, buffer_size=PART_BYTES,
                max_concurrency=N_IN_FLIGHT,
            )  # fmt: skip
        self._parts.write(self._part)

    def _complete(self, store: Any) -> None:
        """Where the answer was lost, the object itself says whether it went through."""
        try:
            self._parts.close()
        except (BaseError, OSError):
            if _writer(store, self._name) != self._mark:
                raise
