"""tiny.py with a mixture of experts, one of them shared, in each block."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import elastic
from elastic.models.experts import MixtureOfExperts
from elastic.models.llama import FeedForward, Llama, init_weights

sys.path.insert(0, str(Path(__file__).parent))
from tiny import CONFIG
from tiny import program as tiny


@torch.no_grad()
def init(made: Llama) -> None:
    init_weights(made)
    for block in made.layers:
        block.mlp.gate.weight.mul_(20.0)  # so that no two experts are chosen by a hair


def with_experts(**how: Any) -> elastic.Program:
    """`how`: of MixtureOfExperts."""

    def model() -> Llama:
        made = Llama(CONFIG)
        for block in made.layers:
            shared = FeedForward(CONFIG)
            block.mlp = MixtureOfExperts(CONFIG.hidden, 32, 8, top_k=2, shared=shared, **how)
        return made

    tp = {name: style for name, style in tiny.tp.items() if "mlp" not in name}
    return replace(tiny, model=model, init=init, tp=tp)


program = with_experts()
