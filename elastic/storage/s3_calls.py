"""Requests to an S3 server: which faults are met by asking again, and what a person is told about
the others.

botocore's own retries are off, so that there is one place. Nothing here puts a credential into a
message.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

import boto3
from botocore import exceptions as aws
from botocore.config import Config
from botocore.parsers import ResponseParserError
from tenacity import Retrying
from urllib3.exceptions import HTTPError

from elastic.errors import StorageDamaged, StorageFailed, StorageRefused
from elastic.storage import objects
from elastic.storage.objects import Patience, WrongBytes

T = TypeVar("T")

CONNECTIONS = 32  # of one process to one server
ENVIRONMENT = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE",
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE", "AWS_CA_BUNDLE",
)  # fmt: skip

PASSING_STATUS = (408, 429, 500, 502, 503, 504)
PASSING_CODES = {
    "SlowDown", "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled",
    "TooManyRequests", "RequestLimitExceeded", "BandwidthLimitExceeded", "RequestTimeout",
    "RequestTimeoutException", "InternalError", "ServiceUnavailable", "IncompleteBody", "BadDigest",
    "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "ConditionalRequestConflict",
    "OperationAborted",
}  # fmt: skip
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
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
    "InvalidAccessKeyId": "the server does not know this "
    "access key; set "
    "AWS_ACCESS_KEY_ID or AWS_PROFILE",
    "SignatureDoesNotMatch": "the secret key does not fit the "
    "access key; set "
    "AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "InvalidToken": "the session token is not valid; set AWS_SESSION_TOKEN, or remove it",
    "RequestTimeTooSkewed": "the clock of this machine is wrong; set it (NTP)",
    "QuotaExceeded": "the quota of the bucket or its owner is "
    "used up; remove "
    "old checkpoints or ask for more",
    "EntityTooLarge": "the server does not take objects of this size",
    "InvalidObjectState": "the object is archived; restore it, and "
    "keep lifecycle "
    "rules off this prefix",
}
WRONG_REGION = (
    "PermanentRedirect",
    "301",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
)
FORBIDDEN = (
    "AccessDenied",
    "403",
    "Forbidden",
    "AllAccessDisabled",
    "UnauthorizedAccess",
    "AccountProblem",
)


# what botocore, or who reads its answer, makes of altered XML, and of an error whose body aborts
UNREADABLE = (ResponseParserError, HTTPError, ValueError, KeyError)


_MAKING = threading.Lock()  # a client takes 0.1 s to make: one is enough


class Calls:
    """Asks a server for things of one bucket."""

    def __init__(self, bucket: str, patience: Patience | None = None) -> None:
        self.bucket = bucket
        self._patience = patience

    @property
    def patience(self) -> Patience:
        return self._patience or objects.DEFAULT

    def ask(self, name: str, request: Callable[[Any], T], attempts: int | None = None) -> T:
        """`request(client)`, repeated as long as a fault may pass. `name`: key or prefix, for
        messages.

        Raises FileNotFoundError, StorageRefused, StorageFailed; a failed condition (412) and a
        range past the end (416) come as ClientError.
        """
        tries = self.patience.tries(_passes, attempts)
        where = f"s3://{self.bucket}/{name}"
        try:
            return tries(lambda: request(self._client()))
        except aws.ClientError as error:
            raise _told(error, where, tries) from error
        except WrongBytes as error:
            raise StorageDamaged(f"{where}: {error} ({_asked(tries)})") from error
        except (aws.BotoCoreError, *UNREADABLE, OSError) as error:
            if isinstance(error, StorageRefused | StorageFailed | FileNotFoundError):
                raise
            raise _untold(error, where, tries) from error

    def _client(self) -> Any:
        patience = self.patience
        settings = tuple(os.environ.get(name) for name in ENVIRONMENT)
        try:
            with _MAKING:
                return _client(settings, patience.connect_s, patience.read_s)
        except (aws.BotoCoreError, ValueError) as error:
            raise StorageRefused(
                f"s3://{self.bucket}: no connection can be set up: {error}"
            ) from error


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


def code_of(error: aws.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: aws.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _passes(error: BaseException) -> bool:
    """Whether asking again may help."""
    if isinstance(error, aws.ClientError):
        return code_of(error) in PASSING_CODES or status_of(error) in PASSING_STATUS
    if isinstance(error, aws.SSLError) and "CERTIFICATE" in str(error).upper():
        return False
    if isinstance(error, StorageRefused | StorageFailed | FileNotFoundError):
        return False
    kinds = (
        WrongBytes, aws.ConnectionError, aws.HTTPClientError, aws.IncompleteReadError,
        aws.CredentialRetrievalError, aws.MetadataRetrievalError, *UNREADABLE, OSError,
    )  # fmt: skip
    return isinstance(error, kinds)


def _asked(tries: Retrying) -> str:
    n = int(tries.statistics.get("attempt_number", 1))
    seconds = float(tries.statistics.get("delay_since_first_attempt", 0.0))
    return f"asked {n} times in {seconds:.0f} s"


def _told(error: Any, where: str, tries: Retrying) -> Exception:
    """What a server's refusal means to the caller."""
    code, status, operation = code_of(error), status_of(error), error.operation_name
    if status in (412, 416):
        return cast(Exception, error)
    if code in ("NoSuchKey", "404", "NotFound") and status == 404:
        return FileNotFoundError(f"{where}: not there")
    if _passes(error):
        busy = code in ("SlowDown", "Throttling")
        hint = "the server asks to slow down" if busy else "it may be down"
        return StorageFailed(
            f"{where}: {operation} failed ({code or status}; {_asked(tries)}): {hint}"
        )
    if code in EXPIRED:
        _client.cache_clear()  # the next call reads the credentials anew
        advice = "the credentials have expired; renew them (a role or a profile renews itself)"
    elif code in WRONG_REGION:
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = headers.get("x-amz-bucket-region") or "the region of the bucket"
        advice = f"the bucket is in another region; set AWS_REGION={region}"
    elif code in FORBIDDEN:
        advice = (
            f"the credentials may not do this; allow {ACTIONS.get(operation, operation)} on {where}"
        )
    else:
        said = str(error.response.get("Error", {}).get("Message", ""))[:200]
        advice = ADVICE.get(code) or said or "no reason was given"
    return StorageRefused(f"{where}: {operation} was refused ({code or status}): {advice}")


def _untold(error: Exception, where: str, tries: Retrying) -> Exception:
    """What it means that no answer, or none that can be read, has come."""
    if isinstance(error, aws.NoCredentialsError | aws.PartialCredentialsError):
        return StorageRefused(
            f"{where}: there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "AWS_PROFILE, or give this machine a role"
        )
    text = " ".join(str(error).split())[:300]
    if _passes(error):
        return StorageFailed(
            f"{where}: no whole answer ({_asked(tries)}): {type(error).__name__}: {text}"
        )
    return StorageRefused(f"{where}: {type(error).__name__}: {text}")
