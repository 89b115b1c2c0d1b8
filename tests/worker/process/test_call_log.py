"""What the scripts of the ranks call: who makes another call than the others, and in which line."""

from __future__ import annotations

import json
import sys
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from elastic.errors import PeerGarbled
from elastic.worker.process.call_log import (
    FILE_BYTES,
    KEPT_MOST,
    PLACES_MOST,
    CallLog,
    PartCalls,
    calls_in,
    difference,
    parts_of,
)

WHOLE, UNDER_WAY = True, False


def calls(words: str, whole: bool = UNDER_WAY, part: int = 6) -> PartCalls:
    """Of words such as 'm9 b10': the kind of a call and its line."""
    each = words.split()
    places = tuple(f"train.py, line {word[1:]}" for word in each)
    return PartCalls(part, whole, len(each), "".join(word[0] for word in each), places)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (["m9 b10"] * 4, ""),
        (["m9 b10", "m9", "", "m9 b10"], ""),
        (["m5 m9", "m9 b10", "m9 b10"], "step 4: rank 0 calls run.model at train.py, line 5, the"),
        (["m9 b10", "m9 b10", "m9 m9"], "step 4: rank 2 calls run.model at train.py, line 9, the"),
        (["m9 m9", "m9 b10"], "step 4: rank 0 calls run.model at train.py, line 9, rank 1 does"),
        (["b10", "m9", "m9"], "step 4: rank 0 does not call run.model at train.py, line 9, the 2"),
        (["m9 b10 m1", "m9 b10 b12", "m9 b10 b12", "m9 b10 m1", "m9 b10 b12"], "ranks 0, 3 call"),
    ],
)
def test_the_first_call_that_differs(ranks: list[str], said: str) -> None:
    found = difference({rank: [calls(words)] for rank, words in enumerate(ranks)})
    assert said in found and bool(said) == bool(found)


def test_a_rank_that_is_past_a_part_calls_nothing_more_in_it() -> None:
    """Before that nobody knows: it may still come to the call."""
    slow = calls("m9 b10")
    quick = [calls("m9 b10", WHOLE), calls("", UNDER_WAY, 7)]
    assert not difference({0: [slow], 1: quick})
    found = difference({0: [calls("m9 b10 m14")], 1: quick, 2: quick})
    assert found.startswith(
        "step 4: rank 0 calls run.model at train.py, line 14, the 2 other ranks"
    )
    behind = [calls("m9 b10", WHOLE), calls("m14", UNDER_WAY, 7)]
    gone_on = [calls("m9 b10", WHOLE), calls("", WHOLE, 7), calls("m9", UNDER_WAY, 8)]
    found = difference({0: behind, 1: gone_on})
    assert found.startswith("behind run.step() of step 4: rank 0 calls run.model at train.py, line")
    assert "`if run.rank == 0:`" in found and "validation= and evaluate=" in found


def logged(*words: str) -> CallLog:
    log = CallLog()
    log.enter(1)
    log.begin(0)
    for word in words:
        log.add("run.model" if word == "m" else "run.backward", sys._getframe())
    return log


def test_the_mark_of_what_was_called_since_the_last_one() -> None:
    one, two, other = logged("m", "b"), logged("m", "b"), logged("b", "m")
    assert one.take_mark() == two.take_mark() != other.take_mark()
    for log in (one, two):
        log.begin(1)
    one.add("run.model", None)
    assert one.take_mark() != two.take_mark() == 0
    one.enter(2)
    assert one.parts() == () and one.generation == 2


def test_a_log_has_the_line_and_stays_small() -> None:
    log = logged(*"m" * (KEPT_MOST + 5))
    for part in range(1, 9):
        log.begin(part)
    assert [part.part for part in log.parts()] == [5, 6, 7, 8]
    part = logged(*"m" * (KEPT_MOST + 5)).parts()[0]
    assert (part.n, len(part.letters)) == (KEPT_MOST + 5, KEPT_MOST)
    assert part.places[0].startswith(f"{__file__}, line ")
    more = logged(*"m" * (KEPT_MOST + 6))
    assert part.letters == more.parts()[0].letters
    assert more.take_mark() != logged(*"m" * (KEPT_MOST + 5)).take_mark()


def test_calls_outlive_their_process_in_a_file(tmp_path: Path) -> None:
    """As the log has them, however often the file was begun anew; nothing of another generation,
    and of a line that was being written when the process died."""
    log, path = CallLog(), tmp_path / "calls"
    log.keep_in(path)
    log.enter(3)
    n = FILE_BYTES // 20_000
    for part in range(n):
        log.begin(part)
        for k in range(PLACES_MOST + 100 if part % 2 else KEPT_MOST + 5):
            log.add("run.model" if k % 2 else "run.backward", sys._getframe())
        if part in (0, 1, n - 1):
            assert calls_in(path, 3) == _with_n(log.parts())
    assert calls_in(path, 2) == () and calls_in(tmp_path / "none", 3) == ()
    log.enter(4)
    assert calls_in(path, 4) == ()
    log.begin(6)
    log.add("run.model", sys._getframe())
    whole = path.read_bytes().partition(b"\0")[0]
    path.write_bytes(whole + b"bhalf of a li")
    (found,) = calls_in(path, 4)
    assert (found.part, found.letters) == (6, "m") and f"{__file__}, line" in found.place(0)


def _with_n(parts: tuple[PartCalls, ...]) -> tuple[PartCalls, ...]:
    """Those that are not told apart are counted when their part is over."""
    return (*parts[:-1], replace(parts[-1], n=min(KEPT_MOST, parts[-1].n)))


@pytest.mark.parametrize(
    "words", [b"[1]", b"[" * 100_000, b"[[1, 2]]", b'[[1e999, 1, 1, "m", []]]']
)
def test_calls_that_are_none_are_the_fault_of_who_sent_them(words: bytes) -> None:
    with pytest.raises(PeerGarbled, match="^rank 3 said something else than its calls"):
        parts_of(words, 3)
    one = PartCalls(4, True, 2, "mb", ("a, line 3",))
    assert parts_of(json.dumps([astuple(one)]).encode(), 3) == [one]
