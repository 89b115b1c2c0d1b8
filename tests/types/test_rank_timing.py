"""When rank 0 tells of the ranks' speeds, and what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from elastic.types import Layout, ModelProfile, Plan, RanksTimed, Resume, TensorSpec, WorkerId
from elastic.types.rank_timing import RankTimes, times_slower, unlike_stages


def told(unit_s: Callable[[int], Sequence[float]], n: int, step_s: float = 2.0) -> list[RanksTimed]:
    times = RankTimes(7)
    found = [
        times.add(step, unit_s(step), [0.0] * len(unit_s(step)), now_s=step * step_s)
        for step in range(1, n + 1)
    ]
    return [one for one in found if one is not None]


def test_the_first_steps_are_warm_up_and_then_it_is_told_ever_more_rarely() -> None:
    found = told(lambda step: (9.0, 9.0) if step <= 2 else (1.0, 2.0), 60, step_s=0.6)
    assert [one.n_steps for one in found] == [3, 6, 12, 24, 48]
    assert all(one.unit_s == (1.0, 2.0) and one.generation == 7 for one in found)


def test_a_jump_is_told_when_two_of_three_steps_show_it_and_what_was_before_counts_no_more() -> (
    None
):
    found = told(lambda step: (1.0, 1.0 if step <= 20 else 2.0), 23)
    last = found[-1]
    assert (last.step, last.n_steps, last.unit_s) == (22, 3, (1.0, 2.0))


def test_a_single_slow_step_is_no_news() -> None:
    found = told(lambda step: (1.0, 5.0 if step == 20 else 1.0), 40, step_s=0.5)
    assert {one.unit_s for one in found} == {(1.0, 1.0)}


def test_without_news_it_is_told_each_half_minute() -> None:
    times = [one.step for one in told(lambda step: (1.0, 1.0), 300, step_s=1.0)]
    assert [b - a for a, b in zip(times[5:], times[6:], strict=False)] == [30] * (len(times) - 6)


def test_the_spread_is_the_median_deviation_as_a_part() -> None:
    (first, *_) = told(lambda step: ((1.0, 0.9, 1.1)[step % 3], 1.0), 5)
    assert first.spread == (pytest.approx(0.1), 0.0)


def test_slower_than_the_faster_half_of_the_same_pool() -> None:
    unit_s = {
        WorkerId(name, 0): one
        for name, one in {"a1": 1.0, "a2": 1.1, "a3": 3.0, "b1": 10.0, "b2": 20.0}.items()
    }
    slower = times_slower(unit_s, lambda worker: worker.node_id[0], {})
    assert slower[WorkerId("a3", 0)] == pytest.approx(3.0 / 1.05)
    assert slower[WorkerId("b1", 0)] == 1.0 and slower[WorkerId("b2", 0)] == 2.0


def test_ranks_with_blocks_of_another_kind_are_not_compared() -> None:
    def model(*sizes: int) -> ModelProfile:
        specs = (TensorSpec(f"b{i}", (size, 4), "float32", block=i) for i, size in enumerate(sizes))
        return ModelProfile(
            len(sizes), 100, (TensorSpec("first", (9, 4), "float32", block=-1), *specs)
        )

    workers = tuple(WorkerId(name, 0) for name in "abcd")
    layout = Layout(pp=2, dp_shard=2)
    staged = Plan(1, layout, workers, (2, 2), (1, 1), 2, Resume("fresh", 0), "start")
    assert unlike_stages(model(4, 8), staged) == dict(zip(workers, (0, 0, 1, 1), strict=True))
    assert unlike_stages(model(4, 4), staged) == {} == unlike_stages(None, staged)
    flat = Plan(1, Layout(dp_shard=4), workers, (1, 1, 1, 1), (2,), 1, Resume("fresh", 0), "start")
    assert unlike_stages(model(4, 8), flat) == {}
