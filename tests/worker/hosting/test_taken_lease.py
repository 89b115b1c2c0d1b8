"""Storage that refuses, or does not answer, the first thing that a run asks of it: its lease."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from support.waiting import until

from elastic.errors import SpecError, StorageFailed, StorageRefused
from elastic.ledger.lease import newest
from elastic.storage import LocalStorage
from elastic.worker.hosting import resume_checks
from elastic.worker.hosting.resume_checks import taken


class Refusing(LocalStorage):
    """Raises this at each write."""

    fault: OSError

    def put(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        raise self.fault


class Silent(LocalStorage):
    """Does not answer before `answers` is set."""

    answers: threading.Event

    def list(self, prefix: str = "", after: str = "") -> list[str]:
        assert self.answers.wait(60.0)
        return super().list(prefix, after)


class EndedBehindTheSign(LocalStorage):
    """A signal comes while its sign of life is written; what follows takes a while."""

    def put(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        written = super().put(key, data, if_absent)
        main = threading.main_thread().ident
        if written and b'"n": 0' in data and main is not None:
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)  # sleeps: storage that is slow behind the sign is the subject
        return written


@pytest.mark.parametrize(
    ("number", "right"),
    [
        (errno.EROFS, f"let user {os.getuid()} write there, or give another storage"),
        (errno.EACCES, f"let user {os.getuid()} write there, or give another storage"),
        (errno.ENOSPC, "make room there, or give another storage"),
        (errno.ENOTDIR, "give a folder, or s3://bucket/prefix (likewise gs://, az://)"),
    ],
)
def test_what_cannot_be_written_is_one_line_with_what_would_be_right(
    tmp_path: Path, number: int, right: str
) -> None:
    storage = Refusing(tmp_path / "x")
    storage.fault = OSError(number, os.strerror(number), str(tmp_path / "x" / "lease"))
    with pytest.raises(SpecError) as found:
        taken(storage, "x")
    what = f"{os.strerror(number)}: {tmp_path / 'x' / 'lease'}"
    assert str(found.value) == f"storage {tmp_path / 'x'} cannot be written ({what}); {right}"


def test_what_an_object_storage_says_is_said_as_it_is(tmp_path: Path) -> None:
    storage = Refusing(tmp_path / "x")
    storage.fault = StorageRefused("s3://b/x: PutObject was refused (AccessDenied): allow it")
    with pytest.raises(StorageRefused, match="PutObject was refused"):
        taken(storage, "x")


def test_storage_that_does_not_answer_is_told_and_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resume_checks, "TELL_AFTER_S", 0.05)
    monkeypatch.setattr(resume_checks, "TAKE_MOST_S", 0.2)
    storage = Silent(tmp_path / "x")
    storage.answers = threading.Event()
    with caplog.at_level(logging.WARNING), pytest.raises(StorageFailed) as found:
        taken(storage, "x")
    assert (found.value.exit_code, len(caplog.messages)) == (4, 1)
    assert f"run 'x': {tmp_path / 'x'} has not answered after" in caplog.messages[0]
    assert "run it again when it does" in str(found.value)
    storage.answers.set()

    def released() -> bool:
        sign = newest(LocalStorage(tmp_path / "x"))
        return sign is not None and sign.released

    until(released, "what came too late is given back")


def test_storage_that_answers_late_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resume_checks, "TELL_AFTER_S", 0.05)
    storage = Silent(tmp_path / "x")
    storage.answers = threading.Event()
    threading.Timer(0.2, storage.answers.set).start()
    with caplog.at_level(logging.WARNING):
        lease = taken(storage, "x")
    assert lease.certain and len(caplog.messages) == 1
    lease.release()


def test_a_driver_that_a_signal_ends_while_it_takes_its_lease_gives_it_back(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        taken(EndedBehindTheSign(tmp_path / "x"), "x")
    sign = newest(LocalStorage(tmp_path / "x"))
    assert sign is not None and sign.released, "the process may end now"
