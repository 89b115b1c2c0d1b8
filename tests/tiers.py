"""Runs tiers of the tests one after the other and says what each took.

lint   ruff, mypy --strict, the import contracts
unit   what needs no Ray and no process but the warm pool of gloo workers
e2e    what starts processes, clusters and runs: with lint and unit all that CI runs
whole  full products of cases, namespaces, `ray up`, pages of Ray Train, certify

A tier that fails does not keep the next one from running. The last line says what was skipped and
why. The exit code is 0 where all passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from support.scene_tools import missing_tools

ROOT = Path(__file__).resolve().parents[1]
SELECTED = {
    "unit": "not e2e and not whole and not gpu", "e2e": "e2e and not whole and not gpu",
    "whole": "whole and not gpu"
}  # fmt: skip
# Processes of pytest-xdist; which runs what: support/scheduling.py. Those of unit wait for a quarter
# of their time (pools, servers, bounds), those of e2e for two fifths: a third one uses it. In the
# later half of whole (runs that wait for clouds, leases and bounds) a third of both cores was idle
# with three.
PARALLEL = {"unit": "3", "e2e": "3", "whole": "4"}
TIERS = ("lint", *SELECTED)
WHOLE_RUN = ROOT / "tests" / "whole_run.json"  # the last run of every tier, for docs/proven.md


@dataclass(frozen=True)
class Ran:
    """What a tier did. `seconds`: wall; `why`: reason -> tests that were skipped for it."""

    tier: str
    seconds: float
    code: int
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    why: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = (
            f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
            if self.tier != "lint"
            else ""
        )
        return (
            f"{self.tier:6} {self.seconds:7.1f} s  {'ok' if self.code == 0 else 'FAILED':6}  "
            f"{counts}"
        ).rstrip()


def lint() -> Ran:
    """Runs every check, so that one run names all that is wrong."""
    began, code, here = time.monotonic(), 0, Path(sys.executable).parent
    for words in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        code |= subprocess.run([str(here / words[0]), *words[1:]], cwd=ROOT).returncode
    contracts = subprocess.run(
        [str(here / "lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    if contracts.returncode:
        print(contracts.stdout, contracts.stderr)
    return Ran("lint", time.monotonic() - began, int(bool(code or contracts.returncode)))


def tests(tier: str, options: Sequence[str]) -> Ran:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = ["-q", "-m", SELECTED[tier], "-n", PARALLEL[tier], f"--junitxml={report}", *options]
        code = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT).returncode
        counts = counted(report) if report.is_file() else (0, 0, 0)
        why = reasons(report) if report.is_file() else {}
    return Ran(tier, time.monotonic() - began, code, *counts, why=why)


def counted(report: Path) -> tuple[int, int, int]:
    """Passed, failed and skipped tests of a report in the form of JUnit."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    n, failures, errors, skipped = (
        sum(int(s.get(k, 0)) for s in suites) for k in ("tests", "failures", "errors", "skipped")
    )
    return n - failures - errors - skipped, failures + errors, skipped


def reasons(report: Path) -> dict[str, int]:
    """Why tests were skipped: `file: reason` -> how many; of a file that was skipped whole, one."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        for skipped in case.iter("skipped"):
            said = skipped.get("message", "")
            if said == "collection skipped":
                told = (skipped.text or "").strip()  # as a tuple: "('file', line, 'Skipped: why')"
                said = told.rpartition("Skipped: ")[2][:-2]
            place = case.get("classname") or case.get("name", "")
            found[f"{place.rpartition('.')[2]}: {' '.join(said.split())}"] += 1
    return dict(found)


def closing(ran: Sequence[Ran]) -> str:
    """As pytest closes; behind it what was skipped, since a scene that is never played proves
    nothing."""
    sums = {
        word: sum(getattr(one, word) for one in ran) for word in ("failed", "passed", "skipped")
    }
    said = ", ".join(f"{n} {word}" for word, n in sums.items() if n) or "no tests ran"
    why = sum((Counter(one.why) for one in ran), Counter[str]())
    skips = "; ".join(f"{n} of {text}" for text, n in sorted(why.items()))
    return f"{said} in {sum(one.seconds for one in ran):.2f}s{skips and f'; skipped: {skips}'}"


def record(ran: Sequence[Ran]) -> None:
    """Keeps a run of every tier, and writes it into docs/proven.md."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    tiers = [asdict(one) for one in ran]
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    WHOLE_RUN.write_text(
        json.dumps({"at": at, "commit": commit, "cpus": os.cpu_count(), "tiers": tiers}, indent=1)
        + "\n"
    )
    subprocess.run([sys.executable, "-m", "elastic.certify.proven"], cwd=ROOT, check=True)


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, options = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tiers", nargs="+", choices=TIERS)
    parser.add_argument(
        "--record", action="store_true", help="keep the seconds of each test (tests/durations.csv)"
    )
    given = parser.parse_args(own)
    more = [*(["--record-durations"] if given.record else []), *options]
    # each process that a test starts would compile all of elastic again
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if "whole" in given.tiers and (gone := missing_tools()):
        print(f"scenes will be skipped: {gone}", flush=True)
    ran = []
    for tier in given.tiers:
        print(f"== {tier}", flush=True)
        ran.append(lint() if tier == "lint" else tests(tier, more))
    print("\n" + "\n".join(map(str, ran)))
    whole = set(given.tiers) == set(TIERS) and not options
    if whole and all(one.code in (0, 1) for one in ran):  # pytest's 2: somebody has stopped it
        record(ran)
    print(closing(ran))
    return int(any(one.code for one in ran))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
