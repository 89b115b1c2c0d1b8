"""Live moves of 105 MB between layouts, beside bare messages of the same processes' kind; the
content proven by digests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

from elastic.certify.checks.fault_checks import MANY, digests_agree, leave
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.layouts_tried import job_of, layouts, live, plan_of
from elastic.certify.reference.bare_runs import wire
from elastic.certify.tasks import Task
from elastic.scenarios.check import Bound, Check, judge
from elastic.scenarios.limit import Failed, Limit
from elastic.scenarios.one_process import program_file
from elastic.types import DigestPart, Layout, Plan

LARGE_BLOCKS = 8
MOVED_LEAST_BYTES = 10_000_000  # smaller moves say nothing of a rate
BOUNDS = (
    Bound(
        "content_equal", "position-keyed digests of all tensors before and after each move", least=1
    ),
    Bound(
        "rate_vs_bare",
        "tests/bench/reshard.py allows 0.5 of bare messages on a quiet machine with 1.1 GB; a "
        "fifth of it, since here a move "
        "is a tenth of that, and its planning, proof and waiting count",
        least=0.1,
    ),
)


def chain(n: int) -> list[Layout]:
    """Layouts that differ much from one to the next, over n ranks, back to the first."""
    mixed = [one for one in layouts(n) if one.dp_replicate == 1 and one.dp_shard < n]
    cut = sorted(mixed, key=lambda one: (-(one.pp > 1) - (one.tp > 1), one.pp * one.tp, one.pp))
    fewer = [Layout(dp_shard=n - 1)] if n > 2 else []
    return [Layout(dp_shard=n), *cut[:2], *fewer, Layout(dp_shard=n)]


def task(lab: Lab) -> Task:
    return Task(("reshard",), partial(_work, lab), least_s=20.0, weight=1.5, where=lab.place.where)


def _work(lab: Lab, limit: Limit) -> Iterator[Check]:
    rates: list[float] = []
    plans: list[Plan] = []
    equal, moved_bytes, transfer_s = True, 0, 0.0
    with lab.worker_pool(limit) as worker_pool:
        worker_pool.open(job_of("reshard", program_file("large"), MANY), lab.run_folder())
        for number, layout in enumerate(chain(worker_pool.n), 1):
            more = {"resume": live(plans[-1])} if plans else {}
            plan = plan_of(number, layout, worker_pool.workers, n_blocks=LARGE_BLOCKS, **more)
            worker_pool.enter(plan)
            entered = worker_pool.entered(plan)
            worker_pool.stepped(plan, 1)
            if plans:
                n_parts = max(len(plan.ranks), len(plans[-1].ranks))
                worker_pool.until(
                    lambda: len(worker_pool.events(DigestPart, number)) >= n_parts,  # noqa: B023
                    "digests",
                )
                equal &= digests_agree(worker_pool.events(DigestPart, number))
                if entered.bytes_moved >= MOVED_LEAST_BYTES:
                    rates.append(entered.bytes_moved / entered.phases_s["transfer"] / 1e9)
                    moved_bytes, transfer_s = (
                        moved_bytes + entered.bytes_moved,
                        transfer_s + entered.phases_s["transfer"],
                    )
            plans.append(plan)
        leave(worker_pool, plans[-1])
    if not rates:
        raise Failed(
            f"no move of {MOVED_LEAST_BYTES} bytes was among {[str(plan.layout) for plan in plans]}"
        )
    lab.make_room()
    bare = wire(lab.place, limit)
    figures = {
        "moves": len(plans) - 1, "bytes": moved_bytes, "gb_per_s": moved_bytes / transfer_s / 1e9,
        "median_gb_per_s": median(rates), "bare_gb_per_s": bare,
        "rate_vs_bare": median(rates) / bare, "content_equal": int(equal),
    }  # fmt: skip
    yield judge("reshard", figures, BOUNDS)
