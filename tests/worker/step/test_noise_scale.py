"""The gradient noise scale: unbiased, the same from every layout, and told with its uncertainty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference import Reference, collate, train
from support.worker.chain import job_of
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool

from elastic.data.order import sample_ids
from elastic.observe.noise_advice import NoiseScale, advice, estimate
from elastic.program import load_program
from elastic.types import Layout, ModelProfile, NoiseSeen, Plan, StepDone, TensorSpec, WorkerId
from elastic.worker.step.gradient_noise import cannot, noise, parts_of


def drawn(parts: list[int], generator: torch.Generator, n: int = 1) -> list[tuple[float, float]]:
    """`n` times of gradients with mean 0.1 and standard deviation 2 in each of 50 dimensions: trace
    200, square norm 0.5."""
    sizes = torch.tensor(parts, dtype=torch.float64)[:, None]
    sums = sizes * 0.1 + 2.0 * sizes.sqrt() * torch.randn(
        n, len(parts), 50, generator=generator, dtype=torch.float64
    )
    small, whole = sums.square().sum((1, 2)), sums.sum(1).square().sum(1)
    return [noise(a, b, parts) for a, b in zip(small.tolist(), whole.tolist(), strict=True)]


def test_estimates_are_unbiased_also_with_unequal_parts() -> None:
    generator = torch.Generator().manual_seed(3)
    for parts in ([16, 16, 16, 16], [40, 8, 8, 8], [1] * 64):
        rows = drawn(parts, generator, 4000)
        trace, square = (sum(column) / len(rows) for column in zip(*rows, strict=True))
        assert trace == pytest.approx(200, rel=0.03), parts
        assert square == pytest.approx(0.5, rel=0.15), parts


def test_the_report_says_how_sure_it_is() -> None:
    generator = torch.Generator().manual_seed(4)
    measured = dict(enumerate(drawn([64] * 8, generator, 120), 1))
    found = estimate(measured)
    assert found and found.n_steps == 100 and found.samples and found.low and found.high
    assert found.low < 400 < found.high and found.high / found.low < 2.5
    assert estimate({step: measured[step] for step in range(1, 10)}) is None, (
        "nine steps say nothing"
    )
    lost = estimate({step: (1.0, (-1.0) ** step) for step in range(1, 40)})
    assert lost == NoiseScale(None, None, None, 39)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (NoiseScale(400.0, 300.0, 530.0, 50),
        "(300 to 530, from 50 steps): a batch larger than 64 would need fewer"), (NoiseScale(10.0,
        8.0, 12.0, 50), "a batch of 64 spends more samples than it saves steps"), (NoiseScale(60.0,
        40.0, 90.0, 50), "the batch of 64 is about right"), (NoiseScale(None, None, None, 12),
        "the gradient cannot be told from noise in 12 steps"),
    ],
)  # fmt: skip
def test_advice(found: NoiseScale, said: str) -> None:
    assert said in advice(found, 64)


def test_layouts_that_give_none_say_why() -> None:
    def why(
        layout: Layout,
        samples: tuple[int, ...],
        n: int = 1,
        tied: str | None = None,
        script: bool = False,
    ) -> str:
        profile = ModelProfile(
            4,
            1,
            (TensorSpec("w", (2, 2), "float32"), TensorSpec("h", (2, 2), "float32", tied_to=tied)),
        )
        workers = tuple(WorkerId("n", i) for i in range(layout.world_size))
        return cannot(Plan(1, layout, workers, samples, (4,), n), profile, script)

    assert why(Layout(dp_shard=2), (6, 6)) == "" == why(Layout(), (12,), 2)
    assert "only one batch size" in why(Layout(), (12,)) and "only one" in why(
        Layout(dp_shard=2), (12, 0)
    )
    assert "tp or cp" in why(Layout(tp=2), (12,), 2) and "script" in why(
        Layout(dp_shard=2), (6, 6), script=True
    )
    assert "tied" in why(Layout(pp=2), (12,), 2, tied="w") and why(Layout(pp=2), (12,), 2) == ""
    assert parts_of((7, 4), (2, 2)) == [4, 3, 2, 2]


STEPS = 8


def by_hand(
    run: Reference, program: Any, job: dict[str, Any], step: int, parts: list[int]
) -> tuple[float, float]:
    """From one backward pass for each part, on a plain model."""
    ids, dataset = sample_ids(512, 12, job["seed"], step=step), program.dataset()
    grads, at = [], 0
    for n in parts:
        batch = collate(dataset, ids[at : at + n])
        found = torch.autograd.grad(
            program.loss(run.model(batch["input"]), batch), list(run.model.parameters())
        )
        grads.append(torch.cat([g.flatten().double() for g in found]))
        at += n
    small = sum(float(g.square().sum()) for g in grads)
    return noise(small, float(torch.stack(grads).sum(0).square().sum()), parts)


@pytest.mark.e2e
def test_what_is_measured_is_what_one_process_finds_part_by_part(
    pool: Pool, tmp_path: Path
) -> None:
    """Shards, and replicas of pipelines of four microbatches, with a live change between them."""
    job = job_of("tiny.py", STEPS) | {"noise_scale": {"every": 2}}
    workers = pool.open(job, tmp_path)
    plans = [plan(1, Layout(dp_shard=3), workers, 12)]
    pool.enter(plans[0])
    pool.wait(lambda: any(e.step >= 2 for e in pool.events(StepDone)), "step 2")
    plans.append(plan(2, Layout(pp=2, dp_replicate=2), workers, 12, resume=live(plans[0])))
    pool.enter(plans[1])
    pool.quiesced(2, 4)
    seen = {e.step: e for e in pool.events(NoiseSeen)}
    assert sorted(seen) == [2, 4, 6, 8] and {e.generation for e in seen.values()} == {1, 2}
    program = load_program(job["program"])

    def compare(done: int, run: Reference) -> None:
        event = seen.get(done + 1)
        if event is not None:
            used = plans[event.generation - 1]
            wanted = by_hand(
                run,
                program,
                job,
                done,
                parts_of(used.samples, (used.n_microbatches,) * len(used.samples)),
            )
            assert (event.trace, event.square_norm) == pytest.approx(wanted, rel=2e-3)

    train(program, job, STEPS, compare)
