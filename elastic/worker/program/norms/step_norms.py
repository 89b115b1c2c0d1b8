"""The BatchNorms of one rank's models in a step: whose samples a pass is of, and the running
statistics when all passes are done.

They are updated group by group in the order of the step, as one process would that passes one group
after another: momentum m gives group i of n the weight m (1 - m)^(n - 1 - i). So each rank adds up
its groups in float64, one all-reduce over the data-parallel ranks adds these sums, and every rank
has the same. A step that is not committed takes it back with all other buffers (state.buffers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.errors import ProgramError
from elastic.worker.program.calls import ModelCall, ModelCalls
from elastic.worker.program.norms.batch_norms import NormPass, StepNorm, StepPasses, norms_of


class StepNorms:
    """`groups`: of the data-parallel ranks, the innermost first."""

    def __init__(self, models: Sequence[nn.Module], groups: Sequence[dist.ProcessGroup]) -> None:
        self.norms, self.groups = norms_of(models), [g for g in groups if g.size() > 1]
        by_step = any(not norm.group for norm in self.norms)
        self.passes = StepPasses(over=self.groups if by_step else ())
        for norm in self.norms:
            norm.step = self.passes

    def begin(self) -> None:
        """A step."""
        for norm in self.norms:
            norm.noted.clear()

    @contextmanager
    def passing(self, rows: range) -> Iterator[None]:
        """A forward pass of these samples of this rank; what is computed again for a backward pass
        is none."""
        self.passes.now = NormPass(rows.start, len(rows))
        try:
            yield
        finally:
            self.passes.now = None

    def of_call(self, call: ModelCall) -> AbstractContextManager[None]:
        """A script's call of its model."""
        evaluates = call.evaluates and not any(norm.module.training for norm in self.norms)
        if not self.norms or evaluates:
            return nullcontext()
        if call.rows is None:
            raise ProgramError(
                f"run.model was called with {call.n} samples behind {call.first} of {call.n_rows}; "
                "with BatchNorm call it with the whole batch, or with parts of it in their order"
            )
        return self.passing(call.rows)

    def check_all(self, calls: ModelCalls) -> None:
        """Of a script's step. Raises ProgramError where samples are missing."""
        if self.norms and calls.first:
            raise ProgramError(
                f"run.model was called with {calls.first} of the {calls.n_rows} samples of the "
                "batch; with BatchNorm call it with all of them"
            )

    @torch.no_grad()
    def update(self, first: int, n_samples: int) -> None:
        """All passes of the step are done, of `n_samples` on all ranks; `first`: that of this
        rank."""
        tracked = [norm for norm in self.norms if norm.module.running_mean is not None]
        if not tracked:
            return
        shares = [_share(norm, first, n_samples) for norm in tracked]
        added = torch.cat([share.added for share in shares])
        if not self.passes.over:
            for group in self.groups:
                dist.all_reduce(added, group=group)
        parts = iter(added.split([len(share.added) // 2 for share in shares for _ in range(2)]))
        for norm, share in zip(tracked, shares, strict=True):
            for running in (norm.module.running_mean, norm.module.running_var):
                assert running is not None
                running.copy_(running.double() * share.decay + next(parts))
            if norm.module.num_batches_tracked is not None:
                norm.module.num_batches_tracked.add_(share.n)


@dataclass(frozen=True)
class _Share:
    """What this rank adds to running statistics, float64 [2 x channels]; what is left of those
    before; how many updates all ranks make together."""

    added: Tensor
    decay: Any
    n: int


def _share(norm: StepNorm, first: int, n_samples: int) -> _Share:
    module, group = norm.module, norm.group
    assert module.running_mean is not None
    added = torch.zeros(
        2 * len(module.running_mean), dtype=torch.float64, device=module.running_mean.device
    )
    seen: Counter[int] = Counter()
    places = []  # of each update among those of a pass, and which pass it is
    for start, mean, _ in norm.noted:
        at = (first + start) // group if group else 0
        places.append([(place, seen[place]) for place in range(at, at + len(mean))])
        seen.update(place for place, _ in places[-1])
    n_calls = max(seen.values(), default=0)
    n = n_calls * (n_samples // group if group else 1)
    if not n:
        return _Share(added, 1.0, 0)
    momentum, before = module.momentum, module.num_batches_tracked
    for here, (_, mean, var) in zip(places, norm.noted, strict=True):
        both = torch.cat([mean, var], 1).double()
        if momentum is not None:
            left = [(1 - momentum) ** (n - 1 - place * n_calls - number) for place, number in here]
            both = both * momentum * both.new_tensor(left)[:, None]
        added += both.sum(0)
    if momentum is not None:
        return _Share(added, (1 - momentum) ** n, n)
    # each update counts as much as any before it
    assert before is not None
    return _Share(added / (before + n), before.double() / (before + n), n)
