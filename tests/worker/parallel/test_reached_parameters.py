"""Experts that one rank's tokens never come to: their gradients are zeros there, and experts that
nobody's tokens come to have none, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.worker.chain import job_of
from support.worker.ranks import meeting, on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elastic.program import Program
from elastic.types import Job, Layout, Plan, WorkerId, parse_layout
from elastic.types.grid import coordinates
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.commit import Commit
from elastic.worker.program.model_profile import trace
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.commit_vector import CommitFields
from elastic.worker.step.optimizer_step import Stepper

N, EACH, D, STEPS = 5, 3, 8, 2
# experts of the tokens of each sample of a step: nobody's come to the last of five
CHOSEN = torch.tensor([[[0, 2], [0, 3], [1, 3], [0, 3]], [[3, 3], [2, 2], [0, 1], [1, 1]]])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.experts = nn.ModuleList(nn.Linear(D, D, bias=i % 2 == 0) for i in range(N))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        h, y = self.norm(x), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)
            if rows[0].numel():
                y[rows] = expert(h[rows])
        return x + y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(N * EACH, D)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head, self.unused = nn.Linear(D, N * EACH), nn.Linear(D, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, ids // EACH)
        found: torch.Tensor = self.head(x)
        return found


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for _, p in named], lr=0.05, weight_decay=0.5)


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["target"].flatten(), reduction="sum")


PROGRAM = Program(model=Net, optimizer=adamw, loss=loss)


def batch_of(step: int, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    ids = CHOSEN[step] * EACH + torch.arange(4)[:, None] % EACH
    return {"input": ids[rows], "target": ids.flip(1)[rows]}


def alone() -> dict[str, torch.Tensor]:
    """Plain torch in one process."""
    torch.manual_seed(7)
    model = Net()
    optimizer = adamw(list(model.named_parameters()))
    for step in range(STEPS):
        batch = batch_of(step)
        (loss(model(batch["input"]), batch) / batch["target"].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def stepper_of(groups: Groups, rank: int, n_microbatches: int, **more: Any) -> Stepper:
    layout = groups.layout
    given = job_of("tiny.py", STEPS, 4) | {"n_samples": 8, "clip_grad_norm": None} | more
    job, layers = Job.from_plain(given), (2,)
    state = TrainState(
        PROGRAM, trace(PROGRAM), groups, layout=layout, layers=layers, rank=rank, job=job
    )
    state.fill_fresh(7)
    workers = tuple(WorkerId("node", i) for i in range(layout.world_size))
    shares = (4 // layout.dp,) * layout.dp
    plan = Plan(1, layout, workers, shares, layers, n_microbatches)
    return Stepper(PROGRAM, job, plan, state=state, groups=groups)


def trained(
    rank: int, n: int, store: tuple[str, int], text: str, n_microbatches: int, how: str
) -> dict[str, Any]:
    """The whole parameters after some steps."""
    torch.set_num_threads(1)
    if how == "before 2.13":
        del FSDPModule.set_reduce_scatter_unused_params
    few_bits = how == "bfloat16"
    groups = Groups(1, parse_layout(text), torch.device("cpu"), fsdp=few_bits)
    groups.join(meeting(n, store[1]), rank)
    job = {"precision": "bfloat16"} if few_bits else {}
    stepper = stepper_of(groups, rank, n_microbatches, **job)
    dp = coordinates(groups.layout, rank).dp(groups.layout)
    mine, n_unreached = slice(dp * 4 // n, (dp + 1) * 4 // n), []
    for step in range(STEPS):
        heard = stepper.run([batch_of(step, mine)], CommitFields())
        assert Commit.of(heard.commit.numbers) == heard.commit
        n_unreached.append(len(heard.commit.unreached))
    whole = {
        fqn: (p.full_tensor() if isinstance(p, DTensor) else p).detach().tolist()
        for fqn, p in stepper.state.parameters.items()
    }
    return {"whole": whole, "unreached": n_unreached}


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["float32", "before 2.13", "bfloat16"])
@pytest.mark.parametrize(
    ("layout", "n_microbatches"),
    [
        ("dp_shard=2", 1),
        ("dp_shard=2,zero_stage=1", 2),
        ("dp_replicate=2", 2),
        ("dp_replicate=2,dp_shard=2", 1),
        ("dp_shard=2,activation_checkpointing=full", 2),
    ],
)
def test_ranks_whose_tokens_come_to_other_experts_train_as_one_process(
    layout: str, n_microbatches: int, how: str
) -> None:
    """Of bfloat16 the steps of small gradients are others."""
    want = alone()
    ranks = parse_layout(layout).world_size
    for found in on_ranks(trained, ranks, layout, n_microbatches, how):
        for name, value in want.items():
            if how != "bfloat16" or "unused" in name or ".experts.4." in name:
                torch.testing.assert_close(torch.tensor(found["whole"][name]), value, msg=name)
        # the fifth expert of each block, and what the forward pass leaves out
        assert found["unreached"] == [2 * 2 + 2] * STEPS


def test_what_no_rank_reaches_is_not_stepped() -> None:
    """Nor decayed; what another rank reaches is."""
    groups = Groups(0, Layout(dp_shard=2), torch.device("cpu"))
    groups.pretend(0)
    try:
        stepper = stepper_of(groups, 0, 1)
        reached = stepper.state.reached
        reached.begin()
        stepper.forward_backward([batch_of(0, slice(2))], train=True)
        gradients = stepper.state.gradients()
        assert set(gradients) == set(reached.names) == set(stepper.state.parameters)
        flags = dict(zip(reached.names, reached.flags, strict=True))
        left = {fqn for fqn, flag in flags.items() if not flag}
        assert {fqn for fqn in left if "layers.0" in fqn} == {
            "layers.0.experts.1.weight", "layers.0.experts.4.weight", "layers.0.experts.4.bias",
        }  # fmt: skip
        assert {fqn for fqn in left if "layers" not in fqn} == {"unused.weight", "unused.bias"}
        numbers = [i for i, fqn in enumerate(reached.names) if ".4." in fqn]
        kept = reached.without(gradients, numbers)
        assert set(gradients) - set(kept) == {fqn for fqn in reached.names if ".4." in fqn}
        reached.begin()
        assert not any(reached.flags)
    finally:
        groups.close()


def test_a_rank_alone_asks_for_nothing() -> None:
    groups = Groups(0, Layout(), torch.device("cpu"))
    try:
        assert stepper_of(groups, 0, 1).state.reached.names == ()
    finally:
        groups.close()
