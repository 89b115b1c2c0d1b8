"""Ranks that must have equal results are compared now and then: a device that silently corrupts its
results says nothing of it.

Three questions, at a boundary that all ranks agree on. What does each rank make of a small product
of integers whose result is known, on whatever device? What loss does the same sample have on each
data-parallel rank, in evaluation mode, to the last bit? And are some of the tensors of the training
state, others each time, the same on all replicas? The answers of all ranks go through one
all-reduce, so that all of them judge alike. What the check touches (random numbers, buffers, modes)
is put back.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from elastic.reshard.rank_boxes import RNG
from elastic.types import Layout, NumbersChecked, Plan, WrongNumbers
from elastic.types.grid import axis_groups, coordinates
from elastic.worker.process.fault_injection import DeviceFaults
from elastic.worker.process_groups.wire import broadcast_tensors
from elastic.worker.program.loop_program import LoopProgram
from elastic.worker.state.content_digest import digest
from elastic.worker.step.evaluation import evaluating
from elastic.worker.step.forward_backward import Batch
from elastic.worker.step.optimizer_step import Stepper

log = logging.getLogger(__name__)

AUTO_EVERY, AUTO_SHARE = 200, 0.005  # steps at first; of the time of the steps
TENSORS = 4  # of the training state, compared over replicas in one check
ALIKE = 0.02  # relative: losses of one sample on devices of different kinds
NEARLY = 1e-3  # of a loss: what orders of sums make of it in 16 bits
KNOWN_SIZE = 128  # of the matrices of the golden matmul: sums up to it are exact in bfloat16 too


@dataclass(frozen=True)
class SdcRow:
    """What one rank says in a check. `loss`: of the sample, NaN = it computes none; `kind`: of its
    device; `content`: digest of tensors that replicas share, in two halves; `good_step`: of the
    newest check that it knows to have found nothing."""

    loss: float = math.nan
    known_wrong: bool = False
    kind: int = 0
    content: tuple[int, int] = (0, 0)
    good_step: int = 0
    check_s: float = 0.0
    step_s: float = 0.0

    def numbers(self) -> list[float]:
        """Absence of a loss is a number of its own: a sum over ranks must not make all of them
        NaN."""
        there = not math.isnan(self.loss)
        return [float(there), self.loss if there else 0.0, float(self.known_wrong),
            float(self.kind), *map(float, self.content),
                float(self.good_step), self.check_s, self.step_s]  # fmt: skip

    @classmethod
    def of(cls, numbers: Sequence[float]) -> SdcRow:
        there, loss, wrong, kind, low, high, good, check_s, step_s = numbers
        loss, content = loss if there else math.nan, (int(low), int(high))
        return cls(loss, wrong > 0, int(kind), content, int(good), check_s, step_s)


@dataclass(frozen=True)
class SdcFinding:
    """`ranks` that may be wrong. `by_loss`: only the losses say so."""

    ranks: tuple[int, ...]
    reason: str
    by_loss: bool = False


def compare(rows: Sequence[SdcRow], layout: Layout, exact: bool = True) -> SdcFinding | None:
    """What the answers of all ranks say; None = all is well. `exact`: devices of one kind make a
    loss of the same bits."""
    wrong = tuple(rank for rank, row in enumerate(rows) if row.known_wrong)
    if wrong:
        return SdcFinding(wrong, f"{_named(wrong)} got a golden matmul of integers wrong")
    return _by_content(rows, layout) or _by_loss(rows, layout, exact)


def _by_content(rows: Sequence[SdcRow], layout: Layout) -> SdcFinding | None:
    odd: list[int] = []
    for replicas in axis_groups(layout, ("dp_replicate",)) if layout.dp_replicate > 1 else ():
        odd += _odd({rank: (rows[rank].kind, rows[rank].content) for rank in replicas})
    text = f"the training state of {_named(odd)} differs from that of its replicas"
    return SdcFinding(tuple(sorted(odd)), text) if odd else None


def _by_loss(rows: Sequence[SdcRow], layout: Layout, exact: bool) -> SdcFinding | None:
    """Data-parallel ranks with equal devices must agree to the last bit (NEARLY where that is not
    `exact`), others to ALIKE."""
    units: dict[int, list[int]] = {}
    for rank in range(layout.world_size):
        units.setdefault(coordinates(layout, rank).dp(layout), []).append(rank)
    losses = {
        dp: tuple(rows[r].loss for r in ranks if not math.isnan(rows[r].loss))
        for dp, ranks in units.items()
    }
    if not all(losses.values()):
        return None
    kinds = {dp: tuple(rows[rank].kind for rank in ranks) for dp, ranks in units.items()}
    odd = _odd({dp: (kinds[dp], losses[dp]) for dp in units}) if exact else []
    common = Counter(kinds.values())
    middle = statistics.median(sum(loss) for loss in losses.values())
    most = {dp: ALIKE if common[kinds[dp]] == 1 else math.inf if exact else NEARLY for dp in units}
    far = [dp for dp, loss in losses.items() if abs(sum(loss) - middle) > most[dp] * abs(middle)]
    odd = sorted({*odd, *far})
    if not odd:
        return None
    ranks = [rank for dp in odd for rank in units[dp]]
    usual = Counter(losses[dp] for dp in units if dp not in odd).most_common(1)
    other = f"the others {sum(usual[0][0]):.9g}" if usual else "nobody knows which of them is right"
    found = ", ".join(f"{sum(losses[dp]):.9g}" for dp in odd)
    return SdcFinding(
        tuple(sorted(ranks)),
        f"of the same sample {_named(ranks)} made a loss of {found}, {other}",
        by_loss=True,
    )


def _odd(answers: dict[int, tuple[object, object]]) -> list[int]:
    """Of those with equal first parts, the ones whose second part is not that of the majority; all
    where there is none."""
    odd: list[int] = []
    for kind in {kind for kind, _ in answers.values()}:
        here = {one: said for one, (its, said) in answers.items() if its == kind}
        most, n = Counter(here.values()).most_common(1)[0]
        if n < len(here):
            odd += [one for one, said in here.items() if said != most or 2 * n <= len(here)]
    return sorted(odd)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


class SdcCheck:
    """The checks of one generation. `good_step`: of the newest check before it, as far as this rank
    knows."""

    def __init__(
        self, stepper: Stepper, plan: Plan, faults: DeviceFaults, *, good_step: int
    ) -> None:
        asked = stepper.job.check_numbers_every
        self.auto = asked == "auto"
        self.every = AUTO_EVERY if asked == "auto" else asked
        self.stepper, self.plan, self.faults = stepper, plan, faults
        self.good_step = good_step
        self.told = False
        self.repeats = True  # the program's losses: the same each time
        # NCCL adds up in an order that follows how a group's GPUs are connected: repeatable in a
        # group, another one in the next; an expert's products are of as many rows as tokens come
        on_device = stepper.device.type != "cuda" or plan.layout.tp * plan.layout.cp == 1
        self.exact = on_device and plan.layout.ep == 1
        self._due = self._next(stepper.state.step)
        self._name = zlib.crc32(_device_name(stepper.device).encode())

    def _next(self, step: int) -> int:
        return (step // self.every + 1) * self.every if self.every else -1

    def after(
        self, step: int, batches: Sequence[Batch], step_s: float
    ) -> WrongNumbers | NumbersChecked | None:
        """After every step, on every rank alike; what was found, where it is time, until something
        was."""
        if step != self._due or self.told:
            return None
        rows = self._ask(step, batches, step_s)
        finding = compare(rows, self.plan.layout, self.exact)
        if finding is not None and finding.by_loss:
            again = self._ask(step, batches, step_s)
            repeats = self._repeats(rows, again)
            finding = compare(again, self.plan.layout, self.exact) if repeats else None
        if self.auto:
            check_s = max(row.check_s for row in rows)
            step_s = max(1e-9, statistics.mean(row.step_s for row in rows))
            self.every = max(AUTO_EVERY, math.ceil(check_s / AUTO_SHARE / step_s))
        self._due = self._next(step)
        good_step = max(row.good_step for row in rows)
        if finding is None:
            self.good_step = step
            return NumbersChecked(self.plan.generation, step)
        self.told = True
        workers = tuple(self.plan.ranks[rank] for rank in finding.ranks)
        return WrongNumbers(self.plan.generation, step, good_step, workers, finding.reason)

    def _repeats(self, rows: Sequence[SdcRow], again: Sequence[SdcRow]) -> bool:
        """A program whose losses are others each time cannot be checked by them."""
        each = zip(rows, again, strict=True)
        pairs = [(one.loss, two.loss) for one, two in each if not math.isnan(one.loss)]
        most = 0.0 if self.exact else NEARLY
        self.repeats = 2 * sum(abs(one - two) <= most * abs(one) for one, two in pairs) > len(pairs)
        if not self.repeats:
            log.warning(
                "the loss of a sample is another one each time: losses of different ranks are not "
                "compared"
            )
        return self.repeats

    # --------------------------------------------------------------------------- one rank's answers

    def _ask(self, step: int, batches: Sequence[Batch], step_s: float) -> list[SdcRow]:
        began = time.monotonic()
        layout = self.plan.layout
        loss = self._loss(batches) if layout.dp > 1 and self.repeats else math.nan
        content = self._content(step) if layout.dp_replicate > 1 else (0, 0)
        wrong = not golden_matmul(self.stepper.device, self.faults.corrupted)
        row = SdcRow(
            loss, wrong, self._name, content, self.good_step, time.monotonic() - began, step_s
        )
        table = self.stepper.groups.commit.gather(torch.tensor(row.numbers(), dtype=torch.float64))
        return [SdcRow.of(numbers) for numbers in table.tolist()]

    def _content(self, step: int) -> tuple[int, int]:
        state = self.stepper.state
        shared = {f"model.{spec.fqn}" for spec in state.profile.specs if spec.buffer} | {RNG}
        shared |= {  # at one rank only
            f"optim.{entry}.{fqn}"
            for fqn, kept in state.owner_update.kept.items()
            for entry in kept
        }
        held = state.tensors.items()
        names = sorted(name for name, (_, x) in held if name not in shared and x.numel())
        start = step // max(1, self.every) * TENSORS
        chosen = {names[(start + i) % len(names)] for i in range(min(TENSORS, len(names)))}
        sizes = {name: state.tensors[name][0].sizes for name in chosen}
        total = digest(state.tensors, sizes, sorted(chosen))
        return total % (1 << 32), total >> 32

    def _loss(self, batches: Sequence[Batch]) -> float:
        """Of the first sample of the step, on every rank; NaN where none is computed. Twice: two
        passes are not cut into microbatches."""
        stepper = self.stepper
        samples = stepper.shares.samples(stepper.state.step - 1)
        # a schedule starts over after it
        if isinstance(stepper.program, LoopProgram) or stepper.groups.pp is not None:
            return math.nan
        one = self._same_sample(batches, next(dp for dp, n in enumerate(samples) if n))
        with evaluating(stepper.state, stepper.job, stepper.device), _same_kernels():
            value, _ = stepper.forward_backward([one, one], train=False, valid=[1, 1])
        return value

    def _same_sample(self, batches: Sequence[Batch], source_dp: int) -> Batch:
        """The first sample of that data-parallel rank: what others would read belongs to their
        loader's threads."""
        layout, groups = self.plan.layout, self.stepper.groups
        ranks = range(layout.world_size)
        source = next(r for r in ranks if coordinates(layout, r).dp(layout) == source_dp)
        mine = None
        if self.stepper.rank == source:
            mine = {key: value[:1].cpu().clone() for key, value in batches[0].items()}
        return broadcast_tensors(mine, source, groups.commit)


def _same_kernels() -> AbstractContextManager[object]:
    """Equal devices must not choose unequal algorithms by what they have timed."""
    return torch.backends.cudnn.flags(
        enabled=torch.backends.cudnn.enabled, benchmark=False, deterministic=True
    )


def _device_name(device: torch.device) -> str:
    """Devices with the same name compute alike, to the last bit."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with open("/proc/cpuinfo") as file:
        model = next((line for line in file if line.startswith("model name")), "")
    return f"{torch.backends.cpu.get_cpu_capability()} {model.strip()}"


def golden_matmul(device: torch.device, corrupted: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Is a product of small integers what it must be, in each precision that models compute in? Its
    sums are exact in any order, on any device. `corrupted`: what a drill makes of a result."""
    index = torch.arange(KNOWN_SIZE, dtype=torch.float64)
    left = (index[:, None] * 7 + index * 3) % 3 - 1
    right = (index[:, None] * 5 + index * 2 + 1) % 3 - 1
    known = left @ right
    for dtype in (torch.float32, torch.bfloat16):
        result = corrupted(left.to(device, dtype) @ right.to(device, dtype))
        if not torch.equal(result.to("cpu", torch.float64), known):
            return False
    return True
