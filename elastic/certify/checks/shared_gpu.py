"""May several NCCL ranks share this GPU? Asked with plain torch alone, so that NCCL's answer is its
own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

from elastic.certify.harness.lab import Lab
from elastic.certify.reference import bare_runs
from elastic.certify.tasks import Task, TaskRefused
from elastic.scenarios.check import Bound, Check, judge
from elastic.scenarios.limit import Failed, Limit

SUM = Bound("sum_is_right", "the sum of the ranks' numbers, added by hand", least=1)
MOST_S = 60.0
WORDS = ("duplicate gpu", "invalid usage", "nccl")
ADVICE = "different NCCL_HOSTID per rank, NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1, socket transport"


def task(lab: Lab) -> Task:
    return Task(("ranks share one GPU",), partial(_work, lab), least_s=10.0, weight=0.5)


def _work(lab: Lab, limit: Limit) -> Iterator[Check]:
    try:
        found = bare_runs.run(
            lab.place, ("elastic.certify.checks.shared_gpu",), limit, most_s=MOST_S
        )
    except Failed as error:
        raise TaskRefused(
            f"NCCL refuses {lab.place.ranks} ranks on one GPU ({ADVICE}): {message(str(error))}"
        ) from error
    yield judge("ranks share one GPU", found | {"ranks": lab.place.ranks}, [SUM])


def message(text: str) -> str:
    """The lines in which NCCL or torch says why."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    telling = [line for line in lines if any(word in line.lower() for word in WORDS)]
    return " | ".join(dict.fromkeys(telling or lines))[-700:]


def main() -> None:
    """One rank: an all-reduce and a message to the right neighbor, on the GPU."""
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from elastic.certify.reference.bare_torch import part

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        rank == 0,
        timedelta(seconds=MOST_S),
    )
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=MOST_S)
    )
    number = torch.full((1024,), float(rank + 1), device="cuda")
    dist.all_reduce(number)
    into = torch.zeros(1024, device="cuda")
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, number, (rank + 1) % world),
            dist.P2POp(dist.irecv, into, (rank - 1) % world),
        ]
    ):
        work.wait()
    torch.cuda.synchronize()
    right = bool((into == world * (world + 1) / 2).all())
    if rank == 0:
        print(
            json.dumps(
                {"sum_is_right": int(right), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
            ),
            flush=True,
        )
    part(store, rank, world)


if __name__ == "__main__":
    main()
