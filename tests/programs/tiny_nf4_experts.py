"""tiny_nf4.py with a mixture of experts in each block: what is frozen in attention, router and
shared expert has 4 bits, the stacked experts are frozen as they are."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from elastic.models.experts import MixtureOfExperts
from elastic.models.llama import FeedForward, Llama, init_weights
from elastic.models.lora import lora
from elastic.models.nf4 import in_nf4

sys.path.insert(0, str(Path(__file__).parent))
from tiny_wide import CONFIG
from tiny_wide import program as wide


def model() -> Llama:
    made = wide.model()
    for block in made.layers:
        block.mlp = MixtureOfExperts(128, 32, 8, top_k=2, shared=FeedForward(CONFIG))
    return made


@torch.no_grad()
def init(made: Llama) -> None:
    init_weights(made)
    for block in made.layers:
        block.mlp.gate.weight.mul_(20.0)  # so that no two experts are chosen by a hair


tp = {name: style for name, style in wide.tp.items() if "mlp" not in name}
BASE = replace(
    wide,
    model=model,
    init=init,
    tp=tp,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
)
program = in_nf4(lora(BASE, ("wq", "wv", "wo", "w1", "w2"), r=4, alpha=16))
