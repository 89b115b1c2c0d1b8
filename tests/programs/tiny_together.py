"""Two towers, each with mixtures of experts that a bias balances, BatchNorm and dropout, also
between the blocks. The job gives the optimizer."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from elastic.models.experts import MixtureOfExperts

sys.path.insert(0, str(Path(__file__).parent))
import tiny_towers
from tiny_towers import N_TEXT, N_VISION, SAYS, SEES, VOCAB, Attention, Towers


class Norm(nn.BatchNorm1d):
    def forward(self, x):  # [batch, positions, features]
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class VisionBlock(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.norm, self.drop = Norm(SEES), drop
        self.mlp = MixtureOfExperts(SEES, 16, 4, top_k=2, bias_rate=0.02)

    def forward(self, x):
        return self.drop(self.mlp(self.norm(x)))


class TextBlock(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.norm, self.cross, self.drop = Norm(SAYS), Attention(SAYS, SEES), drop
        self.mlp = MixtureOfExperts(SAYS, 16, 8, top_k=2, bias_rate=0.02)

    def forward(self, x, seen):
        said = self.drop(self.cross(self.norm(x), seen))
        return said + F.dropout(self.mlp(x + said), 0.2, self.training)


class Embedding(nn.Embedding):
    def forward(self, ids):
        return self.drop(super().forward(ids))


class Head(nn.Linear):
    def forward(self, x):
        return super().forward(self.drop(x))


class Together(Towers):
    def __init__(self):
        super().__init__()
        drop = nn.Dropout(0.2)  # one for all blocks, and for what stands beside them
        self.text["embed"], self.text["head"] = Embedding(VOCAB, SAYS), Head(SAYS, VOCAB)
        self.text["embed"].drop = self.text["head"].drop = drop
        self.text["layers"] = nn.ModuleList(TextBlock(drop) for _ in range(N_TEXT))
        self.vision["layers"] = nn.ModuleList(VisionBlock(drop) for _ in range(N_VISION))
        self.vision["norm"] = Norm(SEES)

    def forward(self, picture, ids):
        said, seen = super().forward(F.dropout(picture, 0.1, self.training), ids)
        return F.dropout(said, 0.1, self.training), seen


@torch.no_grad()
def init(model):
    for name, p in model.named_parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=3.0 if "gate" in name else 0.15)
        else:
            nn.init.constant_(p, 1.0 if "norm" in name else 0.1)


tp = {name: style for name, style in tiny_towers.program.tp.items() if "vision" not in name}
program = replace(tiny_towers.program, model=Together, init=init, tp=tp, optimizer=None)
