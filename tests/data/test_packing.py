"""Samples of one length from documents: what is in them, where documents end, and that no token is
lost or met twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from elastic.data import packing
from elastic.data.packing import NO_TARGET, Item, MaskedWindows, Padded, Whole, Windows, packed
from elastic.errors import SpecError


class Row:
    """Token i of the corpus is i + 1000."""

    def __init__(self, lengths: list[int]) -> None:
        self.ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        self.n_tokens = sum(lengths)
        self.name = "row-" + "-".join(map(str, lengths))

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        assert 0 <= start <= stop <= self.ends[-1]
        return np.arange(start, stop, dtype=np.int64) + 1000


def pieces(item: Item) -> list[tuple[list[int], list[int]]]:
    """Input and target of each document in a sample; checks the masks on the way."""
    document, position = item["document"], item["position"]
    assert all(
        values.dtype == np.int64 and values.shape == item["input"].shape for values in item.values()
    )
    assert document[0] == 0 and set(np.diff(document).tolist()) <= {0, 1}
    found = []
    for d in range(int(document[-1]) + 1):
        of = document == d
        assert position[of].tolist() == list(range(int(of.sum())))
        found.append((item["input"][of].tolist(), item["target"][of].tolist()))
    return found


def test_windows_and_cut_windows_differ_in_the_masks_only() -> None:
    row = Row([5, 3, 1, 7, 4])
    plain, cut = Windows(row, 6), MaskedWindows(row, 6)
    assert len(plain) == len(cut) == 3
    for i in range(3):
        assert (
            plain[i]["input"].tolist()
            == cut[i]["input"].tolist()
            == list(range(1000 + 6 * i, 1006 + 6 * i))
        )
        assert plain[i]["target"].tolist() == list(range(1001 + 6 * i, 1007 + 6 * i))
    none = NO_TARGET
    assert pieces(cut[0]) == [
        ([1000, 1001, 1002, 1003, 1004], [1001, 1002, 1003, 1004, none]),
        ([1005], [1006]),
    ]
    assert pieces(cut[1]) == [
        ([1006, 1007], [1007, none]),
        ([1008], [none]),
        ([1009, 1010, 1011], [1010, 1011, 1012]),
    ]
    assert pieces(cut[2]) == [
        ([1012, 1013, 1014, 1015], [1013, 1014, 1015, none]),
        ([1016, 1017], [1017, 1018]),
    ]
    for one in (plain, cut):
        with pytest.raises(IndexError, match="sample 3 of 3"):
            one[3]


def test_a_document_that_ends_with_the_window() -> None:
    cut = MaskedWindows(Row([4, 4, 1]), 4)
    assert pieces(cut[0]) == [([1000, 1001, 1002, 1003], [1001, 1002, 1003, NO_TARGET])]
    assert pieces(cut[1]) == [([1004, 1005, 1006, 1007], [1005, 1006, 1007, NO_TARGET])]


def test_whole_documents() -> None:
    whole = Whole(Row([3, 9, 2, 1, 4]), 4)
    found = [pieces(whole[i]) for i in range(len(whole))]
    none = NO_TARGET
    assert found == [
        [([1003, 1004, 1005, 1006], [1004, 1005, 1006, 1007])],
        [([1007, 1008, 1009, 1010], [1008, 1009, 1010, 1011])],
        [([1015, 1016, 1017, 1018], [1016, 1017, 1018, none])],
        [([1000, 1001, 1002], [1001, 1002, none]), ([1011], [none])],
        [([1012, 1013], [1013, none]), ([1014], [none]), ([0], [none])],
    ]
    assert whole.filled == 19 / 20


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    seq=st.integers(1, 17),
    look=st.sampled_from([3, 4096]),
)
def test_every_token_comes_up_once_and_no_target_crosses_a_document(
    lengths: list[int], seq: int, look: int
) -> None:
    row, before = Row(lengths), packing.LOOK_AHEAD
    packing.LOOK_AHEAD = look
    try:
        whole = Whole(row, seq)
    finally:
        packing.LOOK_AHEAD = before
    seen: list[int] = []
    document_of = np.searchsorted(row.ends, np.arange(row.ends[-1]), side="right")
    for i in range(len(whole)):
        for source, target in pieces(whole[i]):
            tokens = [token - 1000 for token in source if token >= 1000]
            seen += tokens
            assert tokens == list(range(tokens[0], tokens[0] + len(tokens))) if tokens else True
            for token, after in zip(tokens, target):
                last = token + 1 == row.ends[document_of[token]]
                assert after == (NO_TARGET if last else token + 1001)
            assert tokens or set(target) == {NO_TARGET}
            # shorter than a sample: it is the end of its document, and its start if it fits
            if tokens and len(tokens) < seq:
                assert tokens[-1] + 1 in row.ends
                assert document_of[tokens[0]] == document_of[tokens[-1]]
    assert sorted(seen) == list(range(int(row.ends[-1])))


def test_packing_fills_well_and_quickly() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 50_000).astype(np.int64).clip(1, 4000)
    n_tokens = n_samples = 0
    for pieces, counts in packed(np.cumsum(lengths), 1024):
        assert sum(counts) == len(pieces) <= packing.LOOK_AHEAD
        n_tokens, n_samples = n_tokens + pieces[:, 1].sum(), n_samples + len(counts)
    assert n_tokens == lengths.sum() and n_tokens / (n_samples * 1024) > 0.99


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    seq=st.integers(1, 17),
    look=st.integers(1, 70),
)
def test_pieces_are_taken_in_the_order_of_documents_whatever_their_length(
    lengths: list[int], seq: int, look: int
) -> None:
    """A sample keeps its number: runs go on, and what was packed before stays in the cache."""
    every, start = list[list[int]](), 0
    for length in lengths:
        for at in range(0, length, seq):
            n = min(seq, length - at)
            every.append([start + at, n, int(at + n < length)])
        start += length
    before, packing.LOOK_AHEAD = packing.LOOK_AHEAD, look
    try:
        found = [pieces.tolist() for pieces in packing._pieces(np.cumsum(lengths), seq)]
    finally:
        packing.LOOK_AHEAD = before
    assert found == [every[at : at + look] for at in range(0, len(every), look)]


def test_one_document_per_sample() -> None:
    padded = Padded(Row([3, 1, 7]), 4)
    assert [padded[i]["input"].tolist() for i in range(3)] == [
        [1000, 1001, 1002, 0],
        [1003, 0, 0, 0],
        [1004, 1005, 1006, 1007],
    ]
    none = NO_TARGET
    assert [padded[i]["target"].tolist() for i in range(3)] == [
        [1001, 1002, none, none], [none] * 4, [1005, 1006, 1007, 1008],
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [Windows, MaskedWindows, Whole, Padded])
def test_no_sample_without_length(kind: type[Windows]) -> None:
    with pytest.raises(SpecError, match="seq is 0"):
        kind(Row([4]), 0)
