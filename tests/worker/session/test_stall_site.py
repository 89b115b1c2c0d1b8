"""Where a worker that makes no progress has stalled."""

from __future__ import annotations

import gc
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.waiting import until

import elastic
from elastic.worker.loop.handoff import Handoff
from elastic.worker.process.doing import Doing, Said, doing, said
from elastic.worker.process_groups import wire
from elastic.worker.session.stall_site import stall_site, waits_in

BODY = """
def wait(event, told):
    told.set()
    event.wait()

def within(block, call, *rest):
    with block:
        call(*rest)
"""


def in_file(file: str, name: str = "wait") -> Callable[..., None]:
    """A function that waits, or calls another in a block, as if it stood in that file."""
    names: dict[str, Callable[..., None]] = {}
    exec(compile(BODY, file, "exec"), names)
    return names[name]


@contextmanager
def thread_in(work: Callable[..., None], *before: Any) -> Iterator[threading.Thread]:
    event, told = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(*before, event, told))
    thread.start()
    assert told.wait(60)
    try:
        yield thread
    finally:
        event.set()
        thread.join()


TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(elastic.__file__).parent)
STORAGE = f"{OURS}/storage/local.py"
SCRIPT = "/home/somebody/train.py"


@pytest.mark.parametrize(
    ("file", "found"),
    [
        (f"{TORCH}/distributed/distributed_c10d.py", "others"),
        (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "others"),
        (f"{TORCH}/_inductor/compile_fx.py", "compiling"),
        (f"{OURS}/worker/step.py", "own"),
        (f"{OURS}/data/loader.py", "own"),
        (SCRIPT, "own"),
    ],
)
def test_where_nothing_was_said_torch_tells_and_the_rest_is_work_of_this_rank(
    file: str, found: Doing
) -> None:
    with thread_in(in_file(file)) as thread:
        assert stall_site([thread]) == (found, f"{Path(file).name}:4 in wait")


@pytest.mark.parametrize("what", ["others", "device", "batch", "copying"])
def test_what_was_said_holds_for_all_that_the_block_calls(what: Said) -> None:
    with thread_in(in_file(STORAGE, "within"), doing(what), in_file(STORAGE)) as thread:
        assert stall_site([thread]) == (what, "local.py:4 in wait")
    assert said(thread.ident or 0) == {}


def test_a_function_can_say_it_of_itself() -> None:
    with thread_in(doing("copying")(in_file(STORAGE))) as thread:
        assert stall_site([thread]) == ("copying", "local.py:4 in wait")


def test_who_waits_for_another_stages_first_message_waits_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take(event: threading.Event, told: threading.Event) -> None:
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda _: [SimpleNamespace(wait=event.wait)])
        told.set()
        wire._pass(dist.irecv, torch.zeros(1), 0, group=None)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "P2POp", lambda *parts: parts)
    with thread_in(take) as thread:
        until(lambda: "in _pass" in stall_site([thread])[1], "the message")
        assert stall_site([thread])[0] == "others"


def test_the_innermost_counts() -> None:
    work = in_file(STORAGE, "within")
    with thread_in(work, doing("copying"), work, doing("batch"), in_file(STORAGE)) as thread:
        assert stall_site([thread])[0] == "batch"


@pytest.mark.parametrize(
    ("file", "found"), [(f"{TORCH}/distributed/distributed_c10d.py", "others"), (SCRIPT, "own")]
)
def test_other_ranks_and_the_program_within_a_block_are_seen(file: str, found: Doing) -> None:
    """A dataset of the user's, say, that waits for something of its own."""
    with thread_in(in_file(STORAGE, "within"), doing("batch"), in_file(file)) as thread:
        assert stall_site([thread]) == (found, f"{Path(file).name}:4 in wait")


C10D = f"{TORCH}/distributed/distributed_c10d.py"
LOGGER = f"{TORCH}/distributed/c10d_logger.py"


def test_a_collective_that_a_script_calls_itself_has_the_scripts_line() -> None:
    """Not one that torch or we call for it, nor one of some ranks."""
    called, around = in_file(C10D), in_file(LOGGER, "within")
    with thread_in(in_file(SCRIPT, "within"), nullcontext(), around, nullcontext(), called) as t:
        assert stall_site([t]) == ("script", f"{SCRIPT}, line 8 (wait)")
    for by in (
        f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
        f"{OURS}/worker/wire",
    ):
        with thread_in(in_file(by, "within"), nullcontext(), called) as t:
            assert stall_site([t])[0] == "others"
    names: dict[str, Any] = {}
    exec(
        compile("def wait(event, told, group='of two'):\n told.set()\n event.wait()", C10D, "exec"),
        names,
    )
    with thread_in(in_file(SCRIPT, "within"), nullcontext(), names["wait"]) as t:
        assert stall_site([t])[0] == "others"


def call_of(name: str, group: object) -> Callable[..., None]:
    """A function of torch's file of collectives, called so with this group."""
    names: dict[str, Any] = {"given": group}
    text = f"def {name}(event, told, group=given):\n told.set()\n event.wait()"
    exec(compile(text, C10D, "exec"), names)
    return names[name]


def test_which_collective_of_which_group() -> None:
    """Whoever calls it; not a message from one rank to another, nor work of this rank."""
    group, idle = object(), threading.Thread()
    fsdp = in_file(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "within")
    with thread_in(fsdp, nullcontext(), call_of("all_gather", group)) as t:
        assert waits_in([idle, t]) == ("all_gather", group)
    around = in_file(LOGGER, "within"), nullcontext()
    with thread_in(fsdp, nullcontext(), *around, call_of("barrier", None)) as t:
        assert waits_in([t]) == ("barrier", None)
    with thread_in(fsdp, nullcontext(), call_of("batch_isend_irecv", group)) as t:
        assert waits_in([t]) is None
    with thread_in(in_file(SCRIPT)) as t:
        assert waits_in([t]) is None


def test_those_files_are_there() -> None:
    """Where torch waits for other ranks and where it compiles."""
    for name in (
        "torch.distributed.fsdp._fully_shard._fsdp_collectives",
        "torch.distributed.distributed_c10d",
        "torch.distributed.c10d_logger",
        "torch._inductor",
        "torch._dynamo",
    ):
        assert importlib.util.find_spec(name) is not None


def test_a_script_is_at_work_while_the_training_thread_waits_for_it() -> None:
    turns = Handoff()
    hearing = threading.Thread(target=turns.hear)
    hearing.start()
    try:
        with thread_in(in_file(SCRIPT)) as script:
            until(lambda: stall_site([hearing]) == ("", ""), "the wait for the script")
            assert stall_site([hearing, script]) == ("own", "train.py:4 in wait")
    finally:
        turns._word = object()  # type: ignore[assignment]
        with turns._changed:
            turns._changed.notify_all()
        hearing.join()


def test_a_thread_that_is_gone_stands_nowhere() -> None:
    assert stall_site([threading.Thread()]) == ("", "")


@pytest.mark.parametrize("looked", [True, False])
def test_no_garbage_is_looked_for_among_the_frames_of_another_thread(looked: bool) -> None:
    """It would let that thread run on while the frame of a caller is made, which is gone then."""
    places = list[str]()

    def told(phase: str, info: dict[str, int]) -> None:
        places.append(sys._getframe(1).f_code.co_name)

    work, before = in_file(f"{TORCH}/nn/modules/module.py", "within"), gc.get_threshold()
    blocks = [one for _ in range(20) for one in (nullcontext(), work)]
    with thread_in(work, *blocks, nullcontext(), in_file(STORAGE)) as thread:
        gc.callbacks.append(told)
        gc.set_threshold(1)
        (gc.enable if looked else gc.disable)()
        try:
            assert stall_site([thread]) == ("own", "local.py:4 in wait")
            assert gc.isenabled() == looked and "_site" not in places
        finally:
            gc.enable()
            gc.set_threshold(*before)
            gc.callbacks.remove(told)
