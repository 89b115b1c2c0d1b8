"""Two towers: a picture goes through narrow blocks, and each wide block attends to what comes out.

Residuals and a sum over a distance stand outside of the blocks, the output has a part of its own
from the first tower, and the second one is registered first.
"""

import torch
from torch import nn
from torch.nn import functional as F

import elastic

VOCAB, LETTERS, PATCHES, SEES, SAYS, HEADS = 32, 6, 5, 16, 24, 2
N_VISION, N_TEXT = 3, 3


class Attention(nn.Module):
    def __init__(self, width, of):
        super().__init__()
        self.q, self.v = nn.Linear(width, width), nn.Linear(of, width)
        self.k = nn.Linear(of, width, bias=False)  # a bias of keys changes nothing
        self.out, self.head = nn.Linear(width, width), width // HEADS

    def forward(self, x, to):
        q, k, v = (
            y.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for y in (self.q(x), self.k(to), self.v(to))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VisionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(SEES), nn.Linear(SEES, 2 * SEES), nn.Linear(2 * SEES, SEES),
        )  # fmt: skip

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class TextBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.cross = nn.LayerNorm(SAYS), Attention(SAYS, SEES)

    def forward(self, x, seen):
        return self.cross(self.norm(x), seen)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.ModuleDict(
            {
                "embed": nn.Embedding(VOCAB, SAYS),
                "layers": nn.ModuleList(TextBlock() for _ in range(N_TEXT)),
                "norm": nn.LayerNorm(SAYS),
                "head": nn.Linear(SAYS, VOCAB),
            }
        )
        self.vision = nn.ModuleDict(
            {
                "patches": nn.Linear(4, SEES),
                "layers": nn.ModuleList(VisionBlock() for _ in range(N_VISION)),
                "norm": nn.LayerNorm(SEES),
            }
        )

    def forward(self, picture, ids):
        first = x = self.vision["patches"](picture)
        for layer in self.vision["layers"]:
            x = x + layer(x)
        seen = self.vision["norm"](x + first)
        text = self.text["embed"](ids)
        for layer in self.text["layers"]:
            text = text + layer(text, seen)
        return self.text["head"](self.text["norm"](text + text.mean(1, True))), seen.mean((1, 2))


class Pictures:
    """{"input": float32 [patches, 4], "ids": int64 [letters], "target": the same}."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if not 0 <= index < self.n:
            raise IndexError(index)
        picture = torch.sin(torch.arange(PATCHES * 4.0) * (1 + index % 7)).view(PATCHES, 4)
        ids = (index + torch.arange(LETTERS + 1) * (1 + index % 7)) % VOCAB
        target = ids[1:].clone()
        if index % 3 == 0:
            target[-2:] = -100
        return {"input": picture, "ids": ids[:-1], "target": target}


def init(model):
    for p in model.parameters():
        nn.init.normal_(p, std=0.3) if p.ndim > 1 else nn.init.constant_(p, 0.5)


def loss(output, batch):
    said, seen = output
    target = batch["target"].flatten()
    whole = F.cross_entropy(said.flatten(0, 1), target, reduction="sum", ignore_index=-100)
    return whole + (seen - 0.1).pow(2).sum()


program = elastic.Program(
    model=Towers,
    init=init,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-3),
    dataset=lambda: Pictures(240),
    keywords=lambda batch: {"ids": batch["ids"]},
    loss=loss,
    blocks=["vision.layers.*", "text.layers.*"],
    tp={
        "vision.layers.*.up": "colwise", "vision.layers.*.down": "rowwise",
        "text.layers.*.cross.[qkv]": "colwise", "text.layers.*.cross.out": "rowwise",
    },
    tp_limit=HEADS,
)  # fmt: skip
