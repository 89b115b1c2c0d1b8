"""A linear-chain CRF with learned transitions on top."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.between = nn.Parameter(torch.randn(5, 5) / 5)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 5)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)), self.between


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % VOCAB
        return {"input": ids[:-1], "target": ids[1:] % 5}


def loss(output, batch):
    each, between = output
    right = batch["target"]
    score = each.gather(2, right[..., None]).sum((1, 2))
    score = score + between[right[:, :-1], right[:, 1:]].sum(1)
    total = each[:, 0]
    for i in range(1, each.shape[1]):
        total = (total[:, :, None] + between).logsumexp(1) + each[:, i]
    return (total.logsumexp(1) - score).sum()


program = elastic.Program(
    model=Net,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
)

EXPECT = {
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: elastic.attention",
    "pp": "refused: crf|takes a part|uses the weight",
}
