"""A tiny Llama of transformers with grouped queries, on documents that are packed into each
sequence."""

import sys
from pathlib import Path

import torch

from elastic.models.huggingface import causal_lm

sys.path.insert(0, str(Path(__file__).parent))
import hf_tiny
import tiny_packed


class Packed:
    """{"input", "target", "position", "document"}, as the job's own packing gives them."""

    def __init__(self) -> None:
        self.items = tiny_packed.Packed()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = self.items[index]
        document = item["documents"]
        places = torch.arange(len(document))
        first = torch.stack([places[document == d][0] for d in document.tolist()])
        last = torch.cat([document[1:] != document[:-1], torch.tensor([True])])
        return {
            "input": item["input"], "target": item["target"].masked_fill(last, -100),
            "position": places - first, "document": document,
        }  # fmt: skip


program = causal_lm(
    hf_tiny.CONFIG, Packed, lambda named: torch.optim.AdamW([p for _, p in named], lr=2e-3)
)
