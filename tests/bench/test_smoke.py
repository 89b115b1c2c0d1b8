"""Every bench stays alive: in its smoke size, called as docs/benchmarks.md says, it ends with 0 and
a line of JSON with the documented figures, and nothing of it is left. No figure is compared
here."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import radosgw
from support.e2e.runs import MARK, processes
from support.places import ROOT
from support.waiting import until

from elastic.cluster.ray.processes import command, send

HERE = Path(__file__).resolve().parent
PAGE = ROOT / "docs" / "benchmarks.md"
MOST_S, GONE_S = 300.0, 30.0  # for hangs only
PARTS_OF_A_BENCH = {"bare", "race_picture"}  # named in the docs, but no benches themselves


@dataclass(frozen=True)
class Smoke:
    """`words`: what stands behind `--json --smoke`; `without`: documented figures of parts that are
    not run; `long`: in the whole tier: it takes five seconds or more."""

    bench: str
    words: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    long: bool = False

    def __str__(self) -> str:
        return " ".join((self.bench, *self.words))


SMOKES = (
    Smoke("planner", long=True),
    Smoke("planner_fit", without=("fitted_*", "unseen_*")),
    Smoke("planner_fit", ("--half",), ("all.*", "median_abs_err")),
    Smoke("unequal_plan"),
    Smoke("scale", long=True),
    Smoke("month", long=True),
    Smoke("simulate"),
    Smoke("spot_policy"),
    Smoke("reshard", long=True),
    Smoke("radosgw"),
    Smoke("draws", without=("width_128_*", "width_256_*")),
    Smoke("owners", long=True),
    Smoke("copies", long=True),
    Smoke("planner_cpu", long=True),
    Smoke("overhead", without=("small", "watched.*"), long=True),
    Smoke(
        "overhead",
        ("--parts", "watched", "--watchers", "endpoint dashboard"),
        (
            "small",
            "median_step_time_ratio",
            "step_time_ratio",
            "cpu_seconds_ratio",
            "elastic_*",
            "..._95",
            "watched.trackers*",
            "watched.all*",
        ),
        long=True,
    ),
    Smoke("checkpoint", long=True),
    Smoke("recovery", without=("device_bound_*", "sizes", "ray_train_*"), long=True),
    Smoke(
        "ray_train", ("--cause", "growth"), ("ray_train_loss_s", "ray_train_notice_*"), long=True
    ),
    Smoke(
        "unequal", ("--parts", "1_2_3_4"), ("change.*", "odd.*", "jitter.*", "*.layers"), long=True
    ),
    Smoke("sickness", long=True),
    Smoke("capacity", long=True),
    Smoke("page", long=True),
    Smoke("predict", long=True),
    Smoke("race", long=True),
)


def marked(smoke: Smoke) -> Any:
    marks = [
        pytest.mark.e2e,
        pytest.mark.timeout(MOST_S + 2 * GONE_S),
        *([pytest.mark.whole] if smoke.long else []),
    ]
    if smoke.bench == "radosgw":
        marks.append(pytest.mark.skipif(not radosgw.installed(), reason="Ceph is not installed"))
    return pytest.param(smoke, marks=marks, id=str(smoke))


# ------------------------------------------------------------------------------- what the page says


@cache
def sections() -> dict[str, str]:
    """Text of the page by heading."""
    _, *parts = re.split(r"^## (\w+)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def documented(text: str) -> list[str]:
    """Patterns of the figures in the first column of the tables whose head is `figure`."""
    found, in_table = [], False
    for line in text.splitlines():
        in_table = line.startswith("| figure |") or (in_table and line.startswith("|"))
        if in_table:
            found += [
                name
                for cell in re.findall(r"`([^`]+)`", line.split("|")[1])
                for name in spelled(cell)
            ]
    return found


def spelled(name: str) -> Iterator[str]:
    """`pause_{loss,hang}_s`: both; `<fault>_named_s` and `..._95`: any."""
    name = re.sub(r"<\w+>|\.\.\.", "*", name)
    pieces = re.split(r"\{([^}]*)\}", name)
    choices = [piece.split(",") if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return ("".join(chosen) for chosen in product(*choices))


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Where something stands in the figures that is not null: each folder of numbers too."""
    if value is not None and path:
        yield path
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from paths(inner, f"{path}.{name}" if path else name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "| figure | meaning |\n|---|---|\n| `a_{x,y}_s`, `b` | `c` |\n\n| `d` |\n",
            ["a_x_s", "a_y_s", "b"],
        ),
        ("| figure | meaning |\n| `<one>.named_s` | |\n| `..._95` | |", ["*.named_s", "*_95"]),
        ("| | seconds |\n| `a` | 1 |", []),
    ],
)
def test_the_page_is_read(text: str, found: list[str]) -> None:
    assert documented(text) == found


# -------------------------------------------------------------------------- benches and their names


def knows_smoke(path: Path) -> bool:
    """It is run by itself, and its command line is one of report.py's."""
    tree = ast.parse(path.read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return '__name__ == "__main__"' in path.read_text() and bool(
        called & {"options", "report.options", "report.parser"}
    )


def benches() -> set[str]:
    return {
        path.stem
        for path in HERE.glob("*.py")
        if path.name != Path(__file__).name and knows_smoke(path)
    }


def test_every_file_that_is_run_by_itself_is_a_bench_or_a_part_of_one() -> None:
    run = {
        path.stem
        for path in HERE.glob("*.py")
        if re.search('^if __name__ == "__main__"', path.read_text(), re.MULTILINE)
    }
    assert run == benches() | {"bare", "ray_train_job", "viewer"}


def test_every_bench_has_a_section_of_the_page_with_figures_and_a_smoke_test() -> None:
    assert benches() == {smoke.bench for smoke in SMOKES}
    assert benches() == set(sections())
    assert all(documented(text) for text in sections().values())


@pytest.mark.parametrize(
    "text",
    [PAGE.read_text(), (ROOT / "Makefile").read_text()],
    ids=["docs/benchmarks.md", "Makefile"],
)
def test_whatever_is_named_is_a_bench(text: str) -> None:
    loops = re.findall(r"for bench in ([\w ]+);", text)
    named = {*re.findall(r"tests/bench/(?!test_)(\w+)\.py", text), *" ".join(loops).split()} - {
        "NAME"
    }
    assert named and named <= benches() | PARTS_OF_A_BENCH
    assert all((HERE / f"{name}.py").is_file() for name in named)


# ------------------------------------------------------------------------------------- once through


def left_of(mark: str) -> list[str]:
    """Waits for the end of all that the bench started; what is left then is killed, and its command
    lines returned."""
    with suppress(AssertionError):
        until(lambda: not processes(mark), "their end", GONE_S)
    left = processes(mark)
    words = [" ".join(command(pid)) for pid in left]
    send(left)
    return words


def run(smoke: Smoke) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """As the page says; also what it left behind."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"  # inherited by all that the bench starts
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, f"tests/bench/{smoke.bench}.py", "--json", "--smoke", *smoke.words],
            cwd=ROOT, env={**os.environ, MARK: mark}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=MOST_S,
        )  # fmt: skip
        print(f"{smoke}: {time.monotonic() - began_s:.1f} s, load {os.getloadavg()[0]:.1f}")
    finally:
        left = left_of(mark)
    return done, left


@pytest.mark.parametrize("smoke", [marked(smoke) for smoke in SMOKES])
def test_smoke(smoke: Smoke) -> None:
    done, left = run(smoke)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert not left
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert (found["bench"], found["smoke"], found["figures"]["worse"]) == (smoke.bench, True, [])
    there = set(paths(found["figures"]))
    wanted = [
        name
        for name in documented(sections()[smoke.bench])
        if not any(fnmatchcase(name, no) for no in smoke.without)
    ]
    assert wanted
    missing = [name for name in wanted if not any(fnmatchcase(path, name) for path in there)]
    assert not missing, f"{missing} of {sorted(there)}"
