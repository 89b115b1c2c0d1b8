"""The planner on this machine's CPU: seconds of a step as predicted from a profile and as measured.

    python tests/bench/planner_cpu.py [--parts dense experts] [--json] [--repeats 1]

`dense`: jobs/quickstart in twelve layouts of one to six processes; `experts`: the same model with a
mixture of experts in each block, in seven layouts, of which four share the experts out.

The profile is taken before and after the layouts run, in turns, each alone on the machine; the
prediction is by the mean of the two. About five minutes a round and part on two cores. A machine
that others use at the same time measures them, not the planner. With --smoke one layout, a few
steps, and a profile that nobody has measured.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from report import finish, options
from trial import Clock

from elastic.api.planning import model_source
from elastic.config.hardware import read_hardware
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.sites import site_of
from elastic.planner.cost.step_cost import step_cost
from elastic.planner.step_split import step_of
from elastic.types import HardwareProfile, parse_layout

HERE = Path(__file__).resolve().parent
JOBS = {"dense": HERE.parents[1] / "jobs" / "quickstart", "experts": HERE / "experts_job"}
LAYOUTS = {
    "dense": (
        "dp_shard=1", "dp_shard=2", "tp=2", "pp=2", "dp_replicate=2", "dp_shard=3", "dp_shard=4",
        "dp_shard=2,tp=2", "pp=2,dp_shard=2", "tp=4", "dp_shard=6", "dp_shard=3,tp=2",
    ),
    "experts": (
        "dp_shard=1", "dp_shard=2", "dp_shard=2,ep=2", "dp_shard=4", "dp_shard=4,ep=2",
        "dp_shard=4,ep=4", "dp_replicate=2,dp_shard=2,ep=2",
    ),
}  # fmt: skip
MOST_S = 3600.0
RATE = re.compile(r"([\d,]+) tokens/s\n")


@dataclass(frozen=True)
class Size:
    """`first`, `last`: of a part's layouts; `block`: steps of one measurement; the first one of a
    run builds and warms up. `profiles`: whether they are taken."""

    first: int
    last: int
    steps: int
    block: int
    profiles: bool


WHOLE, SMOKE = Size(0, 99, 40, 5, True), Size(2, 3, 4, 2, False)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def profiled(job: Path, out: Path, size: Size) -> HardwareProfile:
    if not size.profiles:
        return HardwareProfile()
    command = [sys.executable, "-m", "elastic", "profile", str(job), "--local", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, env=environment())
    return read_hardware(out)


def measured(job: Path, layout: str, storage: Path, step_tokens: int, size: Size) -> list[float]:
    """Seconds of a step, one number per block."""
    n = str(parse_layout(layout).world_size)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n,
        "-m", "elastic.worker", str(job), "--layout", layout, "--storage", str(storage),
        "--set", f"steps={size.steps}", "--set", "eval_every=0", "--set", "durable_every=0",
        "--every", str(size.block),
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    return [
        step_tokens / float(rate.replace(",", ""))
        for rate in RATE.findall(done.stdout + done.stderr)
    ][1:]


def measure(clock: Clock, rounds: int, size: Size, part: str) -> dict[str, Any]:
    job = JOBS[part]
    subject = model_source.of_job(str(job))
    took: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiles = [profiled(job, folder / "before.json", size)]
        for turn in range(rounds):
            for layout in LAYOUTS[part][size.first : size.last]:
                clock.look(layout)
                runs = folder / f"{turn}-{layout}"
                took[layout] += measured(job, layout, runs, subject.step_tokens, size)
        profiles.append(profiled(job, folder / "after.json", size))
    work, found = ModelCost.of(subject.model), {}
    for text, seconds in took.items():
        layout = parse_layout(text)
        step = step_of(subject.model, subject.job, layout, per_node=1)
        sites = [site_of(subject.job, profile, 1, world=layout.world_size) for profile in profiles]
        predicted_s = mean(step_cost(site, work, layout, step=step).step_s for site in sites)
        step_s = median(seconds)
        found[text] = {
            "predicted_s": round(predicted_s, 4),
            "measured_s": round(step_s, 4),
            "abs_err": round(abs(predicted_s / step_s - 1), 3),
        }
    errors = [one["abs_err"] for one in found.values()]
    return {
        "layouts": len(errors),
        "median_abs_err": round(median(errors), 3),
        "most": max(errors),
        "of": found,
    }


def main() -> int:
    given = options(__doc__, MOST_S, repeats=1, parts=tuple(JOBS))
    size = SMOKE if given.smoke else WHOLE
    return finish(
        "planner_cpu",
        given,
        lambda clock: {part: measure(clock, given.repeats, size, part) for part in given.parts},
    )


if __name__ == "__main__":
    sys.exit(main())
