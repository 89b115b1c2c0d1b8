"""tiny_distilled.py with a teacher whose layers are wide enough for blocks of 64, in 4 bits."""

from dataclasses import replace
from pathlib import Path

import torch

from elastic.models.distillation import distilled
from elastic.models.llama import Llama, LlamaConfig, init_weights
from elastic.models.nf4 import in_nf4
from elastic.program import load_program

CONFIG = LlamaConfig(
    vocab_size=64, hidden=128, n_layers=2, n_heads=4, n_kv_heads=4, ffn_hidden=128, max_seq=16
)
STUDENT = load_program(Path(__file__).with_name("tiny.py"))


@torch.no_grad()
def sharp(model: Llama) -> None:
    init_weights(model)
    for parameter in model.parameters():
        parameter.mul_(3)


teacher = replace(STUDENT, model=lambda: Llama(CONFIG), init=sharp, tp_limit=4)
program = in_nf4(distilled(STUDENT, teacher, temperature=2.0, share=0.7))
