"""Tokens that mean nothing in place of those in a remote store, where only their number counts and
nobody is to be asked for credentials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from elastic.types import DataKeys, Job
from elastic.types.typed_job import SOURCE_KINDS as KINDS


def with_made_up_data(job: Job, folder: Path) -> Job:
    """The job; where its tokens are in a remote store, with zeros that are written to `folder`
    instead."""
    source = job.data.train or {}
    remote = "://" in str(next((source[kind] for kind in KINDS if kind in source), ""))
    if not remote or not source.get("seq") or source.get("pack") in ("document", "whole", "pad"):
        return job
    (folder / "zeros.bin").write_bytes(bytes(2 * (8 * int(source["seq"]) + 1)))
    train = {"tokens": str(folder), "pattern": "*.bin", "dtype": "uint16", "seq": source["seq"]}
    return replace(job, data=DataKeys(train=train))


@contextmanager
def made_up_data(job: Job) -> Iterator[Job]:
    """The same in a folder of its own."""
    with TemporaryDirectory() as folder:
        yield with_made_up_data(job, Path(folder))
