"""What is trained: a small vision transformer on pictures. Put your model and pictures in the
place of these."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elastic

SIDE, PATCH, HIDDEN, HEADS, CLASSES = 16, 4, 32, 4, 4


class PictureBlock(nn.Module):
    """A block adds to its own input: only so may a pipeline be cut between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.v, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, patches, hidden] -> the same. No size of a cut weight is read: tp may cut it."""
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        change: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + change


class Patches(nn.Conv2d):
    """What makes a row of patches of a picture stands in here, before the first block."""

    def forward(self, pictures: Tensor) -> Tensor:
        return super().forward(pictures).flatten(2).transpose(1, 2)


class Classes(nn.Linear):
    """The mean over patches stands in here, behind the last block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1))


class PictureModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches(3, HIDDEN, PATCH, stride=PATCH)
        self.layers = nn.ModuleList(PictureBlock() for _ in range(4))
        self.classes = Classes(HIDDEN, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """[batch, 3, side, side] -> [batch, classes]."""
        x: Tensor = self.patches(pictures)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.classes(x)
        return scores


class Pictures(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Made up: noise, brighter in one quarter, which is the class. A data set of torchvision does
    the same with `{"input": picture, "target": torch.tensor(label)}`."""

    def __len__(self) -> int:
        return 960

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        picture = torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(index))
        label, half = index % CLASSES, SIDE // 2
        row, column = half * (label // 2), half * (label % 2)
        picture[:, row : row + half, column : column + half] += 0.5
        return {"input": picture, "target": torch.tensor(label)}


program = elastic.Program(
    model=PictureModel,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Pictures,
    # the sum, not the mean: elastic divides by what the whole step counts
    loss=lambda output, batch: F.cross_entropy(output, batch["target"], reduction="sum"),
    metrics=lambda output, batch: {"accuracy": (output.argmax(-1) == batch["target"]).sum()},
    blocks="layers.*",
    tp={
        "layers.*.[qkv]": "colwise", "layers.*.out": "rowwise", "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
    },
    tp_limit=HEADS,
)  # fmt: skip
