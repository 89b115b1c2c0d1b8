"""An S3 server for tests: moto on loopback, or a real one. From other folders of tests: `from
storage.s3_server import ...`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from elastic.storage.storage_faults import Patience

QUICK = Patience(attempts=5, total_s=300.0, first_s=0.01, most_s=0.05, connect_s=30.0, read_s=30.0)
# where an answer never comes; elsewhere a slow machine would be asked twice
IMPATIENT = replace(QUICK, read_s=0.8)
BUCKET = "elastic-tests"
# of a real server on loopback, instead of moto; its credentials are in the environment
REAL = "ELASTIC_TEST_S3_PORT"
PART_BYTES = 5 << 20 if os.environ.get(REAL) else 50_000  # real servers take no smaller ones


@contextmanager
def running_s3() -> Iterator[int]:
    """The port of a server with an empty BUCKET; the environment of this process (and of its
    children) names it."""
    given = os.environ.get(REAL)
    with pytest.MonkeyPatch.context() as patch:
        if given:
            patch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{given}")
            make_bucket()
            yield int(given)
        else:
            yield from _moto(patch)


def _moto(patch: pytest.MonkeyPatch) -> Iterator[int]:
    import moto.s3.models
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    patch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", PART_BYTES)
    _one_write_at_a_time(patch)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        make_bucket()
        yield port
    finally:
        server.stop()


def _one_write_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """moto looks whether an object is there, then writes it; another thread may come between. S3
    does both as one."""
    from moto.s3.responses import S3Response

    writing = threading.RLock()

    def alone(write: Any) -> Any:
        def of_this(*args: Any, **kwargs: Any) -> Any:
            with writing:
                return write(*args, **kwargs)

        return of_this

    for name in ("put_object", "_key_response_post"):
        patch.setattr(S3Response, name, alone(getattr(S3Response, name)))


def make_bucket() -> None:
    """BUCKET is there after it."""
    import boto3

    client = boto3.session.Session().client("s3")
    if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET)
