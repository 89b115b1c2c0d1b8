"""A hook on the optimizer's step gives every row of every matrix length 1, as in nGPT."""

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

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


TP = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % VOCAB
        return {"input": ids[:-1], "target": ids[1:]}


def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


def optimizer(named):
    made = torch.optim.AdamW([p for _, p in named], lr=3e-3)

    def hook(optimizer, *_):
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.ndim == 2:
                        p.copy_(F.normalize(p, dim=-1))

    made.register_step_post_hook(hook)
    return made


program = elastic.Program(model=Net, optimizer=optimizer, dataset=Rows, loss=loss, tp=TP)

EXPECT = {"dp": "equal", "tp": "equal", "cp": "refused: elastic.attention", "pp": "equal"}
