"""Google Cloud Storage's XML API in front of an S3 server: the two protocols differ in names of
headers only, as far as storage of a run uses them (objects, ranges, lists, uploads in parts).

Emulators of Google's server speak its JSON API; obstore asks through the XML one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from urllib.parse import quote, unquote

import pytest
from support.storage.faulty_proxy import FaultyProxy

Headers = list[tuple[str, str]]
TOKEN = "a-token-of-tests"
SIGNED = (
    "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=0"
)
NEVER_REPLACE = ("x-goog-if-generation-match", "0")


def plain(path: str) -> str:
    """obstore encodes the '/' and '-' of names too; moto takes them as they are."""
    names, mark, query = path.partition("?")
    return f"{quote(unquote(names))}{mark}{query}"


def to_s3(headers: Sequence[tuple[str, str]]) -> Headers:
    found: Headers = []
    for name, value in headers:
        low = name.lower()
        if (low, value) == NEVER_REPLACE:
            found.append(("If-None-Match", "*"))
        elif low == "authorization":
            assert value == f"Bearer {TOKEN}"
            found.append((name, SIGNED))
        elif low.startswith("x-goog-meta-"):
            found.append((f"x-amz-meta-{low.removeprefix('x-goog-meta-')}", value))
        else:
            assert not low.startswith("x-goog-"), name
            found.append((name, value))
    return found


def from_s3(headers: Sequence[tuple[str, str]]) -> Headers:
    named = [
        (f"x-goog-{name[6:]}" if name.lower().startswith("x-amz-") else name, value)
        for name, value in headers
    ]
    return [*named, ("x-goog-generation", "1")]


def gcs_proxy(s3_port: int) -> FaultyProxy:
    return FaultyProxy(s3_port, path=plain, asks=to_s3, answers=from_s3)


def point_here(patch: pytest.MonkeyPatch, url: str) -> None:
    """This process and its children take `url` for Google's server."""
    for name in [name for name in os.environ if name.startswith("GOOGLE_")]:
        patch.delenv(name)
    patch.setenv("GOOGLE_BASE_URL", url)
    patch.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
