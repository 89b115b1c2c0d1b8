"""Files that a page names by `name.py` are there: a reader who goes and looks finds them. Verbs of
`elastic` that a page or an alert names are commands."""

from __future__ import annotations

import re
import subprocess

import pytest
from support.places import ROOT

from elastic.cli.command_line import GROUPS

PAGES = sorted([ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")])
# Files of the reader's own, or made while the reader follows the page.
MADE_THERE = {"tests/bench/NAME.py", "model.py", "muon/program.py"}
NAMED = re.compile(r"[\w./]*\b\w+\.py\b")
# what follows is typed: a span of code, a string, a line of a shell, the second of two commands
TYPED = re.compile(r"(?:[`\"]|\$ |then |-m )elastic ([a-z]+)")
MADE_BY_A_BLOCK = re.compile(r"^```\w* file=(\S+)|^\+\+\+ (\S+)", re.MULTILINE)


def missing(text: str, there: set[str]) -> list[str]:
    """Names of Python files in `text` that no file of the repository ends with."""
    made = {"/" + name for found in MADE_BY_A_BLOCK.findall(text) for name in found if name}
    known = there | made | {"/" + name for name in MADE_THERE}
    names = {"/" + found.lstrip("./") for found in NAMED.findall(text)}
    return sorted(name[1:] for name in names if not any(one.endswith(name) for one in known))


@pytest.fixture(scope="module")
def there() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {"/" + name for name in listed.stdout.split()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_file_is_there(page, there):
    assert not missing(page.read_text(), there)


def test_a_file_that_went_is_found(there):
    assert missing("see `worker/went.py`, docs/made.md", there) == ["worker/went.py"]
    assert missing("see `driver.py` and `policy/decide.py`", there) == []
    assert missing("```python file=own.py\n```\nrun own.py", there) == []


def test_every_named_command_is_one():
    verbs = {"certify", *(verb for those in GROUPS.values() for verb in those)}
    files = [*PAGES, *(ROOT / "deploy").rglob("*.md"), *(ROOT / "deploy").rglob("*.y*ml")]
    named = {path.name: {*TYPED.findall(path.read_text())} - verbs for path in files}
    assert not {name: unknown for name, unknown in named.items() if unknown}
    assert TYPED.findall("`elastic ls`, $ elastic set r, that elastic computes") == ["ls", "set"]
