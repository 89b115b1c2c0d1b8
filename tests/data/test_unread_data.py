"""A dataset that cannot be read: what is no fault of the program says so, with and without loader
processes, and is read when it can be."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from elastic.data.batches import Unread
from elastic.data.budget import Microbatch
from elastic.data.loader import Loader
from elastic.data.loader_processes import _serve, readers_of
from elastic.errors import (
    DataUnread,
    ElasticError,
    ProgramError,
    StorageDamaged,
    StorageFailed,
    StorageRefused,
)
from elastic.types import Job
from elastic.worker.session.worker_errors import kind_of, print_error, text_of

AWAY = StorageFailed("s3://b/k: no whole answer (asked 10 times in 120 s)")
CASES: list[tuple[Exception, type[ElasticError], str]] = [
    (AWAY, StorageFailed, "storage"),
    (StorageRefused("s3://b/k: reading was refused (ExpiredToken)"), StorageRefused, "refused"),
    (StorageDamaged("s3://b/k: its CRC-32 is 0"), StorageDamaged, "infrastructure"),
    (OSError(errno.EIO, "Input/output error"), DataUnread, "unread"),
    (OSError(errno.ESTALE, "Stale file handle"), DataUnread, "unread"),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset"), DataUnread, "unread"),
    (OSError(errno.ENOENT, "No such file"), ProgramError, "program"),
    (OSError(errno.EACCES, "Permission denied"), ProgramError, "program"),
    (OSError("image file is truncated"), ProgramError, "program"),  # as pictures are refused
    (ValueError("no JSON"), ProgramError, "program"),
]


class ReadOnce:
    """Sample 7 cannot be read the first time."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error

    def __len__(self) -> int:
        return 100

    def __getitem__(self, sample: int) -> dict[str, int]:
        if sample == 7 and self.error is not None:
            error, self.error = self.error, None
            raise error
        return {"x": sample}


def three(step: int) -> Sequence[Microbatch]:
    return [Microbatch(range(3 * step, 3 * step + 3))]


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize(
    ("error", "raised", "kind"), CASES, ids=[f"{type(one[0]).__name__}-{one[2]}" for one in CASES]
)
def test_what_is_no_fault_of_the_program_says_so(
    n: int, error: Exception, raised: type[ElasticError], kind: str
) -> None:
    job = Job.from_plain({"script": "train.py", "seed": 5, "data": {"loader_workers": n}})
    dataset = ReadOnce(error)
    readers = readers_of(job, dataset)
    loaders = [Loader(dataset, three, 1, readers=readers)]
    try:
        assert loaders[0].take(1)[0][0]["x"].tolist() == [3, 4, 5]
        with pytest.raises(raised, match=r"the dataset failed at sample 7 of step 2: ") as caught:
            loaders[0].take(2)
        assert type(caught.value) is raised and kind_of(caught.value) == kind
        if kind != "program":
            assert text_of(caught.value) == str(caught.value) and not print_error(caught.value)
            assert str(error) in str(caught.value)
        loaders.append(Loader(dataset, three, 2, readers=readers))  # as the next generation does
        assert loaders[1].take(2)[0][0]["x"].tolist() == [6, 7, 8]
    finally:
        for loader in loaders:
            loader.close()
        if readers is not None:
            readers.close()


def test_a_loader_process_opens_the_data_when_its_storage_is_back(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    tried = []

    def opened(job: Job) -> Any:
        tried.append(os.getpid())
        if len(tried) == 1:
            raise AWAY
        return ReadOnce(AWAY)

    def serve() -> None:
        with suppress(EOFError):
            _serve(theirs, opened)

    def asked(ids: list[int]) -> Any:
        ours.send_bytes(pickle.dumps(([Microbatch(ids)], 0), 5))
        return pickle.loads(ours.recv_bytes())

    thread = threading.Thread(target=serve)
    thread.start()
    ours.send_bytes(pickle.dumps(Job(folder=str(tmp_path)), 5))
    answers = [asked([sample]) for sample in range(3)]
    ours.close()
    thread.join()
    assert isinstance(answers[0], Unread) and answers[0].kind is StorageFailed
    assert [batch["x"].tolist() for one in answers[1:] for batch in one] == [[1], [2]]
    assert len(tried) == 2
