"""What stands for a model that counts as large: a few of its blocks, all its kinds, or a line that
says why nothing does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.places import PROGRAMS
from torch import nn

from elastic.program import Program, load_program
from elastic.worker.equivalence import small_batch, small_copy
from elastic.worker.equivalence.small_batch import check_rows, longest, positions, shortened
from elastic.worker.equivalence.small_copy import SmallCopy, TooLarge, n_multiplied
from elastic.worker.program.model_profile import trace

TINY = load_program(PROGRAMS / "tiny.py")
BLOCK = 32 * (32 + 2 * 16 + 32 + 3 * 64) + 2 * 32  # weights of one of its four
ENDS = 2 * 64 * 32 + 32


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Program]:
    """tiny.py as a large model, of which so many parameters may be compared."""

    def made(most: int) -> Program:
        monkeypatch.setattr(small_copy, "WHOLE_MOST_PARAMETERS", 1000)
        monkeypatch.setattr(small_copy, "MOST_PARAMETERS", most)
        return TINY

    return made


def batch_of(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).view(rows, length) % 64
    return {"input": ids, "target": ids}


@pytest.mark.parametrize(("most", "blocks"), [(10**6, 3), (ENDS + 3 * BLOCK - 1, 2)])
def test_as_many_blocks_as_may_be(large: Callable[[int], Program], most: int, blocks: int) -> None:
    small = SmallCopy(large(most), trace(TINY))
    assert (small.profile.n_blocks, small.profile.n_params) == (blocks, ENDS + blocks * BLOCK)
    assert small.profile.tp_limit == trace(TINY).tp_limit


def test_what_is_too_large_even_so_is_one_line_with_the_numbers(
    large: Callable[[int], Program],
) -> None:
    with pytest.raises(
        TooLarge, match=r"^0 M parameters are left of it with 2 blocks, 0 M can be compared$"
    ):
        SmallCopy(large(ENDS + 2 * BLOCK - 1), trace(TINY))


def test_memory_bounds_it_too(
    large: Callable[[int], Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = large(10**6)
    monkeypatch.setattr(
        small_copy, "free_host_bytes", lambda: small_copy.BYTES * (ENDS + 2 * BLOCK)
    )
    assert SmallCopy(program, trace(TINY)).profile.n_blocks == 2
    monkeypatch.setattr(small_copy, "free_host_bytes", lambda: small_copy.BYTES * ENDS)
    with pytest.raises(TooLarge):
        SmallCopy(program, trace(TINY))


def test_tables_that_are_only_looked_up_in_cost_nothing() -> None:
    tied = nn.ModuleDict({"embed": nn.Embedding(64, 8), "head": nn.Linear(8, 64, bias=False)})
    assert n_multiplied(tied) == 64 * 8
    tied["head"].weight = tied["embed"].weight
    assert n_multiplied(tied) == 64 * 8
    assert n_multiplied(nn.Embedding(64, 8)) == 1


def test_passes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all axes but cp fewer positions; of cp rather fewer samples."""
    small = SmallCopy(TINY, trace(TINY))
    batch = batch_of(4, 256)
    for allowed, short, long in (
        (10**9, 64, (4, 256)),
        (800, 64, (2, 256)),
        (300, 64, (1, 256)),
        (130, 32, (1, 128)),
    ):
        monkeypatch.setattr(small_batch, "MOST_FLOP", small.flop * allowed)
        assert positions(shortened(small, batch)) == short
        assert longest(small, batch) == long
    monkeypatch.setattr(small_batch, "MOST_FLOP", small.flop * 16)
    with pytest.raises(TooLarge, match="FLOP for 4 samples"):
        check_rows(small, batch)


def test_one_process_is_asked_once_for_all_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    small, batch, calls = SmallCopy(TINY, trace(TINY)), batch_of(4, 16), []
    alone = small.alone
    monkeypatch.setattr(small, "alone", lambda batch, cp: calls.append(cp) or alone(batch, cp))
    assert small.one_process(batch, 1) is small.one_process(batch, 1)
    assert small.one_process(batch, 2).loss == pytest.approx(small.one_process(batch, 1).loss)
    assert calls == [1, 2]
