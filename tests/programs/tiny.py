"""A tiny decoder on sequences that it can learn: the program of most tests of the worker.

Item i starts at a number and continues in equal strides; every third item has its last targets
masked, so that shares of the global batch differ in their token counts.
"""

import torch

import elastic
from elastic.models.llama import Llama, LlamaConfig, init_weights, loss_sum, tp_plan

VOCAB, SEQ, STRIDES = 64, 16, (1, 3, 7)
CONFIG = LlamaConfig(
    vocab_size=VOCAB, hidden=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_hidden=64, max_seq=SEQ
)


class Strides:
    """`n` sequences, {"input": int64 [seq], "target": int64 [seq]}."""

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first = n, first

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.n:
            raise IndexError(f"sample {index} of {self.n}")
        number = self.first + index
        ids = (number * 37 + torch.arange(SEQ + 1) * STRIDES[number % 5 % 3]) % VOCAB
        target = ids[1:].clone()
        if number % 3 == 0:
            target[-4:] = -100
        return {"input": ids[:-1], "target": target}


def optimizer(named_parameters) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    named = list(named_parameters)
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=4e-3, betas=(0.9, 0.95)
    )


def lr_factor(step: int) -> float:
    return min(1.0, (step + 1) / 5)


program = elastic.Program(
    model=lambda: Llama(CONFIG),
    init=init_weights,
    optimizer=optimizer,
    dataset=lambda: Strides(512),
    validation=lambda: Strides(48, first=512),
    loss=loss_sum,
    tp=tp_plan(),
    tp_limit=CONFIG.n_kv_heads,
    lr_factor=lr_factor,
)
