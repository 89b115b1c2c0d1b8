"""What `elastic certify` does: finds the place, carries the tasks out, prints a row for each check,
or JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.certify import tasks
from elastic.certify.harness import cluster_place
from elastic.certify.harness.place import NO_RAY, Place, find
from elastic.certify.result import CertifyReport, place_lines
from elastic.errors import SpecError
from elastic.scenarios.check import Check
from elastic.storage import open_storage

ABOUT = (
    "try on this machine, or on the Ray cluster at $RAY_ADDRESS, what elastic promises: pass or "
    "fail, with numbers"
)
MINUTES = 5.0
DEFAULT_STORAGE = "elastic_runs"


@dataclass(frozen=True)
class CertifyOptions:
    """Of one run of certify."""

    gpus: int | None = None
    minutes: float = MINUTES
    storage: str | None = None
    no_ray: bool = False
    local: bool = False
    only: tuple[str, ...] = ()
    out: str | None = None
    json: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All but --json and --storage, which every verb has."""
    parser.add_argument(
        "job",
        metavar="JOB",
        nargs="?",
        help="instead: which layouts compute what this job's program does",
    )
    parser.add_argument(
        "--gpus",
        metavar="N",
        type=int,
        help="use N GPUs (0 = the CPU); without GPUs: N processes (default: all; 4)",
    )
    parser.add_argument(
        "--local", action="store_true", help="this host, even where RAY_ADDRESS names a Ray cluster"
    )
    parser.add_argument(
        "--only",
        metavar="NAMES",
        default="",
        help="only checks whose names begin so, with commas: kill,abort",
    )
    parser.add_argument(
        "--minutes",
        metavar="M",
        type=float,
        default=MINUTES,
        help="what does not fit is not run (default: 5)",
    )
    parser.add_argument(
        "--no-ray", action="store_true", help="only plain worker processes on this host"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the JSON there as well; in a folder as KIND.json"
    )


def run(given: argparse.Namespace) -> int:
    """Returns the exit code. Raises SpecError."""
    if given.job:
        from elastic.certify.checks.job_check import certify_job

        return certify_job(given.job, given.json)
    only = tuple(name.strip() for name in given.only.split(",") if name.strip())
    options = CertifyOptions(
        given.gpus,
        given.minutes,
        given.storage,
        given.no_ray,
        given.local,
        only,
        given.out,
        given.json,
    )
    report = certify(options)
    text, lines = json.dumps(report.plain(), indent=1), report.summary()
    if options.out:
        file = _file(Path(options.out), report)
        file.write_text(text + "\n")
        lines.append(f"the same as JSON: {file}")
    print(text if options.json else "\n".join(lines), flush=True)
    return report.exit_code


def _file(out: Path, report: CertifyReport) -> Path:
    """In a folder the file is named by the kind of place."""
    more = (
        "-no-ray"
        if report.place["ray"] == NO_RAY
        else ""
        if report.place["on"] == tasks.HERE
        else "-cluster"
    )
    return out / f"{report.place['kind']}{more}.json" if out.is_dir() else out


def certify(options: CertifyOptions) -> CertifyReport:
    """Raises SpecError where the options are wrong. Ctrl-C ends it early, with what was found."""
    _check(options)
    storage = open_storage(
        options.storage or os.environ.get("ELASTIC_STORAGE") or DEFAULT_STORAGE
    ).uri
    began = time.monotonic()
    with _place(options) as place:
        stream, head = (
            sys.stderr if options.json else sys.stdout,
            [*place_lines(place.plain(storage)), ""],
        )

        def tell(check: Check) -> None:
            print("\n".join([*head, *check.lines()]), file=stream, flush=True)
            head.clear()

        done = tasks.Tasks(tell)
        with _ended_by_signals():
            try:
                budget_s = options.minutes * 60 - (time.monotonic() - began)
                carry_out(place, storage, done, budget_s=budget_s, only=options.only)
            except KeyboardInterrupt:
                done.interrupted = True
        seconds = round(time.monotonic() - began, 1)
        return CertifyReport(
            place.plain(storage),
            tuple(done.checks),
            options.minutes * 60,
            seconds,
            done.interrupted,
        )


@contextmanager
def _place(options: CertifyOptions) -> Iterator[Place]:
    """The Ray cluster that `elastic run` would use, else this host. Raises SpecError."""
    address = "" if options.local or options.no_ray else cluster_place.address()
    if not address:
        yield find(options.gpus, options.no_ray)
        return
    from elastic.cluster.workers import remote_processes

    try:
        yield cluster_place.find(address, options.gpus)
    finally:
        remote_processes.disconnect()


def _check(options: CertifyOptions) -> None:
    if not 0 < options.minutes < 1e5:
        raise SpecError(f"--minutes {options.minutes:g}: it must be more than 0, as in --minutes 5")
    if options.gpus is not None and options.gpus < 0:
        raise SpecError(f"--gpus {options.gpus}: it must be a number of GPUs, or 0 for the CPU")
    if options.out and not Path(options.out).absolute().parent.is_dir():
        raise SpecError(
            f"--out {options.out}: the folder {Path(options.out).absolute().parent} is not there"
        )


def carry_out(
    place: Place, storage: str, done: tasks.Tasks, *, budget_s: float, only: Sequence[str] = ()
) -> None:
    """All tasks that this place has, in an order in which the cheap and the telling come first.
    `only`: with a check whose name begins so. Raises SpecError for a name that none has."""
    from elastic.certify.checks import every_check, shared_gpu
    from elastic.certify.harness.lab import Lab

    limit = tasks.Limit.after(budget_s)
    with Lab(place, storage=storage) as lab:
        if place.shared:
            done.run([shared_gpu.task(lab)], limit.left_s)
            if not any(
                check.name == "ranks share one GPU" and check.verdict == "pass"
                for check in done.checks
            ):
                lab.place = replace(place, ranks=1)
        wanted = _chosen(every_check.tasks_of(lab), only)
        left_out = [
            one for one in every_check.left_out(lab) if not only or one.name.startswith(tuple(only))
        ]
        names = [name for task in wanted for name in task.names] + [one.name for one in left_out]
        names += [check.name for check in done.checks]  # whether ranks share the GPU
        unknown = [word for word in only if not any(name.startswith(word) for name in names)]
        if unknown:
            raise SpecError(
                f"--only {','.join(unknown)}: no check begins so; try abort, layout, kill, main "
                "path, checkpoint"
            )
        if not done.interrupted:
            done.run(wanted, limit.left_s)
    for check in left_out:
        done.note(check)


def _chosen(found: list[tasks.Task], only: Sequence[str]) -> list[tasks.Task]:
    return [
        task
        for task in found
        if not only or any(name.startswith(tuple(only)) for name in task.names)
    ]


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does: everything is taken down, what was found is printed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: list[str] | None = None) -> int:
    """`python -m elastic.certify`, which needs neither Ray nor pydantic."""
    parser = argparse.ArgumentParser(
        prog="python -m elastic.certify", description=ABOUT[:1].upper() + ABOUT[1:] + "."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--storage",
        metavar="URI",
        help="where the checkpoint is tried (default: $ELASTIC_STORAGE or ./elastic_runs)",
    )
    add_arguments(parser)
    given: Any = parser.parse_args(argv)
    try:
        return run(given)
    except SpecError as error:
        print(f"elastic: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
