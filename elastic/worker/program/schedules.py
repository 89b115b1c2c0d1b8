"""Learning-rate schedules as functions of the optimizer step: nothing is kept, so a resize or a
roll-back changes nothing.

`step` counts from 0: the factor of the first update is `factor(0)`. Formulas: linear warm-up and
cosine decay as in Loshchilov and Hutter, SGDR (ICLR 2017), equation 5, without restarts; wsd
(warm-up, stable, decay) as in Hu et al., MiniCPM (2024), section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from elastic.types import LrCurve

Factor = Callable[[int], float]


def schedule(given: LrCurve, steps: int) -> Factor:
    """The factor on the optimizer's learning rates, of a job of `steps` steps. `given`: its
    `lr_schedule`."""
    kind, warmup, least = given.kind, given.warmup_steps, given.min_factor
    begin, length = given.decay(steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if kind == "constant" or step < begin:
            return 1.0
        gone = min(1.0, (step - begin) / length) if length > 0 else 1.0
        falling = 0.5 * (1 + math.cos(math.pi * gone)) if kind == "cosine" else 1 - gone
        return least + (1 - least) * falling

    return factor


def scale(rule: str, global_batch: int, base_global_batch: int | None) -> float:
    """Factor on the learning rates for a batch that is larger than the one they were found with.
    linear: Goyal et al. (2017), section 2.1, for SGD; sqrt: Malladi et al., On the SDEs and Scaling
    Rules for Adaptive Gradient Algorithms (2022)."""
    if rule == "none" or base_global_batch is None:
        return 1.0
    ratio = global_batch / base_global_batch
    return math.sqrt(ratio) if rule == "sqrt" else ratio
