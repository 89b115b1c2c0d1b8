"""How a run is asked for: options, its name, the Ray cluster and the storage that it uses."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from elastic.errors import SpecError, known_keywords
from elastic.observe.find_runs import SUBMITTED
from elastic.observe.metrics.metrics_files import OnStep

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@known_keywords("elastic.Options")
@dataclass(frozen=True)
class Options:
    """How to run. None of it changes what is computed."""

    run_name: str | None = None  # of a run that is there: resume it
    local: bool = False  # the embedded cluster, also where a Ray address is known
    address: str | None = None  # of the Ray cluster to use; default: $RAY_ADDRESS
    overrides: tuple[str, ...] = ()  # key=value over job.yaml
    drill: str | Path | None = None  # a drill file, or "kill at 60", instead of the job's own
    own_drill: bool = False  # the job's own drill is meant for a Ray cluster too
    cluster: str | Path | None = None  # a cluster file: its pools instead of the job's own
    # of a run whose journal is damaged: set that aside, resume from the newest checkpoint
    from_checkpoint: bool = False
    # continue although program, data or mathematics are not those that the run began with
    allow_changed: bool = False
    # nobody looks on: a run that its program has ended as failed is not begun again unchanged
    supervised: bool = False
    # no person has started this driver: one before it was killed, or has lost the run
    started_again: bool = False
    no_budget: bool = False  # paid pools although the job has neither budget_usd nor max_nodes
    words: tuple[str, ...] = ()  # that were typed behind `elastic`: they are told to who resumes it
    show: bool = True  # progress while it runs
    dashboard: bool = False  # a page in the browser while it runs, on this machine
    # drills on a Ray cluster take the workers of a node and leave the node itself alone
    spared: bool = False
    stream: TextIO | None = None  # where progress and report go; default: standard output
    # called with the numbers of each step, in a thread beside the driver's (docs/metrics.md)
    on_step: OnStep | None = None
    # where Prometheus finds the run's numbers, instead of the job's metrics_port
    metrics_port: int | str | None = None


def check_run_name(name: str) -> None:
    """Raises SpecError where it could be no folder of its own."""
    if not RUN_NAME.fullmatch(name):
        raise SpecError(f"run name '{name}': letters, digits, '.', '_' and '-' only")


def ray_address(options: Options) -> str | None:
    """The Ray cluster to use: $RAY_ADDRESS (`ray job submit` sets it); None = the embedded default.
    Raises SpecError where nothing answers there."""
    if options.local:
        return None
    address = (
        options.address
        or os.environ.get("RAY_ADDRESS")
        or ("auto" if os.environ.get(SUBMITTED) else None)
    )
    if address is not None:
        from elastic.cluster.ray.address import check_reachable

        check_reachable(address)
    return address
