"""What one pass leaves behind for another, wherever it lies: values of samples, a count of passes,
gradients, weights that a limit has cut; and what the loss takes beside the output."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from elastic.worker.equivalence.compare_values import REPEATS
from elastic.worker.equivalence.forward_trace import Batch, python_random
from elastic.worker.equivalence.no_randomness import Still
from elastic.worker.equivalence.passes.kept_by_passes import (
    AGREE,
    MOST_FLOP,
    ROWS,
    SMALL,
    ModelPasses,
    changed_weights,
    flop_of,
    rows_of,
)
from elastic.worker.equivalence.small_copy import SmallCopy
from elastic.worker.program.calls import call_model, loss_of, mapped

MANY = 32  # passes, after which what comes now and then, or from the 20th on, has come
MANY_FLOP = 3e10  # that are done for them
FAR = 50.0  # from where weights are, and beyond usual limits of a temperature or a scale


def remembers(small: SmallCopy, batch: Batch) -> str:
    """Is the loss of samples another one after passes of others, or after many passes? Buffers are
    as they were each time. '' = no, or it cannot be told; else what is said of it."""
    if small.program.batch_dependent or flop_of(small, batch) * 4 > MOST_FLOP:
        return ""
    one, other = rows_of(batch, 0, ROWS), rows_of(batch, ROWS, 2 * ROWS)
    most = int(MANY_FLOP / flop_of(small, batch))
    try:
        first, then = _losses(small, [one, other])
        other_first, one_then = _losses(small, [other, one])
        many = _losses(small, [one] * min(MANY, most))
    except Exception:  # noqa: BLE001 - the user's model: the layouts tell what it raises
        return ""
    keep = "keep it in buffers of the model (self.register_buffer), which are moved and stored"
    for alone, after in ((first, one_then), (other_first, then)):
        if _differ(alone, after):
            return (
                f"the loss of the same samples is {alone:.6g} in the first pass of a model and "
                f"{after:.6g} after a pass of others: it keeps something of samples outside of its "
                f"buffers, which each rank has other values of, and no new worker gets; {keep}, "
                "and let nothing in them follow from samples"
            )
    for number, value in enumerate(many):
        if _differ(many[0], value):
            return (
                f"the loss of the same samples is {many[0]:.6g} and, in pass {number + 1} over "
                f"them, {value:.6g}: it counts passes outside of its buffers, which no checkpoint "
                f"has and no new worker gets; {keep}"
            )
    return ""


def _losses(small: SmallCopy, batches: Sequence[Batch]) -> list[float]:
    """Of passes of a new model, one after another, each with the buffers of the first."""
    trial = ModelPasses(small, small.anew(small.dtype).train())
    before, found = trial.buffers(), []
    with Still(), python_random(0.999):
        for batch in batches:
            trial.put(before)
            found.append(float(trial.loss(batch).detach()))
    return found


def _differ(one: float, other: float) -> bool:
    return math.isfinite(one) and not math.isclose(one, other, rel_tol=REPEATS)


def gradients_stand(small: SmallCopy, batch: Batch) -> str:
    """Are the gradients of two passes, one after another, others than the sum of those of each? ''
    = no, or it cannot be told; else what is said of it."""
    if flop_of(small, batch) * 4 > MOST_FLOP:
        return ""
    model = small.anew(small.dtype).train(not small.program.batch_dependent)
    trial = ModelPasses(small, model)
    before, found = trial.buffers(), []
    passes = [(0, True), (1, True), (0, True), (1, False)]
    try:
        with Still(), python_random(0.999):
            for i, fresh in passes:
                trial.put(before)
                trial.run(rows_of(batch, ROWS * i, ROWS * (i + 1)), fresh=fresh)
                found.append(_gradients(model))
    except Exception:  # noqa: BLE001 - see above
        return ""
    one, other, _, both = found
    most = max((float(g.abs().max()) for g in both.values() if g.numel()), default=0.0)
    for name in {**one, **other, **both}:
        given = [g[name] for g in (one, other) if name in g]
        whole = both.get(name, torch.zeros_like(given[0]) if given else None)
        if whole is None or not whole.numel():
            continue
        off = float((whole - sum(given, torch.zeros_like(whole))).abs().max())
        size = max(float(whole.abs().max()), SMALL / AGREE * most, 1e-30)
        if off > AGREE * size:
            return (
                f"the gradients of two passes one after another, as of two micro-batches, are not "
                f"the sum of those of each: that of {name} differs by {off / size:.1%} of its "
                "largest element, so something reads or clears `.grad`, where those of other "
                "samples stand; leave that to the training, or keep what it follows in a buffer"
            )
    return ""


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def limits_weights(small: SmallCopy, batch: Batch) -> str:
    """Does a pass write weights that are beyond some limit? '' = no, or it cannot be told; else
    what is said of it."""
    if flop_of(small, batch) * 2 > MOST_FLOP:
        return ""
    for far in (FAR, -FAR):
        model = small.anew(small.dtype).train()
        trial = ModelPasses(small, model)
        with torch.no_grad():
            for p in model.parameters():
                if p.is_floating_point():  # packed weights are bytes, which no pass limits
                    p.add_(far)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        try:
            with Still(), python_random(0.999), torch.no_grad():
                trial.loss(rows_of(batch, 0, ROWS))
        except Exception:  # noqa: BLE001 - a guard of the user's may well raise here
            continue
        if names := changed_weights(model, before):
            return (
                f"where its values are large, forward writes the weight {names[0]}: what it writes "
                "is lost where the weight is cut; compute a value from the weight (clamp) and use "
                "that"
            )
    return ""


def loss_beside(small: SmallCopy, batch: Batch) -> str:
    """Does Program.loss reach weights by something else than the model's output? '' = no, or it
    cannot be told; else what is said of it."""
    program = small.program
    if flop_of(small, batch) * 2 > MOST_FLOP:
        return ""
    given = {key: x.clone() for key, x in rows_of(batch, 0, ROWS).items()}
    try:
        model = small.anew(small.dtype).train(not program.batch_dependent)
        with Still(), python_random(0.999):
            output = mapped(call_model(program, model, given), lambda x: x.detach())
            loss = loss_of(program, output, given)
            if not loss.requires_grad:
                return ""
            loss.backward()
    except Exception:  # noqa: BLE001 - see above
        return ""
    name = next(iter(_gradients(model)), "a tensor that is no parameter of the model")
    return (
        f"Program.loss reaches {name} by something else than the model's output (a global, an "
        "attribute of a module), which is no part of the model that a rank trains: return it from "
        "forward"
    )
