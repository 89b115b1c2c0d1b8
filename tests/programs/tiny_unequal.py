"""The tiny program with samples of 2 to 16 tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.program import load_program

tiny = load_program(Path(__file__).parent / "tiny.py")
SHORTEST, KINDS = 2, 15


class Unequal:
    """The items of another dataset, each cut at its own length."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def length(self, index: int) -> int:
        return SHORTEST + index * index * 7 % KINDS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: value[: self.length(index)] for key, value in self.items[index].items()}


program = replace(
    tiny, dataset=lambda: Unequal(tiny.dataset()), validation=lambda: Unequal(tiny.validation())
)
