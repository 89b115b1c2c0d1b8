"""tiny.py with a mixture of experts, one of them shared, in each block."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from elastic.models.experts import Mixture
from elastic.models.llama import FeedForward, Llama, init_weights

sys.path.insert(0, str(Path(__file__).parent))
from tiny import CONFIG
from tiny import program as tiny


def model() -> Llama:
    made = Llama(CONFIG)
    for block in made.layers:
        block.mlp = Mixture(CONFIG.hidden, 32, 8, top_k=2, shared=FeedForward(CONFIG))
    return made


@torch.no_grad()
def init(made: Llama) -> None:
    init_weights(made)
    for block in made.layers:
        block.mlp.gate.weight.mul_(20.0)  # so that no two experts are chosen by a hair


program = replace(
    tiny,
    model=model,
    init=init,
    tp={name: style for name, style in tiny.tp.items() if "mlp" not in name},
)
