"""The words of docs/glossary.md: messages, help texts, titles and names say what the field says."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from support.places import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
SOURCES = sorted((ROOT / "elastic").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
A_SENTENCE = 3  # words: a literal with fewer is a key or a label


@dataclass(frozen=True)
class Word:
    wrong: str
    right: str


def words(table: str, column: int) -> list[Word]:
    """The words of one column of the table, each with the term to use instead."""
    rows = [
        line.strip().strip("|").split("|") for line in table.splitlines() if line.startswith("|")
    ][2:]
    return [
        Word(one.strip(), row[0].strip())
        for row in rows
        for one in row[column].split(",")
        if one.strip()
    ]


@cache
def banned(column: int) -> tuple[Word, ...]:
    return tuple(words(GLOSSARY.read_text(), column))


def pattern(*found: Word) -> re.Pattern[str]:
    """Any of them, wherever it stands alone."""
    phrases = "|".join(r"\s+".join(map(re.escape, word.wrong.split())) for word in found)
    return re.compile(rf"(?<![\w./#-])(?:{phrases})(?![\w/])(?!\.md)", re.IGNORECASE)


@cache
def patterns() -> tuple[re.Pattern[str], tuple[tuple[Word, re.Pattern[str]], ...]]:
    """Of any word, and of each."""
    return pattern(*banned(2)), tuple((word, pattern(word)) for word in banned(2))


def in_text(text: str) -> Iterator[Word]:
    one, each = patterns()
    if one.search(text):  # hardly ever
        yield from (word for word, of_word in each if of_word.search(text))


def parts_of(name: str) -> str:
    """`FooBar_baz` -> ` foo bar baz `."""
    return (
        " "
        f"{' '.join(part.lower() for part in re.findall(r'[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+', name))} "
    )


@cache
def in_name(name: str) -> tuple[Word, ...]:
    parts = parts_of(name)
    return tuple(word for word in banned(3) if f" {word.wrong.lower()} " in parts)


def literals(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Sentences of the code, an f-string with `{}` for what is filled in; docstrings are left
    out."""
    skipped = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
    for node in nodes:
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            text = node.value
        if len(text.split()) >= A_SENTENCE:
            yield node.lineno, text  # type: ignore[attr-defined]


def definitions(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


def helps(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Each text that `--help` prints, with the command that prints it."""
    yield parser.prog, f"{parser.description or ''} {parser.epilog or ''}"
    for action in parser._actions:
        yield parser.prog, action.help or ""
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                yield parser.prog, choice.help or ""
            for inner in action.choices.values():
                yield from helps(inner)


def titles(text: str) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced = fenced != line.startswith("```")
        if line.startswith("#") and not fenced:
            yield number, line


def complaint(place: str, word: Word) -> str:
    return f"{place}: '{word.wrong}'; say '{word.right}' (docs/glossary.md)"


def complaints(label: str, source: str) -> list[str]:
    """What is wrong in one file of code."""
    nodes = tuple(ast.walk(ast.parse(source)))
    found = [
        complaint(f"{label}:{at}", word) for at, text in literals(nodes) for word in in_text(text)
    ]
    return found + [
        complaint(f"{label}:{at} {name}", word)
        for at, name in definitions(nodes)
        for word in in_name(name)
    ]


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_messages_and_names_use_the_words_of_the_glossary() -> None:
    found = [line for path in SOURCES for line in complaints(label(path), path.read_text())]
    found += [complaint(label(path), word) for path in SOURCES for word in in_name(path.stem)]
    assert not found, "\n" + "\n".join(found)


def test_help_texts_use_the_words_of_the_glossary() -> None:
    from elastic.cli.command_line import parser

    texts = list(helps(parser()))
    assert len(texts) > 100
    found = [complaint(f"{prog} --help", word) for prog, text in texts for word in in_text(text)]
    assert not found, "\n" + "\n".join(found)


def test_titles_use_the_words_of_the_glossary() -> None:
    found = [
        complaint(f"{label(page)}:{at}", word)
        for page in PAGES
        for at, line in titles(page.read_text())
        for word in in_text(line)
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_glossary_says_everything_once() -> None:
    for column in (2, 3):
        wrong = [word.wrong for word in banned(column)]
        assert len(wrong) == len(set(wrong)) and len(wrong) > 10
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            "def f(n):\n    raise ValueError(f'step {n} has no durable copy here')\n",
            ["x.py:2: 'durable copy'; say 'checkpoint'"],
        ),
        (
            "log.info('worker %s stands\\n still', 1)\n",
            ["x.py:1: 'stands still'; say 'stalled, makes progress'"],
        ),
        ("class FakeCrew:\n    pass\n", ["x.py:1 FakeCrew: 'crew'; say 'worker group'"]),
        (
            "def find_offender():\n    pass\n",
            ["x.py:1 find_offender: 'offender'; say 'faulty rank'"],
        ),
        ("def screws():\n    '''A durable copy in a docstring.'''\n    return 'durable'\n", []),
        ("text = 'see docs/optimization.md for more'\n", []),
    ],
)
def test_a_word_that_is_not_said_is_found_with_its_place_and_what_to_say(
    source: str, found: list[str]
) -> None:
    assert [
        line.removesuffix(" (docs/glossary.md)") for line in complaints("x.py", source)
    ] == found


def test_help_and_titles_are_looked_at() -> None:
    top = argparse.ArgumentParser("top")
    top.add_subparsers().add_parser("one", help="the node is given back").add_argument(
        "--x", help="tried again"
    )
    assert [word.right for _, text in helps(top) for word in in_text(text)] == [
        "requested, joins, leaves, released",
        "retried",
    ]
    assert [line for _, line in titles("# a\n```\n# b\n```\n## c\n")] == ["# a", "## c"]
