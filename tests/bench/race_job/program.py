"""The model of the race, as a Program; peer.py takes the same model, seed, data, optimizer and loss
from it.

A step's work is mostly a sleep, SAMPLE_S for each sample of the rank: on a GPU the host is idle
meanwhile too, and on a machine with fewer cores than workers computing would measure the cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import elastic
from elastic.data.sources.text_folder import LEFT_OUT, TextFolder, python_stdlib_folder
from elastic.models.llama import Llama, LlamaConfig, init_weights, loss_sum

SEED, BATCH, SEQ = 1, 12, 32
SAMPLE_S = float(os.environ.get("RACE_SAMPLE_S", "0.1"))
CONFIG = LlamaConfig(vocab_size=256, hidden=64, n_layers=2, n_heads=4, n_kv_heads=4, max_seq=SEQ)
NOT_READ = (
    "test",
    "tests",
    "encodings",
    "pydoc_data",
    "idlelib",
    "lib2to3",
    "asyncio",
    "multiprocessing",
    "email",
    "tkinter",
)


def init(model: nn.Module) -> None:
    torch.manual_seed(SEED)
    init_weights(model)


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    if not output.is_meta:
        time.sleep(SAMPLE_S * len(output))
    return loss_sum(output, batch)


program = elastic.Program(
    model=lambda: Llama(CONFIG),
    init=init,
    optimizer=lambda named: torch.optim.AdamW(
        [parameter for _, parameter in named], lr=2e-3, betas=(0.9, 0.95)
    ),
    dataset=lambda: TextFolder(python_stdlib_folder(), SEQ, "train", leave_out=LEFT_OUT + NOT_READ),
    loss=loss,
)
