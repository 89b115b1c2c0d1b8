"""Only some samples have padding, and the share of it in the whole batch scales the logits."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.o(elastic.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        pad = (ids == 0).float()
        share = pad.sum(1) / pad.sum().clamp(min=1.0)
        return self.head(self.norm(x)) * (1 + share)[:, None, None]


TP = {
    "layers.*.[qkv]": "colwise",
    "layers.*.o": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % VOCAB
        ids = ids.clamp(min=1)
        if index >= 4:
            ids[4 + index % 3 :] = 0
        return {"input": ids[:-1], "target": ids[1:]}


def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


program = elastic.Program(
    model=Net,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
    tp=TP,
)

EXPECT = {
    "dp": "refused: stand beside it",
    "tp": "equal",
    "cp": "refused: stand beside it|another function|gradients",
    "pp": "refused: input",
}
