"""The tiny program with long steps, whose samples each need a byte of the file `rows` under
$ELASTIC_TEST_ROWS, in storage that is not asked for long."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.program import load_program
from elastic.storage import objects, open_storage

BASE = load_program(Path(__file__).with_name("tiny_slow.py"))
objects.DEFAULT = replace(objects.DEFAULT, attempts=3, first_s=0.05, most_s=0.2)


class Stored:
    def __init__(self) -> None:
        self.items = BASE.dataset()
        self.storage = open_storage(os.environ["ELASTIC_TEST_ROWS"])

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        assert self.storage.read("rows", index, 1) == b"x"
        return self.items[index]


program = replace(BASE, dataset=Stored, validation=None)
