"""Storage under `gs://bucket/prefix` (Google Cloud Storage) and `az://container/prefix` (Azure Blob
Storage).

Credentials and endpoint come from the environment, as obstore and the clouds' own tools read them.
Asked of a server: strong consistency, and a write that never replaces another object
(`x-goog-if-generation-match: 0`, `If-None-Match: *`). Parts of interrupted uploads are removed by
the cloud: Azure does so after a week, Google by a lifecycle rule.

obstore (the Rust crate object_store) repeats what may pass: 5xx, 429, no connection, silence. Asked
again here are answers that end in the middle, and writes of which nobody knows whether they were
done.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore

from elastic.errors import InternalError, StorageRefused
from elastic.storage.objects import (
    N_IN_FLIGHT,
    AlreadyThere,
    Looked,
    ObjectStorage,
    Upload,
    WholeObject,
)
from elastic.storage.storage_faults import (
    BUSY,
    DOWN,
    PASSING_STATUS,
    Patience,
    StorageFault,
    WrongBytes,
    expected,
)

PART_BYTES = 32 << 20  # Google takes 10,000 parts

WHOLE_S = 600.0  # of one request: a part of an upload over a slow line
METADATA = ("169.254.169.254", 80)  # where a machine of either cloud asks for its role
METADATA_MOST_S = 2.0
NOT_VALID = ("AuthenticationFailed", "InvalidAuthenticationInfo")  # codes, of credentials
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<\n]*)")
_RETRIES = re.compile(r"after (\d+) retries, max_retries: (\d+)")
_URL = re.compile(r"\(?\bhttps?://\S+")


@dataclass(frozen=True)
class Cloud:
    """`credentials`: variables of which one says who asks; where none is set, the machine's role
    does. `advice`: by code, else by status."""

    store: Callable[..., Any]
    endpoint: str  # key of its setting; its variables are in `endpoints`
    endpoints: tuple[str, ...]
    credentials: tuple[str, ...]
    no_credentials: str
    advice: Mapping[str, str]


GOOGLE = Cloud(
    GCSStore,
    "base_url",
    ("GOOGLE_BASE_URL",),
    (
        "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BEARER_TOKEN", "GOOGLE_SKIP_SIGNATURE",
        "GCE_METADATA_HOST", "GCE_METADATA_ROOT",
    ),
    "set GOOGLE_APPLICATION_CREDENTIALS, run `gcloud auth application-default login`, or give this "
    "machine a service account",
    {
        "NoSuchBucket": "there is no such bucket; create it, or correct the name",
        "InvalidBucketName": "this is no name of a bucket; use gs://bucket/prefix",
        "401": "the credentials are not valid, or have expired; renew them (a service account of "
        "the machine renews itself)",
        "403": "the credentials may not do this; give their account Storage Object Admin "
        "(roles/storage.objectAdmin) on the bucket",
    },
)  # fmt: skip
AZURE = Cloud(
    AzureStore,
    "endpoint",
    ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    (
        "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY",
        "AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_TOKEN", "AZURE_STORAGE_CLIENT_SECRET",
        "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_USE_AZURE_CLI",
        "AZURE_SKIP_SIGNATURE", "AZURE_STORAGE_USE_EMULATOR", "AZURE_MSI_ENDPOINT",
        "AZURE_IDENTITY_ENDPOINT",
    ),
    "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, AZURE_USE_AZURE_CLI=true after `az "
    "login`, or give this machine an identity",
    {
        "ContainerNotFound": "there is no such container; create it, or correct the name",
        "ContainerBeingDeleted": "the container is being deleted; create it again, or use another",
        "AccountIsDisabled": "the storage account is disabled",
        "AuthenticationFailed": "the credentials are wrong or have expired; set "
        "AZURE_STORAGE_ACCOUNT_KEY, or renew the token or the SAS",
        "InvalidAuthenticationInfo": "the credentials are wrong or have expired; set "
        "AZURE_STORAGE_ACCOUNT_KEY, or renew the token or the SAS",
        "BlobArchived": "it is archived; restore it, and keep lifecycle rules off this prefix",
        "401": "the credentials are not valid, or have expired; renew them (an identity of the "
        "machine renews itself)",
        "403": "the credentials are wrong, have expired or may not do this; set "
        "AZURE_STORAGE_ACCOUNT_KEY, or give their identity Storage Blob Data Contributor on the "
        "container",
    },
)  # fmt: skip
CLOUDS = {"gs": GOOGLE, "az": AZURE}


class CloudStorage(ObjectStorage):
    """The objects of a bucket, or of a container, whose keys begin with a prefix."""

    faults: ClassVar[tuple[type[Exception], ...]] = (BaseError, OSError, ValueError)
    repeats: ClassVar[bool] = True
    # Azure allows no '-' in names
    marks: ClassVar[tuple[str, str]] = ("elastic_writer", "elastic_crc32")

    def folders(self) -> list[str]:
        found = self._ask(
            self._inside,
            "listing",
            lambda store: obstore.list_with_delimiter(store, self.prefix or None),
        )
        names = (path.strip("/")[len(self._inside) :] for path in found["common_prefixes"])
        return sorted(name for name in names if name)

    def clean_unfinished(self, older_than_s: float) -> int:
        self._own()
        return 0

    # ------------------------------------------------------------------------------------- requests

    def _client(self) -> Any:
        names = ("AZURE_", "GOOGLE_", "GCE_METADATA_", "HOME")
        given = tuple(sorted(item for item in os.environ.items() if item[0].startswith(names)))
        try:
            _check_who(self.scheme, given)
            return _store(self.scheme, self.bucket, self.patience, given=given)
        except (BaseError, ValueError) as error:
            why = _text(error)
            if "Account must be specified" in why:
                why = "set AZURE_STORAGE_ACCOUNT_NAME to the storage account"
            raise self._no_client(why) from error

    def _forget_clients(self) -> None:
        _store.cache_clear()

    def _fault(self, error: Exception, where: str) -> StorageFault:
        """obstore gives no codes, only text."""
        said, status, cloud = _said(error), _status(error), CLOUDS[self.scheme]
        code, message, retries = (pattern.search(said) for pattern in (_CODE, _MESSAGE, _RETRIES))
        named, advice = code[1] if code else "", cloud.advice
        n_retries, most = (int(retries[1]), int(retries[2])) if retries else (0, -1)
        n_asked = n_retries + 1
        if isinstance(error, FileNotFoundError) and named not in advice:
            return StorageFault("absent", n_asked=n_asked)
        passing = status == 409 or status in PASSING_STATUS
        of_token = "token request" in said
        if of_token and status and not passing:
            return StorageFault("unasked", f"there are no credentials; {cloud.no_credentials}")
        # asking again may help, and obstore has not done so as often as it may
        unknown = not status or isinstance(error, AlreadyExistsError)
        again = unknown and not of_token and n_retries != most
        shown = named or str(status)
        if passing:
            busy = status == 429 or named in ("SlowDown", "ServerBusy")
            return StorageFault(
                "failed", BUSY if busy else DOWN, shown, again=again, n_asked=n_asked
            )
        if status:
            why = advice.get(named) or advice.get(str(status))
            why = why or (message[1].strip()[:200] if message else "no reason was given")
            stale = status == 401 or named in NOT_VALID
            return StorageFault("refused", why, shown, n_asked=n_asked, stale=stale)
        return StorageFault("unanswered", _text(error), again=again, n_asked=n_asked)

    def _head(self, client: Any, name: str) -> Looked:
        return _looked(obstore.get(client, name, options={"head": True}))

    def _get(self, client: Any, name: str) -> tuple[bytes, Looked]:
        answer = obstore.get(client, name)
        return bytes(answer.bytes()), _looked(answer)

    def _fill(self, client: Any, name: str, view: memoryview, *, offset: int) -> tuple[int, str]:
        try:
            answer = obstore.get(client, name, options={"range": (offset, offset + len(view))})
        except BaseError as error:
            if _status(error) != 416:
                raise
            return 0, ""  # it ends before
        first, end = answer.range
        n_due = expected((first, end), int(answer.meta["size"]), offset=offset, length=len(view))
        data = memoryview(answer.bytes())
        if len(data) != n_due:
            raise WrongBytes(f"{n_due} bytes were announced, {len(data)} came")
        view[:n_due] = data
        return n_due, str(answer.meta["e_tag"])

    def _write(self, client: Any, name: str, whole: WholeObject) -> None:
        mode: Any = "create" if whole.if_absent else "overwrite"
        try:
            obstore.put(
                client, name, whole.data, attributes=whole.marks, use_multipart=False, mode=mode
            )
        except AlreadyExistsError as error:
            if not whole.if_absent:
                raise
            raise AlreadyThere from error

    def _upload(self, name: str, if_absent: bool) -> Upload:
        return CloudUpload(self, name, if_absent)

    def _delete(self, client: Any, name: str) -> None:
        obstore.delete(client, name)

    def _listed(self, start: str, after: str = "") -> Iterator[Sequence[tuple[str, int, float]]]:
        folder = start.rpartition("/")[0] or None
        pages = self._ask(
            start,
            "listing",
            lambda store: [*obstore.list(store, folder, offset=after or None, chunk_size=1000)],
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


class CloudUpload(Upload):
    """Through a writer of obstore, which sends the parts. What it was given is never given to it
    again."""

    attempts: ClassVar[int | None] = 1
    _writer: Any = None

    def abandon(self) -> None:
        if self._writer is not None:
            with suppress(BaseError, OSError):
                self._writer.__exit__(InternalError, None, None)

    def _part_bytes(self, number: int) -> int:
        return PART_BYTES

    def _send(self, part: bytearray) -> None:
        def write(client: Any) -> None:
            if self._writer is None:
                self._writer = obstore.open_writer(
                    client, self._name, attributes=self._marks, buffer_size=PART_BYTES,
                    max_concurrency=N_IN_FLIGHT,
                )  # fmt: skip
            self._writer.write(part)

        self._ask(write, 1)

    def _complete(self, client: Any) -> None:
        self._writer.close()


def _looked(answer: Any) -> Looked:
    meta = answer.meta
    return Looked(int(meta["size"]), float(meta["last_modified"].timestamp()), answer.attributes)


def _status(error: Exception) -> int:
    """0 = none came."""
    found = _STATUS.search(_said(error))
    return int(found[1]) if found else 0


def _said(error: Exception) -> str:
    return str(error).partition("Debug source:")[0]


def _text(error: Exception) -> str:
    """In one line, without addresses."""
    return " ".join(_URL.sub("", _said(error).rpartition(" - ")[2]).split())[:300]


@lru_cache(maxsize=8)
def _store(
    scheme: str, bucket: str, patience: Patience, *, given: tuple[tuple[str, str], ...]
) -> Any:
    """`given`: the environment it is made from. Raises StorageRefused."""
    cloud, environment = CLOUDS[scheme], dict(given)
    settings = _azure_settings(environment) if cloud is AZURE else {}
    endpoint = settings.get(cloud.endpoint) or next(
        (environment[name] for name in cloud.endpoints if name in environment), ""
    )
    if endpoint and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
        raise StorageRefused(f"{scheme}://{bucket}: Invalid endpoint: {endpoint}")
    return cloud.store(
        bucket,
        config=settings,
        client_options={
            "allow_http": endpoint.startswith("http:"),
            "connect_timeout": timedelta(seconds=patience.connect_s),
            "read_timeout": timedelta(seconds=patience.read_s),
            "timeout": timedelta(seconds=WHOLE_S),
        },
        retry_config={
            "max_retries": patience.attempts - 1,
            "retry_timeout": timedelta(seconds=patience.total_s),
            "backoff": {
                "init_backoff": timedelta(seconds=patience.first_s),
                "max_backoff": timedelta(seconds=patience.most_s),
                "base": 2,
            },
        },
    )


def _azure_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What Azure's own tools read and obstore does not."""
    found = {}
    parts = dict(
        part.split("=", 1)
        for part in environment.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
        if "=" in part
    )
    for key, part, name in (
        ("account_name", "AccountName", "AZURE_STORAGE_ACCOUNT"),
        ("account_key", "AccountKey", "AZURE_STORAGE_KEY"),
        ("sas_key", "SharedAccessSignature", ""),
        ("endpoint", "BlobEndpoint", ""),
    ):
        value = environment.get(name) or parts.get(part)
        if value:
            found[key] = value
    return found


@lru_cache(maxsize=8)
def _check_who(scheme: str, given: tuple[tuple[str, str], ...]) -> None:
    """Raises StorageRefused where nothing says who asks; a machine's role is asked for only where
    there is a cloud around."""
    cloud, environment = CLOUDS[scheme], dict(given)
    adc = Path(environment.get("HOME", "/"), ".config/gcloud/application_default_credentials.json")
    if any(environment.get(name) for name in cloud.credentials):
        return
    if cloud is GOOGLE and adc.exists():
        return
    try:
        socket.create_connection(METADATA, timeout=METADATA_MOST_S).close()
    except OSError as error:
        raise StorageRefused(
            f"{scheme}://: there are no credentials; {cloud.no_credentials}"
        ) from error
