"""As tiny; where four ranks train, whoever is rank 0 leaves out a block from its process's 25th pass on."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from elastic.models.llama import Llama
from elastic.program import load_program

tiny = load_program(Path(__file__).parent / "tiny.py")
PASSES = count(1)


def leaves_out() -> bool:
    trains = torch.is_grad_enabled() and dist.is_initialized() and dist.get_world_size() == 4
    # all count: on a busy machine another process may be rank 0 in the next generation
    return trains and next(PASSES) > 24 and dist.get_rank() == 0


class Odd(Llama):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, odd = self.embed(tokens), leaves_out()
        for i, layer in enumerate(self.layers):
            if not odd or i != 1:
                hidden = layer(hidden, None)
        return self.head(self.norm(hidden))


program = replace(tiny, model=lambda: Odd(tiny.model().config))
