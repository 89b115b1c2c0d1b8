"""The tiny program with an iterable dataset that has a state: 31 samples, begun anew at its end."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.program import load_program

tiny = load_program(Path(__file__).parent / "tiny.py")
N = 31


class Endless:
    def __init__(self) -> None:
        self.items, self.at = tiny.dataset(), 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < N:
            self.at += 1
            yield self.items[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


program = replace(tiny, dataset=Endless)
