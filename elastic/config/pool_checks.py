"""What a job asks of the pools that it runs on: enough workers, GPUs that can what it wants, and a
limit on what they may cost."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.config.job import JobSpec
from elastic.config.key_names import place_of
from elastic.errors import SpecError
from elastic.text import n_of
from elastic.types import Job, Pool, is_auto


def check_fit(job: JobSpec, pools: Sequence[Pool]) -> None:
    """Can the job ever run on these pools? Raises SpecError with the numbers."""
    n_workers = sum(pool.max_nodes * pool.gpus_per_node for pool in pools)
    listed = (
        " + ".join(f"{pool.name} {pool.max_nodes} x {pool.gpus_per_node}" for pool in pools)
        or "no pool"
    )
    smallest = min(job.least_layouts(), key=lambda layout: layout.world_size)
    if smallest.world_size > n_workers:
        raise SpecError(
            f"{job.name}: layout '{smallest}' needs {n_of(smallest.world_size, 'worker')}; "
            f"the pools give at most {n_workers} ({listed})"
        )
    if job.min_workers > n_workers:
        raise SpecError(
            f"{job.name}: min_workers={job.min_workers}; the pools give at most {n_workers} "
            f"({listed})"
        )
    _check_float8(job, pools)
    if job.on_demand_floor not in ("auto", 0) and all(
        pool.market_type != "on-demand" for pool in pools
    ):
        kinds = ", ".join(f"{pool.name} is {pool.market_type}" for pool in pools)
        raise SpecError(
            f"{job.name}: on_demand_floor={job.on_demand_floor}, but no pool is on-demand ({kinds})"
        )


def _check_float8(job: JobSpec, pools: Sequence[Pool]) -> None:
    kinds = list(dict.fromkeys(pool.accelerator_type for pool in pools))
    if job.float8 and kinds == ["CPU"]:
        raise SpecError(
            f"{job.name}: float8: true needs GPUs that compute in float8 (H100, H200, B200, L4, "
            "L40S); there are none"
        )
    if job.float8 and len(kinds) > 1:
        raise SpecError(
            f"{job.name}: float8: true needs GPUs of one kind, the pools have {' and '.join(kinds)}"
        )


def fed(job: Job, n_workers: int) -> str:
    """A sentence where a step of a job that names no layout whole has fewer samples than there are
    workers; '' = it has not."""
    most = min(n_workers, job.max_workers or n_workers)
    if job.global_batch >= most or not is_auto(job.layout):
        return ""
    return (
        f"a step has {job.global_batch} samples (global_batch), the pools up to {most} workers: "
        f"{job.global_batch} of them at most are data-parallel ranks, others that no tp, cp or pp "
        f"takes stay idle and are paid for; give a larger global_batch, or max_workers: "
        f"{job.global_batch}"
    )


def unlimited(job: Job, pools: Sequence[Pool]) -> str:
    """Why a run of this job on these pools may cost any amount; '' = a limit is given, or no pool
    is paid."""
    paid = [pool for pool in pools if pool.paid]
    if not paid or job.budget_usd or job.max_nodes:
        return ""
    listed = " + ".join(
        (
            f"{pool.name} {pool.max_nodes} x "
            f"{f'${pool.usd_per_node_h:,.2f}/h' if pool.usd_per_node_h else 'no known price'}"
        )
        for pool in paid
    )
    usd_per_h = sum(pool.max_nodes * pool.usd_per_node_h for pool in paid)
    return (
        "keys 'budget_usd' and 'max_nodes' are missing, and nodes are paid for: up to "
        f"${usd_per_h:,.2f} an hour ({listed}) until the run ends; give budget_usd (dollars in "
        "all) or max_nodes (nodes at a time), or say --no-budget"
    )


def check_budget(job: JobSpec, pools: Sequence[Pool], no_budget: bool = False) -> None:
    """Paid pools need a limit. `no_budget`: somebody has said that there shall be none. Raises
    SpecError."""
    if no_budget and job.budget_usd is not None:
        raise SpecError(
            f"{place_of(job.where, ['budget_usd'])}: key 'budget_usd' is {job.budget_usd:g}, and "
            "--no-budget says none; give one of them"
        )
    why = "" if no_budget else unlimited(job.job(), pools)
    if why:
        raise SpecError(f"{job.where}: {why}")
