"""Models that draw in their forward pass: a run that is resized follows the one that is not, and
what cannot be so is told by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.places import PROGRAMS
from support.worker.chain import job_of, pass_through
from support.worker.host_reads import HostReads
from support.worker.ranks import on_ranks
from support.worker.worker_pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

import elastic
from elastic.models.experts import Experts, MixtureOfExperts
from elastic.program import load_program
from elastic.types import Layout
from elastic.types.grid import Coordinates
from elastic.worker.equivalence.draw_trial import try_draws
from elastic.worker.equivalence.stages.unit_flow import with_flow
from elastic.worker.equivalence.structure import structure_of
from elastic.worker.parallel.activation_checkpointing import checkpoint_blocks
from elastic.worker.parallel.keyed_draws import KeyedDraws, row_keys
from elastic.worker.parallel.keyed_numbers import Distribution, uniform
from elastic.worker.parallel.pipeline import cut_stage
from elastic.worker.parallel.stages.carried_values import MODEL_INPUT
from elastic.worker.program.model_profile import trace

AT = Coordinates(0, 0, 0, 0, 0)
SEQ, D = 6, 4
IDS = [31, 7, 12, 400, 5, 8]

# ------------------------------------------------------------------------------- in a chain of cuts


CHAIN = [
    Layout(dp_shard=3),
    Layout(pp=2, activation_checkpointing="full", schedule="interleaved1f1b", virtual_stages=2),
    Layout(cp=2, tp=2, activation_checkpointing="selective"),
    Layout(dp_replicate=2, microbatch_size=2),
]


@pytest.mark.e2e
def test_a_resized_run_follows_the_undisturbed_one(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny_drops.py", steps=14)
    alone = pass_through(pool, job, tmp_path / "one", [Layout()], every=1)
    resized = pass_through(pool, job, tmp_path / "many", CHAIN, every=2)
    assert {e.generation for e in resized} == set(range(1, len(CHAIN) + 1))
    want, got = ([e.train_loss for e in steps] for steps in (alone, resized))
    assert got == pytest.approx(want, rel=1e-5)
    job |= {"steps": 4}
    again = pass_through(pool, job, tmp_path / "again", [Layout()], every=1)
    assert [e.train_loss for e in again] == want[:4]  # to the last bit
    still = pass_through(
        pool, job | {"program": str(PROGRAMS / "tiny.py")}, tmp_path / "still", [Layout()], every=1
    )
    assert [e.train_loss for e in still] != pytest.approx(want[:4], rel=1e-4)


# -------------------------------------------------------------------------------------- in one pass


class Drawing(nn.Module):
    """A network around a function that draws."""

    def __init__(self, draw: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(D, D), nn.Linear(D, D), draw
        self.attend = nn.MultiheadAttention(D, 2, dropout=0.3, batch_first=True)
        self.scan = nn.LSTM(D, D, 2, dropout=0.3, batch_first=True)
        self.noise = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.draw(self, self.up(x)))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda m, x: F.dropout(x, 0.3, m.training),
    "dropout in place": lambda m, x: F.dropout(x * 1, 0.3, m.training, inplace=True),
    "torch.dropout": lambda m, x: torch.dropout(x, 0.3, m.training),
    "dropout1d": lambda m, x: F.dropout1d(x, 0.3, m.training),
    "dropout2d": lambda m, x: F.dropout2d(x[:, :, None], 0.3, m.training)[:, :, 0],
    "dropout3d": lambda m, x: nn.Dropout3d(0.3)(x[:, :, None, None])[:, :, 0, 0],
    "alpha dropout": lambda m, x: F.alpha_dropout(x, 0.3, m.training),
    "feature alpha dropout": lambda m, x: F.feature_alpha_dropout(x, 0.3, m.training),
    "long rows": lambda m, x: F.dropout(x.repeat(1, 1, 100), 0.3, m.training)[..., :D],
    "features": lambda m, x: F.dropout1d(x.transpose(1, 2), 0.3).transpose(1, 2),
    "every other": lambda m, x: F.dropout(x[:, ::2], 0.3).repeat_interleave(2, 1)[:, : x.shape[1]],
    "drop path": lambda m, x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.7),
    "attention": lambda m, x: (
        F.scaled_dot_product_attention(heads(x), heads(x), heads(x), dropout_p=0.3, is_causal=True)
        .transpose(1, 2)
        .flatten(2)
    ),
    "heads in the rows": lambda m, x: m.attend(x, x, x)[0],
    "layers of a recurrence": lambda m, x: m.scan(x)[0],
    "rand": lambda m, x: x * torch.rand(len(x), 1, 1, device=x.device),
    "rand like": lambda m, x: x * torch.rand_like(x, dtype=torch.float64).float(),
    "randn": lambda m, x: x + torch.randn(x.shape, device=x.device),
    "randint": lambda m, x: x * torch.randint(1, 9, (len(x), 1, D), device=x.device),
    "bernoulli": lambda m, x: x * torch.bernoulli(x.sigmoid()),
    "bernoulli of chances": lambda m, x: x * torch.zeros_like(x).bernoulli_(x.sigmoid()),
    "normal": lambda m, x: torch.normal(x.detach(), 0.5) + x,
    "a distribution": lambda m, x: Normal(x, x.sigmoid() + 0.1).rsample(),
    "gumbel": lambda m, x: F.gumbel_softmax(x, dim=-1) + x,
    "uniform": lambda m, x: x * torch.empty_like(x).uniform_(-1.0, 2.0),
    "positions first": lambda m, x: F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1),
    "tokens as rows": lambda m, x: F.dropout(x.flatten(0, 1), 0.3).unflatten(0, (-1, SEQ)),
    "shared by a step": lambda m, x: x * (m.noise * torch.rand(D, device=x.device)),
}


def program_of(draw: Callable[[Any, Tensor], Tensor]) -> elastic.Program:
    return elastic.Program(
        model=lambda: Drawing(draw), loss=lambda output, batch: output.square().sum()
    )


def batch_of(n: int) -> dict[str, Tensor]:
    return {"input": torch.randn(n, SEQ, D, generator=torch.Generator().manual_seed(3))}


def passed(draw: Any, cut: list[int], step: int = 4, seed: int = 1) -> Tensor:
    """Outputs for all samples, in micro-batches of these sizes."""
    program, batch = program_of(draw), batch_of(len(IDS))
    trial = try_draws(program, batch)
    assert not trial.problems
    draws = KeyedDraws(trial)
    torch.manual_seed(0)
    model = draws.of(program).model()
    keys = row_keys(seed, step, [IDS])[0]
    outputs = []
    with draws.step(Layout(), AT):
        for x, some in zip(
            batch["input"].split(cut), torch.arange(len(IDS)).split(cut), strict=True
        ):
            draws.begin([keys[i] for i in some], step, length=SEQ)
            outputs.append(model(x).detach())
    return torch.cat(outputs)


SLOW = {"layers of a recurrence", "heads in the rows"}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way in SLOW else way for way in WAYS]
)
def test_a_sample_draws_the_same_in_any_company(way: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = passed(WAYS[way], [6])
    for cut in ([1] * 6, [4, 2]):
        torch.testing.assert_close(passed(WAYS[way], cut), whole, atol=1e-5, rtol=1e-5)
    assert not caplog.records
    assert torch.equal(passed(WAYS[way], [6]), whole)
    others = passed(WAYS[way], [6], step=5), passed(WAYS[way], [6], seed=2)
    if way != "shared by a step":
        assert not any(torch.allclose(other, whole) for other in others)


def test_places_and_samples_draw_differently_and_as_often_as_they_should() -> None:
    kept = passed(lambda m, x: F.dropout(torch.ones_like(x), 0.25) @ torch.eye(D), [6])
    draws = KeyedDraws(try_draws(program_of(WAYS["dropout"]), batch_of(1)))
    masks = []
    with draws.step(Layout(), AT):
        draws.begin(row_keys(1, 1, [range(40)])[0], 1)
        for name in ("one", "two"):
            masks.append(draws.inside(name, F.dropout, torch.ones(40, 100), 0.25))
            masks.append(draws.inside(name, F.dropout, torch.ones(40, 1000), 0.25)[:, :100])
    rows = torch.cat(masks).gt(0)
    assert len(rows.unique(dim=0)) == len(rows) and len(kept.unique()) > 2
    assert float(rows.float().mean()) == pytest.approx(0.75, abs=0.02)
    together = (rows[:, None] == rows[None]).float().mean(-1)
    together.fill_diagonal_(0.625)
    assert float(together.min()) > 0.4 and float(together.max()) < 0.85  # not one the other's shift


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout((x * 2).exp() * F.dropout(x, 0.4), 0.4).sin()


class Outer(nn.Module):
    """Computes what another module does again, or a function of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.drop = Inner(), how, nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "a function":
            found = checkpoint(
                lambda x: F.dropout(self.drop(x.exp()), 0.4).sin(), x, use_reentrant=False
            )
        elif self.how in ("reentrant", "not reentrant"):
            found = checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")
        else:
            found = self.inner(x)
        return F.dropout(found, 0.1)


def gradient(how: str) -> Tensor:
    program = elastic.Program(
        model=lambda: Outer(how), loss=lambda output, batch: output.square().sum()
    )
    draws = KeyedDraws(try_draws(program, batch_of(1)))
    model = draws.of(program).model()
    if how in ("full", "selective"):
        checkpoint_blocks([model], how)
    x, keys = batch_of(6)["input"].requires_grad_(), row_keys(1, 1, [IDS])[0]
    with draws.step(Layout(), AT):
        outputs = []
        for part in (slice(0, 4), slice(4, 6)):  # both forward passes before a backward pass
            draws.begin(keys[part], 1)
            outputs.append(model(x[part]))
        for output in outputs:
            output.square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("how", ["full", "selective", "reentrant", "not reentrant"])
def test_what_is_computed_again_draws_the_same(how: str) -> None:
    assert torch.equal(gradient(how), gradient("once"))


def test_a_function_that_is_computed_again_is_left_to_torch() -> None:
    """Its gradients are right, and it is told that its numbers are those of a rank."""
    program = elastic.Program(
        model=lambda: Outer("a function"), loss=lambda output, batch: output.square().sum()
    )
    trial = try_draws(program, batch_of(1))
    assert trial.left == ("",)
    (note,) = trial.problems
    assert "checkpoint modules, or draw with one" in note
    torch.manual_seed(3)
    draws = KeyedDraws(trial)
    x = batch_of(2)["input"].requires_grad_()
    with draws.step(Layout(), AT):
        draws.begin([1, 2], 1)
        output = draws.of(program).model()(x)
        output.backward(torch.ones_like(output))
    assert x.grad is not None
    # d sin(m exp(x)) k = cos(m exp(x)) m exp(x) k: 0 where something was dropped, and nowhere else
    assert torch.equal(x.grad.ne(0), output.ne(0))


def on_a_mesh(rank: int, n: int, store: tuple[str, int]) -> list[Any]:
    """What a rank has of draws on tensors that know how they are cut."""
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=n,
        store=dist.TCPStore(*store, is_master=False),  # type: ignore[misc]
    )
    mesh = init_device_mesh("cpu", (n,))
    found = []
    for cut in (Shard(1), Shard(2), Replicate()):
        draws = KeyedDraws(try_draws(program_of(WAYS["dropout"]), batch_of(1)))
        x = distribute_tensor(torch.ones(3, SEQ, D), mesh, [cut])
        with draws.step(Layout(tp=n), Coordinates(0, 0, 0, 0, rank)):
            draws.begin(row_keys(1, 1, [IDS[:3]])[0], 1, length=SEQ)
            drawn = draws.inside("", F.dropout, x, 0.5)
        found.append(drawn.full_tensor().numpy())  # type: ignore[attr-defined]
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_a_tensor_that_knows_how_it_is_cut() -> None:
    draws = KeyedDraws(try_draws(program_of(WAYS["dropout"]), batch_of(1)))
    with draws.step(Layout(), AT):
        draws.begin(row_keys(1, 1, [IDS[:3]])[0], 1, length=SEQ)
        whole = draws.inside("", F.dropout, torch.ones(3, SEQ, D), 0.5).numpy()
    for found in on_ranks(on_a_mesh, 2):
        assert all((one == whole).all() for one in found)


def test_positions_are_told_from_as_many_features(caplog: pytest.LogCaptureFixture) -> None:
    """Samples of the trial have as many positions as features; later ones, of another phase of the
    job, have more."""

    def drawn(way: str, x: Tensor, layout: Layout, *, length: int, tp: int = 0) -> Tensor:
        batch = {"input": torch.randn(1, D, D)}
        draws = KeyedDraws(try_draws(program_of(WAYS[way]), batch))
        assert not draws.trial.problems
        with draws.step(layout, Coordinates(0, 0, 0, tp, tp)):
            draws.begin(row_keys(1, 1, [IDS[:3]])[0], 1, length=length)
            return draws.inside("", partial(WAYS[way], nn.Module()), x)

    long, cut = torch.ones(3, 2 * D, D), torch.ones(3, D // 2, D // 2)
    for way in ("dropout", "dropout1d"):
        whole = drawn(way, long, Layout(), length=2 * D)
        for tp in (0, 1):  # ranks that both have all of it
            assert torch.equal(drawn(way, long, Layout(tp=2), length=2 * D, tp=tp), whole)
    whole = drawn("features", torch.ones(3, D, D), Layout(), length=D)
    for i, half in enumerate(whole.chunk(2, -1)):  # of the features; and all of the positions
        part = drawn("features", cut, Layout(cp=2, tp=2), length=D, tp=i)
        assert torch.equal(part, half[:, : D // 2])
    assert not caplog.records
    drawn("every other", torch.ones(3, D // 2, D), Layout(tp=2), length=D // 2)  # not a half by tp
    assert "a shape that says nothing of its samples" in caplog.text


def test_a_dropout_that_modules_of_several_stages_share() -> None:
    """Each counts its own draws: a stage does not see those of the others."""
    program = load_program(PROGRAMS / "tiny_together.py")
    program = replace(program, optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1))
    data = program.dataset()
    batch = {key: torch.stack([data[i][key] for i in range(4)]) for key in data[0]}
    draws = KeyedDraws(try_draws(program, batch))
    assert not draws.trial.problems
    keyed, keys = draws.of(program), row_keys(1, 1, [IDS[:4]])[0]
    profile = with_flow(program, trace(program), {key: x[:1] for key, x in batch.items()})

    def passed(model: nn.Module, *given: Tensor, **more: Tensor) -> Any:
        with draws.step(Layout(), AT):
            draws.begin(keys, 1)
            return model(*given, ids=batch["ids"], **more)

    def built() -> nn.Module:
        torch.manual_seed(0)
        return keyed.model().train()

    given: Any = (batch["input"],)
    for stage in range(3):
        part = cut_stage(built(), keyed, profile, layers=(2, 2, 2), stage=stage)
        given = passed(part, *given, **{MODEL_INPUT: batch["input"]})
    torch.testing.assert_close(given, passed(built(), batch["input"]))


# ---------------------------------------------------------------------------- what is not, and cannot


def test_what_draws_nothing_is_left_alone() -> None:
    program = load_program(PROGRAMS / "tiny.py")
    trial = try_draws(program, {k: v[None] for k, v in program.dataset()[0].items()})
    assert trial.modules == () and not trial.problems
    quiet = replace(program_of(lambda m, x: F.dropout(x, 0.0)))
    assert try_draws(quiet, batch_of(1)).modules == ()


CANNOT: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "an order": (
        lambda m, x: x[torch.randperm(len(x))],
        "by an operation that is not known to draw sample by sample",
    ),
    "a generator": (
        lambda m, x: x * torch.rand(len(x), 1, 1, generator=torch.Generator(), device="cpu"),
        "from a generator of its own",
    ),
    "a loop": (
        lambda m, x: torch.stack([F.dropout(one, 0.1) for one in x]),
        "as often as there are samples",
    ),
    "a square": (
        lambda m, x: x * torch.rand(len(x), len(x), device=x.device).sum(),
        "a shape that says nothing of the samples",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_keyed_is_told_by_name(name: str) -> None:
    draw, why = CANNOT[name]
    program = program_of(draw)
    found = structure_of(program, trace(program), batch_of(1))
    assert found.draws
    (note,) = [note for note in found.notes if why in note]
    assert note.startswith("forward (test_keyed_draws.py:") and "each layout draws others" in note


def test_draws_inside_of_experts_close_ep_and_are_told() -> None:
    """Tokens stand there in the order of their experts, not of the samples."""

    class Dropping(Experts):
        def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return F.dropout(super().forward(hidden, index, weights), 0.5, self.training)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([MixtureOfExperts(D, 8, 4, top_k=2)])
            self.layers[0].experts = Dropping(D, 8, 4)
            self.last = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layers[0](x))

    program = elastic.Program(
        model=Mixed, loss=lambda output, batch: output.square().sum(), blocks="layers.*"
    )
    found = structure_of(program, trace(program), batch_of(1))
    assert found.no_ep.startswith("layers.0.experts draws random numbers")
    (note,) = [note for note in found.notes if "draws (" in note]
    assert "in the order of their experts" in note


def test_what_is_keyed_is_no_reason_to_say_something() -> None:
    program = program_of(WAYS["dropout"])
    found = structure_of(program, trace(program), batch_of(1))
    assert not found.draws and not found.notes


def test_names_stay_and_so_does_evaluation() -> None:
    program = program_of(WAYS["dropout"])
    draws = KeyedDraws(try_draws(program, batch_of(1)))
    plain, keyed = program.model(), draws.of(program).model()
    keyed.load_state_dict(plain.state_dict())
    x = batch_of(2)["input"]
    assert torch.equal(plain.eval()(x), keyed.eval()(x))
    torch.manual_seed(5)
    once = plain.train()(x)
    torch.manual_seed(5)
    assert torch.equal(keyed.train()(x), once)  # outside of a step torch draws as ever


def test_keys_go_to_a_gpu_without_waiting_for_it() -> None:
    device = torch.device("cpu")
    with HostReads([]) as reads:
        rows = torch.empty(3, 8, device=device)
        Distribution("bernoulli_", (0.5,)).fill(rows, [4, 5, 6])
    assert not reads.seen
    assert torch.equal(rows, (uniform([4, 5, 6], 8, device) < 0.5).float())
