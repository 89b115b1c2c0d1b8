"""Bytes that the tokens of a mixture send, as the planner counts them and as the exchange sends
them, for each size of ep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.places import PROGRAMS
from support.reference import build, collate, output_of
from support.worker.chain import job_of

from elastic.models.experts import MixtureOfExperts, share_out
from elastic.planner.cost.memory import Step
from elastic.planner.cost.step_cost import exchanges_of, routed_bytes
from elastic.program import load_program
from elastic.types import Job, Layout
from elastic.worker.parallel.activation_checkpointing import checkpoint_blocks
from elastic.worker.profile.sample_profile import sample_profile

ROWS = 6


def sent(ep: int, checkpointing: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each exchange of tokens of one microbatch on a rank, there and back, its own share
    included. What comes is as much as what goes."""
    found: list[int] = []

    def exchange(into: torch.Tensor, given: torch.Tensor, *_: Any, **__: Any) -> None:
        into.copy_(given)
        if given.is_floating_point():  # not how many rows come
            found.append(given.nbytes)

    program = load_program(PROGRAMS / "tiny_experts.py")
    model = build(program, 7)
    if ep > 1:
        monkeypatch.setattr(dist, "all_to_all_single", exchange)
        monkeypatch.setattr(dist, "get_backend", lambda group: "fake")
        group: Any = SimpleNamespace(size=lambda: ep)
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                share_out(module.experts, group)
                module.experts.to_empty(device="cpu")
                for parameter in module.experts.parameters():
                    torch.nn.init.normal_(parameter, std=0.1)
    checkpoint_blocks(model.layers, checkpointing)  # type: ignore[arg-type]
    batch = collate(program.dataset(), range(ROWS))
    program.loss(output_of(program, model, batch), batch).backward()
    return found


@pytest.mark.parametrize(
    ("ep", "checkpointing"), [(1, "none"), (2, "none"), (4, "none"), (4, "full")]
)
def test_the_planner_counts_what_is_sent(
    ep: int, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed again is sent again."""
    program = load_program(PROGRAMS / "tiny_experts.py")
    job = Job.from_plain(job_of("tiny_experts.py", 4, ROWS * 4))
    sample = sample_profile(program, job, program.dataset()[0])
    assert sample is not None
    layout = Layout(dp_shard=4, ep=ep, activation_checkpointing=checkpointing)
    counted = routed_bytes(sample, layout, Step(1, ROWS, ROWS * 4))
    found = sent(ep, checkpointing, monkeypatch)
    n_blocks = 4
    assert len(found) == (exchanges_of(layout) * n_blocks if ep > 1 else 0)
    assert found == [counted] * len(found)
    assert bool(counted) == (ep > 1)
