"""What AWS's error codes mean, and botocore's own errors: the same for whoever asks EC2 or the
price list."""

from __future__ import annotations

from botocore import exceptions as aws

THROTTLED = (
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequestsException",
    "SlowDown",
)
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired")
UNKNOWN = (
    "AuthFailure",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "SignatureDoesNotMatch",
    "InvalidAccessKeyId",
)
REFUSED = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "OptInRequired")
NO_CREDENTIALS = (
    aws.NoCredentialsError, aws.PartialCredentialsError, aws.CredentialRetrievalError,
    aws.ProfileNotFound,
)  # fmt: skip
NO_LOGIN = (aws.TokenRetrievalError, aws.SSOError)  # of single sign-on: it has ended, or never was
