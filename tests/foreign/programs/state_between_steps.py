"""Recurrent blocks that go on with the state which the step before has left."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.state = nn.GRU(D, D, batch_first=True), None

    def forward(self, x):
        if self.state is None or self.state.shape[1] != x.shape[0]:
            self.state = torch.zeros(1, x.shape[0], D)
        y, state = self.rnn(x, self.state)
        self.state = state.detach()
        return x + y


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
        return self.head(self.norm(x))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % VOCAB
        return {"input": ids[:-1], "target": ids[1:]}


def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


program = elastic.Program(
    model=Net,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
)

EXPECT = {
    "dp": "refused: second forward pass .*another loss",
    "tp": "no plan",
    "cp": "refused: elastic.attention|second forward pass",
    "pp": "refused: second forward pass .*another loss",
}
