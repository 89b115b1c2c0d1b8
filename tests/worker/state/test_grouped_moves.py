"""Moves as CUDA's wire carries them, on CPU threads: each bit where it belongs, few messages, a
host that does not wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.worker.movers import CPU, Case, empty_state, numbered_state
from support.worker.thread_wire import Group, Op, Reads, reads_counted, run

from elastic.errors import StateLost
from elastic.reshard.chunks import (
    CPU_SIZES,
    CUDA_SIZES,
    Sizes,
    chunk_bytes,
    lane,
    message_bytes,
    messages,
    sizes_of,
    staging_bytes,
)
from elastic.reshard.transfer_plan import plan_transfers
from elastic.types import Layout, ModelProfile, OptimizerSpec, TensorSpec, Transfer
from elastic.worker.state.state_transfer import TransferStats, carry_out, copy_all, sum64, sum_into
from elastic.worker.state.train_state import region

# two peers at once, as on CUDA
SMALL = Sizes(1 << 16, 1 << 15, 1 << 16, 1 << 19, own_bytes=1 << 18, grouped=True)
LAYOUTS = {
    "dp8": Layout(dp_shard=8), "dp4": Layout(dp_shard=4), "tp2 x dp4": Layout(dp_shard=4, tp=2),
    "pp2 x dp2": Layout(pp=2, dp_shard=2),
    "tp2 x pp2": Layout(pp=2, tp=2), "hsdp": Layout(dp_replicate=2, dp_shard=4), "one": Layout(),
}  # fmt: skip
MOVES = [
    ("dp8", "dp4"), ("dp4", "dp8"), ("dp8", "tp2 x dp4"), ("tp2 x dp4", "pp2 x dp2"), ("pp2 x dp2",
    "hsdp"), ("hsdp", "dp8"), ("tp2 x pp2", "dp4"), ("one", "dp8"), ("dp8", "one"),
]  # fmt: skip


def odd_model() -> ModelProfile:
    """Odd sizes and dtypes; tensors far above and below the limits of SMALL."""
    specs = [
        TensorSpec("embed", (301, 129), "bfloat16", 0, -1),
        TensorSpec("wide", (2, 60_001), "float32", 1, -1),
    ]
    for i in range(4):
        specs += [
            TensorSpec(f"l{i}.up", (117, 133), "float32", 0, i), TensorSpec(f"l{i}.down", (133,
            118), "bfloat16", 1, i), TensorSpec(f"l{i}.norm", (133,), "float32", None, i),
            TensorSpec(f"l{i}.mask", (65,), "bool", None, i, None, False, True),
        ]  # fmt: skip
    return ModelProfile(4, 0, tuple(specs), (OptimizerSpec(("exp_avg",), ("step",)),), tp_limit=2)


def case_of(old: str, new: str) -> Case:
    a, b = LAYOUTS[old], LAYOUTS[new]
    cuts = [(cut, (2, 2) if cut.pp == 2 else ()) for cut in (a, b)]
    n = max(a.world_size, b.world_size)
    return Case(
        odd_model(),
        *cuts,
        {r: (r,) for r in range(a.world_size)},
        tuple(f"n{i // 4}" for i in range(n)),
    )


def moved(
    case: Case, sizes: Sizes, monkeypatch: pytest.MonkeyPatch, fault: Any = None
) -> tuple[list[Any], list[Group], list[Reads]]:
    """Carries the case out and compares every bit. What each participant returned or raised, its
    end of the wire, its reads."""
    counts: dict[int, Reads] = {}

    def participant(group: Group) -> TransferStats:
        me, wire = group.me, group
        held = {
            r: numbered_state(case.model, case.old, r)
            for r, who in case.holders.items()
            if me in who
        }
        new = empty_state(case.model, case.new, me) if me < case.new[0].world_size else {}
        transfers = case.transfers(me)

        def read(t: Transfer) -> torch.Tensor:
            return region(held[t.holding], t)

        with reads_counted() as counts[me]:
            done = carry_out(
                transfers,
                me,
                read=read,
                write=lambda t: region(new, t),
                group=wire,
                device=CPU,
                sizes=sizes,
            )  # type: ignore[arg-type]
        for fqn, (_, tensor) in (numbered_state(case.model, case.new, me) if new else {}).items():
            assert torch.equal(
                new[fqn][1].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
            ), fqn
        return done

    n = len(case.nodes)
    answers, groups = run(n, participant, monkeypatch, fault)
    return answers, groups, [counts[me] for me in range(n)]


@pytest.mark.parametrize(("old", "new"), MOVES, ids=[f"{a} to {b}" for a, b in MOVES])
def test_every_bit_arrives_and_the_host_waits_once(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each participant's groups run one after the other, and end together: an order in which two
    wait for each other hangs."""
    case = case_of(old, new)
    answers, groups, reads = moved(case, SMALL, monkeypatch)
    assert all(isinstance(answer, TransferStats) for answer in answers), answers
    plan = case.transfers()
    for me, (answer, group, read) in enumerate(zip(answers, groups, reads, strict=True)):
        assert answer.received_bytes == sum(
            t.n_bytes for t in plan if t.destination == me != t.source
        )
        assert answer.own_bytes == sum(t.n_bytes for t in plan if t.source == me == t.destination)
        assert read.n <= 2, f"the host of participant {me} waited {read.calls}"
        assert max(group.ops, default=0) <= 4, "two peers each way"
        assert answer.staging_bytes <= staging_bytes(len(groups), SMALL)


def test_an_altered_message_is_named_though_sums_are_read_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []  # the sender of each message that participant 5 receives
    turned: list[str] = []

    def turn(op: Op) -> None:
        """A bit of the second one."""
        if op.group.me == 5:
            seen.append(op.group_peer)
            if len(seen) == 2:
                op.tensor.view(torch.uint8)[3] ^= 16
                turned.append(f"chunk {seen.count(op.group_peer)} of ")
                turned.append(f" from participant {op.group_peer} (")

    answers, _, _ = moved(case_of("dp4", "dp8"), SMALL, monkeypatch, turn)
    wrong = [me for me, answer in enumerate(answers) if not isinstance(answer, TransferStats)]
    assert wrong == [5] and isinstance(answers[5], StateLost), answers
    assert all(part in str(answers[5]) for part in turned)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000, 4099])
@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_sums_on_a_device_are_those_of_the_host(n: int, offset: int) -> None:
    memory = torch.randint(0, 256, (n + 16,), dtype=torch.uint8)
    data, total = memory[offset : offset + n], torch.zeros(2, dtype=torch.int64)
    sum_into(total[1], data)
    assert total.tolist() == [0, sum64(data)]


def test_small_pieces_are_copied_together() -> None:
    """One operation per size of element, NaN and all; what is not contiguous goes by itself."""
    bits = torch.randint(0, 256, (100, 64), dtype=torch.uint8)
    sources = [
        row.view(torch.float32 if i % 2 else torch.bfloat16) for i, row in enumerate(bits)
    ] + [bits[:, 3]]
    targets = [torch.zeros_like(source) for source in sources]
    with Reads() as reads:
        copy_all(list(zip(targets, sources, strict=True)), together=True)
    assert (reads.calls["_foreach_copy_"], reads.calls["copy_"], reads.n) == (2, 1, 0)
    assert all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(targets, sources)
    )


# --------------------------------------------------------------------------- budgets, by arithmetic


def llama_70b() -> ModelProfile:
    """Shapes of Llama 3 70B with AdamW, all in float32: 840 GB."""
    hidden, wide, key = 8192, 28672, 1024
    specs = [TensorSpec("embed", (128256, hidden), "float32", 0, -1)]
    for i in range(80):
        for name, shape, dim in [
            ("wq", (hidden, hidden), 0), ("wk", (key, hidden), 0), ("wv", (key, hidden), 0), ("wo",
            (hidden, hidden), 1), ("w1", (wide, hidden), 0), ("w3", (wide, hidden), 0), ("w2",
            (hidden, wide), 1), ("n1", (hidden,), None), ("n2", (hidden,), None),
        ]:  # fmt: skip
            specs.append(TensorSpec(f"layers.{i}.{name}", shape, "float32", dim, i))
    specs += [
        TensorSpec("norm", (hidden,), "float32", None, 80),
        TensorSpec("head", (128256, hidden), "float32", 0, 80),
    ]
    return ModelProfile(
        80, 0, tuple(specs), (OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",)),), tp_limit=8
    )


def sent_to(old: Layout, new: Layout, me: int, n: int) -> dict[int, list[Transfer]]:
    """What participant `me` sends to each other; every old rank has moved on by one, so that
    nothing stays."""
    holders = {rank: ((rank + 1) % n,) for rank in range(old.world_size)}
    cuts = [
        (cut, tuple(80 // cut.pp for _ in range(cut.pp)) if cut.pp > 1 else ())
        for cut in (old, new)
    ]
    pairs: dict[int, list[Transfer]] = {}
    for t in plan_transfers(llama_70b(), *cuts, holders, [f"n{i // 8}" for i in range(n)], me):
        if t.source == me != t.destination:
            pairs.setdefault(t.destination, []).append(t)
    return pairs


def counted(
    pairs: dict[int, list[Transfer]], me: int, n: int, *, sizes: Sizes
) -> tuple[int, int, int]:
    """Messages, groups and bytes."""
    limit, n_messages, n_bytes, rounds = chunk_bytes(n, sizes), 0, 0, set()
    for peer, pieces in pairs.items():
        for k, message in enumerate(messages(pieces, limit, sizes)):
            assert message_bytes(message) <= limit
            n_messages, n_bytes = n_messages + 1, n_bytes + message_bytes(message)
            rounds.add((k, lane(me, peer, n, sizes)))
    return n_messages, len(rounds), n_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("old", "new", "most"),
    [
        (Layout(dp_shard=64), Layout(dp_shard=8, tp=8), 200),
        (Layout(dp_shard=64), Layout(dp_shard=64), 200),
        (Layout(dp_shard=64), Layout(dp_shard=32), 200),
        (Layout(dp_shard=64), Layout(pp=8, dp_shard=8), 200),
    ],
    ids=["tp", "dp", "half", "pp"],
)
def test_64_gpus_send_13_gb_each_in_few_messages(old: Layout, new: Layout, most: int) -> None:
    """Each of them was a wait of the host, and there were tens of thousands."""
    n = max(old.world_size, new.world_size)
    for me in (1, 38):
        pairs = sent_to(old, new, me, n)
        n_messages, n_groups, n_bytes = counted(pairs, me, n, sizes=CUDA_SIZES)
        before, _, _ = counted(pairs, me, n, sizes=CPU_SIZES)
        print(
            f"{old} to {new}: {n_bytes / 1e9:.2f} GB in {n_messages} messages, {n_groups} groups "
            f"(before: {before})"
        )
        assert n_bytes > 5e9 and n_groups <= n_messages <= most < before


def test_what_a_wire_takes_says_how_large_messages_are() -> None:
    assert sizes_of("cpu") == CPU_SIZES and sizes_of("cuda") == CUDA_SIZES
    for n in (2, 8, 64, 1024):
        assert (chunk_bytes(n, CUDA_SIZES), staging_bytes(n, CUDA_SIZES)) == (128 << 20, 1 << 30)
    lanes = Counter(lane(3, peer, 64, CUDA_SIZES) for peer in range(64) if peer != 3)
    assert max(lanes.values()) == 2 and len(lanes) == 32
    assert {lane(3, peer, 64, CPU_SIZES) for peer in range(64) if peer != 3} == {0}
