"""What a run comes to, and one pass of a fresh model over a few samples does not show, in programs
of a few lines."""

from __future__ import annotations

import functools
import re
import time
from time import time as now
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.errors import ProgramError
from elastic.program import Program
from elastic.worker.equivalence.layout_check import OF_A_PROGRAM, _in_one_process
from elastic.worker.equivalence.small_batch import check_samples
from elastic.worker.equivalence.small_copy import ROWS, SmallCopy
from elastic.worker.program.model_profile import trace

pytestmark = pytest.mark.slow
WIDTH, STEP = 6, 16
BATCH = {
    "input": torch.randn(ROWS, 3, WIDTH, generator=torch.Generator().manual_seed(0)),
    "target": torch.arange(ROWS * 3).view(ROWS, 3) % WIDTH,
}


def each(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), batch["target"], reduction="none").sum(1)


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return each(logits, batch).sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.more()

    def more(self) -> None: ...

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.between(F.gelu(self.inner(x))))
        return found


def hardest(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    found = each(logits, batch)
    return found.topk(min(8, len(found))).values.sum()


def cut_off(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return loss(logits, batch).clamp(max=60.0)


def flooded(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    level = 1.2 * batch["target"].numel()
    return (loss(logits, batch) - level).abs() + level


class CentersLater(Net):
    """Its buffer has counted far before anything of it is seen."""

    def more(self) -> None:
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def between(self, x: Tensor) -> Tensor:
        self.passes += 1
        return torch.where(self.passes > 5000, x - x.mean(0, keepdim=True), x)


class WarmsUp(CentersLater):
    """The same for each sample by itself."""

    def between(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x * (self.passes / 1000).clamp(max=1.0)


class ByGroups(Net):
    def between(self, x: Tensor) -> Tensor:
        return torch.cat([p - p.mean(0) if len(p) == 8 else p for p in x.split(8)])


class Cached(Net):
    @functools.cache  # noqa: B019 - what is looked for
    def size(self) -> Tensor:
        return self.head.weight.detach().norm()

    def between(self, x: Tensor) -> Tensor:
        return x / self.size()


class Table(Net):
    """What does not follow from weights may be kept."""

    @functools.cache  # noqa: B019 - what is looked for
    def places(self, n: int) -> Tensor:
        return torch.linspace(0, 1, n)[:, None]

    def between(self, x: Tensor) -> Tensor:
        return x + self.places(x.shape[1]).to(x.dtype)


class Packed(Net):
    """With frozen bytes, as weights of 4 bits are."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)


class CachedBesidePacked(Packed, Cached):
    pass


class Slower(Net):
    began_s = time.time()

    def between(self, x: Tensor) -> Tensor:
        return x * (0.5 if time.time() - self.began_s > 3600 else 1.0)


class ByTurns(Net):
    def between(self, x: Tensor) -> Tensor:
        return x * (0.5 if now() % 3600 < 1800 else 1.0)


class SeededNoise(Net):
    def between(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x + 0.1 * torch.randn_like(x)


class SeededProjection(Net):
    """One for all samples."""

    def between(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x @ torch.randn(WIDTH, WIDTH).to(x.dtype)


def said_of(kind: type[nn.Module] = Net, **more: Any) -> tuple[str, tuple[str, ...]]:
    program = Program(
        model=kind,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        dataset=list,
        **{"loss": loss, **more},
    )
    copy = SmallCopy(program, trace(program))
    return _in_one_process(copy, BATCH, words=OF_A_PROGRAM, n_rows=STEP)


def longest(batch: dict[str, Tensor]) -> int:
    """Places, filled up to the sample with the largest target."""
    return len(batch["target"]) * int(batch["target"].max())


ALL, OTHERS = {"dp", "tp", "pp", "ep", "cp"}, {"dp", "pp", "ep"}


@pytest.mark.parametrize(
    ("kind", "more", "axes", "says"),
    [
        (Net, {"loss": hardest}, OTHERS, f"the loss of {STEP} samples, as a step has them, is"),
        (Net, {"loss": cut_off}, OTHERS, f"the loss of {STEP} samples, as a step has them, is 60"),
        (ByGroups, {}, OTHERS, f"the loss of {STEP} samples, as a step has them, is"),
        (Net, {"loss": flooded}, OTHERS, rf"after \d+ steps of training the loss of {ROWS} sampl"),
        (CentersLater, {}, OTHERS, r"where its buffer passes has counted 10,000 passes, the loss"),
        (Net, {"count": longest}, OTHERS, rf"Program.count of {ROWS} samples is 20, that of the"),
        (Cached, {}, ALL, "where a pass with other weights came before: it keeps what it has"),
        (CachedBesidePacked, {}, ALL, "where a pass with other weights came before: it keeps what"),
        (Slower, {}, ALL, "a day later, .*: it follows from the clock"),
        (ByTurns, {}, ALL, "a day later, .*: it follows from the clock"),
    ],
)
def test_what_a_run_comes_to_is_named(
    kind: type[nn.Module], more: dict[str, Any], axes: set[str], says: str
) -> None:
    why, closed = said_of(kind, **more)
    assert re.search(says, why) and set(closed) == axes, why


@pytest.mark.parametrize("kind", [Net, WarmsUp, Table, SeededProjection, Packed])
def test_what_each_sample_has_alone_stays_open(kind: type[nn.Module]) -> None:
    assert said_of(kind)[0] == ""


def test_noise_of_a_seed_that_a_pass_sets_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"test_over_a_run.py:\d+: a forward pass sets torch's"):
        said_of(SeededNoise)


@pytest.mark.parametrize("more", [{"loss": hardest}, {"count": longest}])
def test_what_is_wanted_is_taken(more: dict[str, Any]) -> None:
    assert said_of(batch_dependent=True, **more)[0] == ""


class Samples:
    """Augmented at random, which is no reason, and counted, which nothing follows from."""

    given = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.given += 1
        return {"input": torch.full((3,), float(index + self.more())) + torch.rand(3)}

    def more(self) -> int:
        return 0


class Harder(Samples):
    """By thousands of reads."""

    def more(self) -> int:
        return self.given // 5000


class OneByOne(Samples):
    """It reads its file on, whatever is asked for."""

    def __init__(self) -> None:
        self.lines = iter(range(10_000))

    def more(self) -> int:
        return next(self.lines)


class OfItsOwn(Samples):
    """The first sample is nothing but zeros, whatever is drawn."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": torch.full((3,), float(index)) * self.rng.uniform()}


class Cached(Samples):
    """`seeded`: what it keeps follows from the sample."""

    def __init__(self, seeded: bool) -> None:
        self.kept, self.seeded = {0: torch.zeros(3)}, seeded  # the first was read by somebody

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index not in self.kept:
            if self.seeded:
                torch.manual_seed(index)
            self.kept[index] = torch.rand(3)
        return {"input": self.kept[index]}


class Gaps(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": torch.tensor([float(index), float("nan")])}


def test_a_dataset_that_keeps_what_it_drew_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"sample \d+ of the dataset draws .* and keeps them"):
        check_samples(Cached(seeded=False))
    check_samples(Cached(seeded=True))
    check_samples(Gaps())


def test_a_generator_of_the_datasets_own_is_refused_of_any_sample() -> None:
    with pytest.raises(ProgramError, match=r"a generator of its own .* seed a generator"):
        check_samples(OfItsOwn())


def test_a_dataset_whose_samples_follow_from_reads_is_refused() -> None:
    check_samples(Samples())
    with pytest.raises(ProgramError, match=r"after others have been read \(it counts by given\)"):
        check_samples(Harder())
    with pytest.raises(ProgramError, match="sample 0 of the dataset is another one after"):
        check_samples(OneByOne())
    state = torch.get_rng_state()
    check_samples(dataset := Samples())
    assert torch.equal(torch.get_rng_state(), state) and dataset.given < 100
