"""Steps are traced while they are trained: on the ranks that were asked for, to the last bit as
without, and a change of generation ends it with a word."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.places import PROGRAMS
from support.worker.plans import live, plan
from support.worker.worker_pool import WAIT_S, Pool

from elastic.storage import LocalStorage
from elastic.types import Layout, RankProfiled, StartProfile, StepDone
from elastic.worker.process_groups.axis_ranges import axis_range, record_ranges
from elastic.worker.profile import step_profile
from elastic.worker.session.generation import Generation

TINY = str(PROGRAMS / "tiny.py")
BATCH, STEPS = 8, 3
ONE_STEP = json.dumps(
    {
        "traceEvents": [
            {
                "ph": "X", "cat": "user_annotation", "name": "elastic.step 4", "pid": 1, "tid": 2,
                "ts": 0.0, "dur": 5.0,
            }
        ]
    }
)  # fmt: skip


def job(steps: int) -> dict[str, Any]:
    return {
        "program": TINY, "steps": steps, "global_batch": BATCH, "seed": 7, "clip_grad_norm": 1.0,
        "eval_samples": 4,
    }  # fmt: skip


def losses(pool: Pool) -> dict[int, float]:
    return {event.step: event.train_loss for event in pool.events(StepDone)}


def trained(pool: Pool, folder: Path, layout: Layout, n: int, *profiles: StartProfile) -> None:
    """`n` steps, of which some are traced: they are ordered before any rank ends its first."""
    pool.open(job(n), folder, n=layout.world_size)
    first = plan(1, layout, pool.workers, BATCH, n_microbatches=layout.pp)
    for worker in first.ranks:
        pool.patch(worker, no_step_yet)
    pool.enter(first)
    pool.entered(1)
    for worker in first.ranks:
        for order in profiles:
            pool.order(worker, order)
        pool.patch(worker, steps_now)
    pool.wait(lambda: len(losses(pool)) == n, f"{n} steps")


may_step = threading.Event()


def no_step_yet() -> None:
    step = Generation.kept = Generation._step  # type: ignore[attr-defined]

    def later(self: Generation, *of: Any) -> Any:
        assert may_step.wait(WAIT_S)
        return step(self, *of)

    may_step.clear()
    Generation._step = later  # type: ignore[method-assign]


def steps_now() -> None:
    Generation._step = Generation.kept  # type: ignore[attr-defined, method-assign]
    may_step.set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (Layout(pp=2), {"pp", "bubble", "commit"}),
        (Layout(tp=2), {"tp", "commit"}),
        (Layout(cp=2), {"fsdp", "cp", "commit"}),
        pytest.param(
            Layout(dp_replicate=2, cp=2),
            {"fsdp", "dp_replicate", "cp", "commit"},
            marks=pytest.mark.whole,
        ),
        pytest.param(Layout(pp=2, tp=2), {"pp", "tp", "bubble", "commit"}, marks=pytest.mark.whole),
        pytest.param(Layout(dp_shard=4), {"fsdp", "commit"}, marks=pytest.mark.whole),
        pytest.param(Layout(cp=2, dp_shard=2), {"fsdp", "cp", "commit"}, marks=pytest.mark.whole),
    ],
    ids=lambda given: str(given) if isinstance(given, Layout) else "axes",
)
def test_every_rank_says_where_its_steps_went(
    pool: Pool, tmp_path: Path, layout: Layout, axes: set[str]
) -> None:
    order = StartProfile(1, "one", STEPS, (0, 1, 2, 3), 1)
    trained(pool, tmp_path / "run", layout, STEPS + 2, order)
    pool.wait(lambda: len(pool.events(RankProfiled)) == layout.world_size, "traces")
    for event in pool.events(RankProfiled):
        assert (event.error, event.n_steps) == ("", STEPS), event
        place = tmp_path / "run" / "profiles" / "one" / f"rank-{event.rank}"
        said = json.loads(place.with_suffix(".json").read_text())
        assert said["steps"] == [event.first_step + n for n in (1, 2, 3)]
        assert sum(said["parts"].values()) == pytest.approx(said["step_s"], rel=1e-6)
        assert {"compute", "optimizer", *axes} <= set(said["parts"])
        assert "other ranks" not in said["parts"]
        trace = json.loads(gzip.decompress(Path(f"{place}.trace.json.gz").read_bytes()))
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"elastic.commit", "elastic.data", "elastic.optimizer", "where the time goes"} <= {
            *names,
            *(event.get("args", {}).get("name") for event in trace["traceEvents"]),
        }


@pytest.mark.slow
def test_steps_are_traced_without_a_difference_to_the_last_bit(pool: Pool, tmp_path: Path) -> None:
    """Two profiles, one after the other; an id that comes again is known."""
    layout, n = Layout(pp=2), 8
    trained(pool, tmp_path / "without", layout, n)
    undisturbed = losses(pool)
    orders = [StartProfile(1, "one", STEPS, (0, 1), at) for at in (1, 4)]
    trained(pool, tmp_path / "with", layout, n, *orders)
    pool.wait(lambda: len(pool.events(RankProfiled)) == 2, "two traces")
    assert losses(pool) == undisturbed
    assert {event.rank: event.error for event in pool.events(RankProfiled)} == {0: "", 1: ""}
    files = sorted(path.name for path in (tmp_path / "with/profiles/one").iterdir())
    assert files == ["rank-0.json", "rank-0.trace.json.gz", "rank-1.json", "rank-1.trace.json.gz"]
    assert not (tmp_path / "without/profiles").exists()


@pytest.mark.slow
def test_a_generation_that_is_left_ends_its_profile_with_a_word(pool: Pool, tmp_path: Path) -> None:
    """One that is traced, and one whose steps have not come; the next generation can be traced."""
    pool.open(job(100_000), tmp_path / "run", n=2)
    first = plan(1, Layout(dp_shard=2), pool.workers, BATCH)
    pool.enter(first)
    pool.entered(1)
    for worker in first.ranks:
        pool.order(worker, StartProfile(1, "long", 90_000, (0,), 1))
        pool.order(worker, StartProfile(7, "of another generation", 3, (0,), 1))
    pool.order(first.ranks[1], StartProfile(1, "far away", 3, (1,), 90_000))
    pool.wait(lambda: len(losses(pool)) > 3, "steps that are traced")
    second = plan(2, Layout(dp_replicate=2), pool.workers, BATCH, resume=live(first))
    pool.enter(second)
    pool.entered(2)
    told = {event.profile_id: event for event in pool.events(RankProfiled)}
    assert {name: event.rank for name, event in told.items()} == {"long": 0, "far away": 1}
    assert all("left before the steps were done" in event.error for event in told.values())
    for worker in second.ranks:
        pool.order(worker, StartProfile(2, "next", STEPS, (0, 1), 1))
    done = lambda: [e for e in pool.events(RankProfiled) if e.profile_id == "next"]  # noqa: E731
    pool.wait(lambda: len(done()) == 2, "the traces of the next generation")
    assert [event.error for event in done()] == ["", ""]


@pytest.mark.slow
def test_a_program_that_traces_itself_is_told_of(pool: Pool, tmp_path: Path) -> None:
    pool.open(job(100_000), tmp_path / "run", n=2)
    first = plan(1, Layout(dp_shard=2), pool.workers, BATCH)
    pool.patch(first.ranks[0], a_profiler_that_does_not_start)
    pool.enter(first)
    pool.entered(1)
    for worker in first.ranks:
        pool.order(worker, StartProfile(1, "one", STEPS, (0, 1), 1))
    pool.wait(lambda: len(pool.events(RankProfiled)) == 2, "a word of both")
    pool.patch(first.ranks[0], a_profiler_that_starts)
    told = {event.rank: event.error for event in pool.events(RankProfiled)}
    assert told == {0: "torch.profiler does not start: there is one", 1: ""}


def a_profiler_that_does_not_start() -> None:
    def refuse(self: Any) -> None:
        raise RuntimeError("there is one")

    step_profile.profile.kept = step_profile.profile.start  # type: ignore[attr-defined]
    step_profile.profile.start = refuse  # type: ignore[method-assign]


def a_profiler_that_starts() -> None:
    step_profile.profile.start = step_profile.profile.kept  # type: ignore[attr-defined, method-assign]


def test_traced_steps_and_the_one_behind_them_tell_nothing_on_any_rank() -> None:
    for ranks in ((0,), (1,)):
        outlets: Any = None  # nothing is traced here
        of = step_profile.TracedRank(0, "a/0", "", torch.device("cpu"))
        profile = step_profile.StepProfile(of, outlets)
        assert not any(profile.disturbs(step) for step in range(100))
        profile.ask(StartProfile(1, "one", 3, ranks, 10))
        assert [step for step in range(100) if profile.disturbs(step)] == [11, 12, 13, 14]
        profile.ask(StartProfile(1, "one", 3, ranks, 50))
        assert not profile.disturbs(51), "that id is known"


def test_a_script_on_a_cpu_is_not_traced_and_says_why(tmp_path: Path) -> None:
    told: list[RankProfiled] = []
    outlets = step_profile.ProfileOutlets(
        LocalStorage(tmp_path), told.append, lambda *work: None, lambda phase, step: None
    )
    of = step_profile.TracedRank(0, "a/0", "", torch.device("cpu"), refused="it is a script")
    profile = step_profile.StepProfile(of, outlets)
    profile.ask(StartProfile(1, "one", 3, (0,), 10))
    for step in range(9, 20):
        with profile.step(step):
            pass
    profile.close()
    assert told == [RankProfiled(1, "one", 0, error="it is a script")]


def test_ranges_are_recorded_only_while_a_profile_is_on() -> None:
    assert axis_range("commit") is axis_range("data"), "nothing is made"
    end = record_ranges(torch.device("cpu"))
    try:
        assert axis_range("commit") is not axis_range("commit")
    finally:
        end()
    assert axis_range("commit") is axis_range("data")


@pytest.mark.parametrize(
    ("written", "device", "why"),
    [
        ("{", "cpu", "JSONDecodeError"),
        ('{"traceEvents": []}', "cpu", "no whole step is in the trace"),
        (ONE_STEP, "cuda", "no kernel is in it, so CUPTI may not look at this GPU"),
        (ONE_STEP, "cpu", ""),
    ],
)
def test_a_trace_that_says_nothing_is_an_error_of_its_rank(
    tmp_path: Path, written: str, device: str, why: str
) -> None:
    told: list[RankProfiled] = []
    outlets = step_profile.ProfileOutlets(
        LocalStorage(tmp_path), told.append, lambda *work: None, lambda phase, step: None
    )
    of = step_profile.TracedRank(0, "a/0", "", torch.device(device))
    running: Any = SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text(written))
    step_profile.StepProfile(of, outlets)._write(running, RankProfiled(1, "one", 0, 3, 1))
    (event,) = told
    assert why in event.error and bool(why) == bool(event.error)
    assert (tmp_path / "profiles/one/rank-0.json").exists() == (not why)
