"""What AWS's error codes and botocore's own errors mean: the same for whoever asks S3, EC2 or the
price list."""

from __future__ import annotations

from typing import Literal

from botocore import exceptions as aws

Meaning = Literal[
    "throttled", "expired", "unknown", "forbidden", "no credentials", "no login", "no answer", ""
]
CODES: dict[Meaning, tuple[str, ...]] = {
    "throttled": (
        "SlowDown", "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled",
        "TooManyRequests", "TooManyRequestsException", "RequestLimitExceeded",
        "BandwidthLimitExceeded",
    ),
    "expired": (
        "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired",
    ),
    "unknown": (
        "AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException",
        "SignatureDoesNotMatch", "InvalidAccessKeyId",
    ),
    "forbidden": (
        "UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "OptInRequired", "403",
        "Forbidden", "AllAccessDisabled", "UnauthorizedAccess", "AccountProblem",
    ),
}  # fmt: skip
KINDS: dict[Meaning, tuple[type[Exception], ...]] = {
    "no credentials": (
        aws.NoCredentialsError, aws.PartialCredentialsError, aws.CredentialRetrievalError,
        aws.ProfileNotFound,
    ),
    "no login": (aws.TokenRetrievalError, aws.SSOError),  # of single sign-on: ended, or never was
    "no answer": (aws.HTTPClientError, aws.EndpointConnectionError),
}  # fmt: skip
ADVICE: dict[Meaning, str] = {
    "expired": "the credentials have expired; renew them (aws sso login, or new keys; a role or a "
    "profile renews itself)",
    "unknown": "AWS does not know these credentials; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY",
    "no credentials": "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "AWS_PROFILE, or give this machine a role",
}
ADVICE["no login"] = ADVICE["expired"]


def code_of(error: aws.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: aws.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def meaning(error: Exception) -> Meaning:
    """'' = another one."""
    if isinstance(error, aws.ClientError):
        return next((name for name, codes in CODES.items() if code_of(error) in codes), "")
    return next((name for name, kinds in KINDS.items() if isinstance(error, kinds)), "")
