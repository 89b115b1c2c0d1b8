"""What a script's loop has called on a rank, `run.model` and `run.backward`, in its newest steps.

Such a call has collectives, which meet those of the other ranks: all ranks must make the same calls
in the same order. Where they do not (`if run.rank == 0: run.model(x)`), some wait for ever, or a
rank is given what belongs to another call. The report says which rank differs, and in which line.
A rank may die of it (gloo ends a process that is sent other bytes than it waits for): what it calls
is in a file before it waits. Pure but for the log and its file; the driver's side compares too.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from elastic.errors import PeerGarbled
from elastic.text import ranks_of
from elastic.user_frames import outwards
from elastic.version import PACKAGE

Kind = Literal["run.model", "run.backward"]
LETTERS: dict[Kind, str] = {"run.model": "m", "run.backward": "b"}
KINDS = {letter: kind for kind, letter in LETTERS.items()}
MARK_MOST = (1 << 19) - 1  # the squares of 8,192 of them still add up exactly in float64
PARTS_KEPT = 4  # two steps
KEPT_MOST = 1000  # calls of a part that are told apart; the others are counted
PLACES_MOST = 64  # of which the line is kept
FRAMES_MOST = 100
FILE_BYTES = 1 << 18  # of which the newest parts take a fifth, where paths are not very long
GENERATION, PART, DONE = "g", "p", "d"  # how the other lines of the file begin
# in what gloo says of bytes that are another call's
MISMATCH = "distributed collective mismatch"
RULE = (
    "every rank must call run.model and run.backward equally often and in the same order, for an "
    "evaluation too: take the condition (such as `if run.rank == 0:`) from around the call, or "
    "evaluate by validation= and evaluate= of elastic.loop"
)

OF_GROUP = ".param_groups["  # in the names of an optimizer's settings
SAME_GROUPS = (
    "every rank must step with the same; what sets it follows from run.step_index, or from an "
    "object in extra_state: a counter of the script's own, as enumerate(run), begins anew in a "
    "worker that comes later"
)


@dataclass(frozen=True)
class PartCalls:
    """The calls in one part of the loop's body. `part`: 2 * step index up to run.step(), one more
    behind it. `whole`: the script is past it. `letters`: one for each of the first calls, `places`
    their lines."""

    part: int
    whole: bool
    n: int
    letters: str
    places: tuple[str, ...]

    @classmethod
    def of(cls, said: Sequence[Any]) -> PartCalls:
        """Raises ValueError, TypeError or OverflowError for what is none."""
        part, whole, n, letters, places = said
        return cls(int(part), bool(whole), int(n), str(letters), tuple(map(str, places)))

    def letter(self, i: int) -> str | None:
        """Of call `i`; '' = there is none, None = that is not known yet."""
        if i < len(self.letters):
            return self.letters[i]
        return "" if self.whole and i >= self.n else None

    def place(self, i: int) -> str:
        return self.places[i] if i < len(self.places) else "a line that was not kept"


def parts_of(words: bytes, rank: int) -> list[PartCalls]:
    """What that rank has called, as it says. Raises PeerGarbled."""
    try:
        return [PartCalls.of(part) for part in json.loads(words)]
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PeerGarbled(
            f"rank {rank} said something else than its calls ({type(error).__name__})"
        ) from None


@dataclass
class _Part:
    number: int
    n: int = 0
    letters: str = ""
    places: list[str] = field(default_factory=list)


class CallLog:
    """Of the generation that is running. Written by the script's thread, read by any."""

    def __init__(self) -> None:
        self.generation = 0
        self._parts: list[_Part] = []
        self._mark = 0
        self._file: _CallFile | None = None
        # numbers that its script has set on modules of run.model, and those of its optimizers
        self.settings: Mapping[str, float] = {}

    def keep_in(self, path: Path) -> None:
        """From now on also there, where it outlives this process. Raises OSError."""
        self._file = _CallFile(path)

    def enter(self, generation: int) -> None:
        """Whoever enters it begins anew: ranks come from elsewhere, or have left a step midway."""
        self._parts, self._mark, self.generation = [], 0, generation
        if self._file is not None:
            self._file.begin(generation)

    def begin(self, part: int) -> None:
        file, before = self._file, self._parts[1 - PARTS_KEPT :]
        self._parts = [*before, _Part(part)]
        if file is None:
            return
        if file.is_long:
            file.begin(self.generation)
            file.add("".join(map(_lines, before)))
        elif before:
            file.add(f"{DONE}{before[-1].n}\n")
        file.add(f"{PART}{part}\n")

    def add(self, kind: Kind, frame: FrameType | None) -> None:
        self._mark = zlib.crc32(LETTERS[kind].encode(), self._mark)
        if not self._parts:
            return
        part, letter = self._parts[-1], LETTERS[kind]
        part.n += 1
        place = _place(frame) if part.n <= PLACES_MOST else ""
        if place:
            part.places.append(place)
        if part.n <= KEPT_MOST:
            part.letters += letter
            if self._file is not None:
                self._file.add(f"{letter}{place}\n")

    def note_settings(self, settings: Mapping[str, float]) -> None:
        """Before a step is committed: the mark is of these too."""
        self.settings = settings
        if settings:  # of thousands of groups: as numbers, which takes no time
            names = sorted(settings)
            self._mark = zlib.crc32("\n".join(names).encode(), self._mark)
            numbers = array("d", [settings[name] for name in names])
            self._mark = zlib.crc32(numbers, self._mark)

    def take_mark(self) -> int:
        """Of the calls since this was asked last, and of the settings: equal on ranks that have
        made the same."""
        mark, self._mark = self._mark & MARK_MOST, 0
        return mark

    def parts(self) -> tuple[PartCalls, ...]:
        known = self._parts
        return tuple(
            PartCalls(p.number, p is not known[-1], p.n, p.letters, tuple(p.places)) for p in known
        )


class _CallFile:
    """Lines that are there as soon as they are added, whatever becomes of this process. What has no
    room is left out: then nothing is known of it."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            with suppress(OSError):  # a file system without locks
                # for as long as it is mapped: it is in use
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            file.truncate(FILE_BYTES)
            self._bytes = mmap.mmap(file.fileno(), FILE_BYTES)
        self._end = 0

    @property
    def is_long(self) -> bool:
        return self._end > FILE_BYTES // 2

    def begin(self, generation: int) -> None:
        self._bytes[: self._end] = bytes(self._end)
        self._end = 0
        self.add(f"{GENERATION}{generation}\n")

    def add(self, lines: str) -> None:
        data = lines.encode(errors="replace")
        end = self._end + len(data)
        if end < FILE_BYTES:
            self._bytes[self._end : end] = data
            self._end = end


def _lines(part: _Part) -> str:
    """Of a part that is over, as they were added."""
    places = [*part.places, *[""] * (len(part.letters) - len(part.places))]
    calls = (f"{letter}{place}\n" for letter, place in zip(part.letters, places, strict=True))
    return f"{PART}{part.number}\n{''.join(calls)}{DONE}{part.n}\n"


def calls_in(path: Path, generation: int) -> tuple[PartCalls, ...]:
    """What a process has kept there of its newest calls; () = nothing, or another generation's."""
    try:
        said = path.read_bytes().partition(b"\0")[0].decode(errors="replace")
    except OSError:
        return ()
    # the last line may have been half written
    first, *lines = said.rpartition("\n")[0].split("\n")
    parts: list[_Part] = []
    done: dict[int, int] = {}
    if first != f"{GENERATION}{generation}":
        return ()
    try:
        for line in lines:
            kind, rest = line[:1], line[1:]
            if kind == PART:
                parts.append(_Part(int(rest)))
            elif kind == DONE:
                done[parts[-1].number] = int(rest)
            else:
                parts[-1].letters += kind
                parts[-1].places += [rest] if rest else []
    except (ValueError, IndexError):  # what another process has written over it
        return ()
    return tuple(
        PartCalls(p.number, p.number in done, n, p.letters, tuple(p.places))
        for p in parts[-PARTS_KEPT:]
        for n in [done.get(p.number, len(p.letters))]
    )


def _place(frame: FrameType | None) -> str:
    """The innermost line that is neither ours nor torch's."""
    for one in islice(outwards(frame), FRAMES_MOST):
        file = one.f_code.co_filename
        if not file.startswith(f"{PACKAGE}{os.sep}") and "/torch/" not in file:
            return f"{file}, line {one.f_lineno}"
    return "an unknown line"


def difference(ranks: Mapping[int, Iterable[PartCalls]]) -> str:
    """Which rank has made another call than the others, and where; '' = as far as is known none."""
    parts: dict[int, dict[int, PartCalls]] = {}
    for rank, calls in ranks.items():
        for one in calls:
            parts.setdefault(one.part, {})[rank] = one
    for number in sorted(parts):
        here = parts[number]
        kinds = {(one.whole, one.n if one.whole else 0, one.letters) for one in here.values()}
        if len(kinds) > 1 and (i := _first_difference(list(here.values()))) >= 0:
            return f"{_where(number)}: {_told(here, i)}; {RULE}"
    return ""


def other_settings(ranks: Sequence[Mapping[str, float]]) -> str:
    """Which rank has set another mode or number on a module than rank 0, or has another learning
    rate; '' = none."""
    for rank, mine in enumerate(ranks):
        for one, other, a, b in ((mine, ranks[0], rank, 0), (ranks[0], mine, 0, rank)):
            for name, value in one.items():
                if other.get(name) != value and OF_GROUP in name:
                    theirs = f"{other[name]:g}" if name in other else "none"
                    return f"rank {a} has {name} = {value:g}, rank {b} has {theirs}: {SAME_GROUPS}"
                if other.get(name) != value:
                    return (
                        f"rank {a} has set {name} = {value:g} in run.model, rank {b} has not: "
                        "every rank must set the same modes and numbers on its modules"
                    )
    return ""


def unshared(places: Mapping[int, str], n_ranks: int) -> str:
    """What is said of ranks that wait at these places, each in a collective of all ranks that its
    script calls, while all others wait for them elsewhere."""
    odd = sorted(places)
    others = [rank for rank in range(n_ranks) if rank not in places]
    waits, does = ("wait" if len(odd) > 1 else "waits"), ("do" if len(others) > 1 else "does")
    return (
        f"{ranks_of(odd)} {waits} in a collective of the script's own at {places[odd[0]]}, "
        f"{ranks_of(others)} {does} not call it: every rank must call the same collectives in the "
        "same order; take the condition (such as `if run.rank == 0:`) from around the call"
    )


def _first_difference(parts: list[PartCalls]) -> int:
    distinct = list({(p.whole, p.n, p.letters): p for p in parts}.values())
    for i in range(max(len(part.letters) for part in distinct) + 1):
        if len({part.letter(i) for part in distinct} - {None}) > 1:
            return i
    return -1


def _where(number: int) -> str:
    step = number // 2 + 1
    return f"behind run.step() of step {step}" if number % 2 else f"step {step}"


def _told(here: Mapping[int, PartCalls], i: int) -> str:
    """The smaller part of the ranks is named; of two equal ones, that which makes the call."""
    letters = {rank: letter for rank, one in here.items() if (letter := one.letter(i)) is not None}
    counted = Counter(letters.values())
    few = min(counted, key=lambda letter: (counted[letter], -len(letter), letter != "m"))
    many = max((letter for letter in counted if letter != few), key=lambda letter: counted[letter])
    odd, others = (
        [r for r, letter in sorted(letters.items()) if letter == which] for which in (few, many)
    )
    mine, theirs = here[odd[0]], here[others[0]]
    more, letter, caller = _extra(mine, theirs, i)
    place = _first_other_place(*((mine, theirs) if more else (theirs, mine)), letter, i=i)
    rest = f"the {len(others)} other ranks do" if len(others) > 1 else f"rank {others[0]} does"
    verb = "call" if len(odd) > 1 else "calls"
    if more:
        return f"{ranks_of(odd)} {verb} {caller} at {place}, {rest} not"
    denied = "do" if len(odd) > 1 else "does"
    return f"{ranks_of(odd)} {denied} not call {caller} at {place}, {rest}"


def _extra(mine: PartCalls, theirs: PartCalls, i: int) -> tuple[bool, str, Kind]:
    """Whether it is a call that the first makes and the others do not, and which."""
    for letter, kind in KINDS.items():
        a, b = (part.letters[: i + 1].count(letter) for part in (mine, theirs))
        if a != b:
            return a > b, letter, kind
    return True, "m", "run.model"


def _first_other_place(caller: PartCalls, other: PartCalls, letter: str, *, i: int) -> str:
    """Where that call is, which may stand before the first one that is of another kind."""
    for j in range(min(i + 1, len(caller.letters))):
        if caller.letters[j] == letter and (j >= other.n or caller.place(j) != other.place(j)):
            return caller.place(j)
    return caller.place(i)
