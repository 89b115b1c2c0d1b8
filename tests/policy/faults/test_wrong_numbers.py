"""Silent data corruption: back to a copy from before them, and away from who computed them."""

from __future__ import annotations

from support.policy.story import Story, orders, plan_of

from elastic.types import (
    Abort,
    Copy,
    CopyStored,
    Decision,
    DeviceNoted,
    DriverStarted,
    Holding,
    Node,
    NodeReady,
    Plan,
    Quarantine,
    Quiesced,
    ReleaseNode,
    RemoveCopy,
    Silent,
    Stop,
    StoreCopy,
    WorkerId,
    WrongNumbers,
)

A, B, C = (WorkerId(name, 0) for name in "abc")
REPLICAS = {2: "dp_replicate=2", 3: "dp_replicate=3"}


def stored(story: Story, plan: Plan, step: int, kind: str = "durable") -> None:
    uri = f"s3://{step}.g{plan.generation}" if kind == "durable" else ""
    story.tick(
        CopyStored(Copy(step, kind, plan.generation, plan.layout, plan.layers, uri), 1.0, 0.1)
    )  # type: ignore[arg-type]


def wrong(plan: Plan, step: int, good: int, *workers: WorkerId) -> WrongNumbers:
    return WrongNumbers(plan.generation, step, good, workers, "the gradients of replicas differ")


def left(story: Story, plan: Plan, *names: str, live: int, copy: int) -> Decision:
    """These workers leave with their live state and a peer replica of all ranks."""
    decision = Decision()
    for name in names:
        rank, worker = next((i, w) for i, w in enumerate(plan.ranks) if w.node_id == name)
        held = [Holding(worker, plan.generation, rank, live, "live")]
        held += [Holding(worker, plan.generation, r, copy, "peer") for r in range(len(plan.ranks))]
        decision = story.tick(Quiesced(worker, plan.generation, live, tuple(held)))
    return decision


def settled(story: Story, decision: Decision) -> list[Decision]:
    """The decisions that follow without an event, as in the driver's loop."""
    found = [decision]
    while found[-1].actions and len(found) < 5:
        found.append(story.tick(after_s=0.0))
    return found


def test_the_only_worker_of_a_plan_is_put_aside_where_another_node_stands() -> None:
    for others, named in (((), []), (("b",), ["a"])):
        story = Story(layout={1: "dp_shard=1", 2: "dp_replicate=2"})
        plan = story.running("a", steps=20)
        stored(story, plan, 10)
        story.tick(*(NodeReady(Node(name, "spot")) for name in others))
        found = settled(story, story.tick(wrong(plan, 20, 12, A)))
        assert [
            order.node_id for decision in found for order in orders(decision, Quarantine)
        ] == named


def test_the_one_that_differs_is_put_aside_and_the_run_goes_back_to_before_it() -> None:
    story = Story(layout=REPLICAS)
    plan = story.running("a", "b", "c", steps=20)
    stored(story, plan, 10)
    story.steps(10)
    stored(story, plan, 20 + 5)
    found = settled(story, story.tick(wrong(plan, 30, 12, B)))
    assert orders(found[0], Abort) and "right until step 12" in found[0].reason
    assert (
        [order.node_id for order in orders(found[1], Quarantine)]
        == ["b"]
        == [o.node_id for o in orders(found[1], ReleaseNode)]
    )
    assert [order.uri for order in orders(found[1], RemoveCopy)] == ["s3://25.g1"]
    assert "the gradients of replicas differ" in orders(found[1], Quarantine)[0].reason
    back = plan_of(left(story, plan, "a", "c", live=30, copy=28))
    assert (back.cause, back.resume.source, back.resume.step) == ("rollback", "durable", 10), (
        "what peers hold is newer: wrong"
    )
    assert {worker.node_id for worker in back.ranks} == {"a", "c"}
    assert story.state.saved_step == 10 and not story.state.blamed and not story.state.spoilt


def test_a_peer_copy_of_a_good_step_is_taken() -> None:
    story = Story(layout=REPLICAS, peer_every=5)
    plan = story.running("a", "b", "c", steps=29)
    settled(story, story.tick(wrong(plan, 29, 28, B)))
    back = plan_of(left(story, plan, "a", "c", live=29, copy=28))
    assert (back.resume.source, back.resume.step) == ("peer", 28)


def test_without_a_good_copy_it_starts_again_rather_than_from_wrong_numbers() -> None:
    story = Story(layout=REPLICAS)
    plan = story.running("a", "b", "c", steps=30)
    settled(story, story.tick(wrong(plan, 30, 4, B)))
    back = plan_of(left(story, plan, "a", "c", live=30, copy=25))
    assert (back.resume.source, back.resume.step) == ("fresh", 0)


def test_two_of_two_stay_until_it_happens_again() -> None:
    story = Story(layout=REPLICAS)
    plan = story.running("a", "b", steps=20)
    stored(story, plan, 15)
    found = settled(story, story.tick(wrong(plan, 20, 16, A, B)))
    assert orders(found[0], Abort) and not any(orders(one, Quarantine) for one in found)
    assert "which of a, b computed them cannot be told yet" in found[0].reason
    left(story, plan, "a", "b", live=20, copy=19)
    second = story.entered()
    assert second.resume.step == 15
    story.steps(10)
    stored(story, second, 20)
    story.tick(DeviceNoted(A, "uncorrectable memory errors: 2"))
    found = settled(story, story.tick(wrong(second, 25, 22, A, B)))
    assert [order.node_id for order in orders(found[1], Quarantine)] == ["a"], (
        "its GPU says something"
    )
    assert plan_of(left(story, second, "b", live=25, copy=24)).resume.step == 20


def test_who_is_suspected_with_two_others_is_it() -> None:
    story = Story(layout=REPLICAS)
    plan = story.running("a", "b", "c", steps=20)
    stored(story, plan, 15)
    settled(story, story.tick(wrong(plan, 20, 16, A, B)))
    left(story, plan, "a", "b", "c", live=20, copy=19)
    second = story.entered()
    story.steps(5)
    found = settled(story, story.tick(wrong(second, 20, 18, B, C)))
    assert [order.node_id for order in orders(found[1], Quarantine)] == ["b"]


def test_what_was_stored_since_stays_out_whenever_it_is_told() -> None:
    story = Story(layout=REPLICAS)
    plan = story.running("a", "b", "c", steps=20)
    stored(story, plan, 15)
    settled(story, story.tick(wrong(plan, 20, 16, B)))
    stored(story, plan, 20)
    assert story.state.saved_step == 15 and orders(story.decisions[-1], RemoveCopy)
    copies = [
        Copy(step, "durable", 1, plan.layout, plan.layers, f"s3://{step}.g1") for step in (15, 20)
    ]
    story.tick(
        DriverStarted(
            "story",
            2,
            story.state.job.plain(),
            story.state.pools,
            story.start.model,
            durable=tuple(copies),
        )
    )
    assert story.state.saved_step == 15, "a driver that finds it in storage"


def test_what_an_earlier_finding_has_ruled_out_stays_out_after_a_later_one() -> None:
    story = Story(layout=REPLICAS)
    plan = story.running("a", "b", "c", steps=20)
    stored(story, plan, 10)
    settled(story, story.tick(wrong(plan, 20, 12, B)))
    left(story, plan, "a", "c", live=20, copy=19)
    second = story.entered()
    story.steps(20)
    settled(story, story.tick(wrong(second, 30, 25, A, C)))
    copies = tuple(
        Copy(step, "durable", 1, plan.layout, plan.layers, f"s3://{step}.g1") for step in (10, 15)
    )
    story.tick(
        DriverStarted(
            "story",
            2,
            story.state.job.plain(),
            story.state.pools,
            story.start.model,
            durable=copies,
        )
    )
    assert story.state.saved_step == 10, (
        "step 15 of the first generation was computed wrong, whatever was found since"
    )


def test_the_same_news_from_every_rank_count_once_and_old_ones_break_nothing() -> None:
    story = Story(layout=REPLICAS)
    plan = story.running("a", "b", "c", steps=20)
    stored(story, plan, 15)
    settled(story, story.tick(wrong(plan, 20, 16, B), wrong(plan, 20, 16, B)))
    left(story, plan, "a", "c", live=20, copy=19)
    story.entered()
    story.steps(3)
    decision = story.tick(wrong(plan, 20, 16, B))
    assert not decision.actions and story.state.phase == "running"
    late = story.tick(wrong(plan, 19, 15))
    assert not late.actions and story.state.failure is None, "what runs comes of step 15"


def test_wrong_numbers_that_nobody_can_be_blamed_for_end_the_run_at_some_time() -> None:
    story = Story(layout=REPLICAS, steps=1000)
    plan = story.running("a", steps=20)
    for n in range(3):
        stored(story, plan, 15 + 10 * n)
        settled(story, story.tick(wrong(plan, 20 + 10 * n, 16 + 10 * n, A)))
        last = left(story, plan, "a", live=20 + 10 * n, copy=19 + 10 * n)
        if n < 2:
            plan = story.entered()
            story.steps(15)
    assert [order.outcome for order in orders(last, Stop)] == [
        "failed"
    ] or story.state.phase == "failed"
    assert "3 roll-backs" in story.state.outcome_reason


def test_a_node_that_stands_still_again_and_again_is_put_aside() -> None:
    story = Story(layout=REPLICAS)
    story.running("a", "b", "c", steps=20)
    for n in range(3):
        plan = story.state.plan
        assert plan is not None
        found = settled(
            story,
            story.tick(
                Silent(B, plan.generation, "stepping", 6.0, "in the all-reduce of step 21"),
                after_s=60,
            ),
        )
        if n < 2:
            assert not any(orders(one, Quarantine) for one in found)
            found = settled(
                story, left(story, plan, "a", "c", live=story.state.step, copy=story.state.step)
            )
            story.entered()
            story.nodes("b")
            story.tick(after_s=5)
            if story.state.target:
                story.entered()
            story.steps(3)
    put = [order for one in found for order in orders(one, Quarantine)]
    assert [order.node_id for order in put] == ["b"] and "stalled 3 times within an hour" in put[
        0
    ].reason
    assert "in the all-reduce of step 21" in put[0].reason and not any(
        orders(one, StoreCopy) for one in found
    )
