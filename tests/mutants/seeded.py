"""Seeded faults: small wrong edits of the code, each of which a test should notice. Their list, and
how one is made and judged.

A fault is a text of a file (`old`, which stands there exactly once) and what replaces it (`new`),
so it survives lines that shift. It is judged in a copy of the tree: it is caught when a test fails,
hangs or cannot be imported with it, and the same test passes without it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tiers import SELECTED  # noqa: E402

LISTS = ("drawn.yaml", "written.yaml")

# How a tier is told from another one, by pytest's markers; in the order in which they are tried.
TIERS = dict(SELECTED)

# Whose unit tests are all run when those that a fault names have not noticed it. The longest path
# that fits counts.
FOLDERS = {
    "elastic/policy": ("tests/policy", "tests/sim", "tests/test_driver.py"),
    "elastic/planner": ("tests/planner", "tests/policy", "tests/api"),
    "elastic/reshard": ("tests/reshard", "tests/policy"),
    "elastic/ledger": ("tests/ledger", "tests/sim", "tests/observe"),
    "elastic/data": ("tests/data",),
    "elastic/storage": ("tests/storage", "tests/ledger"),
    "elastic/config/clusters": ("tests/cluster_spec",),
    "elastic/config/job.py": (
        "tests/config/test_job.py",
        "tests/config/test_layout_options.py",
        "tests/cli/test_command_line.py",
    ),
    "elastic/config/pool_checks.py": (
        "tests/config/test_job.py",
        "tests/config/test_layout_options.py",
    ),
    "elastic/driver.py": ("tests/test_driver.py", "tests/sim"),
}

TEST_LIMIT_S = 150  # of one test
RUN_LIMIT_S = 1200  # of one call of pytest
MOST_BYTES = 5 << 30  # of a process: a loop that a fault has made endless may take what there is
LOOK_S = 0.5
NO_TESTS = 5  # pytest's exit status
USAGE = 4
_STARTED = re.compile(
    r"^(tests?[^\s:]*(?:/[^\s:]+)*\.py::.+?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)?$"
)
_TOLD = re.compile(r"^(PASSED|FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - .*)?$")


class Refused(Exception):
    """The list, or what was asked for, cannot be used as it is: one line says why."""


@dataclass(frozen=True)
class Fault:
    """`why`: the tool's operator, or the past error or the promise that it stands for. `tests`:
    those that should notice it. `equivalent`: why nobody can notice it, "" for all others."""

    id: str
    file: str
    old: str
    new: str
    origin: str
    why: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def part(self) -> str:
        """`elastic/policy/pools/drain.py` -> `policy`; `elastic/data/order.py` -> `data.order`; and
        so on."""
        names = Path(self.file).with_suffix("").parts[1:]
        return "data.order" if names == ("data", "order") else names[0]


@dataclass(frozen=True)
class Verdict:
    """`test`: the first that noticed it; `how`: failed, timeout, import or crash; `tier`: that of
    the test."""

    test: str = ""
    how: str = ""
    tier: str = ""

    @property
    def caught(self) -> bool:
        return bool(self.how)


@dataclass(frozen=True)
class Told:
    """What one call of pytest said: the first test that did not pass and how, and the tests that
    passed and did not."""

    verdict: Verdict
    passed: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


# ----------------------------------------------------------------------------------------- the list


def read_faults(folder: Path = HERE) -> list[Fault]:
    """All faults of the lists in `folder`. Raises Refused where an id stands twice."""
    found: list[Fault] = []
    for name in LISTS:
        path = folder / name
        for row in yaml.safe_load(path.read_text()) if path.exists() else ():
            found.append(Fault(**{**row, "tests": tuple(row.get("tests", ()))}))
    ids = [fault.id for fault in found]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise Refused(f"{', '.join(twice)}: more than one fault has this id")
    return found


def seeded_text(fault: Fault, text: str) -> str:
    """The file with the fault in it. Raises Refused unless it applies exactly once."""
    n = text.count(fault.old)
    if n != 1 or fault.old == fault.new:
        why = (
            "changes nothing" if n == 1 else f"its old text stands there {n} times instead of once"
        )
        raise Refused(f"{fault.id} does not apply to {fault.file}: {why}")
    return text.replace(fault.old, fault.new)


def folders(fault: Fault) -> tuple[str, ...]:
    """The tests that are near the file of a fault."""
    fitting = [name for name in FOLDERS if fault.file == name or fault.file.startswith(name + "/")]
    return FOLDERS[max(fitting, key=len)] if fitting else ()


# ------------------------------------------------------------------------------- a copy of the tree


class Copy:
    """The tree, without what git ignores, in a temporary folder, with one fault at a time.
    `tests_of`: a commit whose tests are taken instead of those that are there."""

    def __init__(self, root: Path, tests_of: str = "") -> None:
        self.root = root
        self.folder = Path(tempfile.mkdtemp(prefix="seeded-"))
        self.tree = self.folder / "tree"
        self._writes = 0
        self._seeded: Fault | None = None
        for name in _files(root):
            target = self.tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)
        if tests_of:
            shutil.rmtree(self.tree / "tests")
            _unpack(root, tests_of, self.tree)

    def __enter__(self) -> Copy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def seed(self, fault: Fault) -> None:
        """Put the fault into the copy, in place of the one before."""
        self.mend()
        path = self.tree / fault.file
        if not path.exists():
            raise Refused(f"{fault.id} does not apply: there is no {fault.file}")
        text = seeded_text(fault, path.read_text())
        self._seeded = fault
        self._write(path, text)

    def mend(self) -> None:
        """Take the fault out again."""
        if self._seeded is not None:
            path, self._seeded = self.tree / self._seeded.file, None
            self._write(path, (self.root / path.relative_to(self.tree)).read_text())

    def _write(self, path: Path, text: str) -> None:
        """Each text gets a time of its own: Python takes compiled code for current by a file's size
        and whole second."""
        self._writes += 1
        path.write_text(text)
        at_s = int(path.stat().st_mtime) + 10 * self._writes
        os.utime(path, (at_s, at_s))

    def pytest(
        self, tests: Sequence[str], expression: str, stop: bool = True, limit_s: float = RUN_LIMIT_S
    ) -> Told:
        """Run tests in the copy. `expression`: of markers, "" = all; `stop`: at the first that does
        not pass."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            *tests,
            "-v",
            "--tb=no",
            "-rpfE",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-m", expression, "-o", f"timeout={TEST_LIMIT_S}", *(["-x"] if stop else [])]
        # what a run has found out about a program is kept there: not from fault to fault
        layouts = self.folder / "layouts"
        shutil.rmtree(layouts, ignore_errors=True)
        settings = {
            "PYTHONPATH": str(self.tree),
            "OMP_NUM_THREADS": "1",
            "ELASTIC_LAYOUTS": str(layouts),
        }
        status, output = _run(command, self.tree, {**os.environ, **settings}, limit_s)
        return told(status, output)


def _files(root: Path) -> list[str]:
    if not (root / ".git").exists():
        return [
            str(path.relative_to(root))
            for path in root.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ]
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in done.stdout.split("\0") if name and (root / name).exists()]


def _unpack(root: Path, commit: str, target: Path) -> None:
    done = subprocess.run(["git", "archive", commit, "tests"], cwd=root, capture_output=True)
    if done.returncode:
        raise Refused(f"{commit}: {done.stderr.decode().strip()}")
    subprocess.run(["tar", "-x"], input=done.stdout, cwd=target, check=True)


def _run(
    command: list[str], folder: Path, env: dict[str, str], limit_s: float
) -> tuple[int | None, str]:
    """Exit status, None where it took too long or too much memory, and output; what it started ends
    with it."""
    output = folder.parent / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        until_s, status = time.monotonic() + limit_s, None
        try:
            while (
                status is None and time.monotonic() < until_s and _largest(process.pid) < MOST_BYTES
            ):
                try:
                    status = process.wait(LOOK_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    return status, output.read_text(errors="replace")


def _largest(pid: int) -> int:
    """Memory of the largest of a process and those that it has started."""
    try:
        here = psutil.Process(pid)
        return max(int(one.memory_info().rss) for one in (here, *here.children(recursive=True)))
    except psutil.Error:
        return 0


# ------------------------------------------------------------------------------------------ judging


def told(status: int | None, output: str) -> Told:
    """What pytest's exit status (None: it was ended) and output mean."""
    lines = output.splitlines()
    words = [match.groups() for line in lines if (match := _TOLD.match(line))]
    passed = frozenset(name for word, name in words if word == "PASSED")
    failed = [name for word, name in words if word != "PASSED"]
    if status == USAGE:
        raise Refused(
            next(
                (line for line in lines if line.startswith("ERROR")),
                "pytest does not understand its arguments",
            )
        )
    if status in (0, NO_TESTS):
        return Told(Verdict(), passed)
    if failed:
        line = next(
            line for line in lines if line.startswith((f"FAILED {failed[0]}", f"ERROR {failed[0]}"))
        )
        how = "import" if "::" not in failed[0] else "timeout" if "Timeout (>" in line else "failed"
        return Told(Verdict(failed[0], how), passed, frozenset(failed))
    started = [match.group(1) for line in lines if (match := _STARTED.match(line))]
    test = started[-1].strip() if started else ""
    return Told(
        Verdict(test, "timeout" if status is None else "crash"), passed, frozenset({test} - {""})
    )


def judge(copy: Copy, fault: Fault, known: str = "", tier: str = "") -> Verdict:
    """Is the fault caught? `known`: the test that caught it last, which is tried first; then those
    that it names and, of the unit tier, all that are near it. `tier`: this one only. The verdict's
    tier is left open: `prove` knows it."""
    copy.seed(fault)
    tiers = [tier] if tier else list(TIERS)
    attempts: list[tuple[tuple[str, ...], str]] = (
        [((known,), TIERS[tier] if tier else "")] if known else []
    )
    attempts += (
        [(fault.tests, TIERS["unit"]), (folders(fault), TIERS["unit"])] if "unit" in tiers else []
    )
    attempts += [(fault.tests, TIERS[name]) for name in tiers if name != "unit"]
    for tests, expression in attempts:
        present = tuple(test for test in tests if (copy.tree / test.partition("::")[0]).exists())
        if present:
            try:
                verdict = copy.pytest(present, expression).verdict
            except Refused:
                if present != (known,):  # that one may have another name by now
                    raise
                continue
            if verdict.caught:
                return verdict
    return Verdict()


def prove(copy: Copy, tests: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Run the tests that caught a fault on the untouched copy: test -> its tier, and those that
    fail here too, whose word means nothing."""
    copy.mend()
    left, tier_of, wrong = sorted(set(tests) - {""}), dict[str, str](), set[str]()
    for tier, expression in TIERS.items():
        if not left:
            break
        found = copy.pytest(left, expression, stop=False, limit_s=3 * RUN_LIMIT_S)
        for test in left:
            wrong |= {test} if any(_within(name, test) for name in found.failed) else set()
            tier_of |= {test: tier} if any(_within(name, test) for name in found.passed) else {}
        left = [test for test in left if test not in tier_of and test not in wrong]
    return {test: tier for test, tier in tier_of.items() if test not in wrong}, wrong | set(left)


def _within(name: str, test: str) -> bool:
    return name == test or name.startswith((f"{test}::", f"{test}["))


def verdicts(
    copy: Copy, faults: Iterable[Fault], known: dict[str, str], tier: str = ""
) -> Iterator[tuple[Fault, Verdict]]:
    """Each fault with its verdict, as soon as it is known."""
    for fault in faults:
        yield fault, judge(copy, fault, known.get(fault.id, ""), tier)
