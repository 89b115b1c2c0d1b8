"""A participant whose device has failed: what it does afterwards is done in host memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.worker.made_up_cuda import NO_TENSORS, make_up
from support.worker.ranks import meeting

from elastic.types import Layout
from elastic.worker.process.side_stream import boundary
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.transport import HostOnly, Nccl
from elastic.worker.session.workplace import Workplace


def test_nothing_of_the_workplace_touches_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = make_up(monkeypatch)
    program: Any = SimpleNamespace(extra_state={})
    with ThreadPoolExecutor(1) as pool:
        place = Workplace(
            None,
            program,
            NO_TENSORS,
            SimpleNamespace(seed=0),
            *[None] * 3,
            torch.device("cuda", 1),
            print,
            print,
            pool.submit,
        )  # type: ignore[arg-type]
        place.lose_device()
        place.background(lambda: cuda.note("ran", 0)).result()
        with place.side.behind(None) as stream:
            assert stream is None
        assert boundary(place.device) is None
    assert [what for what, *_ in cuda.seen] == ["ran"]


def test_state_moves_in_host_memory_where_one_has_lost_its_device() -> None:
    cuda = torch.device("cuda", 0)
    world: Any = object()
    assert Nccl(cuda).wire(world, cuda, True) == (world, cuda)
    assert Nccl(cuda).wire(world, cuda, False) == (world, torch.device("cpu"))
    assert isinstance(Nccl(cuda).host_only(), HostOnly)


def test_everyone_knows_that_one_has_no_device() -> None:
    """And meets it: its backend is a part of theirs."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    one = Groups(1, Layout(), torch.device("cpu"))
    one.lose_device()
    one.join(meeting(1, store.port), 0)
    try:
        assert (
            one.transport.backend == "cpu:gloo"
            and one.wire == (one.world, torch.device("cpu"))
            and not one._whole
        )
        dist.all_reduce(torch.ones(1), group=one.world)
    finally:
        one.close()
