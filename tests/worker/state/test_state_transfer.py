"""Bytes over gloo: every bit where it belongs, in bounded memory, and an altered chunk is named."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.worker.movers import Case, Mover, Movers, checked_move

from elastic.errors import StateLost
from elastic.reshard.chunks import (
    ALIGN,
    CHUNK_BYTES,
    STAGING_BYTES,
    chunk_bytes,
    message_bytes,
    messages,
    split,
    staging_bytes,
)
from elastic.types import Layout, ModelProfile, OptimizerSpec, TensorSpec, Transfer
from elastic.worker.state.state_transfer import TransferStats, sum64

LAYOUTS = {
    "fsdp4": (Layout(dp_shard=4), ()), "tp2 x fsdp2": (Layout(dp_shard=2, tp=2), ()),
    "pp2 x fsdp2": (Layout(pp=2, dp_shard=2), (3, 1)), "fsdp3": (Layout(dp_shard=3), ()),
    "hsdp": (Layout(dp_replicate=2, dp_shard=2), ()), "pp4": (Layout(pp=4), (1, 1, 2, 0)),
    "tp2": (Layout(tp=2), ()), "one": (Layout(), ()), "cp2 x tp2": (Layout(cp=2, tp=2), ()),
}  # fmt: skip


@pytest.fixture(scope="module")
def movers() -> Iterator[Movers]:
    movers = Movers(4)
    yield movers
    movers.close()


def mixed() -> ModelProfile:
    """Odd sizes, many dtypes, tensors above and below the packing limit, a large row, scalars."""
    specs = [
        TensorSpec("embed", (301, 129), "bfloat16", 0, -1),
        TensorSpec("wide", (2, 1_500_001), "float32", 1, -1),
    ]
    for i in range(4):
        specs += [
            TensorSpec(f"l{i}.up", (517, 333), "float32", 0, i), TensorSpec(f"l{i}.down", (333,
            517), "bfloat16", 1, i), TensorSpec(f"l{i}.norm", (333,), "float32", None, i),
            TensorSpec(f"l{i}.mask", (65,), "bool", None, i, None, False, True),
        ]  # fmt: skip
    return ModelProfile(4, 0, tuple(specs), (OptimizerSpec(("exp_avg",), ("step",)),), tp_limit=2)


def case_of(model: ModelProfile, old: str, new: str) -> Case:
    (a, layers_a), (b, layers_b) = LAYOUTS[old], LAYOUTS[new]
    return Case(
        model,
        (a, layers_a),
        (b, layers_b),
        {r: (r,) for r in range(a.world_size)},
        ("a", "a", "b", "b"),
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("old", LAYOUTS)
def test_every_layout_to_every_other(movers: Movers, old: str) -> None:
    for new in LAYOUTS:
        case = case_of(mixed(), old, new)
        moved: list[TransferStats] = movers.call(checked_move, case)
        assert all(isinstance(m, TransferStats) for m in moved), moved
        plan = case.transfers()
        for me, m in enumerate(moved):
            assert m.sent_bytes == sum(t.n_bytes for t in plan if t.source == me != t.destination)
            assert m.received_bytes == sum(
                t.n_bytes for t in plan if t.destination == me != t.source
            )
            assert m.own_bytes == sum(t.n_bytes for t in plan if t.source == me == t.destination)
            assert m.staging_bytes <= staging_bytes(4)


@pytest.mark.slow
def test_old_and_new_ranks_that_have_nothing_in_common(movers: Movers) -> None:
    """Participants 0 and 1 are new, 2 and 3 only send; then one of two holders of each box is
    somebody else."""
    old, new = LAYOUTS["tp2"], LAYOUTS["pp2 x fsdp2"][0]
    new = Layout(pp=2)
    for holders in ({0: (2,), 1: (3,)}, {0: (3,), 1: (2, 3)}, {0: (0, 2), 1: (3,)}):
        moved = movers.call(
            checked_move, Case(mixed(), old, (new, (2, 2)), holders, ("a", "b", "c", "c"))
        )
        assert all(isinstance(m, TransferStats) for m in moved), moved
        assert sum(m.received_bytes for m in moved) == sum(m.sent_bytes for m in moved) > 0


def with_an_error(mover: Mover, case: Case, at: int) -> Any:
    """Participant 1 finds a bit turned in the `at`-th message that it receives."""
    real, count = dist.irecv, [0]

    class Turned:
        def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
            self.work, self.tensor = work, tensor

        def wait(self) -> None:
            self.work.wait()
            self.tensor[self.tensor.numel() // 2] ^= 4

    def irecv(tensor: torch.Tensor, **where: Any) -> Any:
        work = real(tensor, **where)
        count[0] += 1
        return Turned(work, tensor) if mover.me == 1 and count[0] == at else work

    dist.irecv = irecv
    try:
        return checked_move(mover, case)
    except StateLost as error:
        dist.barrier()  # the others wait there
        return str(error)
    finally:
        dist.irecv = real


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_altered_chunk_is_named(movers: Movers, at: int) -> None:
    answers = movers.call(with_an_error, case_of(mixed(), "fsdp4", "tp2 x fsdp2"), at)
    assert [isinstance(a, TransferStats) for a in answers] == [True, False, True, True]
    assert (
        "chunk " in answers[1]
        and "from participant" in answers[1]
        and "64-bit sum differs" in answers[1]
    )
    assert "model." in answers[1] or "optim." in answers[1]


@pytest.mark.slow
def test_staging_stays_in_its_bounds_when_nothing_is_contiguous(movers: Movers) -> None:
    """Columns go to tp ranks and back: 300 MB that must all be packed or unpacked."""
    specs = tuple(TensorSpec(f"w{i}", (2048, 3072), "float32", 1, 0) for i in range(4))
    model = ModelProfile(1, 0, specs, (OptimizerSpec(("m", "v")),), tp_limit=4)
    case = Case(
        model, (Layout(dp_shard=4), ()), (Layout(tp=4), ()), {r: (r,) for r in range(4)}, ("a",) * 4
    )
    moved = movers.call(checked_move, case)
    assert all(isinstance(m, TransferStats) for m in moved), moved
    assert 0 < max(m.staging_bytes for m in moved) <= STAGING_BYTES
    assert sum(m.received_bytes for m in moved) > 200e6


# ---------------------------------------------------------------------- messages, without processes


@pytest.mark.parametrize("seed", range(20))
def test_messages_hold_every_byte_once_and_keep_their_limit(seed: int) -> None:
    random = Random(seed)
    pieces = []
    for i in range(30):
        sizes = tuple(random.choice([1, 2, 3, 50, 700]) for _ in range(random.randint(0, 3)))
        pieces.append(
            Transfer(
                f"w{i}",
                tuple(random.randint(0, 9) for _ in sizes),
                sizes,
                random.choice(["float32", "bool"]),
                0,
                1,
            )
        )
    limit = random.choice([300 << 10, 1 << 20])
    found = list(messages(pieces, limit))
    assert all(message_bytes(message) <= limit for message in found)
    assert all(message_bytes(message) % ALIGN == 0 for message in found if len(message) > 1)
    by_name: dict[str, int] = {}
    for message in found:
        for piece in message:
            by_name[piece.fqn] = by_name.get(piece.fqn, 0) + piece.n_bytes
    assert by_name == {p.fqn: p.n_bytes for p in pieces}


def test_a_row_larger_than_a_chunk_is_cut_too() -> None:
    piece = Transfer("w", (5, 0, 0), (2, 3, 1 << 20), "float32", 0, 1)
    parts = list(split(piece, 1 << 20))
    assert {p.n_bytes for p in parts} == {1 << 20} and len(parts) == 24
    assert len({p.offsets for p in parts}) == 24 and all(p.sizes == (1, 1, 1 << 18) for p in parts)


@pytest.mark.parametrize(
    ("n", "chunk", "staging"),
    [
        (2, CHUNK_BYTES, 32 << 20),
        (9, 2 << 20, 32 << 20),
        (64, 266305, 32 << 20),
        (257, 256 << 10, 128 << 20),
    ],
)
def test_bounds_by_participants(n: int, chunk: int, staging: int) -> None:
    assert (chunk_bytes(n), staging_bytes(n)) == (chunk, staging)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000, 4099])
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_sums_do_not_depend_on_where_the_bytes_lie(n: int, offset: int) -> None:
    data = torch.randint(0, 256, (n,), dtype=torch.uint8)
    memory = torch.zeros(n + 8, dtype=torch.uint8)
    memory[offset : offset + n] = data
    want = sum(int.from_bytes(bytes(data[i : i + 8].tolist()), "little") for i in range(0, n, 8))
    assert sum64(memory[offset : offset + n]) % (1 << 64) == want % (1 << 64)
