"""Which rank the others wait for, and when that is said."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from support.worker.beats import beat_of

from elastic.types import Job, Layout, Plan, Silent, WorkerId
from elastic.worker.hosting.absent_ranks import RankSite, absent_ranks, unlike_collectives
from elastic.worker.hosting.liveness import Liveness, patience_s
from elastic.worker.process.doing import DEVICE, Doing, InCollective

RANKS = tuple(WorkerId(f"n{i}", 0) for i in range(4))
A, B, C, D = RANKS


def at(**numbers: int) -> RankSite:
    """`fsdp_0=5`: has begun five collectives of the group fsdp whose first rank is 0."""
    return RankSite(
        tuple(
            (name.rpartition("_")[0], int(name.rpartition("_")[2]), n)
            for name, n in numbers.items()
        )
    )


def test_one_group() -> None:
    found = absent_ranks({A: at(dp_0=9), B: at(dp_0=8), C: at(dp_0=9), D: at(dp_0=9)}, staged=False)
    assert found == {B: "has not come to collective 9 of dp; 3 other ranks wait there"}


def test_one_that_waits_in_another_group_is_not_the_one() -> None:
    """A is missed by B in tp; C and D wait for A and B in dp: B is behind there since it waits in
    tp."""
    ranks = {
        A: at(dp_0=5, tp_0=7),
        B: at(dp_1=5, tp_0=8),
        C: at(dp_0=6, tp_2=9),
        D: at(dp_1=6, tp_2=9),
    }
    assert list(absent_ranks(ranks, staged=False)) == [A]


def test_nobody_where_all_have_come() -> None:
    assert absent_ranks({rank: at(dp_0=5) for rank in RANKS}, staged=False) == {}
    assert absent_ranks({rank: at() for rank in RANKS}, staged=False) == {}


def test_two_that_stand_on_one_node_are_both_named() -> None:
    found = absent_ranks({A: at(dp_0=8), B: at(dp_0=8), C: at(dp_0=9), D: at(dp_0=9)}, staged=False)
    assert list(found) == [A, B]


def test_nobody_is_named_where_most_would_be_or_where_several_only_wait_for_their_batch() -> None:
    most = {A: at(dp_0=9), B: at(dp_0=8), C: at(dp_0=8), D: at(dp_0=8)}
    assert absent_ranks(most, staged=False) == {}, "rather A has run ahead"
    two = {A: at(dp_0=8), B: at(dp_0=8), C: at(dp_0=9), D: at(dp_0=9)}
    reading = {
        rank: replace(one, doing="batch") if rank in (A, B) else one for rank, one in two.items()
    }
    assert absent_ranks(reading, staged=False) == {}, "storage is slow for both"
    assert list(absent_ranks({**reading, B: two[B]}, staged=False)) == [A, B]


def gpu(part: str, n: int, first: int, doing: Doing = "device", **numbers: int) -> RankSite:
    """Its GPU is in a part of this kind, behind `n`; `first`: of the ranks that compute the same
    samples."""
    return RankSite((*at(dp_0=9).arrived, *at(**numbers).arrived, (DEVICE + part, first, n)), doing)


def test_a_gpu_that_hangs_is_told_from_those_that_wait_for_it() -> None:
    """Every host has enqueued the same, and waits for its device, or for other hosts."""
    ranks = {rank: gpu("own" if rank == C else "others", 6, i) for i, rank in enumerate(RANKS)}
    why = (
        "has a GPU that stands in part 7 of its work, which is its own; those of the 3 other "
        "ranks wait"
    )
    assert absent_ranks(ranks, staged=False) == {C: why}
    assert list(absent_ranks({**ranks, A: gpu("done", 9, 0, "others")}, staged=True)) == [C]
    assert list(
        absent_ranks({**ranks, D: replace(ranks[D], arrived=at(dp_0=8).arrived)}, staged=False)
    ) == [D], "its host did not come"


def test_a_replica_with_fewer_micro_batches_is_not_the_one() -> None:
    """It has passed fewer marks than the others for good."""
    ranks = {rank: gpu("others", 40 if rank == B else 90, i) for i, rank in enumerate(RANKS)}
    assert absent_ranks(ranks, staged=False) == {}
    assert list(absent_ranks({**ranks, A: gpu("own", 88, 0)}, staged=False)) == [A], (
        "though it has done more than B"
    )


def test_nobody_where_two_gpus_stand_in_work_of_their_own_or_one_is_unknown() -> None:
    ranks = {rank: gpu("own" if rank in (A, C) else "others", 6, i) for i, rank in enumerate(RANKS)}
    assert absent_ranks(ranks, staged=False) == {} == absent_ranks(ranks, staged=True)
    hangs = {**ranks, C: gpu("others", 6, 2)}
    assert list(absent_ranks(hangs, staged=False)) == [A]
    assert absent_ranks({**hangs, B: gpu("done", 6, 1)}, staged=False) == {}, (
        "it has nothing to do, and its host waits for nobody"
    )
    assert absent_ranks({**hangs, B: at(dp_0=9)}, staged=False) == {}


def test_with_tp_a_gpu_within_a_block_may_wait_for_the_other_one() -> None:
    """A and B compute the same samples. B stands before the block that A is in: A waits in a
    collective there."""
    ranks = {
        A: gpu("own", 11, 0),
        B: gpu("others", 10, 0),
        C: gpu("others", 30, 2),
        D: gpu("others", 30, 2),
    }
    assert absent_ranks(ranks, staged=False) == {}
    assert list(absent_ranks({**ranks, B: gpu("others", 12, 0)}, staged=False)) == [A]


def test_stages_are_told_apart_by_what_they_do() -> None:
    """C waits for a message of A: behind D among its own stage, though A is the one that stands."""
    ranks = {A: at(dp_0=5), B: at(dp_0=6), C: at(dp_2=5), D: at(dp_2=6)}
    doing: dict[WorkerId, Doing] = {A: "own", B: "others", C: "others", D: "others"}
    assert list(
        absent_ranks(
            {rank: replace(one, doing=doing[rank]) for rank, one in ranks.items()}, staged=True
        )
    ) == [A]
    numberless = {rank: RankSite((), doing[rank], "f.py:3 in g") for rank in RANKS}
    found = absent_ranks(numberless, staged=True)
    assert found == {
        A: "is in no collective; 3 other ranks wait for a message or a collective; it stands at "
        "f.py:3 in g"
    }
    assert absent_ranks({rank: RankSite((), "others") for rank in RANKS}, staged=True) == {}
    assert absent_ranks({**numberless, B: RankSite()}, staged=True) == {}, (
        "of one nobody knows what it does"
    )


@dataclass
class Run:
    """Four ranks that are polled every half second; B is the one that does not come when
    `stuck`."""

    step_time_s: float = 0.1
    most_s: float | None = None
    now_s: float = 0.0
    n: int = 0
    phase: str = "stepping"
    doing: Doing = "own"
    mute: tuple[WorkerId, ...] = ()
    plan: Plan = Plan(1, Layout(dp_shard=4), RANKS, (2, 2, 2, 2), (4,))
    liveness: Liveness = field(init=False)

    def __post_init__(self) -> None:
        self.liveness = Liveness(0.5, self.most_s)

    def until(
        self, end_s: float, stuck: bool = False, moves: bool = False
    ) -> list[tuple[float, Silent]]:
        """`moves`: though stuck in its step, B begins a collective now and then."""
        found = []
        while self.now_s < end_s:
            self.now_s += 0.25
            if not stuck:
                self.liveness.stepped(1, self.step_time_s)
            if not stuck or (moves and self.now_s % 4 == 0):
                self.n += 1
            for worker in RANKS:
                self.liveness.called(worker)
                if self.now_s % 0.5 == 0 and worker not in self.mute:
                    mine = stuck and worker == B
                    n = self.n - 1 if mine else self.n
                    progress = 0 if stuck else self.n
                    beat = beat_of(
                        1,
                        self.phase,
                        progress,
                        arrived=(("dp_shard", 0, n),),
                        doing=self.doing if mine else "others",
                    )
                    self.liveness.answered(worker, beat)
                    self.liveness.called(worker)
            self.liveness.look(self.now_s)
            found += [(self.now_s, silent) for silent in self.liveness.absent_ranks(self.plan)]
        return found


def test_the_one_that_does_not_come_is_named_once_within_seconds() -> None:
    run = Run()
    assert run.until(10) == []
    found = run.until(60, stuck=True)
    assert [silent.worker for _, silent in found] == [B]
    at_s, silent = found[0]
    assert 20.0 < at_s < 21.5
    assert (silent.generation, silent.phase) == (1, "stepping") and 10 < silent.silent_s < 11
    assert silent.why == f"has not come to collective {run.n} of dp_shard; 3 other ranks wait there"


def test_not_one_that_is_slow_but_begins_collectives() -> None:
    run = Run()
    run.until(10)
    assert run.until(100, stuck=True, moves=True) == []


def test_the_bound_is_many_steps() -> None:
    run = Run(step_time_s=2.0)
    run.until(10)
    assert run.until(39, stuck=True) == [], "a step of ten times its time is slow, not stuck"
    assert [silent.worker for _, silent in run.until(43, stuck=True)] == [B]


def test_the_bound_remembers_slow_steps() -> None:
    run = Run(step_time_s=4.0)
    run.until(10)
    run.step_time_s = 0.1
    run.until(10.5)
    assert run.until(50, stuck=True) == []


def test_a_rank_that_waits_for_its_batch_has_a_minute_and_is_named_with_that() -> None:
    run = Run(doing="batch")
    run.until(10)
    assert run.until(69, stuck=True) == []
    assert run.liveness.stuck_s(1) == 0.0, "nor is all of it aborted meanwhile"
    found = run.until(73, stuck=True)
    assert [silent.worker for _, silent in found] == [B]
    assert "it waits for its batch" in found[0][1].why


@pytest.mark.parametrize("doing", ["compiling", "copying"])
def test_nor_one_that_compiles_or_stores(doing: Doing) -> None:
    run = Run(doing=doing)
    run.until(10)
    assert run.until(69, stuck=True) == []


def test_nobody_before_the_first_step_is_done() -> None:
    assert Run().until(100, stuck=True) == []


def test_nobody_while_one_evaluates_or_does_not_answer() -> None:
    evaluating = Run(phase="evaluating")
    evaluating.until(10)
    assert evaluating.until(60, stuck=True) == []
    mute = Run()
    mute.until(10)
    mute.mute = (D,)
    assert mute.until(60, stuck=True) == [], "it is D's silence that is looked at"


def test_the_jobs_upper_bound_holds_here_too() -> None:
    run = Run(most_s=2.0, doing="batch")
    run.until(10)
    found = run.until(14, stuck=True)
    assert [silent.worker for _, silent in found] == [B]


def test_how_long_others_may_wait_is_for_the_job_to_say() -> None:
    """10 s at least, 60 s for a script's own loop, and what `max_silence_s` says, shorter or
    longer."""
    bounds = [
        Liveness(0.5, most_s, least_s, {1: 0.1}).missing_bound_s(1, False)
        for most_s, least_s in BOUNDS
    ]
    assert bounds == [10.0, 60.0, 2.0, 300.0, 300.0]


BOUNDS = [
    (None, 0.0),
    (None, patience_s(Job(script="train.py"))),
    (2.0, 0.0),
    (300.0, 0.0),
    (300.0, 60.0),
]


LINE, BACK = "m.py, line 3", "its backward pass (all_reduce of 9 numbers)"


@pytest.mark.parametrize(
    ("mine", "theirs", "sure", "said"),
    [
        ((LINE, 3, 2), (LINE, 4, 1), True, "has begun 2 collectives of plan and 3 of fsdp, rank"),
        ((BACK, 4, 1), (LINE, 4, 1), False, "not the same ones"),
        ((BACK, 4, 1), ("commit.py:9 in f", 4, 1), False, "not the same ones"),
        ((BACK, 4, 1), (f"{LINE} (all_gather of 9 numbers)", 4, 1), False, "not the same ones"),
        ((LINE, 3, 1), (LINE, 4, 1), False, "not the same ones"),
        ((LINE, 4, 1), (LINE, 4, 1), False, ""),
        (("a.py:1 in f", 4, 1), ("b.py:9 in g", 4, 1), False, ""),
    ],
)
def test_ranks_that_all_wait_may_be_in_other_collectives(
    mine: tuple[str, int, int], theirs: tuple[str, int, int], sure: bool, said: str
) -> None:
    a, b = (
        RankSite((("plan", 0, plan), ("fsdp", 0, fsdp)), "others", where)
        for where, fsdp, plan in (mine, theirs)
    )
    for ranks in ([a, b], [b, a], [a, a, b], [b, a, b]):
        found = unlike_collectives(ranks, staged=False)
        assert found[0] is sure and (said in found[1] if said else not found[1]), found
        alone = replace(a, arrived=((DEVICE + "own", 0, 2), *a.arrived))
        assert unlike_collectives([*ranks, alone], staged=False) == (False, ""), "its GPU may hang"
        told = found if sure else (False, "")
        assert unlike_collectives(ranks, staged=True) == told, "of stages only what is sure"


def waits(kind: str, axis: str = "fsdp", first: int = 0, **numbers: int) -> RankSite:
    return replace(at(**numbers), doing="others", collective=InCollective(kind, axis, first))


def test_one_collective_of_a_group_cannot_be_of_two_kinds() -> None:
    """Also where the ranks are stages, or in other groups besides."""
    ranks = [
        waits("all_gather", fsdp_0=5, tp_0=8),
        waits("reduce_scatter", fsdp_0=5, tp_1=9),
        waits("all_gather", first=2, fsdp_2=7),
        waits("all_gather", first=2, fsdp_2=7),
    ]
    said = "collective 5 of fsdp is all_gather on rank 0 and reduce_scatter on rank 1"
    assert unlike_collectives(ranks, True) == unlike_collectives(ranks, False) == (True, said)


def test_what_a_network_may_have_done_is_not_sure() -> None:
    """One has what the other still waits for; or they wait in two groups, or in one of which
    another rank counts less."""
    for mine, theirs in (
        (waits("all_gather", fsdp_0=5), waits("reduce_scatter", fsdp_0=6)),
        (waits("all_gather", fsdp_0=5), waits("all_reduce", "dp", 0, fsdp_0=5, dp_0=3)),
        (waits("all_gather", fsdp_0=5), waits("reduce_scatter", first=2, fsdp_2=5)),
        (waits("all_gather", fsdp_0=5), replace(at(fsdp_0=5), doing="others")),
    ):
        assert not unlike_collectives([mine, theirs], staged=False)[0]
        assert unlike_collectives([mine, theirs], staged=True) == (False, "")


def test_messages_of_stages_are_begun_in_orders_of_their_own() -> None:
    ranks = [at(pp_0=5, plan_0=2), at(pp_0=6, plan_0=1)]
    assert unlike_collectives(ranks, staged=True) == (False, "")
    assert unlike_collectives(ranks, staged=False)[0]


def test_the_shards_of_a_stage_send_their_messages_in_one_order() -> None:
    """Rank 0 of the first stage leaves out a block: it has sent its samples on and waits for their
    gradients, while rank 1 waits for it in that block. What the second stage does is its own."""
    second = [waits("all_gather", "dp_shard", 2, dp_shard_2=3, pp_0=1), at(dp_shard_2=2, pp_1=0)]
    ranks = [at(dp_shard_0=2, pp_0=2), waits("all_gather", "dp_shard", dp_shard_0=3, pp_1=0)]
    sure, said = unlike_collectives([*ranks, *second], staged=True)
    assert sure
    assert "rank 1 has begun 3 collectives of dp_shard and 0 of pp, rank 0 2 and 2" in said
    # the same numbers of ranks that are no shards of one replica, or of one stage, say nothing
    replicas = [at(dp_replicate_0=2, pp_0=2), at(dp_replicate_0=3, pp_1=0)]
    assert unlike_collectives(replicas, staged=True) == (False, "")
    stages = [at(dp_shard_0=2, pp_0=2), at(dp_shard_2=3, pp_0=0)]
    assert unlike_collectives(stages, staged=True) == (False, "")
    # nor has one that comes later to all of it anything of its own
    late = [at(dp_shard_0=2, pp_0=1), at(dp_shard_0=3, pp_1=2), *second]
    assert unlike_collectives(late, staged=True) == (False, "")


def test_of_more_than_two_stages_messages_do_not_say_who_has_not_come() -> None:
    """Those in the middle have more of them."""
    ranks = {A: at(pp_0=2), B: at(pp_0=5), C: at(pp_0=5), D: at(pp_0=3)}
    assert absent_ranks(ranks, staged=True) == {}
    assert list(absent_ranks({A: at(pp_0=2), B: at(pp_0=4)}, staged=True)) == [A]
