"""As tiny_spike.py, with two optimizers: SGD with momentum for the blocks, AdamW for all that is
beside them.

A pipeline stage in the middle has no parameter of AdamW.
"""

from dataclasses import replace
from pathlib import Path

import torch

from elastic.program import load_program


def optimizers(named_parameters) -> dict[str, torch.optim.Optimizer]:
    named = list(named_parameters)
    blocks = [p for name, p in named if name.startswith("layers.")]
    others = [p for name, p in named if not name.startswith("layers.")]
    return {
        "blocks": torch.optim.SGD(blocks, lr=0.1, momentum=0.9, weight_decay=0.01),
        "others": torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1),
    }


program = replace(load_program(Path(__file__).with_name("tiny_spike.py")), optimizer=optimizers)
