"""A tiny decoder of bytes: what it reads is the job's, so that phases may read other lengths."""

import torch

import elastic
from elastic.models.llama import Llama, LlamaConfig, init_weights, loss_sum, tp_plan

CONFIG = LlamaConfig(
    vocab_size=256, hidden=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_hidden=64, max_seq=64
)

program = elastic.Program(
    model=lambda: Llama(CONFIG),
    init=init_weights,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=4e-3, betas=(0.9, 0.95)),
    dataset=None,
    loss=loss_sum,
    tp=tp_plan(),
    tp_limit=CONFIG.n_kv_heads,
)
