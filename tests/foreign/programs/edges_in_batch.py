"""Messages along edges that each sample brings, numbered through the batch."""

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
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, ids, source, goal):
        x = self.embed(ids)
        first = torch.arange(len(ids))[:, None] * ids.shape[1]
        flat = x.flatten(0, 1)
        sent = flat[(source + first).flatten()]
        x = x + torch.zeros_like(flat).index_add(0, (goal + first).flatten(), sent).view_as(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % VOCAB
        source = (torch.arange(12) * (1 + index % 3)) % 8
        goal = (torch.arange(12) * 5 + index) % 8
        return {"input": ids[:-1], "target": ids[1:], "source": source, "goal": goal}


def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


program = elastic.Program(
    model=Net,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
    keywords=lambda batch: {"source": batch["source"], "goal": batch["goal"]},
)

EXPECT = {
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: edges_in_batch|elastic.attention",
    "pp": "refused: edges_in_batch|before the blocks",
}
