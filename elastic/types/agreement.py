"""Which numbers count as equal when two layouts compute the same thing: losses of one sample or of
one step, by the precision that the job computes in. Also what is compared where a step is done
again. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from elastic.types.events import StepDone
from elastic.types.typed_job import Job

TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2, "float8": 5e-2}  # relative
# key of a running job: the type of fewest bits that its model was seen to compute in
COMPUTES_IN = "computes_in"
SMALLEST = 1e-3  # of the numbers that a difference is set in relation to
SKIPPED = math.inf  # stands for the loss of a step whose update was left out

# step -> train_loss, digest of its sample ids, generation
Losses = Mapping[int, tuple[float, str, int]]


def tolerance(job: Job) -> float:
    """Relative difference of two losses that the rounding of this job explains: by its precision,
    and by what its model was seen to compute in (autocast in a block, bfloat16 weights); float32's
    where neither is known."""
    types = ("float32", job.precision, job.computes_in, "float8" if job.float8 else None)
    return max(TOLERANCES.get(str(dtype), 0.0) for dtype in types)


def coarsest(types: Iterable[str]) -> str:
    """That of fewest bits, of names as in TOLERANCES; '' = only float32, or others that are not
    known."""
    found = max(types, key=lambda name: TOLERANCES.get(name, 0.0), default="")
    return found if TOLERANCES.get(found, 0.0) > TOLERANCES["float32"] else ""


def agree(a: float, b: float, tolerance: float) -> bool:
    """Relative to the larger one. What is no number agrees only with what is none either."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return abs(a - b) <= tolerance * max(abs(a), abs(b), SMALLEST)


def repeats(job: Job, draws: bool) -> bool:
    """Has a step that is done again the loss that it had? `draws`: see ModelProfile. Of scripts
    nobody knows."""
    return not (draws or job.script or job.restarted)


def redone_as_before(losses: Losses, done: StepDone, n_redone: int, *, job: Job) -> bool | None:
    """Has the step the loss that it had before, on the same samples? None = it was not done before,
    or nothing can be said. It is the `n_redone`-th in a row that is done again: each adds its own
    rounding errors."""
    if done.step not in losses:
        return None
    before, digest, _ = losses[done.step]
    if (
        done.skipped
        or before == SKIPPED
        or digest != done.digest
        or not math.isfinite(done.train_loss)
    ):
        return None
    return agree(before, done.train_loss, max(1, n_redone) * tolerance(job))
