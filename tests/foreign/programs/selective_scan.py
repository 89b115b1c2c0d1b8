"""A selective state-space scan in each block, as in Mamba."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.decay, self.select = nn.Parameter(torch.randn(D, 4)), nn.Linear(D, 9)

    def forward(self, x):
        u, gate = self.inner(self.norm(x)).chunk(2, -1)
        write, read, step = self.select(u).split([4, 4, 1], -1)
        step, state, out = F.softplus(step), x.new_zeros(len(x), D, 4), []
        for t in range(x.shape[1]):
            state = state * torch.exp(-step[:, t, :, None] * self.decay.exp())
            state = state + (step[:, t] * u[:, t])[..., None] * write[:, t, None]
            out.append((state * read[:, t, None]).sum(-1))
        return x + self.out(torch.stack(out, 1) * F.silu(gate))


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
