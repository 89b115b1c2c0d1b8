"""`elastic run`: a job or a script to its end, the same run again, or a driver that is watched and
started again."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from elastic import api
from elastic.api.running.supervise import command_of, supervised
from elastic.cli.parser import EXIT, add_overrides, option, overrides, verb
from elastic.driver import interruptible
from elastic.errors import ElasticError, Interrupted, RunDone, SpecError
from elastic.observe import find_runs
from elastic.text import printable
from elastic.types import is_auto, named_after_auto, parse_layout


def add(verbs: Any) -> None:
    made = verb(
        verbs,
        "run",
        _run,
        about="train a job to its end; with the name of an interrupted run: resume it",
    )
    option(made, "JOB", "folder with job.yaml and program.py (with --script: without)", nargs="?")
    option(
        made,
        "--script FILE",
        "a training script instead of a program.py; its arguments come last, after --",
    )
    made.set_defaults(refuse=made.error)
    option(made, "--run-name NAME", "default: the job's name and the time; a known name is resumed")
    option(
        made,
        "--supervise",
        "start a driver again that was killed or has lost its run; needs --run-name",
    )
    option(
        made,
        "--started-again",
        "of a command that is begun again by itself (a RayJob's): what `elastic stop` asked for "
        "stands",
    )
    option(made, "--supervised", argparse.SUPPRESS)  # what --supervise starts
    option(
        made,
        "--local",
        "use this machine even if RAY_ADDRESS is set; where it has no GPUs, CPU processes",
    )
    option(made, "--cluster FILE", "a cluster file; its pools are used instead of the job's own")
    option(
        made,
        "--layout LAYOUT",
        "always this one, as dp_shard=2,tp=2; or a part of it: auto,tp=2 (default: the job's)",
    )
    option(
        made,
        "--allow-changed",
        "resume although program.py, the data or the mathematics have changed",
    )
    option(
        made,
        "--from-checkpoint",
        "of a run whose journal is damaged: resume from its newest checkpoint",
    )
    option(
        made,
        "--no-budget",
        "paid pools without a limit: the job has neither budget_usd nor max_nodes",
    )
    option(
        made,
        "--drill DRILL",
        "notices, kills and growth to carry out instead of the job's own: a file, or in short "
        "'notice at 40, kill at 60, add at 80'",
    )
    _add_watching(made)
    add_overrides(made)


def _add_watching(made: argparse.ArgumentParser) -> None:
    """Who is shown what while it runs."""
    option(
        made,
        "--metrics-port PORT",
        "tell Prometheus the run's numbers there (PORT, HOST:PORT, 0 = any, or ray)",
    )
    option(made, "-q --quiet", "no progress and no report while it runs")
    option(made, "--dashboard", "show it in a browser too, as `elastic dashboard`")


def _run(given: argparse.Namespace) -> int:
    """A signal that comes before the run's loop hears it, or after that, ends it at once."""
    try:
        with interruptible():
            return _ran(given)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT) from None


def _ran(given: argparse.Namespace) -> int:
    if given.supervise:
        if not given.run_name:
            given.refuse(
                "--supervise needs --run-name NAME: by it a driver that is started again "
                "continues with the run"
            )
        return supervised(
            command_of(given.words),
            lambda text: print(f"elastic: {text}", file=sys.stderr, flush=True),
            again=command_of(given.words, again=True),
        )
    options = api.Options(
        run_name=given.run_name,
        local=given.local,
        overrides=_overrides(given),
        drill=given.drill,
        cluster=given.cluster,
        from_checkpoint=given.from_checkpoint,
        allow_changed=given.allow_changed,
        supervised=given.supervised,
        started_again=given.started_again,
        no_budget=given.no_budget,
        words=tuple(given.words),
        metrics_port=given.metrics_port,
        dashboard=given.dashboard,
        stream=sys.stderr if given.json else sys.stdout,
        show=not given.quiet,
    )
    try:
        result = _result(given, options)
    except RunDone as done:
        if given.json:
            print(json.dumps({"run": done.run, "outcome": "succeeded", "steps": done.steps}))
        raise
    if given.json:
        print(json.dumps(result.summary))
    elif result.outcome == "failed":
        print(f"elastic: run {result.run} failed: {printable(result.reason)}", file=sys.stderr)
    if result.outcome == "stopped":
        lines = find_runs.stopped_lines(result.run, result.reason, given.words)
        print(lines, end="", file=sys.stderr)
    return EXIT[result.outcome]


def _result(given: argparse.Namespace, options: api.Options) -> api.Result:
    """Of the script or the job that was given. Raises RunDone where nothing is left to do."""
    if given.script is not None:
        return api.run_script(given.script, given.args, given.job, options=options)
    if given.job is None:
        _name_what_resumes(given, given.run_name)
        given.refuse("JOB is missing: a folder with job.yaml and program.py; or give --script FILE")
    if not (Path(given.job) / "job.yaml").exists():
        _name_what_resumes(given, given.job)
    return api.run(given.job, options=options)


def _name_what_resumes(given: argparse.Namespace, name: str | None) -> None:
    """Raises SpecError where a run is named and its job is not."""
    try:
        run = find_runs.open_run(name or "", given.storage, exact=True)
        seen = find_runs.now(run)
    except ElasticError:  # no such run, or nothing is to be read of it
        return
    if again := find_runs.resuming(run, seen.job):
        raise SpecError(
            f"'{name}' is a run ({seen.phase}, step {seen.progress}), and its job is not named; to "
            f"resume it, with the same --set as before: {again}"
        )


def _overrides(given: argparse.Namespace) -> tuple[str, ...]:
    """Those of the command line, --layout among them. Raises SpecError."""
    if given.layout and any(each.startswith("layout=") for each in given.overrides):
        raise SpecError("--layout and --set layout=... are two ways at once; give one of them")
    if given.layout:
        _ = named_after_auto(given.layout) if is_auto(given.layout) else parse_layout(given.layout)
    return (*overrides(given), *([f"layout={given.layout}"] if given.layout else []))
