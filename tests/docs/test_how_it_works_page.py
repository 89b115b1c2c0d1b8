"""docs/how-it-works.md: the map is that of the rooms, and each file and function that the page
names is there."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.docs.pages import block, pages, text_of
from support.places import ROOT

PAGE = "how-it-works.md"
ELASTIC = ROOT / "elastic"
FILE = re.compile(r"\belastic/[\w./]*\.(?:py|csv|yaml)\b")
NAMED = re.compile(r"([\w/]+\.py):([A-Za-z_]\w*(?:\.\w+)?)")
WIDTH = 18  # of the names in the map


def layers() -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    return [line.replace("(", "").replace(")", "") for line in contracts[0]["layers"]]


def first_thought(path: Path) -> str:
    """The first paragraph of a file's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def rooms(folder: Path, depth: int = 0) -> Iterator[str]:
    """The room and those inside of it, a line each."""
    yield f"{'  ' * depth + folder.name:<{WIDTH}} {first_thought(folder / '__init__.py')}"
    for inside in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from rooms(inside, depth + 1)


@cache
def names_in(path: Path) -> set[str]:
    """Functions and classes of a file, methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inside.name}"
                for inside in node.body
                if isinstance(inside, ast.FunctionDef)
            }
    return found


def files_of(name: str) -> list[Path]:
    """`decide.py`, `policy/decide.py` and `elastic/policy/decide.py` are the same file."""
    name = name.removeprefix("elastic/")
    return [
        path
        for path in ELASTIC.rglob("*.py")
        if f"/{path.relative_to(ELASTIC)}".endswith(f"/{name}")
    ]


def test_the_order_of_imports_is_the_linters() -> None:
    assert block(PAGE, "text", 1).splitlines() == layers()


def test_the_map_says_of_each_room_what_the_room_says() -> None:
    expected: list[str] = []
    for name in " | ".join(layers()).split(" | "):
        file = ELASTIC / f"{name}.py"
        expected += (
            [f"{file.name:<{WIDTH}} {first_thought(file)}"]
            if file.exists()
            else rooms(ELASTIC / name)
        )
    assert block(PAGE, "text", 2).splitlines() == expected


def test_the_drawing_names_the_rooms() -> None:
    words = set(re.findall(r"\w+", block(PAGE, "text", 0)))
    assert words >= {
        name
        for name in " | ".join(layers()).split(" | ")
        if name not in ("program", "errors", "user_frames", "text", "version")
    }


@pytest.mark.parametrize("page", pages())
def test_the_files_that_a_page_names_are_there(page: str) -> None:
    assert [name for name in FILE.findall(text_of(page)) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", pages())
def test_the_functions_that_a_page_names_are_there(page: str) -> None:
    wrong = []
    for file, name in NAMED.findall(text_of(page)):
        found = files_of(file)
        if len(found) != 1 or name not in names_in(found[0]):
            wrong.append(f"{file}:{name}")
    assert wrong == []


def test_the_page_follows_a_notice_through_every_room_that_acts() -> None:
    passed = {
        files_of(file)[0].relative_to(ELASTIC).parts[0] for file, _ in NAMED.findall(text_of(PAGE))
    }
    assert passed >= {
        "cluster",
        "driver.py",
        "policy",
        "planner",
        "reshard",
        "ledger",
        "worker",
        "observe",
        "sim",
    }
