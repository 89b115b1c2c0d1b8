"""The planner on this machine's CPU: seconds of a step of jobs/quickstart as predicted from a
profile and as measured, for twelve layouts of one to six processes.

    python tests/bench/planner_cpu.py [--json] [--repeats 1]

The profile is taken before and after the layouts run, in turns, each alone on the machine; the
prediction is by the mean of the two. About five minutes a round on two cores. A machine that others
use at the same time measures them, not the planner. With --smoke one layout, a few steps, and a
profile that nobody has measured.
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

JOB = Path(__file__).resolve().parents[2] / "jobs" / "quickstart"
LAYOUTS = (
    "dp_shard=1", "dp_shard=2", "tp=2", "pp=2", "dp_replicate=2", "dp_shard=3", "dp_shard=4",
    "dp_shard=2,tp=2", "pp=2,dp_shard=2", "tp=4", "dp_shard=6", "dp_shard=3,tp=2",
)  # fmt: skip
MOST_S = 1800.0
RATE = re.compile(r"([\d,]+) tokens/s\n")


@dataclass(frozen=True)
class Size:
    """`block`: steps of one measurement; the first one of a run builds and warms up. `profiles`:
    whether they are taken."""

    layouts: tuple[str, ...]
    steps: int
    block: int
    profiles: bool


WHOLE, SMOKE = Size(LAYOUTS, 40, 5, True), Size(LAYOUTS[1:2], 4, 2, False)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def profiled(folder: Path, name: str, size: Size) -> HardwareProfile:
    if not size.profiles:
        return HardwareProfile()
    out = folder / f"{name}.json"
    command = [sys.executable, "-m", "elastic", "profile", str(JOB), "--local", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, env=environment())
    return read_hardware(out)


def measured(folder: Path, layout: str, turn: int, step_tokens: int, size: Size) -> list[float]:
    """Seconds of a step, one number per block."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [
        str(parse_layout(layout).world_size),
        "-m",
        "elastic.worker",
        str(JOB),
        "--layout",
        layout,
    ]
    command += [
        "--set",
        f"steps={size.steps}",
        "--set",
        "eval_every=0",
        "--set",
        "durable_every=0",
        "--every",
        str(size.block),
    ]
    command += [
        "--storage",
        str(folder / "runs"),
        "--run-name",
        f"{turn}-{layout.replace(',', '-')}",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    return [
        step_tokens / float(rate.replace(",", ""))
        for rate in RATE.findall(done.stdout + done.stderr)
    ][1:]


def measure(clock: Clock, rounds: int, size: Size) -> dict[str, Any]:
    subject = model_source.of_job(str(JOB))
    took: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiles = [profiled(folder, "before", size)]
        for turn in range(rounds):
            for layout in size.layouts:
                clock.look(layout)
                took[layout] += measured(folder, layout, turn, subject.step_tokens, size)
        profiles.append(profiled(folder, "after", size))
    work, found = ModelCost.of(subject.model), {}
    for text, seconds in took.items():
        layout = parse_layout(text)
        step = step_of(subject.model, subject.job, layout, per_node=1)
        sites = [site_of(subject.job, profile, 1, world=layout.world_size) for profile in profiles]
        predicted, step_s = (
            mean(step_cost(site, work, layout, step=step).step_s for site in sites),
            median(seconds),
        )
        error = round(abs(predicted / step_s - 1), 3)
        found[text] = {
            "predicted_s": round(predicted, 4),
            "measured_s": round(step_s, 4),
            "abs_err": error,
        }
    errors = [one["abs_err"] for one in found.values()]
    return {
        "layouts": len(errors),
        "median_abs_err": round(median(errors), 3),
        "most": max(errors),
        "of": found,
    }


def main() -> int:
    given = options(__doc__, MOST_S, repeats=1)
    return finish(
        "planner_cpu",
        given,
        lambda clock: measure(clock, given.repeats, SMOKE if given.smoke else WHOLE),
    )


if __name__ == "__main__":
    sys.exit(main())
