"""What is kept of each of the newest steps: the running digest of the sample ids, and the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from elastic.data.order import NO_STEP, chained
from elastic.policy.state.layered import with_entry
from elastic.types import Losses, StepDone
from elastic.types.agreement import SKIPPED

V = TypeVar("V")

KEPT_DIGESTS, KEPT_LOSSES = 512, 500


def digested(digests: Mapping[int, str], event: StepDone) -> Mapping[int, str]:
    """Running digests of the sample ids, with the step's; without, where that of the step before is
    not known."""
    if len(digests) >= KEPT_DIGESTS:
        digests = _newer(digests, KEPT_DIGESTS // 2)
    before = digests.get(event.step - 1, NO_STEP if event.step == 1 else None)
    if before is None:
        return digests
    return with_entry(digests, event.step, chained(before, event.step, event.digest))


def with_loss(losses: Losses, done: StepDone) -> Losses:
    """With what is known now: a step that was done before keeps its first loss. Where an update is
    left out that was not before, or the reverse, the steps after it are others."""
    loss = SKIPPED if done.skipped else done.train_loss
    if not done.skipped and not math.isfinite(loss):
        return losses
    known = losses.get(done.step)
    if known is not None and (known[0] == SKIPPED) == done.skipped:
        return losses
    if known is not None:
        losses = {step: kept for step, kept in losses.items() if step < done.step}
    losses = with_entry(losses, done.step, (loss, done.digest, done.generation))
    return _newer(losses, KEPT_LOSSES // 2) if len(losses) > KEPT_LOSSES else losses


def _newer(of: Mapping[int, V], n_older: int) -> dict[int, V]:
    """Without so many of the oldest steps."""
    return {step: of[step] for step in sorted(of)[n_older:]}
