"""Requests to Google Cloud Storage and to Azure Blob Storage through obstore: its clients, and what
a person is told about the faults that it does not mend.

obstore (the Rust crate object_store) repeats what may pass: 5xx, 429, no connection, silence. Asked
again here are answers that end in the middle, and writes of which nobody knows whether they were
done. Nothing here puts a credential into a message.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore

from elastic.errors import StorageDamaged, StorageFailed, StorageRefused
from elastic.storage.objects import Patience, WrongBytes

T = TypeVar("T")

WHOLE_S = 600.0  # of one request: a part of an upload over a slow line
METADATA = ("169.254.169.254", 80)  # where a machine of either cloud asks for its role
METADATA_MOST_S = 2.0
PASSING_STATUS = (408, 409, 429, 500, 502, 503, 504)
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


class CloudCalls:
    """Asks a cloud for things of one bucket."""

    def __init__(self, scheme: str, bucket: str, patience: Callable[[], Patience]) -> None:
        self.start, self._cloud = f"{scheme}://{bucket}", CLOUDS[scheme]
        self._scheme, self._bucket, self._patience = scheme, bucket, patience

    def ask(
        self, name: str, operation: str, request: Callable[[Any], T], *, once: bool = False
    ) -> T:
        """`request(store)`, repeated as long as a fault may pass (`once`: by obstore only). `name`:
        key or prefix, for messages. Raises FileNotFoundError, StorageRefused, StorageFailed."""
        patience, n_before, where = self._patience(), 0, f"{self.start}/{name}"

        def may_pass(error: BaseException) -> bool:
            nonlocal n_before
            again = isinstance(error, WrongBytes) or (
                isinstance(error, (BaseError, OSError)) and _Answer(error).unknown
            )
            n_before += _Answer(error).n_asked if again else 0
            return again

        tries = patience.tries(may_pass, 1 if once else None)
        try:
            return tries(lambda: request(self._store(patience)))
        except (StorageRefused, StorageFailed):
            raise
        except (BaseError, WrongBytes, OSError, ValueError) as error:
            last = _Answer(error)
            n = n_before or last.n_asked
            seconds = float(tries.statistics.get("delay_since_first_attempt", 0.0))
            asked = f"asked {n} times in {seconds:.0f} s"
            raise self._told(error, f"{where}: {operation}", asked) from error

    def _store(self, patience: Patience) -> Any:
        names = ("AZURE_", "GOOGLE_", "GCE_METADATA_", "HOME")
        given = tuple(sorted(item for item in os.environ.items() if item[0].startswith(names)))
        try:
            _check_who(self._scheme, given)
            return _store(self._scheme, self._bucket, patience, given=given)
        except (BaseError, ValueError) as error:
            why = _Answer(error).text
            if "Account must be specified" in why:
                why = "set AZURE_STORAGE_ACCOUNT_NAME to the storage account"
            raise StorageRefused(f"{self.start}: no connection can be set up: {why}") from error

    def _told(self, error: Exception, what: str, asked: str) -> Exception:
        """What it means to the caller."""
        answer = _Answer(error)
        code, status, advice = answer.code, answer.status, self._cloud.advice
        if isinstance(error, WrongBytes):
            return StorageDamaged(f"{what}: {error} ({asked})")
        if isinstance(error, FileNotFoundError) and code not in advice:
            return FileNotFoundError(f"{what}: not there")
        if answer.of_token and status and status not in PASSING_STATUS:
            return StorageRefused(f"{what}: there are no credentials; {self._cloud.no_credentials}")
        if status in PASSING_STATUS:
            hint = (
                "the server asks to slow down"
                if status == 429 or code in ("SlowDown", "ServerBusy")
                else "it may be down"
            )
            return StorageFailed(f"{what} failed ({code or status}; {asked}): {hint}")
        if status:
            if status == 401:
                _store.cache_clear()  # the next call reads the credentials anew
            why = advice.get(code) or advice.get(str(status)) or answer.message
            return StorageRefused(f"{what} was refused ({code or status}): {why}")
        return StorageFailed(f"{what}: no whole answer ({asked}): {answer.text}")


class _Answer:
    """What obstore says of a fault, taken apart: it gives no codes, only text."""

    def __init__(self, error: BaseException) -> None:
        whole = str(error).partition("Debug source:")[0]
        found = _STATUS.search(whole)
        self.status = int(found[1]) if found else 0
        code, message, retries = (pattern.search(whole) for pattern in (_CODE, _MESSAGE, _RETRIES))
        self.code = code[1] if code else ""
        self.message = message[1].strip()[:200] if message else "no reason was given"
        n_retries, most = (int(retries[1]), int(retries[2])) if retries else (0, -1)
        self.n_asked = n_retries + 1
        self.of_token = "token request" in whole
        self.text = " ".join(_URL.sub("", whole.rpartition(" - ")[2]).split())[:300]
        # asking again may help, and obstore has not done so as often as it may
        lasting = isinstance(error, (FileNotFoundError, StorageRefused, StorageFailed))
        self.unknown = (
            not lasting
            and not self.of_token
            and (not self.status or isinstance(error, AlreadyExistsError))
            and n_retries != most
        )


def is_status(error: BaseException, status: int) -> bool:
    return _Answer(error).status == status


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
