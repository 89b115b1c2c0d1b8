"""Writes docs/proven.md: each claim of the README, and where it ran, from the results that certify
left in docs/certified.

`python -m elastic.certify.proven` in the repository's root; with `--check` it only says whether the
file is what it should be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.certify.claims import Claim, stated
from elastic.certify.harness.place import Kind
from elastic.certify.result import CertifyReport
from elastic.certify.tasks import HERE
from elastic.errors import SpecError
from elastic.scenarios.check import Check, shown
from elastic.text import n_of

README, RESULTS, PAGE = "README.md", "docs/certified", "docs/proven.md"
TESTS = "tests/whole_run.json"  # what `make test-all` keeps of its last run
COLUMNS: Mapping[Kind, str] = {
    "cpu-gloo": "CPU gloo",
    "one-gpu": "One GPU",
    "several-gpus": "Several GPUs",
}
COMMAND = "python -m elastic.certify.proven"
INTRO = f"""# Verification status

Each claim of the [README](../README.md), and where `elastic certify` has tried it. Made by
`{COMMAND}` from the results in
[certified/](certified); [certify.md](certify.md) says what each check does and how to run it on
your own machine.

- **pass**: every check named for the claim passed there. **part**: those that ran passed, others
  were not run.
- **not run**: nobody has run it there, or its minutes were spent; it may work, nothing here says
  so.
- **ran**: the claim names figures of one machine. The checks passed their own, wider bounds; what
  they measured stands beside.
- A claim that certify has no check for is held by the tests of this repository alone, on the CPU
  with gloo.
"""


def read_results(folder: Path) -> dict[str, CertifyReport]:
    """File name -> result. Raises SpecError for a file that is none."""
    out = {}
    for file in sorted(folder.glob("*.json")):
        try:
            out[file.name] = CertifyReport.from_plain(json.loads(file.read_text()), str(file))
        except ValueError as error:
            raise SpecError(
                f"{file}: not JSON ({error}); run elastic certify --json again"
            ) from error
    return out


def read_whole_run(file: Path) -> dict[str, Any] | None:
    """None where nobody has run every tier yet."""
    return dict(json.loads(file.read_text())) if file.is_file() else None


def page(
    readme: str, results: Mapping[str, CertifyReport], whole_run: Mapping[str, Any] | None = None
) -> str:
    """The text of docs/proven.md. `whole_run`: the last run of every tier of the tests."""
    for name, report in results.items():
        if report.place.get("kind") not in COLUMNS:
            raise SpecError(
                f"{name}: kind '{report.place.get('kind')}' is none of {', '.join(COLUMNS)}"
            )
    lines = [
        INTRO,
        "| claim of the README | " + " | ".join(COLUMNS.values()) + " | tests here |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for one in stated(readme):
        cells = [
            cell(one.claim, [r for r in results.values() if r.place["kind"] == kind])
            for kind in COLUMNS
        ]
        tests = ", ".join(f"[{Path(path).stem}](../{path})" for path in one.claim.tests)
        lines.append(f"| {_plain(one.text)} | {' | '.join(cells)} | {tests} |")
    lines += ["", *_tests(whole_run)] if whole_run is not None else []
    for name, report in results.items():
        lines += ["", *_place(name, report)]
    return "\n".join(lines) + "\n"


def cell(claim: Claim, reports: Sequence[CertifyReport]) -> str:
    """What certify found of the claim in one kind of place."""
    if not claim.checks:
        return "no check"
    found = [
        check
        for check in merged(reports)
        if any(matches(check.name, wanted) for wanted in claim.checks)
    ]
    failed = [check.name for check in found if check.verdict == "fail"]
    if failed:
        return f"**FAIL**: {', '.join(failed)}"
    passed = [check for check in found if check.verdict == "pass"]
    if not passed:
        return "not run"
    missing = [
        wanted
        for wanted in claim.checks
        if not any(matches(check.name, wanted) for check in passed)
    ]
    missing += [
        check.name for check in found if check.verdict == "not run" and check.name not in missing
    ]
    n = n_of(len(passed), "check")
    word = "part" if missing else "ran" if claim.figures else "pass"
    rest = f"; not run: {', '.join(missing)}" if missing else ""
    seen = [f"{check.name}: {_figures(check, claim)}" for check in passed if claim.figures]
    return "; ".join([f"{word} ({n}{rest})", *seen])


def _figures(check: Check, claim: Claim) -> str:
    return ", ".join(
        f"{name} {shown(check.figures[name])}" for name in claim.figures if name in check.figures
    )


def matches(name: str, wanted: str) -> bool:
    return name.startswith(wanted[:-1]) if wanted.endswith("*") else name == wanted


def merged(reports: Sequence[CertifyReport]) -> list[Check]:
    """One check per name: a failure counts before a pass, and that before one that was not run."""
    order = ("fail", "pass", "not run")
    best: dict[str, Check] = {}
    for check in (check for report in reports for check in report.checks):
        known = best.get(check.name)
        if known is None or order.index(check.verdict) < order.index(known.verdict):
            best[check.name] = check
    return list(best.values())


def _tests(ran: Mapping[str, Any]) -> list[str]:
    """The last run of every tier, as tests/tiers.py keeps it."""
    minutes = sum(tier["seconds"] for tier in ran["tiers"]) / 60
    rows = [
        (t["tier"], f"{t['seconds']:.0f}", t["passed"], t["failed"], t["skipped"])
        for t in ran["tiers"]
    ]
    return [
        "## The tests of this repository",
        "",
        f"The last whole run (`make test-all`): {ran['at']}, commit {ran['commit']}, "
        f"{minutes:.0f} minutes on {ran['cpus']} cores.",
        "",
        "| tier | seconds | passed | failed | skipped |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
        *_skipped(ran),
    ]


def _skipped(ran: Mapping[str, Any]) -> list[str]:
    """What was never played, and why."""
    rows = [
        f"- {tier['tier']}, {n} of {text}"
        for tier in ran["tiers"]
        for text, n in tier["why"].items()
    ]
    return ["", "Skipped:", "", *rows] if rows else []


def _place(name: str, report: CertifyReport) -> list[str]:
    place = report.place
    gpus = f", {' and '.join(map(str, place['gpus']))}" if place["gpus"] else ""
    lines = [
        f"## {COLUMNS[place['kind']]}: [{name}](certified/{name})",
        "",
        f"{place['at']}, {place.get('on', HERE)}: {place['ranks']} ranks{gpus}, {place['cpus']} "
        f"CPU cores (load {place['load_1min']} at the end), torch {place['torch']}, Ray "
        f"{place['ray']}, Python {place['python']}. {report.counts}, in {report.seconds:.0f} s of "
        f"the {report.budget_s / 60:g} minutes given"
        f"{', interrupted' if report.interrupted else ''}.",
        "",
        "| check | verdict | where | numbers | held against |",
        "|---|---|---|---|---|",
    ]
    for check in report.checks:
        numbers = ", ".join(f"{key} {shown(value)}" for key, value in check.figures.items())
        text = "; ".join(part for part in (numbers, _plain(check.why)) if part)
        lines.append(
            f"| {check.name} | {check.verdict} | {check.where} | {text} | "
            f"{'; '.join(map(str, check.bounds))} |"
        )
    return lines


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(words: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        text = page(
            Path(README).read_text(), read_results(Path(RESULTS)), read_whole_run(Path(TESTS))
        )
    except (SpecError, FileNotFoundError) as error:
        print(f"elastic: {error}", file=sys.stderr)
        return 2
    if "--check" in words:
        same = Path(PAGE).is_file() and Path(PAGE).read_text() == text
        print(
            f"{PAGE} is what the results say"
            if same
            else f"{PAGE} is not what the results say: {COMMAND}"
        )
        return 0 if same else 1
    Path(PAGE).write_text(text)
    print(f"{PAGE} is written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
