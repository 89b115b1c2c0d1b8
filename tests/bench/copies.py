"""What a peer replica costs: two workers on two nodes, about 100 MB of state, a copy every few
steps.

Next to it, at the same time on the same machine: how long the step would have waited had the copy
been made at the boundary into a new buffer, as it was before copies were taken behind the steps;
and raw copies of as many bytes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import finish, options
from trial import Clock, Failed

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from support.worker.plans import plan  # noqa: E402
from support.worker.worker_pool import Pool  # noqa: E402

from elastic.types import CopyStored, Layout, Quiesced, StepDone  # noqa: E402

MOST_S, PACED = 300.0, 145e6  # bytes per second that a rank may send; 0 = no limit
EVERY = 4
LEFT_OUT = 2  # copies at the start: buffers are made then


@dataclass(frozen=True)
class Size:
    program: Path
    steps: int

    def job(self) -> dict[str, Any]:
        return {
            "name": "copies", "program": str(self.program), "steps": self.steps, "global_batch": 16,
            "seed": 7, "eval_every": 0, "eval_samples": 0, "clip_grad_norm": 1.0,
        }  # fmt: skip


WHOLE = Size(HERE / "copies_job" / "program.py", 33)
SMOKE = Size(HERE.parent / "programs" / "tiny.py", 25)


def at_the_boundary(n_bytes: int) -> tuple[float, float]:
    """Seconds to copy that many bytes into a new buffer, and into one that was used before."""
    source = torch.ones(n_bytes, dtype=torch.uint8)
    began_s = time.monotonic()
    buffer = torch.empty(n_bytes, dtype=torch.uint8)
    buffer.copy_(source)
    new_s = time.monotonic() - began_s
    began_s = time.monotonic()
    buffer.copy_(source)
    return new_s, time.monotonic() - began_s


def copied(size: Size, link_bytes_per_s: float, clock: Clock) -> dict[str, Any]:
    pool, beside = Pool(2), []
    try:
        with tempfile.TemporaryDirectory() as run:
            workers = pool.open(size.job(), Path(run))
            pool.enter(
                plan(
                    1,
                    Layout(dp_shard=2),
                    workers,
                    16,
                    peer_every=EVERY,
                    copy_bytes_per_s=link_bytes_per_s,
                )
            )
            pool.wait(lambda: bool(pool.events(CopyStored)), "the first copy", 300)
            n_bytes = pool.events(CopyStored)[0].copy.n_bytes // 2
            while len({e.worker for e in pool.events(Quiesced, 1)}) < 2 or not beside:
                clock.look("the last step")
                if len(beside) < 8:
                    beside.append(at_the_boundary(n_bytes))
                pool.wait(lambda: True, "messages")
                pool.drain()
                time.sleep(0.5)
    finally:
        pool.close()
    steps = [e for e in pool.events(StepDone) if e.step > 1]
    stored = [e for e in pool.events(CopyStored) if e.copy.kind == "peer"]
    if len(stored) <= LEFT_OUT:
        raise Failed(f"only {len(stored)} copies were stored")
    step_s = median(e.step_time_s - e.data_s - e.copy_s for e in steps)
    stall_s = median(e.stall_s for e in stored[LEFT_OUT:])
    new_s, warm_s = median(b[0] for b in beside), median(b[1] for b in beside)
    return {
        "state_mb_per_rank": round(n_bytes / 1e6, 1),
        "copies": len(stored),
        "step_s": round(step_s, 4),
        "stall_s": round(stall_s, 5),
        "stall_share_of_a_step": round(stall_s / step_s, 5),
        "stall_share_of_the_run": round(
            sum(e.stall_s for e in stored[LEFT_OUT:]) / sum(e.step_time_s for e in steps), 5
        ),
        "at_the_boundary_s": round(new_s, 5),
        "at_the_boundary_share_of_a_step": round(new_s / step_s, 5),
        "warm_copy_s": round(warm_s, 5),
        "slowed_s": round(stored[-1].slowed_s, 4),
        "flight_s": round(median(e.seconds for e in stored[LEFT_OUT:]), 4),
        "copy_gb_per_s": round(n_bytes / median(e.seconds for e in stored[LEFT_OUT:]) / 1e9, 3),
        "host_copy_gb_per_s_warm": round(n_bytes / warm_s / 1e9, 2),
    }


def measure(size: Size, clock: Clock, paced: float) -> Mapping[str, Any]:
    found, unpaced = copied(size, paced, clock), copied(size, 0.0, clock)
    return {
        **found,
        **{
            f"unpaced_{name}": unpaced[name]
            for name in ("flight_s", "copy_gb_per_s", "stall_s", "step_s")
        },
    }


def main() -> int:
    given = options(__doc__, MOST_S, repeats=1)
    return finish(
        "copies", given, lambda clock: measure(SMOKE if given.smoke else WHOLE, clock, PACED)
    )


if __name__ == "__main__":
    sys.exit(main())
