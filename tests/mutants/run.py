"""Which test notices each seeded fault: `make mutants`. The results are kept in results.json, fault
by fault.

    python tests/mutants/run.py                          # all faults; each with the test that caught it last first
    python tests/mutants/run.py --only 'policy-*' wire-2 # these
    python tests/mutants/run.py --tier unit              # by the tests of one tier alone; nothing is kept
    python tests/mutants/run.py --before COMMIT          # with the tests of that commit; kept beside the others

Exit status: 1 where a fault that is recorded as caught is missed now, 2 where a fault does not
apply to the code.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from seeded import (
    HERE,
    TIERS,
    Copy,
    Fault,
    Refused,
    Verdict,
    folders,
    prove,
    read_faults,
    seeded_text,
    verdicts,
)

# faults, behind which what caught them is run on the untouched copy, and results are written
BATCH = 10

Kept = dict[str, dict[str, dict[str, str]]]  # fault -> "now" or "before" -> its verdict


def main(
    arguments: list[str] | None = None, root: Path = HERE.parent.parent, here: Path = HERE
) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="ID", help="these faults; * stands for anything"
    )
    parser.add_argument(
        "--tier",
        choices=list(TIERS),
        default="",
        help="by the tests of this tier alone; nothing is kept",
    )
    parser.add_argument(
        "--before", default="", metavar="COMMIT", help="with the tests of this commit"
    )
    parser.add_argument("--new", action="store_true", help="faults without a result alone")
    parser.add_argument(
        "--fresh", action="store_true", help="without trying first what caught them last"
    )
    parser.add_argument("--json", action="store_true", help="the results as JSON")
    asked = parser.parse_args(arguments)
    try:
        return _run(asked, root, here)
    except Refused as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2


def _run(asked: argparse.Namespace, root: Path, here: Path) -> int:
    faults, path = read_faults(here), here / "results.json"
    column = "before" if asked.before else "now"
    kept = _read(path)
    for fault in faults:
        seeded_text(fault, (root / fault.file).read_text() if (root / fault.file).exists() else "")
    wanted = _wanted(asked, root, faults, kept=kept)
    path.write_text(as_text(kept))
    caught_by = {key: _known(columns, column) for key, columns in kept.items() if not asked.fresh}
    found: dict[str, Verdict] = {}
    missed, unproven = list[str](), list[str]()
    with Copy(root, asked.before) as copy:
        for first in range(0, len(wanted), BATCH):
            batch: dict[str, Verdict] = {}
            for fault, verdict in verdicts(
                copy, wanted[first : first + BATCH], caught_by, asked.tier
            ):
                batch[fault.id] = verdict
                print(
                    f"{fault.id:14} "
                    f"{'survived' if not verdict.caught else f'{verdict.how}: {verdict.test}'}",
                    flush=True,
                )
            tier_of, wrong = prove(copy, (verdict.test for verdict in batch.values()))
            unproven += [
                f"{key}: {verdict.test}" for key, verdict in batch.items() if verdict.test in wrong
            ]
            found |= {
                key: replace(one, tier=tier_of.get(one.test, ""))
                for key, one in batch.items()
                if one.test not in wrong
            }
            kept = _read(path)  # another run may have added to it
            missed += [
                key
                for key in batch
                if key in found and not found[key].caught and _lost(kept.get(key, {}), column)
            ]
            if not asked.tier:
                for key in [key for key in batch if key in found and key not in missed]:
                    kept.setdefault(key, {})[column] = (
                        asdict(found[key]) if found[key].caught else {}
                    )
                path.write_text(
                    as_text({fault.id: kept[fault.id] for fault in faults if fault.id in kept})
                )
    told = {key: asdict(verdict) for key, verdict in found.items()}
    print(json.dumps(told, indent=1) if asked.json else summary(faults, kept))
    for name, some in (
        ("caught before, missed now", missed),
        ("fails without a fault too", unproven),
    ):
        if some:
            print(f"{name}: {', '.join(some)}", file=sys.stderr)
    return 1 if missed or unproven else 0


def _wanted(
    asked: argparse.Namespace, root: Path, faults: list[Fault], *, kept: dict[str, Any]
) -> list[Fault]:
    """The faults to be tried. Raises Refused where none is left."""
    column = "before" if asked.before else "now"
    wanted = [
        fault
        for fault in faults
        if not asked.only or any(fnmatch(fault.id, one) for one in asked.only)
    ]
    wanted = [
        fault
        for fault in wanted
        if not fault.equivalent and not (asked.new and column in kept.get(fault.id, {}))
    ]
    if not wanted:
        raise Refused("no fault is left of those asked for")
    for fault in [fault for fault in wanted if asked.before]:
        row = kept.get(fault.id, {}).get("now")
        # the same test and the same fault
        if row and "::" in row["test"] and stood(root, asked.before, row["test"]):
            kept[fault.id]["before"] = row
            wanted.remove(fault)
    return wanted


def _lost(columns: dict[str, dict[str, str]], column: str) -> bool:
    """Is it recorded as caught, so that it is an error where it is missed?"""
    return column == "now" and any(row.get("how") for row in columns.values())


def stood(root: Path, commit: str, test: str) -> bool:
    """Does the test stand in that commit as it stands now?"""
    file, _, name = test.partition("::")
    done = subprocess.run(
        ["git", "show", f"{commit}:{file}"], cwd=root, capture_output=True, text=True
    )
    return (
        not done.returncode
        and _function(done.stdout, name) == _function((root / file).read_text(), name) != ""
    )


def _function(text: str, name: str) -> str:
    """What a test does; '' = there is none of that name."""
    wanted = name.partition("[")[0].split("::")[-1]
    found = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == wanted
    ]
    return ast.unparse(found[0]) if found else ""


def _read(path: Path) -> Kept:
    found: Kept = json.loads(path.read_text()) if path.exists() else {}
    return found


def _known(columns: dict[str, dict[str, str]], column: str) -> str:
    """The test that caught a fault last."""
    return next(
        (row["test"] for name in (column, "now", "before") if (row := columns.get(name))), ""
    )


def as_text(kept: Kept) -> str:
    """A line per fault, so that a change of one is a line."""
    rows = [
        f" {json.dumps(key)}: {json.dumps(columns, sort_keys=True)}"
        for key, columns in kept.items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def summary(faults: list[Fault], kept: Kept) -> str:
    """A Markdown table: per origin and part how many faults there are and which tier catches them,
    then the survivors."""
    lines = [
        "",
        "| | faults | equivalent | caught before | "
        + " | ".join(f"now by {tier}" for tier in TIERS)
        + " | missed |",
    ]
    lines.append("|---" * (5 + len(TIERS)) + "|")
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.origin, fault.part), []).append(fault)
    for origin in sorted({fault.origin for fault in faults}):
        groups[origin, "all"] = [fault for fault in faults if fault.origin == origin]
    for (origin, part), some in sorted(
        groups.items(), key=lambda item: (item[0][0], item[0][1] == "all", item[0][1])
    ):
        lines.append(
            f"| {origin}, {part} | " + " | ".join(str(n) for n in _numbers(some, kept)) + " |"
        )
    left = [
        fault
        for fault in faults
        if not fault.equivalent and kept.get(fault.id, {}).get("now") == {}
    ]
    lines += [
        "",
        f"{len(left)} survive"
        + "".join(f"\n- {fault.id} ({fault.file}): {fault.why}" for fault in left),
    ]
    n_without = sum(not folders(fault) and not fault.tests for fault in faults)
    return "\n".join(
        [*lines, *([f"{n_without} faults name no tests and are near none"] if n_without else [])]
    )


def _numbers(faults: list[Fault], kept: Kept) -> list[int]:
    now = [kept.get(fault.id, {}).get("now") for fault in faults]
    before = [kept.get(fault.id, {}).get("before") for fault in faults]
    by_tier = Counter(verdict["tier"] for verdict in now if verdict)
    equivalent = sum(bool(fault.equivalent) for fault in faults)
    return [
        len(faults),
        equivalent,
        sum(map(bool, before)),
        *(by_tier[tier] for tier in TIERS),
        sum(row == {} for row in now),
    ]


if __name__ == "__main__":
    sys.exit(main())
