"""The digest where it is taken on a GPU: the same number, one wait of the host, and never of memory
that is given up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.waiting import is_waiting, until
from support.worker.made_up_cuda import NO_TENSORS, make_up
from support.worker.plans import plan as plan_of
from support.worker.thread_wire import Reads

from elastic.types import Box, Job, Layout, Move, Resume, WorkerId
from elastic.types.orders import Rendezvous
from elastic.worker.session import generation as generations
from elastic.worker.session import takeover
from elastic.worker.session.generation import Generation
from elastic.worker.session.takeover import Taken, Takeover, digest_of_given
from elastic.worker.session.workplace import EnterOrder, Workplace
from elastic.worker.state import content_digest
from elastic.worker.state.content_digest import digest, digest_of
from elastic.worker.state.train_state import Held

CPU, CUDA_1 = torch.device("cpu"), torch.device("cuda", 1)
SIZES = [(300, 40), (7, 5, 33), (20_000,), (70_000,), (3, 40_001), (6, 17), ()]


def boxes(n: int) -> dict[str, tuple[Box, torch.Tensor]]:
    """n tensors of each shape, float32 and bfloat16 by turns; parts of larger tensors, so that keys
    begin anywhere."""
    torch.manual_seed(1)
    found = {}
    for i in range(n):
        for k, sizes in enumerate(SIZES):
            dtype = torch.bfloat16 if (i + k) % 2 else torch.float32
            box = Box(
                f"w{i}.{k}",
                tuple(3 * d + 1 for d in range(len(sizes))),
                sizes,
                str(dtype).removeprefix("torch."),
            )
            found[box.fqn] = (box, torch.randn(sizes).to(dtype))
    return found


def order_of(generation: int, via: Any = "host") -> EnterOrder:
    plan = plan_of(generation, Layout(), [WorkerId("n", 0)], 8)
    return EnterOrder(
        replace(plan, move=Move(via=via), resume=Resume("live", 1)),
        0,
        Rendezvous(plan.ranks, ("", 0)),
    )


def workplace(pool: ThreadPoolExecutor, device: torch.device = CPU) -> Workplace:
    program: Any = SimpleNamespace(extra_state={})
    none: Any = None
    return Workplace(
        WorkerId("n", 0),
        program,
        NO_TENSORS,
        Job(),
        none,
        none,
        none,
        device,
        print,
        print,
        pool.submit,
    )


def test_in_large_blocks_it_is_the_same_and_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = boxes(12)
    shapes = {fqn: box.sizes for fqn, (box, _) in tensors.items()}
    want = digest(tensors, shapes, tensors)
    assert digest_of([*tensors.values()], shapes) == want
    monkeypatch.setattr(content_digest, "in_cache", lambda device: False)
    few = boxes(2)
    with Reads() as reads_few:
        digest(few, shapes, few)
    with Reads() as reads:
        got = digest(tensors, shapes, tensors)
    assert got == want
    assert reads.n == 1, "the host waited in between"
    assert reads.calls["arange"] == reads_few.calls["arange"], "keys were made anew for each tensor"
    assert not reads.calls["_to_copy"], "keys were copied from the host"


def test_of_given_parts_it_is_taken_on_a_side_stream_behind_the_takeover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = make_up(monkeypatch)
    streams: list[Any] = []
    monkeypatch.setattr(
        takeover, "digest_of", lambda *_: streams.append(torch.cuda.current_stream(CUDA_1)) or 5
    )
    monkeypatch.setattr(takeover, "state_specs", lambda profile: ())
    with ThreadPoolExecutor(1) as pool:
        place = workplace(pool, CUDA_1)
        behind: Any = object()
        assert digest_of_given(place, [Taken(given=(), behind=behind)], []) == 5
    assert [(device, event) for device, _, event in cuda.of("stream waits")] == [(1, behind)]
    assert len(cuda.of("stream")) == 1 and len(streams) == 1 and streams[0].device == 1


def test_boxes_that_are_still_compared_do_not_leave_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check of the takeover before reads the old boxes when the next one makes room: their memory
    stays until it is done."""
    box = Box("w", (0,), (1000,), "float32")
    tensor = torch.ones(1000)
    reading, go_on, seen = threading.Event(), threading.Event(), []

    def check(*_: Any, **__: Any) -> None:
        reading.set()
        assert go_on.wait(60)
        seen.append(tensor.untyped_storage().nbytes())
        raise RuntimeError("what a check raises does not stop the next takeover")

    monkeypatch.setattr(generations, "digest_of_given", check)
    with ThreadPoolExecutor(2) as pool:
        place = workplace(pool)
        place.held = [Held(1, 0, 6, "live", Layout(), (), {box.fqn: (box, tensor)})]
        generation = Generation.__new__(Generation)
        generation.place, generation.order, generation.plan = place, order_of(2), order_of(2).plan
        generation.state = None
        # it only sends, so that it waits for the check itself
        starting = pool.submit(generation._start, Taken(given=()))
        assert reading.wait(60)
        # it may begin before it is put down
        until(lambda: place.checks, "the check among those that are waited for")
        groups: Any = SimpleNamespace(world=None)
        making_room = threading.Thread(target=Takeover(place, order_of(3), groups).make_room)
        making_room.start()
        until(
            lambda: is_waiting(making_room) or not making_room.is_alive(), "its wait for the check"
        )
        assert making_room.is_alive() and tensor.untyped_storage().nbytes() == 4000, (
            "its memory was given up"
        )
        go_on.set()
        making_room.join(60)
        assert seen == [4000] and tensor.untyped_storage().nbytes() == 0 and place.held[0].on_host
        assert isinstance(starting.exception(60), RuntimeError)
