"""What connects ranks on NCCL comes before the first step: how each group is used then, and what a
step may not be the first to do (support/worker/nccl_like.py refuses it in every run on it)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from support.worker.nccl_like import NcclLike, NcclLikeTransport
from support.worker.ranks import meeting, on_ranks
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.pipelining import schedules

from elastic.types import Layout
from elastic.worker.parallel import pipeline
from elastic.worker.process_groups.first_use import Use, use_once
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.transport import Nccl, Transport

CPU = torch.device("cpu")


def uses(layout: Layout, rank: int = 0, **more: bool) -> dict[str, set[str]]:
    made = Groups(1, layout, CPU, **more)
    made.pretend(rank)
    names = made.axis_names()
    found = {
        names.get(str(group.group_name), "world"): its for group, its in made._device_groups.items()
    }
    made.close()
    return found


def test_each_group_is_used_as_a_step_uses_it() -> None:
    # of the second of four stages
    whole = uses(Layout(pp=4, dp_replicate=2, dp_shard=2, cp=2, tp=2), rank=16)
    assert whole == {
        "world": set(), "pp": {"line"},
        "dp_replicate": {"sums", "parts"}, "fsdp": {"parts"}, "tp": {"sums", "parts"},
        "cp": {"parts"},
    }  # fmt: skip
    assert uses(Layout(pp=2))["pp"] == {"line", "sums"}, "its ends are all of it"
    assert uses(Layout(pp=3, schedule="interleaved1f1b"), rank=1)["pp"] == {"ring"}
    assert uses(Layout(dp_shard=4, ep=2))["ep"] == {"pieces"}
    assert uses(Layout(dp_shard=2), stage=True)["fsdp"] == {"parts", "pieces"}


def first_use(rank: int, n: int, store: tuple[str, int], layout: Layout) -> list[list[str]]:
    """What each group of the device has done when it is joined, and after the first messages."""
    of = Groups(1, layout, CPU, transport=NcclLikeTransport())
    of.join(meeting(n, store[1], 60.0, "secret"), rank)
    found = []
    for then in (lambda: None, of.first_messages):
        then()
        done: set[str] = set()
        for group in of._device_groups:
            assert isinstance(group, NcclLike)
            done |= group.connected
        found.append(sorted(done - {""}))
    of.close()
    return found


@pytest.mark.e2e
def test_stages_next_to_each_other_are_connected_before_the_first_step() -> None:
    """And not earlier: until then others need the memory."""
    line = on_ranks(first_use, 4, Layout(pp=4))
    assert [before for before, _ in line] == [[]] * 4
    peers = [[1], [0, 2], [1, 3], [2]]
    assert [after for _, after in line] == [
        sorted(f"message {way} {peer}" for peer in its for way in ("from", "to")) for its in peers
    ]
    ring = on_ranks(first_use, 3, Layout(pp=3, schedule="interleaved1f1b"))
    assert [len(after) for _, after in ring] == [4] * 3


@pytest.mark.e2e
def test_parts_are_gathered_and_scattered_when_the_groups_are_joined() -> None:
    found = on_ranks(first_use, 4, Layout(dp_shard=4, ep=2))
    assert (
        found
        == [[["all-gather", "reduce-scatter"], ["all-gather", "all-to-all", "reduce-scatter"]]] * 4
    )


def test_messages_of_a_warm_up_go_by_the_connections_of_the_group() -> None:
    """NCCL would make a communicator for each pair of ranks."""
    said: list[Any] = []
    group = SimpleNamespace(
        rank=lambda: 1, size=lambda: 3,
        allreduce=lambda tensors: SimpleNamespace(wait=lambda: said.append("sum")),
        send=lambda tensors, to, tag: said.append(("send", to)),
        recv=lambda tensors, source, tag: said.append(("recv", source)),
        _start_coalescing=lambda device: said.append("begin"),
        _end_coalescing=lambda device: SimpleNamespace(wait=lambda: said.append("done")),
    )  # fmt: skip

    class Hashed:
        def __getattr__(self, name: str) -> Any:
            return getattr(group, name)

    given: Any = {Hashed(): {"line"}}
    Nccl(CPU).warm_up(given)
    assert said == ["sum", "begin", ("send", 0), ("recv", 0), ("send", 2), ("recv", 2), "done"]


def test_stages_send_in_batches_also_what_goes_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[Any] = []
    monkeypatch.setattr(pipeline, "batch_isend_irecv", lambda ops: batches.append(ops) or ["work"])
    ops: Any = [SimpleNamespace(op=dist.isend, peer=1), SimpleNamespace(op=dist.isend, peer=1)]
    assert schedules._sorted_batch_p2p(ops) == {1: ["work"]}
    assert batches == [ops]
    assert schedules._batch_p2p([]) == []


def by_torch(rank: int, n: int, store: tuple[str, int]) -> int:
    """Every use of a group that is torch's own."""
    group = Transport().make(
        TCPStore(*store, is_master=False), "g", range(n), me=rank, timeout=timedelta(seconds=60)
    )
    batches: list[list[Any]] = []

    @contextmanager
    def batch(_: Any) -> Iterator[list[Any]]:
        batches.append([])
        yield batches[-1]

    use_once(group, get_args(Use), CPU, large_bytes=64, batch=batch)
    return len(batches)


@pytest.mark.e2e
def test_torchs_groups_have_the_calls_of_a_first_use() -> None:
    assert on_ranks(by_torch, 3) == [2] * 3
    assert hasattr(dist.ProcessGroup, "_start_coalescing")
    assert hasattr(dist.ProcessGroup, "_end_coalescing")
