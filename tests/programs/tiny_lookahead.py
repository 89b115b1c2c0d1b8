"""As tiny.py, with a Lookahead that has the state of the optimizer which it stands around."""

from dataclasses import replace
from pathlib import Path

import torch
from programs.counting_optimizers import SharedLookahead

from elastic.program import load_program


def optimizer(named_parameters):
    return SharedLookahead(torch.optim.AdamW([p for _, p in named_parameters], lr=4e-3))


program = replace(
    load_program(Path(__file__).with_name("tiny.py")), optimizer=optimizer, lr_factor=None
)
