"""As tiny_qlora.py, with an optimizer and the frozen layers of its blocks in 4 bits."""

from dataclasses import replace
from pathlib import Path

import torch

from elastic.models.nf4 import in_nf4
from elastic.program import load_program

program = in_nf4(
    replace(
        load_program(Path(__file__).with_name("tiny_qlora.py")),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
    )
)
