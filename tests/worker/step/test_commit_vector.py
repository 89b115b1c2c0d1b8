"""What a rank says in a commit, and what all of them hear of the sum: each slot by itself, and all
of random plans at once."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import accumulate
from math import isnan, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.data.order import HASH_BITS
from elastic.errors import ProgramError
from elastic.types import Layout
from elastic.types.grid import coordinates
from elastic.worker.process.call_log import MARK_MOST
from elastic.worker.program.commit import Commit
from elastic.worker.step.commit_vector import (
    SHARE_MOST,
    TOKENS_MOST,
    CommitFields,
    CommitReport,
    RankPart,
    Slots,
)

FOUR = Layout(dp_shard=4)
NOTHING = Commit(0.0, 0.0, 0.0)


def said(layout: Layout, changes: dict[int, RankPart] | None = None) -> list[RankPart]:
    """Of each rank; who is not named says nothing."""
    found = [
        RankPart(rank, coordinates(layout, rank).dp(layout), NOTHING)
        for rank in range(layout.world_size)
    ]
    return [(changes or {}).get(part.rank, part) for part in found]


def words(**one: CommitFields) -> CommitReport:
    """What four ranks hear when each rank0 .. rank3 named says this."""
    parts = said(FOUR)
    return heard([replace(part, words=one.get(f"rank{part.rank}", part.words)) for part in parts])


def heard(parts: list[RankPart], layout: Layout = FOUR) -> CommitReport:
    first = parts[0]
    n_small, n_calls = (1 if first.small_square_norm else 0), 2 * any(p.calls for p in parts)
    n_blocks = len(first.sums.block_square_norms)
    slots = Slots.of(
        layout, n_blocks, n_small=n_small, n_calls=n_calls, n_reached=len(first.reached)
    )
    return CommitReport.unpack(reduce(torch.add, [part.pack(slots) for part in parts]), slots)


# ------------------------------------------------------------------------------------- single slots


def test_of_ranks_that_say_nothing_nothing_is_heard() -> None:
    assert heard(said(FOUR)) == CommitReport(NOTHING, (0.0,) * 4, (0.0,) * 4, (0,) * 4)


def test_the_word_of_one_rank_is_heard_by_all() -> None:
    silent = heard(said(FOUR))
    for rank in ("rank0", "rank3"):
        assert words(**{rank: CommitFields(stop=True)}) == replace(silent, stop=True)
        assert words(**{rank: CommitFields(save=True)}) == replace(silent, save=True)
        assert words(**{rank: CommitFields(copy_stored=True)}) == replace(silent, n_copies_stored=1)
        assert words(**{rank: CommitFields(copy_failed=True)}) == replace(silent, n_copies_failed=1)
        assert words(**{rank: CommitFields(copy_free=True)}) == replace(silent, n_copies_free=1)
    assert words(
        rank0=CommitFields(stop=True), rank1=CommitFields(stop=True), rank2=CommitFields(stop=True)
    ).stop


def test_parts_of_a_copy_are_counted_apart_from_those_that_failed() -> None:
    stored = CommitFields(copy_stored=True, copy_free=True)
    all_said = words(rank0=stored, rank1=stored, rank2=CommitFields(copy_failed=True), rank3=stored)
    assert (all_said.n_copies_stored, all_said.n_copies_failed, all_said.n_copies_free) == (3, 1, 3)


@pytest.mark.parametrize("cadence", [(5, 0), (0, 0), (0, 7), (1_000_000, 3)])
def test_a_cadence_is_told_from_none(cadence: tuple[int, int]) -> None:
    assert words(rank0=CommitFields(cadence=cadence)).cadence == cadence


def test_shares_are_those_that_rank_0_wants_and_tokens_those_of_each_data_parallel_rank() -> None:
    layout = Layout(pp=2, dp_shard=3)
    parts = [
        replace(part, words=CommitFields(shares=(1, 2, 3)) if part.rank == 0 else CommitFields())
        for part in said(layout)
    ]
    counted = {3: 10, 4: 20, 5: 30}  # the last stage knows them
    parts = [
        replace(part, sums=replace(NOTHING, tokens=counted.get(part.rank, 0))) for part in parts
    ]
    told = heard(parts, layout)
    assert (told.shares, told.tokens, told.commit.tokens) == ((1, 2, 3), (10, 20, 30), 60)


def test_both_fit_into_their_slot_up_to_its_limit_and_no_further() -> None:
    most = Layout(dp_shard=2)
    sums, shares = replace(NOTHING, tokens=TOKENS_MOST - 1), (SHARE_MOST - 1, 1)
    parts = [
        replace(
            part, sums=sums, words=CommitFields(shares=shares) if part.rank == 0 else CommitFields()
        )
        for part in said(most)
    ]
    told = heard(parts, most)
    assert told.tokens == (TOKENS_MOST - 1,) * 2 and told.shares == shares
    for more in (
        replace(parts[0], words=CommitFields(shares=(SHARE_MOST, 1))),
        replace(parts[0], sums=replace(sums, tokens=TOKENS_MOST)),
    ):
        with pytest.raises(ProgramError, match="of one data-parallel rank in a step"):
            more.pack(Slots.of(most))
    with pytest.raises(ProgramError, match="^-1 tokens"):
        replace(parts[0], sums=replace(sums, tokens=-1)).pack(Slots.of(most))


@pytest.mark.parametrize(
    "waits",
    [[0.0, 0.0, 0.0, 0.0], [0.25, 0.0, 0.25, 0.1], [3600.0, 1.0, 1.0, 1.0], [1e-9, 1e9, 0.3, 0.0]],
)
def test_the_longest_wait_is_exact(waits: list[float]) -> None:
    told = words(**{f"rank{rank}": CommitFields(data_s=wait) for rank, wait in enumerate(waits)})
    assert told.data_s == tuple(waits)


def test_one_overflow_and_one_number_that_is_none_are_those_of_the_step() -> None:
    over = said(FOUR, {2: RankPart(2, 2, replace(NOTHING, overflowed=True))})
    assert heard(over).commit == replace(NOTHING, overflowed=True)
    none = said(FOUR, {1: RankPart(1, 1, replace(NOTHING, loss_sum=nan), CommitFields(data_s=1.5))})
    told = heard(none)
    assert isnan(told.commit.loss_sum) and not told.commit.finite
    assert replace(told, commit=NOTHING) == replace(
        heard(said(FOUR)), data_s=(0.0, 1.5, 0.0, 0.0)
    ), "and of nothing else"


def test_digests_are_exact_up_to_their_limit() -> None:
    """2**27 samples whose hashes have all their bits, by one rank less and by one sample less."""
    hashed, n = (1 << HASH_BITS) - 1, 1 << 27
    whole, odd = hashed * n // 4, hashed * (n // 4) - 1
    parts = [
        RankPart(rank, rank, replace(NOTHING, samples=(whole, odd if rank == 3 else whole)))
        for rank in range(4)
    ]
    assert heard(parts).commit.samples == (hashed * n, hashed * n - 1) and hashed * n <= 1 << 53


def test_what_others_need_of_a_commit_is_kept_in_numbers() -> None:
    commit = Commit(2.5, 7.25, 3.0, ((1 << 53) - 1, 12), True, (0.5, 1.5))
    assert Commit.of(commit.numbers) == commit and {type(number) for number in commit.numbers} == {
        float
    }
    assert Commit.of(NOTHING.numbers) == NOTHING
    for blocks in ((), (0.5, 1.5)):
        few = replace(commit, block_square_norms=blocks, unreached=(0, 7))
        assert (
            Commit.of(few.numbers) == few
            and few.told(skipped=False) == replace(commit, block_square_norms=()).numbers
        )


def test_a_parameter_is_reached_where_one_rank_has_reached_it() -> None:
    each = {0: (1.0, 0.0, 0.0, 1.0), 3: (0.0, 0.0, 0.0, 1.0)}
    parts = [replace(part, reached=each.get(part.rank, (0.0,) * 4)) for part in said(FOUR)]
    assert heard(parts).commit.unreached == (1, 2)


def test_the_size_at_8192_ranks() -> None:
    slots = Slots.of(Layout(dp_shard=8192))
    assert (
        RankPart(8191, 8191, NOTHING).pack(slots).nbytes
        == 8 * sum(slots.widths.values())
        == 196_720
    )


# ------------------------------------------------------------------------------------- random plans

SECONDS = st.floats(0, 1e6)
SUMS = st.floats(-1e30, 1e30)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    one_or_two = st.integers(1, 2)
    layout = Layout(
        pp=draw(one_or_two), dp_replicate=draw(one_or_two), dp_shard=draw(st.integers(1, 3))
    )
    return (
        replace(layout, cp=draw(one_or_two))
        if draw(st.booleans())
        else replace(layout, tp=draw(one_or_two))
    )


@st.composite
def parts_of(draw: st.DrawFn, layout: Layout) -> list[RankPart]:
    """Each data-parallel rank's samples and tokens are told by one of its ranks; what is rank 0's
    by rank 0."""
    n_blocks, measured = draw(st.integers(0, 3)), draw(st.booleans())
    parts, counted = [], set()
    for part in said(layout):
        speaks = part.dp not in counted
        counted.add(part.dp)
        sums = Commit(
            draw(SUMS), draw(SUMS), draw(st.integers(0, TOKENS_MOST - 1)) if speaks else 0,
            draw(st.tuples(st.integers(0, 1 << 43), st.integers(0, 1 << 43))) if speaks else (0, 0),
            draw(st.booleans()), tuple(draw(st.lists(SUMS, min_size=n_blocks, max_size=n_blocks))),
        )  # fmt: skip
        own: dict[str, object] = {}
        if part.rank == 0 and draw(st.booleans()):
            shares = st.lists(
                st.integers(1, SHARE_MOST - 1), min_size=layout.dp, max_size=layout.dp
            ).map(tuple)
            own = {
                "shares": draw(shares),
                "cadence": draw(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6))),
            }
        yes = [draw(st.booleans()) for _ in range(5)]
        spoken = CommitFields(*yes, data_s=draw(SECONDS), **own)  # type: ignore[arg-type]
        small = draw(st.floats(1.0, 1e9)) if measured else 0.0
        parts.append(RankPart(part.rank, part.dp, sums, spoken, draw(SECONDS), small))
    return parts


@pytest.mark.slow
@given(layouts().flatmap(lambda layout: st.tuples(st.just(layout), parts_of(layout))))
def test_all_hear_what_each_has_said(case: tuple[Layout, list[RankPart]]) -> None:
    layout, parts = case
    told, all_words = heard(parts, layout), [part.words for part in parts]

    def summed(values: list[float]) -> float:
        *_, last = accumulate(values)
        return last

    assert told.commit.square_norm == summed([part.sums.square_norm for part in parts])
    assert told.commit.loss_sum == summed([part.sums.loss_sum for part in parts])
    assert told.commit.tokens == sum(part.sums.tokens for part in parts) == sum(told.tokens)
    assert told.tokens == tuple(
        sum(p.sums.tokens for p in parts if p.dp == dp) for dp in range(layout.dp)
    )
    assert told.commit.samples == tuple(
        sum(part.sums.samples[i] for part in parts) for i in range(2)
    )
    assert told.commit.overflowed == any(part.sums.overflowed for part in parts)
    blocks = zip(*(part.sums.block_square_norms for part in parts), strict=True)
    assert told.commit.block_square_norms == tuple(summed(list(block)) for block in blocks)
    assert told.unit_s == tuple(part.unit_s for part in parts) and told.data_s == tuple(
        w.data_s for w in all_words
    )
    assert (told.stop, told.save) == (
        any(w.stop for w in all_words),
        any(w.save for w in all_words),
    )
    counts = [
        sum(getattr(w, word) for w in all_words)
        for word in ("copy_stored", "copy_failed", "copy_free")
    ]
    assert [told.n_copies_stored, told.n_copies_failed, told.n_copies_free] == counts
    assert (told.shares, told.cadence) == (all_words[0].shares, all_words[0].cadence)
    assert told.small_square_norm == summed([part.small_square_norm for part in parts])


@pytest.mark.parametrize("n", [2, 3, 8192])
def test_scripts_that_have_not_all_called_the_same_are_heard_of_exactly(n: int) -> None:
    """Of one rank among thousands too, whatever the marks are."""
    layout, sums = Layout(dp_shard=n), Commit(0.0, 0.0, 1.0)
    slots = Slots.of(layout, n_calls=2)
    for mark, other in ((MARK_MOST, MARK_MOST), (MARK_MOST, MARK_MOST - 1), (0, 1), (7, 7)):
        alike = RankPart(0, 0, sums, calls=mark).pack(slots)
        vector = alike * (n - 1) + RankPart(0, 0, sums, calls=other).pack(slots)
        assert CommitReport.unpack(vector, slots).calls_differ is (mark != other)
    assert not CommitReport.unpack(
        RankPart(0, 0, sums).pack(Slots.of(layout)), Slots.of(layout)
    ).calls_differ
