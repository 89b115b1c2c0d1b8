"""Where a thread stands that does not get on."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.waiting import until

import elastic
from elastic.worker.standing import Doing, standing
from elastic.worker.turns import Turns

BODY = """
def wait(event, told):
    told.set()
    event.wait()
"""


def waits_in(file: str) -> Callable[[threading.Event, threading.Event], None]:
    """A function that waits, as if it stood in that file."""
    names: dict[str, Callable[[threading.Event, threading.Event], None]] = {}
    exec(compile(BODY, file, "exec"), names)
    return names["wait"]


@contextmanager
def thread_in(file: str) -> Iterator[threading.Thread]:
    event, told = threading.Event(), threading.Event()
    thread = threading.Thread(target=waits_in(file), args=(event, told))
    thread.start()
    assert told.wait(60)
    try:
        yield thread
    finally:
        event.set()
        thread.join()


TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(elastic.__file__).parent)


@pytest.mark.parametrize(
    ("file", "doing"),
    [
        (f"{TORCH}/distributed/distributed_c10d.py", "others"),
        (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "others"),
        (f"{TORCH}/_inductor/compile_fx.py", "compiling"),
        (f"{OURS}/data/loader.py", "batch"),
        (f"{OURS}/worker/saving.py", "copying"),
        (f"{OURS}/worker/host_copy.py", "copying"),
        (f"{OURS}/worker/step.py", "own"),
        (f"{OURS}/worker/readback.py", "device"),
        ("/home/somebody/train.py", "own"),
    ],
)
def test_by_the_file(file: str, doing: Doing) -> None:
    with thread_in(file) as thread:
        assert standing([thread]) == (doing, f"{Path(file).name}:4 in wait")


def test_those_files_are_there() -> None:
    """Where torch waits for other ranks and where it compiles."""
    for name in ("torch.distributed.fsdp._fully_shard._fsdp_collectives", "torch._inductor", "torch._dynamo"):
        assert importlib.util.find_spec(name) is not None


def test_a_script_is_at_work_while_the_training_thread_waits_for_it() -> None:
    turns = Turns()
    hearing = threading.Thread(target=turns.hear)
    hearing.start()
    try:
        with thread_in("/home/somebody/train.py") as script:
            until(lambda: standing([hearing]) == ("", ""), "the wait for the script")
            assert standing([hearing, script]) == ("own", "train.py:4 in wait")
    finally:
        turns._word = object()  # type: ignore[assignment]
        with turns._changed:
            turns._changed.notify_all()
        hearing.join()


def test_a_thread_that_is_gone_stands_nowhere() -> None:
    assert standing([threading.Thread()]) == ("", "")
