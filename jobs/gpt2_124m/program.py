"""GPT-2 of 124 million parameters from random weights, on the bytes of the running Python's
standard library."""

import math

import torch
from transformers import GPT2Config

from elastic.data.sources import TextFolder, python_stdlib_folder
from elastic.models.huggingface import causal_lm

STEPS, WARM_UP_STEPS, SEQ = 19_073, 715, 1024  # STEPS as in job.yaml
# no dropout: its masks would depend on the layout
CONFIG = GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, n_positions=SEQ)


def optimizer(named):
    """AdamW; weight decay on matrices."""
    named = list(named)
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=torch.cuda.is_available())


def lr_factor(step):
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    done = min(1.0, (step - WARM_UP_STEPS) / (STEPS - WARM_UP_STEPS))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


program = causal_lm(
    CONFIG,
    dataset=lambda: TextFolder(python_stdlib_folder(), SEQ, "train"),
    validation=lambda: TextFolder(python_stdlib_folder(), SEQ, "validation"),
    optimizer=optimizer,
    lr_factor=lr_factor,
)
