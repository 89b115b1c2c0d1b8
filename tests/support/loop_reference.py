"""A script that enters elastic.loop, trained in one process with plain torch: what its resized runs
are measured by.

Its own body computes the loss; batches, gradient scale, clipping and the optimizer step are done
here, not in elastic.worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.reference import collate

from elastic.data.order import sample_ids
from elastic.types import Job, Layout
from elastic.worker.loop.script_host import Script, ScriptSource
from elastic.worker.program.commit import Commit
from elastic.worker.program.extra_state import ExtraState
from elastic.worker.program.loop_program import LoopProgram
from elastic.worker.program.optimizers import by_name


@dataclass(frozen=True)
class ScriptAtLoop:
    """A script that stands before its first batch, and what a session would have made for it."""

    script: Script
    program: LoopProgram
    state: Any
    extra: ExtraState
    steps: int

    @classmethod
    def of(cls, file: Path, args: Sequence[str], seed: int, steps: int) -> ScriptAtLoop:
        script = Script(ScriptSource(str(file), tuple(args), seed), torch.device("cpu"))
        program = script.start()
        model = program.model()
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        extra = ExtraState(program.extra_state)
        boxes = {
            spec.fqn: (None, torch.zeros(spec.shape, dtype=torch.uint8)) for spec in extra.specs()
        }
        extra.fresh(boxes)
        optimizers = SimpleNamespace(each=by_name(program.optimizer(named)))
        profile = SimpleNamespace(optimizers=())
        state = SimpleNamespace(
            step=0, rank=0, optimizers=optimizers, model=model, tensors=boxes, profile=profile
        )
        return cls(script, program, state, extra, steps)

    def begin(self, generation: int = 1) -> None:
        plan: Any = SimpleNamespace(generation=generation, layout=Layout())
        self.script.begin(plan, self.state, Job(steps=self.steps), extra=self.extra)

    def batch(self, step: int, seed: int) -> dict[str, torch.Tensor]:
        dataset = self.program.dataset()
        n = self.program.settings["global_batch"]
        return collate(dataset, sample_ids(len(dataset), n, seed, step=step))


def train_script_alone(file: Path, args: Sequence[str], seed: int, steps: int) -> list[float]:
    """Train loss of each step of an undisturbed run of the script in one process, on the samples in
    elastic's order."""
    at_loop = ScriptAtLoop.of(file, args, seed, steps)
    script, model, each = at_loop.script, at_loop.state.model, at_loop.state.optimizers.each
    at_loop.begin()
    losses = []
    for step in range(steps):
        torch.manual_seed((seed * 1_000_003 + step) * 65_537)
        loss_sum, tokens = map(float, script.compute(at_loop.batch(step, seed), step, 0))
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad /= tokens
        if clip := script.clip_grad_norm or at_loop.program.settings.get("clip_grad_norm"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in each.values():
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss_sum / tokens)
        script.applied(Commit(0.0, loss_sum, float(tokens)), step + 1)
    script.finish(lambda: None, lambda: False)
    return losses
