"""Does what is drawn for a sample act on others of its batch (an order of random numbers, as mixup
takes it, or their mean)? Each rank would have another batch for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.worker.equivalence.compare_values import double
from elastic.worker.equivalence.forward_trace import Batch, python_random
from elastic.worker.equivalence.no_randomness import Still
from elastic.worker.equivalence.passes.kept_by_passes import MOST_FLOP, ModelPasses, flop_of
from elastic.worker.equivalence.small_copy import SmallCopy
from elastic.worker.program.norms.batch_norms import norms_of

# what is drawn for each row, of what may be: in no order
DRAWN = (0.6, 0.2, 0.9, 0.35, 0.75)
ROWS = len(DRAWN)  # no usual number of channels or heads
AGREES = 1e-4


class DrawnByRow(TorchDispatchMode):
    """Within a Still: draws in a shape that begins with the samples differ from row to row.
    `same`: the number that all rows have, None = each its own."""

    supports_higher_order_operators = True

    def __init__(self, same: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = torch.tensor(DRAWN if same is None else [same] * ROWS, dtype=torch.float64)
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        seeded = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        by_row = isinstance(out, Tensor) and out.ndim > 0 and out.shape[0] == ROWS
        if not seeded or not by_row:
            return out
        name = func.overloadpacket.__name__.removesuffix("_like").removesuffix("_")
        middle = out.flatten()[:1].double()  # Still has filled it
        if name in ("rand", "uniform", "exponential"):
            rows = 2 * middle * self.rows
        elif name in ("randn", "normal"):
            rows = middle + self.rows - 0.5
        elif name in ("randint", "random"):
            rows = (2 * middle * self.rows).floor()
        elif name == "bernoulli":
            rows = (self.rows > 0.5).double()
        else:
            return out
        self.any = True
        return out.copy_(rows.view(-1, *[1] * (out.ndim - 1)).expand_as(out))


def drawn_together(small: SmallCopy, batch: Batch) -> str:
    """'' = no, or it cannot be told; else what is said of it."""
    program = small.program
    if program.batch_dependent or norms_of([small.model]) or flop_of(small, batch) * 5 > MOST_FLOP:
        return ""
    n = len(next(iter(batch.values())))
    rows = [i % n for i in range(ROWS)]
    trial, losses = ModelPasses(small, small.anew(torch.float64).train()), []
    before = trial.buffers()
    tries = [(rows, None), *(([row] * ROWS, DRAWN[i]) for i, row in enumerate(rows))]
    for chosen, same in tries:
        given = double({key: x[chosen] for key, x in batch.items()})
        trial.put(before)
        try:
            with Still(), python_random(0.999), DrawnByRow(same) as drawn, torch.no_grad():
                losses.append(float(trial.loss(given)))
        except Exception:  # noqa: BLE001 - the user's model: the layouts tell what it raises
            return ""
        if not drawn.any or not math.isfinite(losses[-1]):
            return ""
    each = sum(losses[1:]) / ROWS
    if math.isclose(losses[0], each, rel_tol=AGREES):
        return ""
    return (
        f"with random numbers that differ from sample to sample the loss of {ROWS} samples is "
        f"{losses[0]:.6g}, that of the same one by one {each:.6g}: what is drawn for a sample acts "
        "on others beside it (an order that is drawn, or a mean of what is drawn); let it act on "
        f"its own sample, or say {program.anyway} to train on all the same"
    )
