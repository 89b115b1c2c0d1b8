"""A row of tokens as samples: windows, windows with document masks, whole documents packed
together, or each by itself.

Every sample is a function of its number. A packed sample has, int64 [seq] each:
input      token ids
target     the next token of the same document, -100 where there is none
document   0, 1, ... rising: which of its documents a place belongs to (filling is a document of its
           own)
position   0, 1, ... from the first token of each document that is here
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.data.progress import gets_on
from elastic.data.sources.array_file import ArrayWriter
from elastic.data.sources.block_cache import BlockCache
from elastic.data.sources.corpus import Corpus
from elastic.errors import SpecError

NO_TARGET = -100
LOOK_AHEAD = 4096  # pieces that are packed together
PIECES, FIRSTS = "pieces.npy", "firsts.npy"
Item = dict[str, NDArray[np.int64]]


class Windows:
    """Sample i: {"input", "target"}, tokens i*seq .. i*seq+seq and one later, whatever documents
    they are from."""

    def __init__(self, corpus: Corpus, seq: int) -> None:
        self.corpus, self.seq = corpus, seq
        self._n = max(0, corpus.n_tokens - 1) // _checked(seq)

    def __len__(self) -> int:
        return self._n

    def length(self, index: int) -> int:
        return self.seq

    def __getitem__(self, index: int) -> Item:
        start = _inside(index, self._n) * self.seq
        ids = self.corpus.read(start, start + self.seq + 1)
        return {"input": ids[:-1], "target": ids[1:]}


class MaskedWindows(Windows):
    """The same windows, with document masks: a document that continues beyond a window is cut
    there."""

    def __getitem__(self, index: int) -> Item:
        start = _inside(index, self._n) * self.seq
        stop = start + self.seq
        ids, ends = self.corpus.read(start, stop + 1), self.corpus.ends
        at = int(np.searchsorted(ends, start, side="right"))
        # 1 .. seq
        inside = np.asarray(ends[at : int(np.searchsorted(ends, stop, side="right"))]) - start
        begins = np.concatenate(([0], inside[inside < self.seq])).astype(np.int64)
        target = ids[1:].copy()
        target[inside - 1] = NO_TARGET
        return {"input": ids[:-1], "target": target, **_masks(begins, self.seq)}


class Whole:
    """Documents that are not cut unless they are longer than seq, best-fit packed into samples in
    their own order, LOOK_AHEAD at a time. The plan is made once per node and kept in the cache."""

    def __init__(self, corpus: Corpus, seq: int, cache: BlockCache | None = None) -> None:
        self.corpus, self.seq = corpus, _checked(seq)

        def plan(into: Path) -> None:
            with ArrayWriter(into / PIECES, 3) as pieces, ArrayWriter(into / FIRSTS) as firsts:
                firsts.add([0])
                n = 0
                for some, counts in packed(corpus.ends, seq):
                    pieces.add(some)
                    firsts.add(n + np.cumsum(counts))
                    n += len(some)
                    gets_on()

        name = f"packed-{corpus.name}-{seq}-{LOOK_AHEAD}"
        folder = (cache or BlockCache()).once(name, plan)
        self._pieces: NDArray[np.int64] = np.load(folder / PIECES, mmap_mode="r")
        self._firsts: NDArray[np.int64] = np.load(folder / FIRSTS, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def length(self, index: int) -> int:
        return self.seq

    @property
    def filled(self) -> float:
        """Share of the places of all samples that hold a token."""
        return float(self._pieces[:, 1].sum()) / max(1, len(self) * self.seq)

    def __getitem__(self, index: int) -> Item:
        _inside(index, len(self))
        pieces = self._pieces[int(self._firsts[index]) : int(self._firsts[index + 1])]
        source, target = _empty(self.seq)
        begins, at = [], 0
        # more: 1 where the document continues behind the piece
        for start, length, more in pieces.tolist():
            ids = self.corpus.read(start, start + length + more)
            source[at : at + length] = ids[:length]
            target[at : at + length - 1 + more] = ids[1:]
            begins.append(at)
            at += length
        if at < self.seq:
            begins.append(at)
        return {
            "input": source,
            "target": target,
            **_masks(np.asarray(begins, dtype=np.int64), self.seq),
        }


class Documents:
    """One document per sample: {"input", "target"}, cut at seq, as long as it is; the target of its
    last token is -100."""

    def __init__(self, corpus: Corpus, seq: int) -> None:
        self.corpus, self.seq = corpus, _checked(seq)

    def __len__(self) -> int:
        return len(self.corpus.ends)

    def length(self, index: int) -> int:
        start, stop = self._span(index)
        return min(stop - start, self.seq)

    def _span(self, index: int) -> tuple[int, int]:
        stop = int(self.corpus.ends[_inside(index, len(self))])
        return int(self.corpus.ends[index - 1]) if index else 0, stop

    def __getitem__(self, index: int) -> Item:
        start, stop = self._span(index)
        ids = self.corpus.read(start, min(stop, start + self.seq + 1))
        n, places = min(len(ids), self.seq), self.length(index)
        source, target = _empty(places)
        source[:n] = ids[:n]
        target[: len(ids) - 1] = ids[1:]
        return {"input": source, "target": target}


class Padded(Documents):
    """The same, filled up to seq; filling has the target -100."""

    def length(self, index: int) -> int:
        return self.seq


def packed(ends: NDArray[np.int64], seq: int) -> Iterator[tuple[NDArray[np.int64], list[int]]]:
    """LOOK_AHEAD pieces at a time: [pieces, 3] (first token, length, does its document continue?)
    in the order of their samples, and how many each of these samples has. A function of its
    arguments."""
    for pieces in _pieces(ends, seq):
        samples = _fitted(pieces[:, 1].tolist(), seq)
        order = np.asarray([i for sample in samples for i in sample])
        yield pieces[order], [len(sample) for sample in samples]


def _pieces(ends: NDArray[np.int64], seq: int) -> Iterator[NDArray[np.int64]]:
    """Those of all documents in their order, LOOK_AHEAD at a time."""
    document = at = 0  # the first that is left, and its first token that is
    while document < len(ends):
        stops = np.asarray(ends[document : document + LOOK_AHEAD])
        starts = np.concatenate(([at], stops[:-1]))
        until = np.minimum(np.cumsum(-(-(stops - starts) // seq)), LOOK_AHEAD)
        n_cuts = np.diff(until, prepend=0)
        of = np.repeat(np.arange(len(stops)), n_cuts)
        first = starts[of] + (np.arange(len(of)) - np.repeat(until - n_cuts, n_cuts)) * seq
        last = np.minimum(first + seq, stops[of])
        yield np.stack([first, last - first, last < stops[of]], axis=1)
        at = int(last[-1])
        document += int(np.searchsorted(stops, at, side="right"))


def _fitted(lengths: list[int], seq: int) -> list[list[int]]:
    """Best-fit decreasing: each piece, the longest first, goes where it leaves the least room.
    Indices of each."""
    samples: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, sample), rising
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(rooms, (lengths[i], -1))
        if at < len(rooms):
            room, sample = rooms.pop(at)
        else:
            room, sample = seq, len(samples)
            samples.append([])
        samples[sample].append(i)
        left = (room - lengths[i], sample)
        if left[0]:
            rooms.insert(bisect_left(rooms, left), left)
    return [sorted(sample) for sample in samples]


def _empty(n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs and targets of filling."""
    return np.zeros(n, dtype=np.int64), np.full(n, NO_TARGET, dtype=np.int64)


def _masks(begins: NDArray[np.int64], seq: int) -> dict[str, Any]:
    """Of documents that begin at these places: the first of them is 0."""
    document = np.zeros(seq, dtype=np.int64)
    document[begins[1:]] = 1
    document = np.cumsum(document)
    return {"document": document, "position": np.arange(seq, dtype=np.int64) - begins[document]}


def _inside(index: int, n: int) -> int:
    if not 0 <= index < n:
        raise IndexError(f"sample {index} of {n}")
    return index


def _checked(seq: int) -> int:
    if seq < 1:
        raise SpecError(f"seq is {seq}; it must be at least 1")
    return seq
