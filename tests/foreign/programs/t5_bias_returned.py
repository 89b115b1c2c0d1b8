"""The relative bias of block 0 is handed on from block to block."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Block(nn.Module):
    def __init__(self, biased):
        super().__init__()
        self.norm, self.qkv, self.o = (
            nn.LayerNorm(D),
            nn.Linear(D, 3 * D, bias=False),
            nn.Linear(D, D, bias=False),
        )
        self.bias = nn.Embedding(16, 4) if biased else None

    def table(self, n, device):
        place = torch.arange(n, device=device)
        return self.bias(place[:, None] - place + 8).permute(2, 0, 1)

    def forward(self, x, bias=None):
        bias = self.table(x.shape[1], x.device) if bias is None else bias
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return x + self.o(
            F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        ), bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(Block(i == 0) for i in range(4))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
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
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: elastic.attention",
    "pp": "refused: layers|bias|forward",
}
