"""A linear recurrence over the positions."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.read, self.write = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)
        self.decay = nn.Parameter(torch.linspace(-2.0, 2.0, D))

    def forward(self, x):
        h, state, states = self.read(self.norm(x)), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.sigmoid(self.decay) * state + h[:, t]
            states.append(state)
        return x + self.write(torch.stack(states, 1))


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

EXPECT = {"dp": "equal", "tp": "no plan", "cp": "refused: elastic.attention", "pp": "equal"}
