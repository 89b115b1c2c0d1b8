"""Commands that a run obeys: stop, drill. They put an order into its inbox."""

from __future__ import annotations

import argparse
from typing import Any

from elastic import api
from elastic.cli.parser import opened, option, run_verb, show

UNDRIVEN = (
    "nobody drives it now; the next driver that is started again without a person (--supervise, "
    "torchrun, SLURM) saves and stops (a start by hand trains): "
)


def add(verbs: Any) -> None:
    made = run_verb(verbs, "stop", _stop, about="ask a run to save its state and stop")
    option(made, "--reason", "written to the journal", default="requested on the command line")
    made = run_verb(
        verbs,
        "drill",
        _drill,
        about="remove a node from a live run, or add one, to see what it does",
    )
    made.add_argument(
        "entry",
        metavar="KEY=VALUE",
        nargs="+",
        help="notice=NODE [deadline_s=30], kill=NODE, hang=NODE, partition=NODE [for_s=30] or "
        "add=POOL, at once or at_step=N; "
        "NODE is any, any-spot, rank0, rank:N, a node id, or several with commas",
    )


def _stop(given: argparse.Namespace) -> int:
    run = opened(given)
    driven = api.stop(run.storage, given.reason)
    said = "" if driven else UNDRIVEN
    show(
        given,
        {"run": run.name, "asked": "stop", "driven": driven},
        [f"run {run.name} is asked to stop: {said}elastic status {given.run}"],
    )
    return 0


def _drill(given: argparse.Namespace) -> int:
    run = opened(given)
    entry = api.drill(run.storage, given.entry)
    show(given, {"run": run.name, "drill": entry}, [f"run {run.name} is given the drill {entry}"])
    return 0
