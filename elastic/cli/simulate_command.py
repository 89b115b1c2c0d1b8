"""`elastic simulate`: its arguments, and the answer as plain data and as lines."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from elastic.api import simulate, simulated_drill
from elastic.api.planning import model_source
from elastic.api.planning.quantities import hours_of
from elastic.cli.parser import add_job_or_script, add_overrides, number, option, show, verb, whole
from elastic.config.clusters import load_cluster
from elastic.errors import SpecError
from elastic.observe.plans import simulated
from elastic.observe.reporting.pictures import asked_for

ABOUT = "what a job will cost and take on a spot market: the real policy on months of traces"
MOST_STARTS = 10_000
TOLD_EVERY_S = 10.0
EPILOG = """examples:
  elastic simulate jobs/llama3_8b_spot --cluster cluster_configs/aws_p5_p4d_spot.yaml
  elastic simulate JOB --cluster FILE --trace traces/us-west-2.json --deadline 14d
  elastic simulate JOB --cluster FILE --trace traces/ --compare greedy,uniform-progress,no-replicas
  elastic simulate JOB --cluster FILE --fit traces/us-west-2.json --start-times 100
  elastic simulate JOB --cluster FILE --calibrate my-last-run --png run.png
  elastic simulate JOB --drill FILE --calibrate my-last-run
  elastic simulate --script train.py --cluster FILE -- --epochs 3

A trace is a JSON file of ticks ({"metadata": {"gap_seconds": 300}, "data": [8, 8, 7, ...]}), a CSV
file with the columns at_s,nodes (and usd_per_node_h) or at_s,event,node (add, remove), or a past
run. A folder has one file for each spot pool. docs/simulate.md says what is simulated."""


def add(verbs: Any) -> None:
    made = verb(verbs, "simulate", _answered, about=ABOUT)
    made.epilog, made.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    add_job_or_script(made)
    option(made, "--cluster FILE", "its pools (default: the job's own)")
    option(made, "--trace PATH", "file, folder, or a past run", default="")
    option(made, "--fit FILE", "make up markets like this trace", default="")
    option(made, "--calibrate RUN", "start-up, pauses and steps as it measured", default="")
    option(
        made,
        "--drill DRILL",
        "no market: what this drill does on the embedded cluster (with --calibrate)",
        default="",
    )
    option(made, "--deadline TIME", "36h, 14d (default: the job's)", default="")
    option(made, "--compare A,B", f"of {', '.join(simulate.KNOWN)}", default="")
    option(made, "--policy IMPORT", "module:function in the place of elastic's", default="")
    option(
        made,
        "--start-times N",
        "over the trace (default: 16)",
        type=whole(1, MOST_STARTS),
        default=16,
    )
    option(
        made,
        "--unannounced SHARE",
        "of nodes taken without a notice (default: 0)",
        type=number("a share from 0 to 1, as in 0.1", lambda share: 0 <= share <= 1),
        default=0.0,
    )
    option(made, "--seed N", "of made-up markets", type=int, default=0)
    option(made, "--png FILE", "a picture of one simulated run")
    add_overrides(made)


OF_MARKETS = ("trace", "fit", "compare", "policy", "deadline", "unannounced", "png")


def _answered(given: argparse.Namespace) -> int:
    if given.drill:
        return _drilled(given)
    asked = simulate.Simulation(
        _subject(given),
        trace=given.trace,
        fit=given.fit,
        calibrate=given.calibrate,
        compare=tuple(filter(None, given.compare.split(","))) or simulate.USUAL,
        own_policy=given.policy,
        deadline_h=hours_of(given.deadline, "--deadline") if given.deadline else 0.0,
        n_starts=given.start_times,
        unannounced=given.unannounced,
        seed=given.seed,
    )
    found = simulate.simulate(asked, progress=_Progress())
    data = found.plain()
    lines = simulated.table(data)
    if given.png:
        with asked_for(given.png):
            data["png"] = str(simulated.save(found.one_run().history, data, given.png))
        lines.append(f"picture: {data['png']}")
    show(given, data, lines)
    return 0


def _drilled(given: argparse.Namespace) -> int:
    for name in OF_MARKETS:
        if getattr(given, name):
            raise SpecError(f"--{name} is of markets, --drill of none; leave one of them out")
    found = simulated_drill.simulate_drill(
        _subject(given), drill=given.drill, calibrate=given.calibrate
    )
    show(given, found.plain(), found.text())
    return 0


def _subject(given: argparse.Namespace) -> model_source.Subject:
    if not given.job and not given.script:
        raise SpecError(
            "simulate: JOB or --script is missing: elastic simulate jobs/quickstart --cluster "
            "cluster_configs/aws_p5_p4d_spot.yaml"
        )
    cluster = load_cluster(given.cluster) if given.cluster is not None else None
    return model_source.of_job_or_script(
        given.job, given.script, given.args, overrides=given.overrides, cluster=cluster
    )


@dataclass
class _Progress:
    """On stderr, also beside --json: one line that changes on a terminal, elsewhere a line now and
    then."""

    told_s: float = field(default_factory=time.monotonic)

    def __call__(self, done: int, of: int) -> None:
        text = f"{done} of {of} starts"
        if sys.stderr.isatty():
            print(f"\r{text}", end="\n" if done == of else "", file=sys.stderr, flush=True)
        elif (now_s := time.monotonic()) >= self.told_s + TOLD_EVERY_S:
            self.told_s = now_s
            print(text, file=sys.stderr, flush=True)
