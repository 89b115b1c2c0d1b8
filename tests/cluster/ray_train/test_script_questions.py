"""What the ranks of a restarted script ask, and the one answer that all of them get."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.waiting import until
from torch.distributed import HashStore

from elastic.cluster.ray_train import script_questions
from elastic.cluster.ray_train.script_child import asker
from elastic.cluster.ray_train.script_questions import NOTICE, REPORT, Questions

NOTED = {"deadline_ms": 5, "ranks": {"a": [1]}}


class Ranks:
    """`ask[rank]` is what its script asks with."""

    def __init__(self, n: int) -> None:
        self.over, self.notices = threading.Event(), [None] * n
        self.lines, self.ask = list[socket.socket](), list[Callable[..., Any]]()
        self.store = HashStore()
        self.of = [self._one(rank, n) for rank in range(n)]

    def _one(self, rank: int, n: int) -> Questions:
        mine, theirs = socket.socketpair()
        notice = lambda: self.notices[rank]  # noqa: E731
        questions = Questions(rank, n, self.store, notice=notice, over=self.over.is_set)
        threading.Thread(target=questions.answer, args=(mine,), daemon=True).start()
        self.lines.append(theirs)
        self.ask.append(asker(theirs))
        return questions

    def all(self, *asked: dict[str, Any]) -> list[Any]:
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(lambda ask, words: ask(**words), self.ask, asked))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    made.over.set()
    for line in made.lines:
        line.close()


def test_all_are_told_what_rank_0_knows_of_a_notice(ranks: Ranks) -> None:
    asked = [{"ask": NOTICE}] * 3
    ranks.notices[1] = NOTED  # type: ignore[call-overload]
    assert ranks.all(*asked) == [None] * 3
    assert not any(one.noticed for one in ranks.of)
    ranks.notices[0] = NOTED  # type: ignore[call-overload]
    assert ranks.all(*asked) == [NOTED] * 3
    assert all(one.noticed for one in ranks.of)


def test_a_report_waits_for_all_and_says_how_many_gave_a_checkpoint(ranks: Ranks) -> None:
    asked = [{"ask": REPORT, "said": f"of {k}", "given": k == 1} for k in range(3)]
    assert ranks.all(*asked) == [["of 0", 1]] * 3
    asked = [one | {"given": False} for one in asked]
    assert ranks.all(*asked) == [["of 0", 0]] * 3
    # nothing is left of them but the last ones' count
    assert ranks.store.num_keys() <= 1


def test_who_waits_long_says_for_whom_and_ends_with_its_process(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script_questions, "LONG_S", 0.05)
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(ranks.ask[0], ask=REPORT, said="x", given=True)
        said = ""

        def heard() -> bool:
            nonlocal said
            said += capfd.readouterr().out
            return "for the other ranks; all 3 ranks must call it equally often" in said

        until(heard, lambda: f"a line: {said}", 30.0)
        assert said.startswith("ray.train.report(): rank 0 has waited") and not alone.done()
        ranks.over.set()
        assert alone.result(30) is None


def test_who_waits_for_a_rank_that_has_ended_is_told_so(ranks: Ranks) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ranks.ask[k], ask=REPORT, said="x", given=True) for k in (0, 2)]
        ranks.of[1].ended()
        for one in waiting:
            with pytest.raises(RuntimeError, match=r"report\(\): rank 1 has ended; all 3 ranks"):
                one.result(30)
    with ThreadPoolExecutor(2) as pool:  # of a notice only rank 0 says something
        late = pool.submit(ranks.ask[2], ask=NOTICE)
        assert ranks.ask[0](ask=NOTICE) is None and late.result(30) is None
    ranks.of[0].ended()
    with pytest.raises(RuntimeError, match="rank 0 has ended"):
        ranks.ask[2](ask=NOTICE)


def test_one_rank_alone_asks_nobody() -> None:
    questions = Questions(0, 1, None, notice=lambda: NOTED, over=lambda: False)
    mine, theirs = socket.socketpair()
    threading.Thread(target=questions.answer, args=(mine,), daemon=True).start()
    ask = asker(theirs)
    assert ask(ask=REPORT, said="x", given=True) == ["x", 1]
    assert ask(ask=NOTICE) == json.loads(json.dumps(NOTED)) and questions.noticed
    theirs.close()


def test_a_handler_that_asks_in_the_middle_of_a_question_is_told_so() -> None:
    mine, theirs = socket.socketpair()
    ask = asker(theirs)
    before = signal.signal(signal.SIGTERM, lambda *_: ask(ask=REPORT))

    def answer() -> None:
        mine.recv(100)  # it waits now
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="'report' is asked by a signal's handler"):
            ask(ask=REPORT)
    finally:
        signal.signal(signal.SIGTERM, before)
        thread.join()
    mine.sendall(b"1\n")
    assert ask(ask=NOTICE) == 1, "it can ask again"
    mine.close()
    theirs.close()
