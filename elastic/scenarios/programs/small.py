"""A tiny decoder that eight ranks can cut along any axis, on sequences that it can learn.

Item i starts at a number and continues in equal strides; every third item has its last targets
masked, so that shares of the global batch differ in their token counts.
"""

import torch

import elastic
from elastic.models.llama import Llama, LlamaConfig, init_weights, loss_sum, tp_plan

VOCAB, SEQ, STRIDES = 64, 16, (1, 3, 7)
CONFIG = LlamaConfig(
    vocab_size=VOCAB, hidden=64, n_layers=8, n_heads=8, n_kv_heads=8, ffn_hidden=96, max_seq=SEQ
)
LEARNING_RATE = 1e-3  # small: over hundreds of steps, rounding must not grow into another run


class Strides:
    """`n` sequences, {"input": int64 [seq], "target": int64 [seq]}."""

    def __init__(self, n: int, seq: int = SEQ, vocab: int = VOCAB) -> None:
        self.n, self.seq, self.vocab = n, seq, vocab

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.n:
            raise IndexError(f"sample {index} of {self.n}")
        ids = (index * 37 + torch.arange(self.seq + 1) * STRIDES[index % 5 % 3]) % self.vocab
        target = ids[1:].clone()
        if index % 3 == 0:
            target[-4:] = -100
        return {"input": ids[:-1], "target": target}


program = elastic.Program(
    model=lambda: Llama(CONFIG),
    init=init_weights,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=LEARNING_RATE),
    dataset=lambda: Strides(512),
    loss=loss_sum,
    tp=tp_plan(),
    tp_limit=CONFIG.n_kv_heads,
)
