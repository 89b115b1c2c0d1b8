"""A class token and positions as the model's own parameters; the head reads the class token."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

D, CLASSES = 32, 7


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, D))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, D) * 0.02)
        self.patch_embed = nn.Conv2d(3, D, 4, 4)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, CLASSES)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


TP = {
    "blocks.*.[qkv]": "colwise",
    "blocks.*.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        image = torch.sin(torch.arange(3 * 8 * 8) * (1 + index % 7) / 9.0).view(3, 8, 8)
        return {"input": image, "target": torch.tensor(index % 7)}


def loss(logits, batch):
    return F.cross_entropy(logits, batch["target"], reduction="sum")


program = elastic.Program(
    model=Net,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Images,
    loss=loss,
    blocks="blocks.*",
    tp=TP,
)

EXPECT = {
    "dp": "equal",
    "tp": "equal",
    "cp": "refused: elastic.attention",
    "pp": "refused: cls_token|pos_embed|patch_embed|forward",
}
