"""The planner on this machine's CPU: seconds of a step of jobs/quickstart as predicted from a profile and as measured, for
twelve layouts of one to six processes.

    python tests/bench/planner_cpu.py [--json] [--rounds 1]

The profile is taken before and after the layouts run, in turns, each alone on the machine; the prediction is by the mean of the
two. About five minutes a round on two cores. A machine that others use at the same time measures them, not the planner.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

from elastic.api.planning import subjects
from elastic.hardware_file import read_hardware
from elastic.planner.cost import step_cost
from elastic.planner.search import site_of
from elastic.planner.steps import step_of
from elastic.planner.work import Work
from elastic.types import HardwareProfile, parse_layout

JOB = Path(__file__).resolve().parents[2] / "jobs" / "quickstart"
LAYOUTS = (
    "dp_shard=1", "dp_shard=2", "tp=2", "pp=2", "dp_replicate=2", "dp_shard=3", "dp_shard=4", "dp_shard=2,tp=2",
    "pp=2,dp_shard=2", "tp=4", "dp_shard=6", "dp_shard=3,tp=2",
)  # fmt: skip
STEPS, BLOCK = 40, 5  # a block of steps is one measurement; the first one of a run builds and warms up
RATE = re.compile(r"([\d,]+) tokens/s\n")


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def profiled(folder: Path, name: str) -> HardwareProfile:
    out = folder / f"{name}.json"
    command = [sys.executable, "-m", "elastic", "profile", str(JOB), "--local", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, env=environment())
    return read_hardware(out)


def measured(folder: Path, layout: str, turn: int, step_tokens: int) -> list[float]:
    """Seconds of a step, one number per block."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(parse_layout(layout).world_size), "-m", "elastic.worker", str(JOB), "--layout", layout]
    command += ["--set", f"steps={STEPS}", "--set", "eval_every=0", "--set", "durable_every=0", "--every", str(BLOCK)]
    command += ["--storage", str(folder / "runs"), "--run-name", f"{turn}-{layout.replace(',', '-')}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    return [step_tokens / float(rate.replace(",", "")) for rate in RATE.findall(done.stdout + done.stderr)][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    subject = subjects.of_job(str(JOB))
    took: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiles = [profiled(folder, "before")]
        for turn in range(given.rounds):
            for layout in LAYOUTS:
                took[layout] += measured(folder, layout, turn, subject.step_tokens)
        profiles.append(profiled(folder, "after"))
    work, errors = Work.of(subject.model), {}
    for text, seconds in took.items():
        layout = parse_layout(text)
        step = step_of(subject.model, subject.job, layout, 1)
        sites = [site_of(subject.job, profile, 1, layout.world_size) for profile in profiles]
        predicted, found = mean(step_cost(site, work, layout, step).step_s for site in sites), median(seconds)
        errors[text] = abs(predicted / found - 1)
        if not given.json:
            print(f"{text:18s} predicted {predicted:.3f} s  measured {found:.3f} s  {predicted / found - 1:+.0%}")
    figures = {
        "layouts": len(errors),
        "median_abs_err": round(median(errors.values()), 3),
        "most": round(max(errors.values()), 3),
    }
    print(json.dumps({"bench": "planner_cpu", "figures": figures}))


if __name__ == "__main__":
    main()
