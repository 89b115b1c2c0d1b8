"""What a dataset draws while a sample is read follows from seed, step and sample, whoever reads
it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic.data.budget import Microbatch
from elastic.data.collate import collate
from elastic.data.loader import Loader
from elastic.data.loader_processes import Readers
from elastic.data.sample_draws import ALWAYS, FOR_NOTHING, SampleDraws
from elastic.program import load_program
from elastic.types import Job
from elastic.worker.parallel.keyed_draws import from_another

WAYS: dict[str, Callable[[], Any]] = {
    "random": lambda: [random.random(), random.gauss(0, 1), *random.sample(range(99), 3)],
    "numpy": lambda: np.concatenate([np.random.rand(3), np.random.randn(3), np.random.permutation(3)]),
    "rand": lambda: torch.rand(20),
    "randn": lambda: torch.randn(20),
    "randint": lambda: torch.randint(0, 99, (5,)),
    "randint below": lambda: torch.randint(99, (5,)),
    "randperm": lambda: torch.randperm(9),
    "like": lambda: torch.rand_like(torch.ones(3)) + torch.randn_like(torch.ones(3)),
    "in place": lambda: torch.empty(5).uniform_(-1, 1) + torch.empty(5).exponential_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 3),
    "normal": lambda: torch.normal(torch.zeros(4), torch.ones(4)),
    "of a distribution": lambda: torch.distributions.Beta(0.4, 0.4).sample(),
    "init": lambda: torch.nn.init.trunc_normal_(torch.empty(4)),
}  # fmt: skip


class Rows:
    """Draws in one way."""

    def __init__(self, draw: Callable[[], Any] | None, n: int = 40) -> None:
        self.draw, self.n = draw, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, sample: int) -> dict[str, Any]:
        drawn = torch.zeros(1) if self.draw is None else torch.as_tensor(np.asarray(self.draw()))
        return {"drawn": drawn, "input": torch.tensor([sample])}


def drawn(draws: SampleDraws, rows: Rows, sample: int = 5, step: int = ALWAYS) -> list[float]:
    found: list[float] = draws.item(rows, sample, step=step)["drawn"].tolist()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_sample_is_the_same_whoever_reads_it_and_another_in_each_step(way: str) -> None:
    rows, alone, beside = Rows(WAYS[way]), SampleDraws(7), SampleDraws(7, from_another)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    first = drawn(alone, rows, step=3)
    drawn(beside, rows, sample=6, step=3)
    assert drawn(beside, rows, step=3) == first == drawn(alone, rows, step=3)
    others = [
        drawn(SampleDraws(8, from_another), rows, step=3),
        drawn(beside, rows, sample=6, step=3),
        drawn(beside, rows, step=4),
    ]
    assert all(one != first for one in others)
    assert (random.getstate(), str(np.random.get_state())) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_what_draws_nothing_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, draws = Rows(None), SampleDraws(7, from_another)
    assert not draws.draws(rows)
    monkeypatch.setattr(SampleDraws, "_keyed", None)
    assert drawn(draws, rows) == [0.0]


class Few(Rows):
    """Those draw that no trial meets."""

    draws_at = frozenset({5})

    def __getitem__(self, sample: int) -> dict[str, Any]:
        here = Rows(self.draw if sample in self.draws_at else None)
        return here[sample]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("instead", [None, from_another])
def test_a_few_samples_that_draw_are_met_in_their_batch(
    way: str, instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.data.sample_draws.TRIED", 0)
    rows, draws = Few(WAYS[way]), SampleDraws(7, instead)
    assert not draws.draws(rows)

    def read(ids: tuple[int, ...]) -> list[list[float]]:
        batch = draws.batch(rows, Microbatch(ids), collate, step=3)
        return [batch["drawn"].tolist(), batch["input"].flatten().tolist()]

    read((1, 2))
    assert not draws.draws(rows)
    wanted = drawn(SampleDraws(7, instead), Rows(WAYS[way]), step=3)
    first = read((5, 5))
    assert draws.draws(rows) and first == read((5, 5)) == [[wanted, wanted], [5, 5]]


def test_what_the_training_thread_draws_is_none_of_the_dataset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it draws again and again while samples are read, they are keyed, and not read twice
    any more: what draws later is the same in both processes."""
    rows, n_read = Few(WAYS["rand"]), []
    real = Few.__getitem__

    def beside(self: Few, sample: int) -> dict[str, Any]:
        n_read.append(sample)
        thread = threading.Thread(target=torch.rand, args=(1,))
        thread.start()
        thread.join()
        return real(self, sample)

    monkeypatch.setattr("elastic.data.sample_draws.TRIED", 0)
    monkeypatch.setattr(Few, "draws_at", frozenset({7}))
    one, other = SampleDraws(7, from_another), SampleDraws(7, from_another)
    assert not one.draws(rows)
    with monkeypatch.context() as disturbed:
        disturbed.setattr(Few, "__getitem__", beside)
        for _ in range(FOR_NOTHING + 2):
            one.batch(rows, Microbatch((5,)), collate, step=3)
    assert len(n_read) == 2 * FOR_NOTHING + 2
    found = [draws.batch(rows, Microbatch((7,)), collate, step=4) for draws in (one, other)]
    assert torch.equal(found[0]["drawn"], found[1]["drawn"])


def test_a_sample_that_cannot_be_read_says_so_where_it_is_wanted() -> None:
    class Torn(Rows):
        def __getitem__(self, sample: int) -> dict[str, Any]:
            if sample == 0:
                raise ValueError("torn")
            return super().__getitem__(sample)

    draws, rows = SampleDraws(7, from_another), Torn(WAYS["random"])
    assert draws.draws(rows)
    with pytest.raises(ValueError, match="torn"):
        draws.item(rows, 0)


def test_torch_seeded_by_the_dataset_is_seeded_for_it_alone() -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(3)
        return torch.rand(2)

    rows, seed = Rows(draw), torch.initial_seed()
    wanted = torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()
    assert drawn(SampleDraws(7, from_another), rows) == wanted == drawn(SampleDraws(7), rows)
    assert torch.initial_seed() == seed


PROGRAM = """
import random
import numpy as np
import torch, elastic
from torch import nn

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, sample):
        shift = torch.randn(3) + random.random() + np.random.randint(9)
        return {"input": torch.arange(3.0) + sample + shift, "target": torch.tensor([sample % 3])}

program = elastic.Program(
    model=lambda: nn.Linear(3, 3), optimizer=torch.optim.SGD, dataset=Rows, loss=None
)
"""


@pytest.mark.slow
def test_a_thread_and_two_processes_read_the_same_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    rows = load_program(file).dataset()
    readers = Readers(Job(folder=str(tmp_path), program=str(file), seed=7), 2)

    def parts_of_step(step: int) -> list[Microbatch]:
        return [Microbatch((step, step + 1)), Microbatch((step + 2,))]

    def read(steps: list[int], **how: Any) -> dict[int, list[float]]:
        loader = Loader(rows, parts_of_step, steps[0], **how)
        try:
            taken = {step: loader.take(step)[0] for step in steps}
        finally:
            loader.close()
        return {
            step: torch.cat([batch["input"].flatten() for batch in batches]).tolist()
            for step, batches in taken.items()
        }

    try:
        beside = SampleDraws(7, from_another)
        first = read([0, 1, 2, 3], draws=beside)
        assert read([3, 2, 1, 0], draws=beside) == first == read([1, 0, 3, 2], readers=readers)
    finally:
        readers.close()
    assert read([0, 1, 2, 3]) != first
