"""What a peer copy costs: two workers on two nodes, about 100 MB of state, a copy every few steps.

Next to it, at the same time on the same machine: how long the step would have waited had the copy been made at the boundary
into a new buffer, as it was before copies were taken behind the steps; and raw copies of as many bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from support.worker.plans import plan  # noqa: E402
from support.worker.worker_pool import Pool  # noqa: E402

from elastic.types import CopyStored, Layout, Quiesced, StepDone  # noqa: E402

EVERY, STEPS = 4, 33


def job(steps: int) -> dict[str, Any]:
    return {
        "name": "copies", "program": str(HERE / "copies_job" / "program.py"), "steps": steps, "global_batch": 16, "seed": 7,
        "eval_every": 0, "eval_samples": 0, "clip_grad_norm": 1.0,
    }  # fmt: skip


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


def measure(link_bytes_per_s: float) -> dict[str, Any]:
    pool, beside = Pool(2), []
    try:
        with tempfile.TemporaryDirectory() as run:
            workers = pool.open(job(STEPS), Path(run))
            pool.enter(plan(1, Layout(dp_shard=2), workers, 16, peer_every=EVERY, copy_bytes_per_s=link_bytes_per_s))
            pool.wait(lambda: any(e.step >= 2 for e in pool.events(StepDone)), "step 2", 300)
            n_bytes = pool.events(CopyStored)[0].copy.n_bytes // 2 if pool.events(CopyStored) else 0
            while len({e.worker for e in pool.events(Quiesced, 1)}) < 2:
                n_bytes = n_bytes or next((e.copy.n_bytes // 2 for e in pool.events(CopyStored)), 0)
                if n_bytes and len(beside) < 8:
                    beside.append(at_the_boundary(n_bytes))
                pool.wait(lambda: True, "messages")
                pool.drain()
                time.sleep(0.5)
    finally:
        pool.close()
    steps = [e for e in pool.events(StepDone) if e.step > 1]
    stored = [e for e in pool.events(CopyStored) if e.copy.kind == "peer"]
    step_s = median(e.step_time_s - e.data_s - e.copy_s for e in steps)
    stall_s = median(e.stall_s for e in stored[2:])
    new_s, warm_s = median(b[0] for b in beside), median(b[1] for b in beside)
    return {
        "state_mb_per_rank": round(n_bytes / 1e6, 1),
        "copies": len(stored),
        "step_s": round(step_s, 4),
        "stall_s": round(stall_s, 5),
        "stall_share_of_a_step": round(stall_s / step_s, 5),
        "stall_share_of_the_run": round(sum(e.stall_s for e in stored[2:]) / sum(e.step_time_s for e in steps), 5),
        "at_the_boundary_s": round(new_s, 5),
        "at_the_boundary_share_of_a_step": round(new_s / step_s, 5),
        "warm_copy_s": round(warm_s, 5),
        "slowed_s": round(stored[-1].slowed_s, 4),
        "flight_s": round(median(e.seconds for e in stored[2:]), 4),
        "copy_gb_per_s": round(n_bytes / median(e.seconds for e in stored[2:]) / 1e9, 3),
        "host_copy_gb_per_s_warm": round(n_bytes / warm_s / 1e9, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--paced", type=float, default=145e6, help="bytes per second that a rank may send; 0 = no limit")
    arguments = parser.parse_args()
    paced, unpaced = measure(arguments.paced), measure(0.0)
    figures = {**paced, **{f"unpaced_{name}": unpaced[name] for name in ("flight_s", "copy_gb_per_s", "stall_s", "step_s")}}
    if not arguments.json:
        print("\n".join(f"{name:36} {value}" for name, value in figures.items()))
    print(json.dumps({"bench": "copies", "figures": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
