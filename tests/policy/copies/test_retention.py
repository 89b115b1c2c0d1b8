"""Which checkpoints stay, and what a copy that fails or cannot be read leads to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import StateLost
from elastic.policy.copies import retention as retention_of
from elastic.policy.copies.recovery import newest
from elastic.policy.copies.retention import COPY_TRIES, COPY_WAIT_S, kept, removal, retention
from elastic.policy.decide import decide
from elastic.policy.faults import retries
from elastic.policy.state.fold import Aborting, Failure, fold
from elastic.policy.state.state import State
from elastic.types import (
    Abort,
    Copy,
    CopyDamaged,
    CopyFailed,
    CopyReadBegun,
    CopyRemoved,
    CopyStored,
    CopyVerified,
    Decided,
    Evaluated,
    Job,
    Layout,
    NumbersChecked,
    Plan,
    RemoveCopy,
    Resume,
    Stop,
    WorkerId,
)  # fmt: skip

PLAN = Plan(1, Layout(), (WorkerId("a", 0),), (8,), (4,))


def copy(step: int, n_bytes: int = 10**9) -> Copy:
    return Copy(step, "durable", 1, Layout(), uri=f"u{step}", n_bytes=n_bytes)


def state(steps: Sequence[int], losses: dict[int, float] | None = None, **job: Any) -> State:
    """A run that has checkpoints of these steps (newest first)."""
    made = State(
        phase="running",
        run="r",
        job=Job.from_plain({"steps": 1000, "global_batch": 8, **job}),
        plan=PLAN,
        generation=1,
        step=900,
    )
    return replace(
        made, plans={1: PLAN}, durable=tuple(copy(step) for step in steps), validation=losses or {}
    )


def stays(of: State) -> list[int]:
    return [c.step for c in of.durable if c.uri in kept(of)]


@pytest.mark.parametrize(
    ("job", "losses", "expected"),
    [
        ({}, {}, [50, 40]),
        ({"keep_last": 1}, {}, [50]),
        ({"keep_last": 3}, {}, [50, 40, 30]),
        ({"keep_last": 1, "keep_every": 20}, {}, [50, 40, 20]),
        ({"keep_last": 1, "keep_best": 1}, {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5, 50: 2.0}, [50, 20]),
        (
            {"keep_last": 1, "keep_best": 2},
            {10: 3.0, 20: 1.0, 30: 1.0, 40: 2.5, 50: 2.0},
            [50, 30, 20],
        ),
        # measured between the copies: counts for later ones
        ({"keep_last": 1, "keep_best": 1}, {15: 1.0, 35: 2.0}, [50, 30]),
        ({"keep_last": 1, "keep_best": 3}, {45: 2.0}, [50]),  # of the others no loss is known
        ({"keep_last": 4, "storage_quota_gb": 4.1}, {}, [50, 40, 30]),
        ({"keep_last": 4, "storage_quota_gb": 1.5}, {}, [50]),
    ],
)
def test_what_stays(job: dict[str, Any], losses: dict[int, float], expected: list[int]) -> None:
    assert stays(state([50, 40, 30, 20, 10], losses, **job)) == expected


@given(
    st.lists(st.integers(1, 99), unique=True, max_size=8),
    st.fixed_dictionaries(
        {
            "keep_last": st.integers(1, 4),
            "keep_every": st.integers(0, 30),
            "keep_best": st.integers(0, 3),
        },
        optional={"storage_quota_gb": st.floats(0.1, 20)},
    ),
    st.dictionaries(st.integers(1, 99), st.floats(0, 10), max_size=6),
)
def test_the_newest_copy_always_stays_and_removal_comes_to_rest(
    steps: list[int], job: dict[str, Any], losses: dict[int, float]
) -> None:
    was = state(sorted(steps, reverse=True), losses, **job)
    after = fold(was, Decided(removal(was)), 1.0)
    assert after.durable[:1] == was.durable[:1]
    assert not removal(after).actions
    if "storage_quota_gb" not in job:
        assert len(after.durable) >= min(len(steps), job["keep_last"])


@pytest.mark.parametrize("flag", [True, False])
def test_the_quota_counts_every_copy_that_there_is(flag: bool) -> None:
    """It leaves room for one of 100, and keep_every would keep 200."""
    now = replace(state([], keep_every=1, storage_quota_gb=102.5), judges_all=flag)
    for step in range(1, 201):
        now = fold(now, CopyStored(copy(step)), 1.0)
    assert len(now.durable) == (200 if flag else 100)
    gone = removal(now).actions
    assert len(gone) == (101 if flag else 1)
    assert len(fold(now, Decided(removal(now)), 1.0).durable) == 99


def test_a_removal_says_why_and_nothing_resumes_from_it() -> None:
    was = state([50, 40, 30, 20])
    decision = retention(was)
    assert decision.actions == (RemoveCopy("u30"), RemoveCopy("u20"))
    assert decision.reason == "checkpoints of step 30, 20 (2.0 GB) are removed: keep_last=2, 2 stay"
    after = fold(was, Decided(decision), 1.0)
    assert [c.step for c in after.durable] == [50, 40]
    assert fold(after, CopyRemoved("u30"), 2.0).durable == after.durable
    assert retention(after).actions == ()
    assert decide(was, 5.0).actions[:2] == decision.actions


@pytest.mark.parametrize(
    "change", [{"phase": "entering"}, {"phase": "waiting"}, {"below_step": 45}]
)
def test_nothing_is_removed_while_something_is_wrong(change: dict[str, Any]) -> None:
    assert retention(replace(state([50, 40, 30]), **change)).actions == ()


def test_the_copy_that_is_being_resumed_from_stays() -> None:
    target = replace(PLAN, generation=2, resume=Resume("durable", 20, uri="u20"))
    assert stays(replace(state([50, 40, 30, 20]), target=target, generation=2)) == [50, 40, 20]


def test_at_the_end_the_run_leaves_only_what_stays() -> None:
    done = replace(state([1000, 900, 800]), step=1000)
    actions = decide(done, 1.0).actions
    assert actions[0] == RemoveCopy("u800")
    assert isinstance(actions[1], Stop) and actions[1].outcome == "succeeded"


# --------------------------------------------------------------------------------- copies that fail


def test_validation_losses_are_remembered() -> None:
    after = fold(state([]), Evaluated(1, 5, {"validation_loss": 2.0}), 1.0)
    after = fold(after, Evaluated(1, 6, {"validation_loss": float("nan")}), 1.0)
    assert after.validation == {5: 2.0}, "as drivers before decided"
    after = fold(replace(after, scores_all=True), Evaluated(1, 7, {"accuracy": 0.5}), 1.0)
    for step, loss in ((8, math.nan), (9, -math.inf)):
        after = fold(after, Evaluated(1, step, {"validation_loss": loss}), 1.0)
    assert after.validation == {5: 2.0, 8: math.inf, 9: math.inf}


@pytest.mark.parametrize(("flag", "expected"), [(True, [50, 30]), (False, [50, 40])])
def test_a_copy_whose_validation_loss_is_not_finite_is_not_the_best(
    flag: bool, expected: list[int]
) -> None:
    now = replace(state([50, 40, 30], keep_last=1, keep_best=1), scores_all=flag)
    for step, loss in ((30, 1.0), (40, math.nan), (50, 2.0)):
        now = fold(now, Evaluated(1, step, {"validation_loss": loss}), 1.0)
    assert stays(now) == expected


@pytest.mark.parametrize(("flag", "expected"), [(True, [1000, 500]), (False, [1000, 520])])
def test_of_copies_with_one_loss_that_of_the_step_which_was_validated_is_the_best(
    flag: bool, expected: list[int]
) -> None:
    """One of a notice comes behind it; what `--step best` looks for is that of the validation."""
    losses = {500: 1.0, 1000: 2.0}
    now = state([1000, 520, 500], losses, keep_last=1, keep_best=1)
    assert stays(replace(now, keeps_validated=flag)) == expected
    before = state([520, 500], {500: 1.0}, keep_last=1, keep_best=1)
    assert stays(replace(before, keeps_validated=flag)) == ([520, 500] if flag else [520])


@pytest.mark.parametrize(("flag", "expected"), [(True, [90, 20]), (False, [90])])
def test_the_best_copy_stays_however_many_evaluations_come_after_it(
    flag: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_of, "KEPT_EVALUATIONS", 3)
    now = replace(state([20], keep_last=1, keep_best=1), scores_all=flag)
    for step in range(10, 100, 10):
        loss = 1.0 if step == 10 else 2.0 + step
        now = fold(now, Evaluated(1, step, {"validation_loss": loss}), 1.0)
    # of steps 10 and 20 the older one is pruned: step 20 is judged by its own
    assert list(now.validation) == ([20] if flag else []) + [70, 80, 90]
    assert stays(replace(now, durable=(copy(90), copy(20)))) == expected


def test_a_copy_that_fails_on_the_way_stops_nothing() -> None:
    after = fold(state([50]), CopyFailed(1, 60, "rank 0: the disk is full"), 1.0)
    assert decide(after, 1.0).actions == decide(state([50]), 1.0).actions
    assert after.durable == (copy(50),) and after.copy_failures == 1
    last = after
    for step in (70, 80, last.steps):
        last = fold(last, CopyFailed(1, step, "rank 0: the disk is full"), 2.0)
    assert last.copy_failures == 1, "that of the last step has tries of its own"
    again = fold(after, CopyStored(copy(70)), 2.0)
    assert (again.copy_failed, again.copy_failures) == (None, 0)


def test_the_copy_of_the_last_step_is_tried_again_and_then_fails_the_run() -> None:
    at_s, now = 100.0, replace(state([50]), step=1000, last_step_at_s=100.0)
    for attempt in range(1, COPY_TRIES):
        now = fold(now, CopyFailed(now.generation, 1000, "rank 0: the disk is full"), at_s)
        assert decide(now, at_s).actions == () and "retried in 5 s" in decide(now, at_s).reason
        at_s += COPY_WAIT_S
        assert decide(now, at_s).actions == (Abort(now.generation),), attempt
        now = replace(
            now, generation=now.generation + 1, plan=replace(PLAN, generation=now.generation + 1)
        )
    now = fold(now, CopyFailed(now.generation, 1000, "rank 0: the disk is full"), at_s)
    (stop,) = decide(now, at_s).actions
    assert isinstance(stop, Stop) and stop.outcome == "failed"
    assert (
        stop.reason
        == "the copy of the last step could not be stored in 3 tries: rank 0: the disk is full"
    )


def test_the_last_step_is_saved_as_long_as_the_orphan_lease_lasts() -> None:
    """A disk that is full for 20 minutes, each try a generation: less and less often."""
    full, tries = "rank 0: No space left on device", [100.0]
    now = replace(state([50]), step=1000, last_step_at_s=100.0, waits_to_save=True)
    while True:
        now = fold(now, CopyFailed(now.generation, 1000, full), tries[-1])
        found = decide(now, tries[-1])
        if found.actions:
            break
        assert "and so on for 900 s (orphan_lease_s)" in found.reason
        assert found.wake_at_s is not None
        assert decide(now, found.wake_at_s).actions == (Abort(now.generation),)
        late = Failure("infrastructure", "aborted", found.wake_at_s)
        begun = Aborting(now.generation, found.wake_at_s, frozenset(), late)
        assert not retries.gave_up(replace(now, aborting=begun, retries=99))
        tries.append(found.wake_at_s)
        generation = now.generation + 1
        now = replace(
            now, generation=generation, plan=replace(PLAN, generation=generation),
            entered_at_s=tries[-1],
        )  # fmt: skip
        assert not decide(now, tries[-1] + 119.0).actions, "each try has its time"
    waits = [b - a for a, b in zip(tries, tries[1:])]
    assert waits[:6] == [5.0, 5.0, 5.0, 10.0, 20.0, 40.0] and {*waits[6:]} == {60.0}
    assert 940.0 <= tries[-1] < 1000.0
    (stop,) = found.actions
    assert isinstance(stop, Stop) and stop.outcome == "failed"
    told = f"in {len(tries)} tries for 900 s (orphan_lease_s): {full}"
    assert stop.reason == f"the copy of the last step could not be stored {told}"
    late = Failure("infrastructure", "aborted", 1001.0)
    begun = Aborting(now.generation, 1001.0, frozenset(), late)
    assert "no progress" in retries.gave_up(replace(now, aborting=begun, retries=99))


# -------------------------------------------------------------------------- copies that are damaged


def test_a_damaged_copy_is_passed_over_and_never_removed_by_itself() -> None:
    now = replace(state([50, 40, 30]), phase="waiting")
    assert newest(now).uri == "u50"
    now = fold(now, CopyDamaged("u50", "u50/__0_0.distcp: altered"), 1.0)
    assert newest(now).uri == "u40"
    assert RemoveCopy("u50") not in removal(now).actions


def test_when_no_copy_can_be_read_the_run_does_not_begin_anew() -> None:
    now = fold(
        replace(state([50]), phase="waiting", best_step=0),
        CopyDamaged("u50", "u50/commit.json: altered"),
        1.0,
    )
    with pytest.raises(
        StateLost, match=r"no checkpoint can be read: u50/commit\.json: altered; mend one"
    ):
        newest(now)


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [
        ("auto", range(20, 920, 20), [900, 880, 420]),
        ("auto", range(20, 200, 20), [180, 160]),
        (100, range(20, 920, 20), [900, 880, 420]),
        (0, range(20, 920, 20), [900, 880]),
    ],
)
def test_a_copy_from_before_the_last_good_comparison_of_results_stays(
    every: Any, steps: range, expected: list[int]
) -> None:
    of = state(list(reversed(steps)), check_numbers_every=every)
    assert (
        stays(replace(of, step=max(steps), checked_step=430 if max(steps) > 430 else 0)) == expected
    )


def test_there_is_always_one_to_go_back_to_when_a_comparison_fails() -> None:
    of = state([], check_numbers_every=200)
    for step in range(20, 4001, 20):
        if step % 700 == 0:  # as rarely as the workers compare them
            assert of.checked_step == 0 or any(c.step <= of.checked_step for c in of.durable), (
                "nothing to go back to"
            )
            of = fold(of, NumbersChecked(1, step), float(step))
            assert of.checked_step == step
        of = replace(of, step=step, durable=(copy(step), *of.durable))
        of = replace(of, durable=tuple(c for c in of.durable if c.uri in kept(of)))
        assert len(of.durable) <= 4


def test_nothing_is_removed_before_a_newer_copy_was_read_back() -> None:
    fresh = state([50, 40, 30], keep_last=1, verify_copies=True)
    assert stays(fresh) == [50, 40, 30]
    older = fold(fresh, CopyVerified("u30"), 1.0)
    assert stays(older) == [50, 30], "40 is neither the newest nor known to be right"
    assert stays(fold(older, CopyVerified("u50"), 2.0)) == [50]
    damaged = fold(older, CopyDamaged("u50", "altered"), 2.0)
    assert stays(damaged) == [40, 30]
    assert stays(replace(older, job=replace(older.job, storage_quota_gb=2.1))) == [50], (
        "the quota has more weight"
    )
    assert fold(older, CopyVerified("elsewhere"), 2.0).verified == {"u30"}


def test_a_copy_that_is_being_read_back_stays_until_that_is_done() -> None:
    now = replace(state([30, 10], keep_last=2, verify_copies=True), verified=frozenset({"u10"}))
    now = fold(now, CopyReadBegun("u30"), 1.0)
    for step in (40, 50, 60):
        now = fold(now, CopyStored(copy(step)), 1.0)
        found = retention(now)
        now = fold(now, Decided(found), 1.0)
    assert [c.step for c in now.durable] == [60, 50, 30, 10]
    assert "; step 30 stays while it is read back; step 10 stays until a newer" in found.reason
    assert stays(replace(now, job=replace(now.job, storage_quota_gb=3.1))) == [60, 10]
    assert stays(fold(now, CopyVerified("u30"), 2.0)) == [60, 50, 30]
    assert stays(fold(now, CopyDamaged("u30", "altered"), 2.0)) == [60, 50, 10]
    done = replace(now, step=1000, durable=(copy(1000), *now.durable))
    gone = [action for action in decide(done, 1.0).actions if isinstance(action, RemoveCopy)]
    assert RemoveCopy("u30") in gone, "nobody reads it any more"


@pytest.mark.parametrize("flag", [True, False])
def test_a_damaged_copy_goes_where_a_quota_counts_it(flag: bool) -> None:
    now = replace(state([50, 40, 30], storage_quota_gb=2.1, verify_copies=True), frees_damaged=flag)
    now = fold(now, CopyDamaged("u50", "u50/__0_0.distcp: altered"), 1.0)
    now = fold(now, CopyDamaged("u50", "once more"), 1.0)
    found = retention(now)
    assert found.actions == tuple(map(RemoveCopy, ["u30", "u50"] if flag else ["u30"]))
    after = fold(now, Decided(found), 1.0)
    assert (not after.damaged) == flag and not retention(after).actions
    assert ("step 50 is damaged, and counts for the quota" in found.reason) == flag


def test_the_newest_of_nothing_but_damaged_copies_stays() -> None:
    now = replace(state([50, 40], storage_quota_gb=2.1), frees_damaged=True)
    for uri in ("u40", "u50"):
        now = fold(now, CopyDamaged(uri, "altered"), 1.0)
    assert retention(now).actions == (RemoveCopy("u40"),)
    no_quota = replace(now, job=replace(now.job, storage_quota_gb=None))
    assert retention(no_quota).actions == ()


def test_a_copy_that_stays_beside_the_rules_is_named_with_its_reason() -> None:
    late = replace(state([60, 50, 40, 30], keep_last=2, verify_copies=True), verified={"u40"})
    found = retention(late)
    assert [action.uri for action in found.actions if isinstance(action, RemoveCopy)] == ["u30"]
    assert found.reason.endswith(
        "keep_last=2; step 40 stays until a newer one was read back and is right, 3 stay"
    )
    right = replace(late, verified={"u60"})
    assert retention(right).reason.endswith("keep_last=2, 2 stay")
