"""What keyed random numbers cost: forward and backward pass of a small decoder with nine dropouts on
one core, drawn by torch and keyed by sample, in turns.

`ratio`: processor time of the keyed passes over that of plain ones, the median over the repeats;
`ratio_quartiles`: half of them lie between. `plain_ms`: the median of the plain passes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from statistics import median, quantiles
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from report import finish, options
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trial import Clock, Failed

import elastic
from elastic.types import Layout
from elastic.types.grid import Coordinates
from elastic.worker.equivalence.draw_trial import try_draws
from elastic.worker.parallel.keyed_draws import KeyedDraws, row_keys

MOST_S, REPEATS = 600.0, 100
PARTS = {"width_32": 32, "width_128": 128, "width_256": 256}
SAMPLES, LENGTH, BLOCKS, HEADS, RATE, VOCABULARY = 8, 256, 4, 4, 0.1, 256
WARM = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.Dropout(RATE), nn.Dropout(RATE)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True)
        x = x + self.first(self.out(mixed.transpose(1, 2).flatten(2)))
        made: Tensor = x + self.second(self.down(F.gelu(self.up(self.behind(x)))))
        return made


class Decoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(VOCABULARY, width), nn.Dropout(RATE)
        self.layers = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


def program(width: int) -> elastic.Program:
    return elastic.Program(
        model=partial(Decoder, width),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        dataset=lambda: TensorDataset(torch.zeros(SAMPLES, LENGTH)),
        loss=loss,
    )


def of_width(width: int, repeats: int, clock: Clock) -> dict[str, Any]:
    own, numbers = program(width), torch.Generator().manual_seed(0)
    shape = (SAMPLES, LENGTH)
    batch = {
        key: torch.randint(0, VOCABULARY, shape, generator=numbers) for key in ("input", "target")
    }
    trial = try_draws(own, batch)
    if trial.problems or len(trial.modules) != 2 * BLOCKS + 1:
        raise Failed(f"not all draws are keyed: {trial.modules}, {trial.problems}")
    draws, keys = KeyedDraws(trial), row_keys(1, 1, [range(SAMPLES)])[0]
    plain, keyed = own.model(), draws.of(own).model()

    def passed_plain() -> None:
        loss(plain(batch["input"]), batch).backward()

    def passed_keyed() -> None:
        with draws.step(Layout(), Coordinates(0, 0, 0, 0, 0)):
            draws.begin(keys, 1, length=LENGTH)
            loss(keyed(batch["input"]), batch).backward()

    seconds: dict[Any, list[float]] = {passed_plain: [], passed_keyed: []}
    for _ in range(WARM + max(2, repeats)):
        clock.look(f"width {width}")
        for passed, took_s in seconds.items():
            began_s = process_time()
            passed()
            took_s.append(process_time() - began_s)
    without, with_keys = (took_s[WARM:] for took_s in seconds.values())
    ratios = [a / b for a, b in zip(with_keys, without, strict=True)]
    return {
        "ratio": round(median(ratios), 4),
        "ratio_quartiles": [round(value, 4) for value in quantiles(ratios, n=4)[::2]],
        "plain_ms": round(1e3 * median(without), 2),
    }  # fmt: skip


def measure(parts: Sequence[str], repeats: int, clock: Clock) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        f"{part}_{name}": value
        for part in parts
        for name, value in of_width(PARTS[part], repeats, clock).items()
    }


def main() -> int:
    given = options(__doc__, MOST_S, repeats=REPEATS, parts=tuple(PARTS), smoke_parts=("width_32",))
    return finish("draws", given, lambda clock: measure(given.parts, given.repeats, clock))


if __name__ == "__main__":
    sys.exit(main())
