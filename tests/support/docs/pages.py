"""The code blocks of README.md and of every page of docs/: what tests take from the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from support.places import ROOT

FENCED = re.compile(
    r"^(?P<indent> *)```(?P<kind>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
SHELL = ("bash", "sh")
# that a block without a kind begins with
COMMANDS = ("elastic", "torchrun", "python", "ray", "make", "export", "RAY_ADDRESS=")


@dataclass(frozen=True)
class Block:
    """`kind`: what stands behind the fence; where nothing does: `shell`, `session` (`$ command`,
    what it prints) or `text`."""

    page: str
    line: int
    kind: str
    text: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.page}: {self.first}"

    @property
    def first(self) -> str:
        """Its first line."""
        return self.text.partition("\n")[0].strip()


def pages() -> list[str]:
    """README.md and the files of docs/, but for the one that is made of docstrings."""
    found = (path.name for path in (ROOT / "docs").glob("*.md") if path.name != "api.md")
    return ["README.md", *sorted(found)]


def text_of(page: str) -> str:
    """`page`: the name of a file of docs/, or README.md."""
    return (ROOT / ("" if page == "README.md" else "docs") / page).read_text()


def blocks(page: str, kind: str = "") -> list[Block]:
    """In their order; of one kind where that is given."""
    text = text_of(page)
    found = []
    for one in FENCED.finditer(text):
        said, _, file = one["kind"].partition(" file=")
        body = "".join(line.removeprefix(one["indent"]) for line in one["text"].splitlines(True))
        found.append(
            Block(page, text.count("\n", 0, one.start()) + 1, _kind(said.strip(), body), body, file)
        )
    return [block for block in found if kind in ("", block.kind)]


def block(page: str, kind: str, which: int = 0) -> str:
    """The text of one."""
    return blocks(page, kind)[which].text


def _kind(said: str, body: str) -> str:
    if said:
        return "shell" if said in SHELL else said
    if body.startswith("$ "):
        return "session"
    return "shell" if body.lstrip().startswith(COMMANDS) else "text"


def commands(text: str) -> list[list[str]]:
    """The words of each line of a shell block, without comments, variables and brackets around what
    may be left out."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = (
            re.sub(r"(^|\s)#.*$", "", line)
            .replace("[", " ")
            .replace("]", " ")
            .replace("&", " ")
            .split()
        )
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            found.append([word.strip("\"'") for word in words])
    return found
