"""How long each test took: said at the end of a run, held against what is on record, and recorded.

The record, tests/durations.csv, has the last KEPT values of each test that takes REST_S or longer,
and of the rest of each file together. `--record-durations` adds a run's values to it. A test takes
the time of its set-up, its call and its clearing up.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest
from support.places import TESTS

RECORD = TESTS / "durations.csv"
KEPT = 3  # values of a test
REST_S = 0.1  # tests below it are recorded together, by file: `tests/x/test_y.py::*`
SLOWEST = 25
# what is named: three times its record, and so long that it is no noise
TIMES_SLOWER, LEAST_S = 3.0, 0.5
UNMARKED_S = 1.0  # a unit test above it is marked slow


@dataclass(eq=False)  # pluggy wants it hashable
class Durations:
    """The pytest plugin. Under pytest-xdist the reports of all processes come to the one that
    started them."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    unmarked: dict[str, float] = field(default_factory=dict)  # of the calls of unmarked tests

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self.seconds[name] += report.duration
        if report.when == "call" and not {"slow", "e2e", "whole"} & set(report.keywords):
            self.unmarked[name] = report.duration

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        known = read(RECORD)
        if config.getoption("--record-durations"):
            write(RECORD, merged(known, by_record(self.seconds)))
            terminalreporter.write_line(
                f"seconds per test: {RECORD.relative_to(TESTS.parent)} has them"
            )
        if len(self.seconds) < 2 * SLOWEST:
            return
        say = terminalreporter.write_line
        terminalreporter.section("seconds by folder, and the slowest tests")
        for folder, (n, total) in sorted(
            by_folder(self.seconds).items(), key=lambda item: -item[1][1]
        ):
            say(f"{total:8.1f} s  {n:5} tests  {folder}")
        for name, took_s in sorted(self.seconds.items(), key=lambda item: -item[1])[:SLOWEST]:
            say(f"{took_s:8.1f} s  {name}")
        for line in slower(self.unmarked, known):
            say(line, yellow=True)
        for name, took_s in self.unmarked.items():
            if took_s > UNMARKED_S and median(known.get(name, [took_s])) > UNMARKED_S:
                say(
                    f"{name} took {took_s:.1f} s: a unit test above {UNMARKED_S:g} s is marked "
                    "slow",
                    yellow=True,
                )


def file_of(name: str) -> str:
    return name.partition("::")[0]


def by_folder(seconds: Mapping[str, float]) -> dict[str, tuple[int, float]]:
    """Folder -> number of tests, and their seconds."""
    found: dict[str, tuple[int, float]] = {}
    for name, took_s in seconds.items():
        folder = file_of(name).rpartition("/")[0]
        n, total = found.get(folder, (0, 0.0))
        found[folder] = (n + 1, total + took_s)
    return found


def by_record(seconds: Mapping[str, float]) -> dict[str, float]:
    """As they are recorded: the short ones of a file together."""
    found: dict[str, float] = defaultdict(float)
    for name, took_s in seconds.items():
        found[name if took_s >= REST_S else f"{file_of(name)}::*"] += took_s
    return dict(found)


def slower(seconds: Mapping[str, float], known: Mapping[str, list[float]]) -> list[str]:
    """A line for each test that has become much slower than its record."""
    return [
        (
            f"{name} took {took_s:.1f} s: {took_s / median(known[name]):.1f} times its record "
            f"({median(known[name]):.1f} s)"
        )
        for name, took_s in seconds.items()
        if name in known and took_s > LEAST_S and took_s > TIMES_SLOWER * median(known[name])
    ]


# --------------------------------------------------------------------------------------- the record


def merged(known: Mapping[str, list[float]], new: Mapping[str, float]) -> dict[str, list[float]]:
    """The record with a run's values, without tests that are no more."""
    kept = {name: old for name, old in known.items() if is_there(name)}
    return kept | {name: [*known.get(name, []), took_s][-KEPT:] for name, took_s in new.items()}


def is_there(name: str) -> bool:
    file, function = TESTS.parent / file_of(name), name.partition("[")[0].rpartition("::")[2]
    return file.is_file() and (function == "*" or f"def {function}(" in file.read_text())


def read(path: Path) -> dict[str, list[float]]:
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {
            name: [float(value) for value in values]
            for name, _, *values in csv.reader(file)
            if name != "test"
        }


def write(path: Path, values: Mapping[str, list[float]]) -> None:
    """test, median of the values, values (seconds, oldest first)."""
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["test", "median_s", "values_s"])
        for name, seen in sorted(values.items()):
            out.writerow([name, f"{median(seen):.2f}", *(f"{value:.2f}" for value in seen)])
