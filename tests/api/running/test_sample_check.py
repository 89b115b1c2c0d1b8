"""Whether each step was trained on its samples, as the journal tells it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.api.tiny_job import START, prepared, steps

from elastic.api.running import sample_check
from elastic.data.streams import N_POSITIONS
from elastic.ledger.journal import Line
from elastic.policy.state.fold import State
from elastic.policy.state.newest_steps import digested
from elastic.types import (
    Copy,
    Decision,
    DriverStarted,
    EnterPlan,
    Layout,
    NodePrepared,
    Plan,
    PlanEntered,
    Resume,
    WorkerId,
)


def test_samples_are_counted_over_the_steps_that_stayed(folder: Path) -> None:
    one = prepared(folder)
    one.program = replace(one.program, dataset=None)  # what the nodes have read need not be here

    def exact(
        *events: tuple[float, object], told: int = 100, start: DriverStarted = START
    ) -> bool | None:
        ready = Line(0.0, 1, ((0.0, start), (0.5, NodePrepared("a", (1,), told))))
        return sample_check.exact([ready, Line(9.0, 1, tuple(events))], one.spec)  # type: ignore[arg-type]

    assert exact(*steps([1, 2, 3, 4])) is True
    assert exact(*steps([1, 2, 3]), (3.5, PlanEntered(2, 2)), *steps([3, 4], generation=2)) is True
    assert exact(*steps([1, 2, 4])) is False
    assert exact(*steps([1, 2, 3])) is False
    assert exact(*steps([1, 2, 3]), *steps([4], n_samples=90)) is False
    imported = replace(START, durable=(Copy(2, "durable", 0, Layout()),))
    assert exact(*steps([3, 4]), start=imported) is True
    assert (
        exact(*steps([1, 2, 3, 4]), told=0) is None
        and exact(*steps([1, 2, 3, 4]), told=N_POSITIONS) is None
    )


def test_of_steps_that_a_killed_driver_had_not_written_down_nobody_knows(folder: Path) -> None:
    """Their copy was there all the same, and the next driver continued from it."""
    one = prepared(folder)
    one.program = replace(one.program, dataset=None)

    def exact(before: list[int], after: list[int], n_samples: int = 100) -> bool | None:
        ready = Line(0.0, 1, ((0.0, START), (0.5, NodePrepared("a", (1,), 100)), *steps(before)))  # type: ignore[arg-type]
        again = (
            (9.0, PlanEntered(2, after[0] - 1)),
            *steps(after, generation=2, n_samples=n_samples),
        )
        return sample_check.exact([ready, Line(9.0, 2, again)], one.spec)  # type: ignore[arg-type]

    assert exact([1, 2], [3, 4]) is True and exact([1, 2], [2, 3, 4]) is True
    assert exact([1, 2], [4]) is None and exact([], [3, 4]) is None
    assert exact([1, 2], [4], n_samples=90) is False
    assert exact([1, 3], [4]) is False, "within a driver all are written down"


def test_steps_that_a_killed_driver_did_not_write_down_are_unknown_also_where_they_are_the_last(
    folder: Path,
) -> None:
    one = prepared(folder, run_name="last")
    n = one.spec.steps
    before = Line(9.0, 1, ((0.0, START), *steps(list(range(1, n - 1)))))
    after = Line(20.0, 2, ((20.0, PlanEntered(2, n)),))
    assert sample_check.exact([before, after], one.spec) is None
    copy = Copy(n, "durable", 1, Layout())
    ended = Line(20.0, 2, ((20.0, replace(START, epoch=2, durable=(copy,))),))
    assert sample_check.exact([before, ended], one.spec) is None, "it had nothing left to train"
    assert sample_check.Unwritten.of([before, ended]).steps == {n - 1, n}


def test_a_checkpoints_running_digest_tells_of_steps_that_no_line_tells_of(folder: Path) -> None:
    """Its driver was killed before it wrote them down, or the journal's end is gone."""
    one = prepared(folder)
    one.program = replace(one.program, dataset=None)

    def stored(step: int, n_samples: int = 100) -> Copy:
        state = State()
        for _, event in steps(list(range(1, step + 1)), n_samples=n_samples):
            state = replace(state, digests=digested(state.digests, event))
        return Copy(step, "durable", 1, Layout(), samples=state.digests[step])

    def exact(
        found: Copy, after: list[int], cut: str = "", before: tuple[int, ...] = (1,)
    ) -> bool | None:
        ready = Line(
            0.0, 1, ((0.0, START), (0.5, NodePrepared("a", (1,), 100)), *steps(list(before)))
        )
        again = replace(START, epoch=2, durable=(found,), cut=cut)
        entered = ((9.0, again), (9.0, PlanEntered(2, after[0] - 1)), *steps(after, generation=2))
        lines = [
            *([ready] if before else []),
            Line(9.0, 2, ((8.9, NodePrepared("a", (1,), 100)), *entered)),
        ]
        return sample_check.exact(lines, one.spec)

    assert exact(stored(3), [4]) is True and exact(replace(stored(3), samples=""), [4]) is None
    assert exact(stored(3, n_samples=90), [4]) is False, "they were others"
    assert exact(stored(2), [4]) is None, "of step 3 it does not tell"
    for before in ((), (1,), (1, 2)):
        assert exact(stored(3), [4], cut="its journal was damaged", before=before) is True
    assert exact(replace(stored(3), samples=""), [4], cut="its journal was damaged") is None


def test_steps_that_were_rolled_back_are_not_those_that_a_killed_driver_did_not_write_down(
    folder: Path,
) -> None:
    """The first driver went back to step 0 and did three steps again, of which it wrote down one: 2
    and 3 of those are known to nobody, though steps of these numbers had been written down
    before."""
    one = prepared(folder)
    one.program = replace(one.program, dataset=None)
    ready = ((0.0, START), (0.5, NodePrepared("a", (1,), 100)))
    undone, redone = steps([1, 2, 3]), ((5.0, PlanEntered(2, 0)), *steps([1], generation=2))
    after = ((9.0, PlanEntered(3, 3)), *steps([4], generation=3))
    first, second, third = (
        Decision(
            (EnterPlan(Plan(k, Layout(), (WorkerId("a", 0),), (8,), (1,), resume=resume)),), "why"
        )
        for k, resume in ((1, Resume()), (2, Resume()), (3, Resume("peer", 3, 2)))
    )
    lines = [
        Line(0.5, 1, ready, first), Line(4.0, 1, ((0.6, PlanEntered(1, 0)), *undone), second),
        Line(8.0, 1, redone), Line(8.5, 2, (), third), Line(9.0, 2, after),
    ]  # fmt: skip
    assert (
        sample_check.Unwritten.of(lines).steps == {2, 3}
        and sample_check.exact(lines, one.spec) is None
    )
