"""A small byte-level decoder on the text of the running Python's own standard library: real input,
nothing to download."""

import math
from collections.abc import Iterable

import torch
from torch import nn

import elastic
from elastic.data.sources import LEFT_OUT, TextFolder, python_stdlib_folder
from elastic.models.llama import Llama, LlamaConfig, generate, init_weights, loss_sum, tp_plan

SEQ = 128  # bytes per sample
# STEPS as in job.yaml: the length of the cosine
STEPS, WARM_UP_STEPS, LAST_LR_FACTOR = 260, 20, 0.05
LEARNING_RATE, WEIGHT_DECAY = 2e-3, 0.1
# tables, generated text, another Python
NOT_PROSE = ("test", "tests", "encodings", "pydoc_data", "idlelib", "lib2to3")
CONFIG = LlamaConfig(vocab_size=256, hidden=256, n_layers=2, n_heads=8, n_kv_heads=4, max_seq=SEQ)
PROMPT = "    def "


def text(split: str) -> TextFolder:
    return TextFolder(python_stdlib_folder(), SEQ, split, leave_out=LEFT_OUT + NOT_PROSE)


def optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices, none on norms. A pipeline stage may have none of one
    kind."""
    named = list(named_parameters)
    matrices = [parameter for _, parameter in named if parameter.ndim >= 2]
    others = [parameter for _, parameter in named if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def lr_factor(step: int) -> float:
    """Linear warm-up, then half a cosine down to LAST_LR_FACTOR."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    done = min(1.0, (step - WARM_UP_STEPS) / (STEPS - WARM_UP_STEPS))
    return LAST_LR_FACTOR + (1 - LAST_LR_FACTOR) * 0.5 * (1 + math.cos(math.pi * done))


def sample(model: nn.Module) -> str:
    """What the model writes behind PROMPT."""
    ids = generate(model, list(PROMPT.encode()), n=260, temperature=0.8, seed=1)
    return bytes(ids).decode("utf-8", errors="replace")


program = elastic.Program(
    model=lambda: Llama(CONFIG),
    init=init_weights,
    optimizer=optimizer,
    dataset=lambda: text("train"),
    validation=lambda: text("validation"),
    loss=loss_sum,
    tp=tp_plan(),
    tp_limit=CONFIG.n_kv_heads,
    lr_factor=lr_factor,
    sample=sample,
)
