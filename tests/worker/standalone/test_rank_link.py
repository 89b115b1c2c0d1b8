"""What ranks send each other comes as it went, and is JSON of known shapes."""

from __future__ import annotations

import math
import pickle
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.worker.torchrun import job

from elastic.config.job import load_job
from elastic.policy.state.state import StopWish
from elastic.policy.stopping import of_a_person
from elastic.types import (
    Copy,
    CopyStored,
    EnterPlan,
    Holding,
    Layout,
    NodePrepared,
    Plan,
    Prepare,
    Quiesced,
    RollForward,
    ShardStored,
    StepDone,
    StopAsked,
    WorkerFailed,
    WorkerId,
)
from elastic.types.events import SIGNAL
from elastic.types.orders import Rendezvous, WorkerOrder, WriteShard
from elastic.worker.hosting.served_session import Said
from elastic.worker.process.beat import Beat
from elastic.worker.process.doing import InCollective
from elastic.worker.standalone.rank_link import (
    CommittedCheckpoint,
    EndOfRun,
    RankLink,
    SignOfLife,
    StandaloneResult,
)
from elastic.worker.standalone.standalone_run import StandaloneOptions, StandaloneRun, StartRefused

ME = WorkerId("node-0", 1)
PLAN = Plan(
    3, Layout(dp_shard=2), (WorkerId("node-0", 0), ME), (6, 6), (4,), copies_to=((1,), (0,))
)
RENDEZVOUS = Rendezvous(PLAN.ranks, ("127.0.0.1", 4711), 60.0, "5e" * 32)
EVENTS = (
    NodePrepared("node-0", (7,), 100, None),
    StepDone(3, 9, 0.1 + 0.2, 96, 0.01, digest="ab"),
    ShardStored(3, 9, 1, 100, 0.1, digest=2**64 - 1),
    Quiesced(ME, 3, 9, (Holding(ME, 3, 1, 9, "peer"),), (1e-300, math.pi), 10),
    CopyStored(Copy(9, "peer", 3, Layout(dp_shard=2)), 0.1),
    WorkerFailed(ME, 3, "program", "ValueError: no\nsuch thing"),
)
WORDS: list[Any] = [
    WorkerOrder(EnterPlan(PLAN), RENDEZVOUS),
    WorkerOrder(Prepare("node-0")),
    WorkerOrder(RollForward(3, 9, (math.inf, 1.0))),
    WorkerOrder(WriteShard(PLAN, 9, 1)),
    Beat(
        tuple(enumerate(EVENTS, 1)),
        3,
        "stepping",
        9,
        17,
        4711,
        (),
        (("dp", 0, 3),),
        "others",
        collective=InCollective("all_reduce", "dp", 0),
    ),
    StopAsked("enough"),
    ME,
    CommittedCheckpoint(9, "/runs/r/9", {"train_loss": 3.5, "step": 9}),
    EndOfRun(StandaloneResult("r", "stopped", "enough", 9, final_loss=3.25)),
    EndOfRun(None, "no", 2),
    SignOfLife(),
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_it_comes_as_it_went(word: Any) -> None:
    here, there = (RankLink(end) for end in Pipe())
    here.send(Said(0, word))
    assert there.poll(5) and there.recv() == Said(0, word)


@pytest.mark.parametrize(
    "text",
    [
        pickle.dumps((0, ME)), b"[]", b'[0, "Plan", {}]', b'[0, "WorkerId", {"x": 1}]',
        b'[1e999, "StopAsked", {"reason": "x"}]', b"[" * 100_000,
        b'[0, "WorkerOrder", {"action": {"kind": "Fly"}}]',
    ],
)  # fmt: skip
def test_what_is_no_word_is_as_if_the_rank_had_hung_up(text: bytes) -> None:
    mine, theirs = Pipe()
    theirs.send_bytes(text)
    with pytest.raises(OSError, match="not a word between ranks"):
        RankLink(mine).recv()


def test_the_signal_of_another_rank_is_no_persons_wish(tmp_path: Path) -> None:
    said: list[Said] = []
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    run = StandaloneRun(
        load_job(job(tmp_path)), StandaloneOptions(storage=str(tmp_path / "runs")), told
    )
    run.stop(f"{SIGNAL}SIGTERM")
    link = SimpleNamespace(
        send=said.append, poll=lambda _: True, recv=lambda: Said(0, EndOfRun(None, "", 2))
    )
    met: Any = SimpleNamespace(links=(link,), worker=WorkerId("node-0", 1))
    quiet: Any = SimpleNamespace(closed=True)
    with pytest.raises(StartRefused):
        run._followed(met, quiet)
    (asked,) = [each.what for each in said if isinstance(each.what, StopAsked)]
    assert asked.reason == "signal SIGTERM (rank 1)"
    assert not of_a_person(StopWish(asked.reason, 0.0))
