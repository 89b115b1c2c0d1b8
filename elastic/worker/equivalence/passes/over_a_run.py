"""What a run comes to and one pass of a fresh model over a few samples does not show: steps of many
samples, weights that were trained, buffers that have counted on, weights that have changed since a
pass."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from elastic.errors import ProgramError
from elastic.program import Program
from elastic.user_frames import LIBRARIES, user_line
from elastic.worker.equivalence.compare_values import LOSS_AGREES, REPEATS, depends, double
from elastic.worker.equivalence.forward_trace import Batch, python_random
from elastic.worker.equivalence.no_randomness import Still
from elastic.worker.equivalence.passes.kept_by_passes import (
    MOST_FLOP,
    ROWS,
    ModelPasses,
    flop_of,
    rows_of,
)
from elastic.worker.equivalence.small_copy import SmallCopy
from elastic.worker.program.calls import count_of
from elastic.worker.program.norms.batch_norms import norms_of

MOST_ROWS = 4096  # samples of a step that are passed at once
STEP_FLOP = 1e10  # of the passes of a step
STEPS, RATE = 24, 1e-2  # of training: enough for a few samples to be learned, and others not
TRAINING_FLOP = 3e10
TRAINING_S = 5.0  # of a program that waits, or is slow for other reasons than its products
AHEAD = (100, 1_000, 10_000, 100_000)  # passes that a counting buffer is set on by
# about a day, with half a minute and half an hour, or half an hour and half a day besides
LATER_S, CLOCKS = (88_230.0, 131_400.0), ("time", "monotonic", "perf_counter")


def counts_others(small: SmallCopy, batch: Batch) -> str:
    """Is the count of samples another one than the sum of theirs? '' = no, or it cannot be told;
    else what is said of it."""
    return counts_of_others(small.program, batch)


def counts_of_others(program: Program, batch: Batch) -> str:
    """The same of a program."""
    if program.count is None or program.batch_dependent:
        return ""
    n = len(next(iter(batch.values())))
    try:
        whole = count_of(program, batch)
        each = sum(count_of(program, rows_of(batch, i, i + 1)) for i in range(n))
    except Exception:  # noqa: BLE001 - the user's own code: the layouts tell what it raises
        return ""
    if whole == each:
        return ""
    return (
        f"{program.of}count of {n} samples is {whole}, that of the same one by one adds up to "
        f"{each}: each rank and micro-batch counts its own, and the loss is divided by the sum; "
        "count each sample by itself"
    )


def sees_a_step(small: SmallCopy, batch: Batch, n_rows: int) -> str:
    """Is the loss of as many samples as a step has another one than the sum of theirs? '' = no, or
    it cannot be told; else what is said of it."""
    rows = len(next(iter(batch.values())))
    most = min(n_rows, MOST_ROWS, int(STEP_FLOP / flop_of(small, batch) * ROWS))
    if most <= rows or _may_see(small):
        return ""
    many = {key: x[[i % rows for i in range(most)]] for key, x in batch.items()}
    trial = ModelPasses(small, small.anew(torch.float64).train())
    before = trial.buffers()
    try:
        with _quiet():
            whole = _loss(trial, before, double(many))
            ones = [_loss(trial, before, double(rows_of(batch, i, i + 1))) for i in range(rows)]
    except Exception:  # noqa: BLE001 - see above
        return ""
    each = sum(ones[i % rows] for i in range(most))
    if _equal(whole, each):
        return ""
    return (
        f"the loss of {most} samples, as a step has them, is {whole:.6g}, that of the same one by "
        f"one {each:.6g}: {depends(small.program.anyway)}"
    )


def sees_others_later(small: SmallCopy, batch: Batch) -> str:
    """Does the loss of samples become another one than the sum of theirs, where some of them have
    been learned and buffers have counted on? '' = no, or it cannot be told; else what is said of
    it."""
    if _may_see(small):
        return ""
    rows = len(next(iter(batch.values())))
    exact = double(batch)
    ones = [rows_of(exact, i, i + 1) for i in range(rows)]
    try:
        with _quiet():
            for when, trial in _later(small, exact):
                before = trial.buffers()
                whole = _loss(trial, before, exact)
                each = sum(_loss(trial, before, one) for one in ones)
                if not _equal(whole, each):
                    return (
                        f"{when} the loss of {rows} samples is {whole:.6g}, that of the same one "
                        f"by one {each:.6g}: {depends(small.program.anyway)}"
                    )
    except Exception:  # noqa: BLE001 - see above
        return ""
    return ""


def keeps_old_weights(small: SmallCopy, batch: Batch) -> str:
    """Is the loss of changed weights another one where a pass with the old ones came before? '' =
    no, or it cannot be told; else what is said of it."""
    if flop_of(small, batch) * 4 > MOST_FLOP:
        return ""
    losses = []
    try:
        for passed in (False, True):
            trial = ModelPasses(small, small.anew(small.dtype).train())
            before = trial.buffers()
            with _quiet(), torch.no_grad():
                if passed:
                    _loss(trial, before, batch)
                for p in trial.model.parameters():
                    if p.is_floating_point():
                        p.mul_(1.25)
                losses.append(_loss(trial, before, batch))
    except Exception:  # noqa: BLE001 - see above
        return ""
    fresh, after = losses
    if not math.isfinite(fresh) or math.isclose(fresh, after, rel_tol=REPEATS):
        return ""
    return (
        f"the loss of a model is {fresh:.6g}, and {after:.6g} where a pass with other weights came "
        "before: it keeps what it has computed from weights (functools.lru_cache, an attribute), "
        "which each change of the workers computes anew; compute it in each pass, or keep it in a "
        "buffer of the model"
    )


def _later(small: SmallCopy, batch: Batch) -> Iterator[tuple[str, ModelPasses]]:
    """A model after steps of training on the first samples; then with its counts far ahead."""
    model = small.anew(torch.float64).train()
    trial = ModelPasses(small, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    first = {key: x[:ROWS] for key, x in batch.items()}
    begun, until_s = trial.buffers(), time.monotonic() + TRAINING_S
    if trained:
        optimizer = torch.optim.Adam(trained, lr=RATE)
        for step in range(min(STEPS, int(TRAINING_FLOP / (6 * flop_of(small, batch))))):
            optimizer.zero_grad()
            trial.loss(first).backward()
            optimizer.step()
            yield f"after {step + 1} steps of training", trial
            if time.monotonic() >= until_s:
                break
    counts = {
        name: value - begun[name]
        for name, value in trial.buffers().items()
        if not value.is_floating_point() and value.dtype != torch.bool and value.numel() == 1
        if bool((value != begun[name]).all())
    }
    for ahead in AHEAD if counts else ():
        trial.put({name: begun[name] + ahead * change.sign() for name, change in counts.items()})
        yield f"where its buffer {next(iter(counts))} has counted {ahead:,} passes,", trial


@contextmanager
def _quiet() -> Iterator[None]:
    with Still(), python_random(0.999):
        yield


def _may_see(small: SmallCopy) -> bool:
    return small.program.batch_dependent or bool(norms_of([small.model]))


def _loss(trial: ModelPasses, buffers: dict[str, Tensor], batch: Batch) -> float:
    """Within `_quiet`, with these buffers before and after."""
    trial.put(buffers)
    with torch.no_grad():
        value = float(trial.loss(batch))
    trial.put(buffers)
    return value


def _equal(whole: float, each: float) -> bool:
    return not math.isfinite(whole) or math.isclose(whole, each, rel_tol=LOSS_AGREES)


def follows_the_clock(small: SmallCopy, batch: Batch) -> str:
    """Is the loss of samples another one a day later? '' = no, or it cannot be told; else what is
    said of it."""
    if flop_of(small, batch) * 2 > MOST_FLOP:
        return ""
    losses = []
    try:
        for later_s in (0.0, *LATER_S):
            trial = ModelPasses(small, small.anew(small.dtype).train())
            with _quiet(), _clock(later_s):
                losses.append(_loss(trial, trial.buffers(), batch))
    except Exception:  # noqa: BLE001 - see above
        return ""
    now, *others = losses
    later = next((x for x in others if not math.isclose(now, x, rel_tol=REPEATS)), None)
    if later is None or not math.isfinite(now):
        return ""
    return (
        f"the loss of the same samples is {now:.6g} and, a day later, {later:.6g}: it follows from "
        "the clock, which each rank reads for itself and a resumed run reads anew; let it follow "
        "from passes that a buffer counts"
    )


def check_seeds(small: SmallCopy, batch: Batch) -> None:
    """Raises ProgramError where a pass sets torch's seed and draws for each sample: what is drawn
    for samples follows from the job's seed, the step and the sample."""
    if flop_of(small, batch) * 2 > MOST_FLOP:
        return
    own, places, losses = torch.manual_seed, list[str](), list[float]()

    def noted(seed: int) -> torch.Generator:
        places.append(user_line())
        return own(seed)

    try:
        trial = ModelPasses(small, small.anew(torch.float64).train())
        before, exact = trial.buffers(), double(batch)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), python_random(0.999):
            for i in (None, *range(ROWS)):
                given = rows_of(exact, 0, ROWS) if i is None else rows_of(exact, i, i + 1)
                trial.put(before)
                own(0)
                torch.manual_seed = noted
                losses.append(float(trial.loss(given)))
                torch.manual_seed = own
    except Exception:  # noqa: BLE001 - see above
        return
    finally:
        torch.manual_seed = own
    whole, each = losses[0], sum(losses[1:])
    if places and math.isfinite(whole) and not math.isclose(whole, each, rel_tol=REPEATS):
        raise ProgramError(
            f"{places[0]}: a forward pass sets torch's seed and then draws for each sample, the "
            "same in each step, which it would not be here: what is drawn for a sample follows "
            "from the job's seed, the step and the sample; leave the seed out, or draw once for "
            "all samples"
        )


@contextmanager
def _clock(later_s: float) -> Iterator[None]:
    """Python's clocks, so many seconds later; also by names that files of the program's own have
    for them (`from time import time`)."""
    own = [(time, name, getattr(time, name)) for name in CLOCKS]
    clocks = [read for _, _, read in own]
    for module in [*sys.modules.values()]:
        if (file := getattr(module, "__file__", None)) and not file.startswith(LIBRARIES):
            named = [*vars(module).items()]
            own += [(module, k, x) for k, x in named if any(x is read for read in clocks)]
    for module, name, read in own:
        setattr(module, name, partial(_later_time, read, later_s))
    try:
        yield
    finally:
        for module, name, read in own:
            setattr(module, name, read)


def _later_time(read: Callable[[], float], later_s: float) -> float:
    return read() + later_s
