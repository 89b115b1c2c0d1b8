"""A decoder of 1.2 billion parameters for nodes of different speeds: each gets the share of the
batch that it can do."""

import torch

import elastic
from elastic.models.llama import Llama, LlamaConfig, init_weights, loss_sum, tp_plan

CONFIG = LlamaConfig(
    vocab_size=50_304, hidden=2048, n_layers=20, n_heads=16, n_kv_heads=8, max_seq=2048
)


def optimizer(named):
    return torch.optim.AdamW(
        [p for _, p in named], lr=3e-4, betas=(0.9, 0.95), fused=torch.cuda.is_available()
    )


program = elastic.Program(
    model=lambda: Llama(CONFIG),
    init=init_weights,
    optimizer=optimizer,
    dataset=None,
    loss=loss_sum,
    tp=tp_plan(vocab=True),
    tp_limit=CONFIG.n_kv_heads,
    lr_factor=lambda step: min(1.0, (step + 1) / 200),
)
