"""As tiny.py, with documents packed into each sequence: tokens see those of their own document
only."""

from dataclasses import replace
from pathlib import Path

import torch

from elastic.program import load_program

BASE = load_program(Path(__file__).with_name("tiny.py"))


class Packed:
    """Where the documents begin depends on the sample."""

    def __init__(self) -> None:
        self.items = BASE.dataset()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = self.items[index]
        places = torch.arange(len(item["input"]))
        return item | {
            "documents": (places > 2 + index % 4).long() + (places > 9 + index % 3).long()
        }


program = replace(
    BASE, dataset=Packed, validation=None, keywords=lambda batch: {"documents": batch["documents"]}
)
