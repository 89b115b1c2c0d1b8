"""Ranks that must have equal results: the one that silently corrupts its results is named, and the
check leaves no trace."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.worker.chain import job_of
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool

from elastic.types import Job, Layout, NumbersChecked, Quiesce, StepDone, WorkerId, WrongNumbers
from elastic.types.orders import InjectFault
from elastic.worker.process.fault_injection import DeviceFaults
from elastic.worker.step import sdc_check
from elastic.worker.step.sdc_check import SdcCheck, SdcRow, compare, golden_matmul

EVERY = 3
LAYOUTS = [
    Layout(dp_shard=4), Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=2, tp=2), Layout(pp=2,
    dp_shard=2), Layout(dp_replicate=3), Layout(pp=2, tp=2),
]  # fmt: skip

NAMED = [(LAYOUTS[0], True), (Layout(dp_replicate=3), False)]  # in `make test`


def rows(losses: list[float], **more: Any) -> list[SdcRow]:
    return [SdcRow(loss, **more) for loss in losses]


# ----------------------------------------------------------------------------- what the answers say


def test_the_one_that_differs_from_the_majority() -> None:
    layout = Layout(dp_shard=4)
    assert compare(rows([2.5, 2.5, 2.5, 2.5]), layout) is None
    found = compare(rows([2.5, 2.5, 2.5000002, 2.5]), layout)
    assert found is not None and found.ranks == (2,) and found.by_loss
    assert "rank 2 made a loss of 2.5000002, the others 2.5" in found.reason


def test_of_two_that_differ_both_may_be_wrong() -> None:
    found = compare(rows([2.5, 2.6]), Layout(dp_shard=2))
    assert found is not None and found.ranks == (0, 1) and "nobody knows" in found.reason


def test_all_ranks_that_share_a_pass_are_named_with_it() -> None:
    """dp_shard=3 x tp=2: ranks 2 and 3 compute one part of the samples together."""
    found = compare(rows([2.5, 2.5, 2.6, 2.6, 2.5, 2.5]), Layout(dp_shard=3, tp=2))
    assert found is not None and found.ranks == (2, 3)
    nan = math.nan  # the first stage computes no loss
    found = compare(rows([nan, nan, nan, 2.5, 2.4, 2.5]), Layout(pp=2, dp_shard=3))
    assert found is not None and found.ranks == (1, 4)


def test_sums_in_another_order_are_no_wrong_numbers() -> None:
    """Where tp or cp ranks add up over NCCL, the bits follow how the GPUs of each group are
    connected."""
    layout = Layout(dp_shard=3, tp=2)
    near = rows([2.5, 2.5, 2.5004, 2.5004, 2.4996, 2.4996])
    assert compare(near, layout, exact=False) is None
    assert compare(near, layout) is not None
    found = compare(rows([2.5, 2.5, 2.51, 2.51, 2.5, 2.5]), layout, exact=False)
    assert found is not None and found.ranks == (2, 3)
    unlike = [
        SdcRow(2.5, kind=1),
        SdcRow(2.5, kind=1),
        SdcRow(2.5, kind=1),
        SdcRow(2.5, kind=1),
        SdcRow(2.53, kind=2),
        SdcRow(2.53, kind=2),
    ]
    assert compare(unlike, layout, exact=False) is None, "the only one of its kind may be 2 % off"


def test_a_known_answer_that_is_wrong_tells_which_of_them_it_is() -> None:
    both = rows([2.5, 2.6])
    found = compare([both[0], replace(both[1], known_wrong=True)], Layout(dp_shard=2))
    assert found is not None and found.ranks == (1,) and "golden matmul" in found.reason


def test_devices_of_another_kind_may_differ_a_little() -> None:
    unlike = [SdcRow(2.5, kind=1), SdcRow(2.5, kind=1), SdcRow(2.51, kind=2), SdcRow(2.49, kind=3)]
    assert compare(unlike, Layout(dp_shard=4)) is None
    found = compare([*unlike[:3], SdcRow(2.8, kind=3)], Layout(dp_shard=4))
    assert found is not None and found.ranks == (3,)
    found = compare(
        [SdcRow(2.5, kind=1), SdcRow(2.5000001, kind=1), SdcRow(2.5, kind=1), SdcRow(2.51, kind=2)],
        Layout(dp_shard=4),
    )
    assert found is not None and found.ranks == (1,), "equal devices must agree to the last bit"


def test_replicas_whose_state_differs() -> None:
    layout = Layout(dp_replicate=3, dp_shard=2)
    same = [SdcRow(2.5, content=(7, rank % 2)) for rank in range(6)]
    assert compare(same, layout) is None
    found = compare([*same[:3], replace(same[3], content=(8, 1)), *same[4:]], layout)
    assert found is not None and found.ranks == (3,) and not found.by_loss
    found = compare(
        [replace(same[0], content=(9, 0)), *same[1:4]], Layout(dp_replicate=2, dp_shard=2)
    )
    assert found is not None and found.ranks == (0, 2), "of two replicas nobody knows which"


def test_a_row_survives_its_journey() -> None:
    for row in (SdcRow(), SdcRow(2.5, True, 2**32 - 1, (2**32 - 1, 5), 400, 0.25, 1.5)):
        back = SdcRow.of(torch.tensor(row.numbers(), dtype=torch.float64).tolist())
        assert str(back) == str(row)


def test_the_known_product() -> None:
    cpu = torch.device("cpu")
    assert golden_matmul(cpu, lambda result: result)
    assert not golden_matmul(cpu, lambda result: result * 1.015625)

    def one_bit(result: torch.Tensor) -> torch.Tensor:
        result = result.clone()
        result[17, 5] += 1
        return result

    assert not golden_matmul(cpu, one_bit)


SHARDS = Layout(dp_shard=4)


class Scripted(SdcCheck):
    """Answers are given; `asked`: the steps after which there was a question."""

    def __init__(
        self,
        every: int | str,
        answers: list[SdcRow],
        entered: int = 0,
        layout: Layout = SHARDS,
        device: str = "cpu",
    ) -> None:
        stepper: Any = SimpleNamespace(
            job=Job(check_numbers_every=every),
            state=SimpleNamespace(step=entered),
            device=torch.device(device),
        )
        workers = [WorkerId(str(i), 0) for i in range(layout.world_size)]
        super().__init__(stepper, plan(3, layout, workers, 8), DeviceFaults(), good_step=0)
        self.answers, self.asked = answers, list[int]()

    def _ask(self, step: int, batches: Any, step_s: float) -> list[SdcRow]:
        self.asked.append(step)
        return [replace(row, good_step=self.good_step) for row in self.answers]


@pytest.mark.parametrize(
    ("device", "layout", "exact"),
    [
        ("cpu", Layout(dp_shard=4), True),
        ("cpu", Layout(dp_shard=2, tp=2), True),
        ("cuda", Layout(dp_shard=4), True),
        ("cuda", Layout(dp_replicate=2, dp_shard=2), True),
        ("cuda", Layout(dp_shard=2, tp=2), False),
        ("cuda", Layout(dp_shard=2, cp=2), False),
    ],
)
def test_only_where_nccl_adds_up_within_a_pass_may_bits_differ(
    device: str, layout: Layout, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdc_check, "_device_name", lambda device: "one kind")
    nearly = rows([2.5, 2.5, 2.5 * (1 + 1e-6), 2.5 * (1 + 1e-6)])
    found = Scripted(10, nearly, layout=layout, device=device).after(10, [], 0.1)
    assert isinstance(found, WrongNumbers if exact else NumbersChecked)
    far = rows([2.5, 2.5, 2.6, 2.6])
    assert isinstance(
        Scripted(10, far, layout=layout, device=device).after(10, [], 0.1), WrongNumbers
    )


def test_how_often() -> None:
    cheap, dear = (rows([2.5] * 4, check_s=check_s, step_s=0.1) for check_s in (0.01, 1.0))
    for every, answers, asked in (
        (0, cheap, []),
        (300, cheap, [300, 600, 900]),
        (300, dear, [300, 600, 900]),
    ):
        one = Scripted(every, answers)
        told = [one.after(step, [], 0.1) for step in range(1, 1000)]
        assert [found for found in told if found is not None] == [
            NumbersChecked(3, step) for step in asked
        ]
        assert one.asked == asked
    one = Scripted("auto", cheap, entered=250)
    [one.after(step, [], 0.1) for step in range(251, 1000)]
    assert one.asked == [400, 600, 800] and one.good_step == 800
    one = Scripted("auto", dear)
    [one.after(step, [], 0.1) for step in range(1, 5000)]
    assert one.asked == [200, 2000, 4000], "0.5 % of 0.1 s is 2000 times in a second"


def test_told_once_with_the_last_step_that_was_right() -> None:
    one = Scripted(10, rows([2.5] * 4))
    assert one.after(10, [], 0.1) == NumbersChecked(3, 10)
    one.answers = rows([2.5, 2.5, 2.5, 2.6])
    found = one.after(20, [], 0.1)
    assert isinstance(found, WrongNumbers)
    assert (found.generation, found.step, found.good_step, found.workers) == (
        3,
        20,
        10,
        (WorkerId("3", 0),),
    )
    assert one.asked == [10, 20, 20], "the pass is made once more"
    assert one.after(30, [], 0.1) is None and len(one.asked) == 3


def test_a_program_whose_loss_is_another_one_each_time() -> None:
    class Chance(Scripted):
        def _ask(self, step: int, batches: Any, step_s: float) -> list[SdcRow]:
            super()._ask(step, batches, step_s)
            return rows([len(self.asked) + rank / 8 for rank in range(4)])

    one = Chance(10, [])
    assert one.after(10, [], 0.1) == NumbersChecked(3, 10)
    assert not one.repeats


# ----------------------------------------------------------------------------------------- on ranks


def blind() -> None:
    """In a worker's process: the golden matmul finds nothing, as where a fault spares it."""
    sdc_check.golden_matmul = lambda device, spoilt: True


def seeing() -> None:
    sdc_check.golden_matmul = golden_matmul


def run(pool: Pool, job: dict[str, Any], folder: Path, layout: Layout) -> list[StepDone]:
    workers = pool.open(job, folder)
    pool.enter(plan(1, layout, workers, job["global_batch"]))
    pool.quiesced(1, layout.world_size)
    return pool.events(StepDone)


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "program"),
    [
        *((layout, name) for layout in LAYOUTS for name in ("tiny.py", "tiny_dropout.py")),
        (Layout(dp_shard=2, cp=2), "tiny.py"),  # the other one's model does not cut sequences
    ],
    ids=str,
)
def test_the_check_leaves_no_trace(
    pool: Pool, tmp_path: Path, layout: Layout, program: str
) -> None:
    job = job_of(program, steps=8, global_batch=16 if layout.pp > 1 else 12)
    found = []
    for every in (0, 1, 2):
        steps = run(pool, job | {"check_numbers_every": every}, tmp_path / str(every), layout)
        assert len(steps) == 8
        found.append([(e.step, e.train_loss, e.grad_norm, e.tokens) for e in steps])
        assert not pool.events(WrongNumbers)
    assert found[0] == found[1] == found[2]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("layout", "see"),
    [
        pytest.param(
            layout,
            see,
            id=f"{layout}-{'known' if see else 'loss'}",
            marks=[] if (layout, see) in NAMED else [pytest.mark.whole],
        )
        for layout in LAYOUTS
        for see in (True, False)
    ],
)
def test_the_rank_that_computes_wrong_numbers_is_named(
    pool: Pool, tmp_path: Path, layout: Layout, see: bool
) -> None:
    """Each rank in turn, rank 0 too (the first and the last of the later layouts); `see`: the
    golden matmul fails there too."""
    job = job_of("tiny.py", steps=1_000_000, global_batch=16 if layout.pp > 1 else 12) | {
        "check_numbers_every": EVERY
    }
    for victim in range(
        0, layout.world_size, 1 if layout in LAYOUTS[:3] else layout.world_size - 1
    ):
        workers = pool.open(job, tmp_path / str(victim))
        for worker in workers:
            pool.patch(worker, seeing if see else blind)
        pool.enter(plan(1, layout, workers, job["global_batch"]))
        pool.wait(lambda: len(pool.events(StepDone)) >= 2 * EVERY, "steps")
        assert not pool.events(WrongNumbers)
        pool.order(workers[victim], InjectFault("corrupt"))
        if not see and (layout.dp == 1 or layout.pp > 1):
            done = len(pool.events(StepDone))
            pool.wait(lambda done=done: len(pool.events(StepDone)) > done + 3 * EVERY, "steps")
            assert not pool.events(WrongNumbers), "there is nothing to compare with"
        else:
            pool.wait(lambda: pool.events(WrongNumbers), "silent data corruption")
            (found,) = pool.events(WrongNumbers)
            named_right(found, workers, victim, layout, see)
        for worker in workers[: layout.world_size]:
            pool.order(worker, Quiesce(1, save=False))
        pool.quiesced(1, layout.world_size)
    for worker in workers:
        pool.patch(worker, seeing)


def named_right(
    found: WrongNumbers, workers: list[WorkerId], victim: int, layout: Layout, see: bool
) -> None:
    print(f"{layout}, rank {victim}: step {found.step}, good {found.good_step}: {found.reason}")
    named = [workers.index(worker) for worker in found.workers]
    assert victim in named
    assert 0 < found.good_step == found.step - EVERY
    if see:
        assert named == [victim]
    elif layout.dp > 2:
        assert len(named) == layout.world_size // layout.dp
    else:
        assert named == list(range(layout.world_size)), "of two parts nobody knows which"


LOSS, ASK = SdcCheck._loss, SdcCheck._ask


def as_it_was() -> None:
    sdc_check.SdcCheck._loss, sdc_check.SdcCheck._ask = LOSS, ASK  # type: ignore[method-assign]


def no_loss() -> None:
    """In a worker's process: digests of the state are left."""
    sdc_check.SdcCheck._loss = lambda self, batches: math.nan  # type: ignore[method-assign]


def one_bit_flips() -> None:
    """In a worker's process: at step 20 a bit of one number of the model's first tensor."""
    ask = sdc_check.SdcCheck._ask

    def flips(self: SdcCheck, step: int, batches: Any, step_s: float) -> list[SdcRow]:
        if step == 20:
            tensors = self.stepper.state.tensors
            _, tensor = tensors[next(name for name in sorted(tensors) if name.startswith("model."))]
            with torch.no_grad():
                tensor.view(torch.int32).view(-1)[0] ^= 1 << 20
        return ask(self, step, batches, step_s)

    sdc_check.SdcCheck._ask = flips  # type: ignore[method-assign]


@pytest.mark.whole
@pytest.mark.parametrize("victim", [0, 2])
def test_a_bit_that_flips_in_a_replica_is_found(pool: Pool, tmp_path: Path, victim: int) -> None:
    job = job_of("tiny.py", steps=1_000_000, global_batch=12) | {"check_numbers_every": 10}
    workers = pool.open(job, tmp_path)
    for worker in workers[:3]:
        pool.patch(worker, no_loss)
    pool.patch(workers[victim], one_bit_flips)
    pool.enter(plan(1, Layout(dp_replicate=3), workers, 12))
    pool.wait(lambda: pool.events(WrongNumbers), "silent data corruption")
    (found,) = pool.events(WrongNumbers)
    assert found.workers == (workers[victim],) and found.step >= 20
    assert "training state" in found.reason and "replicas" in found.reason
    for worker in workers[:3]:
        pool.order(worker, Quiesce(1, save=False))
    pool.quiesced(1, 3)
    for worker in workers[:3]:
        pool.patch(worker, as_it_was)


def wrong_from_the_second_on() -> None:
    """In a worker's process: the device silently corrupts results in every generation but the
    first."""
    ask = sdc_check.SdcCheck._ask

    def wrong(self: SdcCheck, step: int, batches: Any, step_s: float) -> list[SdcRow]:
        if self.plan.generation > 1:
            self.faults.inject_fault("corrupt")
        return ask(self, step, batches, step_s)

    sdc_check.SdcCheck._ask = wrong  # type: ignore[method-assign]


@pytest.mark.e2e
def test_what_was_right_is_known_in_the_next_generation(pool: Pool, tmp_path: Path) -> None:
    """The first check of the second generation fails: whatever was right was so in the first."""
    job = job_of("tiny.py", steps=1_000_000, global_batch=12) | {"check_numbers_every": 5}
    workers = pool.open(job, tmp_path)
    pool.patch(workers[1], wrong_from_the_second_on)
    first = plan(1, Layout(dp_shard=4), workers, 12)
    pool.enter(first)
    pool.wait(lambda: len(pool.events(StepDone)) >= 12, "steps")
    pool.enter(plan(2, Layout(dp_shard=3), workers, 12, resume=live(first)))
    pool.wait(lambda: pool.events(WrongNumbers), "silent data corruption")
    (found,) = pool.events(WrongNumbers)
    checked = {(e.generation, e.step) for e in pool.events(NumbersChecked)}
    assert found.workers == (workers[1],) and found.generation == 2
    assert (1, found.good_step) == max(checked) >= (1, 10)
    for worker in workers[:3]:
        pool.order(worker, Quiesce(2, save=False))
    pool.quiesced(2, 3)
    pool.patch(workers[1], as_it_was)


@pytest.mark.whole
def test_what_a_check_costs(pool: Pool, tmp_path: Path) -> None:
    """Printed only: this machine may be shared."""
    layout = Layout(dp_shard=4)
    for every in (0, 1):
        began = time.monotonic()
        job = job_of("tiny.py", steps=60, global_batch=12) | {"check_numbers_every": every}
        steps = run(pool, job, tmp_path / str(every), layout)
        times = sorted(b[0] - a[0] for a, b in zip(told(pool), told(pool)[1:], strict=False))
        print(
            f"check_numbers_every={every}: median {times[len(times) // 2] * 1e3:.1f} ms from step "
            f"to step, {len(steps)} steps"
        )
        print(f"  {time.monotonic() - began:.1f} s in all")
    assert len(steps) == 60


def told(pool: Pool) -> list[tuple[float, Any]]:
    return [(at_s, e) for at_s, _, e in pool.log if isinstance(e, StepDone)]
