"""Readers of what other processes of a run say: between ranks, and between rank 0 and the others
where it drives them without Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from support.fuzz import mutating
from support.fuzz.target import Target

from elastic.errors import PeerGarbled
from elastic.types import EnterPlan, Layout, Plan, StepDone, StopAsked, WorkerId
from elastic.types.orders import Rendezvous, WorkerOrder
from elastic.worker.hosting.served_session import Said
from elastic.worker.process import call_log
from elastic.worker.process.beat import Beat
from elastic.worker.process_groups import wire
from elastic.worker.standalone.meeting import RankHello
from elastic.worker.standalone.rank_link import (
    CommittedCheckpoint,
    EndOfRun,
    RankLink,
    StandaloneResult,
)

CALLS = call_log.PartCalls(4, True, 2, "mb", ("train.py, line 3", "train.py, line 4"))


class _Pipe:
    """A connection on which one word comes, or goes."""

    def __init__(self, words: bytes = b"") -> None:
        self.words = words

    def recv_bytes(self, most: int) -> bytes:
        return self.words[:most]

    def send_bytes(self, words: bytes) -> None:
        self.words = words


def rank_link() -> Target:
    plan = Plan(1, Layout(dp_shard=2), (WorkerId("a", 0), WorkerId("b", 0)), (4, 4), (2,))
    meeting = Rendezvous(plan.ranks, ("127.0.0.1", 29500), 60.0, "secret")
    beat = Beat(
        ((1, StepDone(1, 5, 2.5, 80, 1.0, digest="d")),), 1, "running", 5, 9, 4711, calls=(CALLS,)
    )
    result = StandaloneResult("run", "succeeded", "done", 5, metrics={"accuracy": 0.5})
    words = [
        beat, CommittedCheckpoint(5, "/r/c", {"loss": 2.5}), EndOfRun(result), StopAsked("signal"),
        WorkerId("a", 0), WorkerOrder(EnterPlan(plan), meeting),
    ]  # fmt: skip

    def sent(word: Any) -> bytes:
        pipe = _Pipe()
        RankLink(cast(Any, pipe)).send(Said(3, word))
        return pipe.words

    def read(data: bytes) -> Any:
        return RankLink(cast(Any, _Pipe(data))).recv()

    return Target("rank-link", list(map(sent, words)), read, (OSError,), mutating.as_json)


def hello() -> Target:
    return Target(
        "rank-hello",
        [json.dumps(asdict(RankHello(1, "node", 1 << 34))).encode()],
        RankHello.read,
        (ValueError,),
        mutating.as_json,
    )


def wires() -> list[Target]:
    numbers = json.dumps({"train_loss": 2.5, "n": 3}).encode()
    tensors = json.dumps([["w", "float32", [4, 4]], ["b", "bfloat16", []]]).encode()
    metas = json.dumps([[[4, 8], [8, 1], "float32", True], None]).encode()
    addresses = json.dumps([True, [["127.0.0.1", 29500], ["", 1]], ["AAE="]]).encode()
    calls = json.dumps([list(asdict(CALLS).values())] * 2).encode()
    readers: dict[str, tuple[bytes, Callable[[bytes, int], Any]]] = {
        "wire-numbers": (numbers, wire.numbers),
        "wire-tensors": (tensors, wire.empty_tensors),
        "wire-metas": (metas, wire.tensor_metas),
        "wire-addresses": (addresses, wire.addresses),
        "wire-calls": (calls, call_log.parts_of),
    }
    return [
        Target(
            name,
            [seed],
            partial(lambda read, data: read(data, 1), read),
            (PeerGarbled,),
            mutating.as_json,
        )
        for name, (seed, read) in readers.items()
    ]


def opened() -> list[Target]:
    return [rank_link(), hello(), *wires()]
