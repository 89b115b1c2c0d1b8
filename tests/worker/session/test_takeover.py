"""What a move takes is what was told before it; an altered content never becomes a generation that
counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.worker.chain import job_of
from support.worker.plans import live, plan
from support.worker.recovery import digests_agree, loss_curve_agrees, recover
from support.worker.worker_pool import Pool

from elastic.program import load_program
from elastic.reshard.transfer_forecast import Room, TransferRates, forecast
from elastic.reshard.transfer_plan import holders_of, participants
from elastic.types import (
    Abort,
    DigestPart,
    Layout,
    Move,
    Plan,
    PlanEntered,
    Quiesced,
    StepDone,
    WorkerFailed,
    WorkerId,
)
from elastic.worker.program.model_profile import trace
from elastic.worker.session import takeover

pytestmark = pytest.mark.slow


def told(
    job: dict[str, Any], old: Plan, layout: Layout, workers: list[WorkerId], room: Room
) -> Move:
    resume = live(old)
    everyone = participants(tuple(workers[: layout.world_size]), resume)
    layers = plan(9, layout, workers, job["global_batch"]).layers
    nodes = [worker.node_id for worker in everyone]
    cuts = (old.layout, old.layers), (layout, layers)
    return forecast(
        trace(load_program(job["program"])),
        *cuts,
        holders=holders_of(resume, everyone),
        nodes=nodes,
        room=room,
        pace=TransferRates(),
    ).move


CHAIN = [
    Layout(dp_shard=4), Layout(dp_shard=2, tp=2), Layout(pp=4), Layout(dp_shard=3),
    Layout(dp_replicate=2, dp_shard=2), Layout(tp=2), Layout(pp=2, dp_shard=2),
]  # fmt: skip


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize("room", [Room(), Room(memory_bytes=1)], ids=["device", "host"])
def test_what_was_told_is_what_it_takes(pool: Pool, tmp_path: Path, room: Room) -> None:
    """Bytes exactly; the peak within its bound; the loss as ever, also where the old state left the
    device first."""
    job = job_of("tiny.py", steps=2 * len(CHAIN) + 2)
    workers = pool.open(job, tmp_path, per_node=2)
    plans: list[Plan] = []
    for i, layout in enumerate(CHAIN):
        more = (
            {"resume": live(plans[-1]), "move": told(job, plans[-1], layout, workers, room)}
            if plans
            else {}
        )
        plans.append(plan(i + 1, layout, workers, job["global_batch"], **more))
        pool.enter(plans[-1])
        entered, move = pool.entered(i + 1), plans[-1].move
        if move is not None:
            assert move.via == ("host" if room.memory_bytes else "device")
            assert entered.bytes_moved == move.n_bytes
            assert 0 <= entered.peak_bytes <= move.peak_bytes
            if move.via == "device":
                assert entered.peak_bytes > 0.8 * (move.peak_bytes - (32 << 20)), (
                    "the bound is far from what it takes"
                )
        pool.wait(
            lambda: any(e.step >= 2 * i + 2 for e in pool.events(StepDone)),  # noqa: B023
            f"step {2 * i + 2}",
        )
    pool.quiesced(len(CHAIN), len(plans[-1].ranks))
    loss_curve_agrees(pool, job)
    for generation in range(2, len(CHAIN) + 1):
        n_parts = max(len(plans[generation - 2].ranks), len(plans[generation - 1].ranks))
        pool.wait(lambda: len(pool.events(DigestPart, generation)) == n_parts, "digests")  # noqa: B023
        assert digests_agree(pool, generation)


# ---------------------------------------------------------------------------------- run in a worker


def turn_a_bit_on_the_wire() -> None:
    """The first message of this worker's next takeover arrives with one bit turned."""
    real = dist.irecv

    class Turned:
        def __init__(self, work: Any, tensor: torch.Tensor) -> None:
            self.work, self.tensor = work, tensor

        def wait(self) -> None:
            self.work.wait()
            self.tensor.view(torch.uint8)[7] ^= 1

    def irecv(tensor: torch.Tensor, **where: Any) -> Any:
        dist.irecv = real
        return Turned(real(tensor, **where), tensor)

    dist.irecv = irecv


def turn_a_bit_in_memory() -> None:
    """After the chunk sums agreed, one bit of one element of this worker's new state is turned."""
    real = takeover.carry_out

    def carry_out(transfers: Any, me: int, *, write: Any, **more: Any) -> Any:
        takeover.carry_out = real
        moved = real(transfers, me, write=write, **more)
        one = next(
            t for t in transfers if t.destination == me and t.fqn.startswith("optim.exp_avg.")
        )
        write(one).view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return moved

    takeover.carry_out = carry_out


def two_generations(
    pool: Pool, run: Path, fault: Any, peer_every: int = 0
) -> tuple[dict[str, Any], list[WorkerId], Plan]:
    """The second is entered live from the first, with the fault in worker 1."""
    job = job_of("tiny.py", steps=14)
    workers = pool.open(job, run)
    first = plan(1, Layout(dp_shard=4), workers, 12, peer_every=peer_every)
    pool.enter(first)
    pool.wait(lambda: any(e.step >= 4 for e in pool.events(StepDone)), "step 4")
    pool.patch(workers[1], fault)
    pool.enter(plan(2, Layout(dp_shard=2, tp=2), workers, 12, resume=live(first)))
    return job, workers, first


@pytest.mark.e2e
def test_a_chunk_that_arrives_altered_ends_the_transition_and_the_old_boxes_are_still_there(
    pool: Pool, tmp_path: Path
) -> None:
    job, workers, first = two_generations(pool, tmp_path, turn_a_bit_on_the_wire)
    pool.wait(
        lambda: any(e.kind == "infrastructure" for e in pool.events(WorkerFailed, 2)), "failure"
    )
    (failed,) = [e for e in pool.events(WorkerFailed, 2) if e.kind == "infrastructure"]
    assert failed.worker == workers[1]
    assert "chunk 1 of" in failed.error and "64-bit sum differs" in failed.error
    new = recover(pool, first, Layout(tp=2), workers, workers)
    assert not pool.events(PlanEntered, 2), "a generation with altered boxes was entered"
    assert new.resume.step == max(e.step for e in pool.events(StepDone, 1)), (
        "the live boxes of the first one were not used"
    )
    pool.quiesced(new.generation, 4)
    loss_curve_agrees(pool, job)


@pytest.mark.e2e
def test_a_bit_that_turns_in_memory_is_seen_behind_the_steps(pool: Pool, tmp_path: Path) -> None:
    job, workers, first = two_generations(pool, tmp_path, turn_a_bit_in_memory)
    pool.entered(2)
    pool.wait(lambda: len(pool.events(DigestPart, 2)) == 4, "digests")
    assert not digests_agree(pool, 2)
    for worker in workers:
        pool.order(worker, Abort(2))
    pool.wait(
        lambda: {e.worker for e in pool.events(Quiesced, 2)} >= set(workers),
        "the end of generation 2",
    )
