"""A vision transformer, written by hand, on the handwritten digits of scikit-learn: 1,797 pictures
of 8 x 8, real data."""

from functools import lru_cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import elastic

SIDE, PATCH, HIDDEN, HEADS, N_LAYERS, CLASSES, N_TRAIN = 8, 2, 64, 4, 4, 10, 1500
HEAD_DIM = HIDDEN // HEADS


class Block(nn.Module):
    """Pre-norm attention over all patches, then an MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        """[batch, patches, hidden] -> the same."""
        y = self.norm1(x)
        q, k, v = (
            m(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Patches(nn.Module):
    """[batch, 8, 8] -> [batch, 16, hidden]."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(PATCH * PATCH, HIDDEN)
        self.place = nn.Parameter(torch.zeros((SIDE // PATCH) ** 2, HIDDEN))

    def forward(self, x):
        cut = x.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        return self.project(cut) + self.place


class Classes(nn.Linear):
    """[batch, patches, hidden] -> [batch, classes]. The mean over patches belongs in here: where
    another pipeline stage holds this module, the hidden state passes through all of it."""

    def forward(self, x):
        return super().forward(x.mean(1))


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = Patches()
        self.layers = nn.ModuleList(Block() for _ in range(N_LAYERS))
        self.norm, self.classes = nn.LayerNorm(HIDDEN), Classes(HIDDEN, CLASSES)

    def forward(self, x):
        x = self.patches(x)
        for layer in self.layers:
            x = layer(x)
        return self.classes(self.norm(x))


@lru_cache(maxsize=1)
def digits():
    """Pictures [1797, 8, 8] in 0..1 and classes, in an order of their own (the set is sorted by
    writers)."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[
        order
    ]


class Digits:
    def __init__(self, split):
        pictures, classes = digits()
        part = slice(0, N_TRAIN) if split == "train" else slice(N_TRAIN, None)
        self.pictures, self.classes = pictures[part], classes[part]

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, index):
        return {"input": self.pictures[index], "target": self.classes[index]}


def init(model):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(
                parameter, std=0.02 if name.endswith("place") else parameter.shape[-1] ** -0.5
            )


program = elastic.Program(
    model=Vit,
    init=init,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=2e-3, weight_decay=0.05),
    dataset=lambda: Digits("train"),
    validation=lambda: Digits("validation"),
    loss=lambda output, batch: F.cross_entropy(output, batch["target"], reduction="sum"),
    metrics=lambda output, batch: {"accuracy": (output.argmax(-1) == batch["target"]).sum()},
    tp={
        "layers.*.[qkv]": "colwise", "layers.*.out": "rowwise", "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
    },
    tp_limit=HEADS,
    lr_factor=lambda step: min(1.0, (step + 1) / 20),
)  # fmt: skip
