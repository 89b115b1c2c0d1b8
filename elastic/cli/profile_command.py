"""`elastic profile`: of a RUN, which trains on; or of a JOB, which hardware it finds, or how it
scales."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from elastic import api
from elastic.cli.parser import add_overrides, option, overrides, show, verb, whole
from elastic.errors import SpecError
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.storage import open_storage

JOB_FILE = "job.yaml"
ABOUT = (
    "where the time of a live run goes; or measure hardware with what a job computes, which plan "
    "and run read; or how a job scales"
)
OF_RUN, OF_JOB, OF_SCALE = ("steps", "ranks"), ("out", "seconds"), ("scale", "png", "cluster")
WIDEST = 120


def add(verbs: Any) -> None:
    made = verb(verbs, "profile", _profile, about=ABOUT)
    made.add_argument(
        "what",
        metavar="RUN|JOB",
        help="a run, if there is one of this name; else the folder of a job (./NAME: never a run)",
    )
    run = made.add_argument_group("of a run that trains")
    option(run, "--steps N", "steps that are traced (default: 5; --scale: 3)", type=whole(0))
    option(run, "--ranks RANKS", "0,3 or all or node, the first of each node (default)")
    job = made.add_argument_group("of a job: measure the hardware")
    option(job, "--local", "this machine even if RAY_ADDRESS is set")
    option(job, "--out FILE", "default: elastic/hardware/KIND.json in the user's cache folder")
    option(job, "--seconds S", "about how long it may take (default: 60)", type=whole(0))
    add_overrides(made)
    scale = made.add_argument_group("of a job: how it scales")
    option(scale, "--scale N,N", "run some steps at each of these numbers of workers: 1,2,4")
    option(scale, "--png FILE", "a picture of that")
    option(scale, "--cluster FILE", "its pools instead of the job's own")


def _profile(given: argparse.Namespace) -> int:
    run = _run(given)
    if run is not None:
        _refuse(given, (*OF_JOB, *OF_SCALE, "overrides", "local"), f"run '{run.name}'")
        return _of_run(given, run)
    if given.scale is not None:
        _refuse(given, (*OF_JOB, "ranks"), "a scaling study")
        return _scale(given)
    _refuse(given, (*OF_RUN, *OF_SCALE), f"the job {given.what}")
    seconds = 60 if given.seconds is None else given.seconds
    found = api.profile(
        given.what, api.ProfileRequest(given.out, seconds, overrides(given), given.local)
    )
    show(
        given,
        {"hardware": [one.plain() for one in found]},
        [line for one in found for line in one.lines()],
    )
    return 0


def _run(given: argparse.Namespace) -> RunFolder | None:
    """The run that is meant; None = a job. Raises SpecError where it may be both, or is neither."""
    text, job = given.what, (Path(given.what) / JOB_FILE).is_file()
    is_path = "://" in text or text.startswith(".") or os.sep in text
    uri = text if is_path else f"{find_runs.storage_uri(given.storage)}/{text}"
    named = RunFolder.of(open_storage(uri))
    if named.exists() and job and not is_path:
        raise SpecError(
            f"profile: '{text}' is a run in {uri} and the folder of a job; say {uri}, or ./{text} "
            "for the job"
        )
    if named.exists():
        return named
    if job:
        return None
    try:
        return find_runs.open_run(text, given.storage)
    except SpecError as error:
        raise SpecError(
            f"profile: {error}; and {text} is no folder of a job (job.yaml, program.py) either"
        ) from None


def _refuse(given: argparse.Namespace, names: tuple[str, ...], of: str) -> None:
    """Raises SpecError for an option of another use."""
    for name in names:
        if getattr(given, name):
            option = "set" if name == "overrides" else name
            raise SpecError(f"profile: --{option} says nothing to {of}; see elastic profile --help")


def _of_run(given: argparse.Namespace, run: RunFolder) -> int:
    wishes = api.RunProfileRequest(5 if given.steps is None else given.steps, given.ranks or "node")
    found = api.profile_run(run, wishes, say=(lambda text: None) if given.json else print)
    show(given, found.plain(), found.lines(_width()))
    return 1 if found.error else 0


def _scale(given: argparse.Namespace) -> int:
    try:
        workers = tuple(int(word) for word in given.scale.split(","))
    except ValueError:
        workers = ()
    if not workers or min(workers) < 1:
        raise SpecError(
            f"--scale {given.scale}: must be numbers of workers with commas, as in 1,2,4"
        )
    options = api.Options(local=given.local, overrides=overrides(given), cluster=given.cluster)
    steps = 3 if given.steps is None else given.steps
    found = api.scaling_study(given.what, api.ScalingRequest(workers, steps, options, given.png))
    show(given, found.plain(), found.lines(_width()))
    return 0


def _width() -> int:
    return min(WIDEST, shutil.get_terminal_size().columns)
