"""Loader processes: the same batches, a bound, an end that is told, and none that is left
behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.child import child
from support.places import PROGRAMS, ROOT
from support.waiting import is_waiting, once_waiting, until

from elastic.data.batches import Unread
from elastic.data.budget import Microbatch
from elastic.data.loader import Loader, ReadAhead
from elastic.data.loader_processes import LoaderLost, Reader, Readers, readers_of
from elastic.data.open_datasets import dataset_of
from elastic.data.order import sample_ids
from elastic.data.sample_draws import SampleDraws
from elastic.errors import ProgramError
from elastic.program import Program
from elastic.types import Job
from elastic.worker.parallel.keyed_draws import from_another

READ = PROGRAMS / "tiny_read.py"
PLAIN = Program(
    model=lambda: None, optimizer=lambda named: None, dataset=None, loss=lambda output, batch: None
)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture
def text_job(tmp_path: Path) -> dict[str, Any]:
    lines = [json.dumps({"text": f"document {i} " * (i % 9 + 1)}) for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    source = {"jsonl": "rows.jsonl", "tokenizer": "bytes", "seq": 32, "pack": "cut"}
    return {"folder": str(tmp_path), "seed": 1, "data": {"train": source, "loader_workers": 2}}


@pytest.fixture
def started() -> Iterator[list[Readers | Loader]]:
    found: list[Readers | Loader] = []
    yield found
    for one in reversed(found):
        one.close()


def read_job(folder: Path, n: int = 1) -> dict[str, Any]:
    return {"folder": str(folder), "program": str(READ), "seed": 0, "data": {"loader_workers": n}}


def test_the_same_batches_as_without(
    text_job: dict[str, Any], started: list[Readers | Loader]
) -> None:
    """Two generations with other shares over the same processes: what each step reads is a function
    of the step."""
    dataset = dataset_of(PLAIN, Job.from_plain(text_job))
    readers = readers_of(Job.from_plain(text_job), dataset)
    assert readers is not None and len(readers.each) == 2
    started.append(readers)
    pids = [reader.pid for reader in readers.each]
    for share, steps in (
        (slice(0, 4), range(5)),
        (slice(2, 8), range(5, 10)),
        (slice(0, 0), range(10, 12)),
    ):

        def parts(step: int, share: slice = share) -> list[Microbatch]:
            return [Microbatch(sample_ids(len(dataset), 8, 1, step=step)[share])]

        loader = Loader(
            dataset, parts, steps[0], ahead=ReadAhead.of(Job.from_plain(text_job)), readers=readers
        )
        plain = Loader(dataset, parts, steps[0])
        started += [loader, plain]
        for step in steps:
            one, two = loader.take(step)[0][0], plain.take(step)[0][0]
            assert (
                sorted(one) == ["document", "input", "position", "target"]
                and len(one["input"]) == share.stop - share.start
            )
            assert all(
                torch.equal(one[key], two[key]) and one[key].dtype == two[key].dtype for key in one
            )
        assert loader.close() and plain.close()
    assert [reader.pid for reader in readers.each] == pids
    for pid in pids:
        # a job's own data needs none
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    readers.close()
    assert not any(alive(pid) for pid in pids)


@pytest.mark.e2e
def test_a_killed_process_is_told_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Readers | Loader]
) -> None:
    monkeypatch.setenv("ELASTIC_TEST_READ", str(tmp_path))
    (tmp_path / "half").touch()
    readers = readers_of(Job.from_plain(read_job(tmp_path)), None)
    assert readers is not None
    started.append(readers)
    loader = Loader(None, lambda step: [Microbatch([step])], 5, readers=readers)
    started.append(loader)
    batch = loader.take(5)[0][0]
    assert (
        batch["x"].tolist() == [5]
        and batch["half"].tolist() == [2.5]
        and batch["half"].dtype == torch.bfloat16
    )
    before = readers.each[0].pid
    (tmp_path / "kill").touch()
    with pytest.raises(
        LoaderLost,
        match=rf"loader process {before} was killed by SIGKILL while .*memory.*\(step \d+\)",
    ):
        for step in range(6, 20):
            loader.take(step)
    loader.close()
    # as the next generation does
    again = Loader(None, lambda step: [Microbatch([step])], 8, readers=readers)
    started.append(again)
    assert [again.take(step)[0][0]["x"].tolist() for step in range(8, 11)] == [[8], [9], [10]]
    assert readers.each[0].pid != before and not alive(before)
    with pytest.raises(
        ProgramError, match=r"the dataset failed at sample 77 of step 77: OSError: disk on fire"
    ):
        again.take(77)


@pytest.mark.slow
def test_no_process_outlives_its_parent(tmp_path: Path) -> None:
    """Though the dataset hangs, and the parent is killed."""
    (tmp_path / "hang").touch()
    code = (
        "import sys; from elastic.data.loader_processes import *\nfrom elastic.types import "
        "Job\nreader = Reader(Job(folder='.', program=sys.argv[1]))\nprint(reader.pid, "
        "flush=True); reader.load([Microbatch([1])], 0)"
    )
    environment = {**os.environ, "ELASTIC_TEST_READ": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with child(
        [sys.executable, "-c", code, str(READ)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until((tmp_path / f"pid-{pid}").exists, "the first read of the process")
        assert alive(pid)
        parent.send_signal(signal.SIGKILL)
    until(lambda: not alive(pid), "the end of the process")
    assert (tmp_path / "hang").exists()


def test_data_that_cannot_be_opened(tmp_path: Path, started: list[Readers | Loader]) -> None:
    readers = Readers(
        Job.from_plain(
            {
                "folder": str(tmp_path),
                "data": {"train": {"jsonl": "absent", "tokenizer": "bytes", "seq": 4}},
            }
        ),
        1,
    )
    loader = Loader(None, lambda step: [Microbatch([step])], 0, readers=readers)
    started += [readers, loader]
    with pytest.raises(
        ProgramError, match=r"the batch of step 0: data\.train: .*absent: no such folder or file"
    ):
        loader.take(0)


def test_close_frees_a_take_that_waits_for_a_process_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Readers | Loader]
) -> None:
    monkeypatch.setenv("ELASTIC_TEST_READ", str(tmp_path))
    (tmp_path / "hang").touch()
    readers = Readers(Job.from_plain(read_job(tmp_path)), 1)
    loader = Loader(None, lambda step: [Microbatch([step])], 0, readers=readers)
    started += [loader, readers]
    pid = readers.each[0].pid
    until((tmp_path / f"pid-{pid}").exists, "the first read of the process")
    closer = once_waiting("take", readers.close)
    with pytest.raises(LoaderLost, match=r"ended while they read a batch \(step 0\)"):
        loader.take(0)
    closer.join()
    until(lambda: not alive(pid), "the end of the process")


def test_jobs_that_ask_for_none() -> None:
    assert readers_of(Job.from_plain({"data": {}}), None) is None and readers_of(Job(), []) is None


class OfAScript:
    """What no other process could make: it reads a file that is open, and keeps a lock."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(range(200)) * 10)
        self.file, self.lock = path.open("rb", buffering=0), threading.Lock()

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        with self.lock:
            self.file.seek(index)
            time.sleep(0.0005)  # sleeps: another reader may move the place meanwhile
            byte = self.file.read(1)[0]
        if index == 77:
            raise OSError("disk on fire")
        return {"at": torch.tensor(byte), "drawn": torch.rand(2), "by": torch.tensor(os.getpid())}


@pytest.fixture
def of_a_script(tmp_path: Path) -> Iterator[OfAScript]:
    dataset = OfAScript(tmp_path / "bytes")
    with dataset.file:
        yield dataset


def of_script(n: int = 2) -> Job:
    return Job.from_plain({"script": "train.py", "seed": 5, "data": {"loader_workers": n}})


def test_copies_of_a_worker_read_what_its_script_has_made(
    of_a_script: OfAScript, started: list[Readers | Loader]
) -> None:
    """The same as the worker reads itself, who reads on meanwhile; each at its own place of the
    open file."""
    dataset, job = of_a_script, of_script()
    readers = readers_of(job, dataset)
    assert readers is not None
    started.append(readers)

    def parts(step: int) -> list[Microbatch]:
        return [Microbatch([(7 * step + 13 * i) % 200 + 300 for i in range(6)])]

    draws = SampleDraws(job.seed)
    plain = Loader(dataset, parts, 0, draws=SampleDraws(job.seed, from_another))
    copied = Loader(dataset, parts, 0, readers=readers)
    started += [plain, copied]
    by = set[int]()
    for step in range(12):
        one, two = (loader.take(step)[0][0] for loader in (copied, plain))
        assert torch.equal(one["at"], torch.tensor([i % 200 for i in parts(step)[0].ids]))
        assert torch.equal(one["at"], two["at"]) and torch.equal(one["drawn"], two["drawn"])
        by |= set(one["by"].tolist())
    assert draws.draws(dataset) and by == {reader.pid for reader in readers.each}
    assert os.getpid() not in by


def test_a_copy_that_is_killed_is_told_and_replaced(
    of_a_script: OfAScript, started: list[Readers | Loader]
) -> None:
    readers = readers_of(of_script(1), of_a_script)
    assert readers is not None
    started.append(readers)
    (reader,), part = readers.each, [Microbatch([3])]
    before = reader.pid
    assert reader.load(part, 0)[0]["at"].tolist() == [3]
    os.kill(before, signal.SIGKILL)
    with pytest.raises(LoaderLost, match=rf"loader process {before} was killed by SIGKILL while"):
        reader.load(part, 0)
    assert reader.load(part, 0)[0]["at"].tolist() == [3] and reader.pid != before
    with pytest.raises(Unread, match="disk on fire"):
        reader.load([Microbatch([77])], 0)
    readers.close()
    assert not alive(reader.pid) and not alive(before)


def test_a_copy_holds_no_connection_of_its_parent(
    of_a_script: OfAScript, started: list[Readers | Loader]
) -> None:
    """Who waits for the end of the parent would wait for that of the copy."""
    ours, theirs = socket.socketpair()
    readers = readers_of(of_script(1), of_a_script)
    assert readers is not None
    started.append(readers)
    assert readers.each[0].load([Microbatch([1])], 0)
    ours.close()
    theirs.settimeout(30.0)
    assert theirs.recv(1) == b""
    theirs.close()


@pytest.mark.slow
def test_no_copy_outlives_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from elastic.data.loader_processes import *\n"
        "class Hangs:\n    def __getitem__(self, i): print(os.getpid(), flush=True); time.sleep(999)"
        "\n    def __len__(self): return 9\n"
        "readers = Readers(Job(), 1, partial(CopiedReader, dataset=Hangs()))\n"
        "readers.each[0].load([Microbatch([1])], 0)"
    )
    with child(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert pid != parent.pid and alive(pid)
        parent.send_signal(signal.SIGKILL)
    until(lambda: not alive(pid), "the end of the copy")


class Large:
    """Items of 1000 bytes; counts what was read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {"x": torch.zeros(250) + index}


@pytest.mark.parametrize(("most_bytes", "steps"), [(3500, 3), (10, 1), (100_000, 8)])
def test_reading_ahead_is_bounded_in_bytes_too(
    most_bytes: int, steps: int, started: list[Readers | Loader]
) -> None:
    dataset = Large()
    loader = Loader(dataset, lambda step: [Microbatch([step])], 0, ahead=ReadAhead(8, most_bytes))
    started.append(loader)
    for step in range(4):
        until(
            lambda step=step: (
                len(dataset.read) >= step + steps and all(map(is_waiting, loader._threads))
            ),
            "full buffers",
        )
        assert dataset.read == list(range(step + steps))
        assert loader.take(step)[0][0]["x"][0, 0] == step


def test_one_reader_serves_one_thread_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_TEST_READ", str(tmp_path))
    reader = Reader(Job.from_plain(read_job(tmp_path)))
    found: dict[int, list[int]] = {}

    def load(n: int) -> None:
        found[n] = reader.load([Microbatch([n] * 3)], 0)[0]["x"].tolist()

    threads = [threading.Thread(target=load, args=(n,)) for n in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader.close()
    assert found == {n: [n] * 3 for n in range(9)}
    # a thread that is late starts no new process
    with pytest.raises(LoaderLost, match="have been ended"):
        reader.load([Microbatch([1])], 0)
    assert reader.pid == 0
