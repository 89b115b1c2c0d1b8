"""Encoder and decoder of torch; the blocks' pattern names the layers of both."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        one = nn.TransformerEncoderLayer(D, 4, 64, dropout=0.0, batch_first=True)
        other = nn.TransformerDecoderLayer(D, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
        self.decoder, self.head = nn.TransformerDecoder(other, 2), nn.Linear(D, VOCAB)

    def forward(self, source, so_far):
        mask = nn.Transformer.generate_square_subsequent_mask(so_far.shape[1], device=so_far.device)
        memory = self.encoder(self.embed(source))
        return self.head(
            self.decoder(self.embed(so_far), memory, tgt_mask=mask, tgt_is_causal=True)
        )


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % VOCAB
        return {"input": ids[:-1], "target": ids[1:], "source": ids[:6].flip(0)}


def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


program = elastic.Program(
    model=Net,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
    blocks="*.layers.*",
    inputs=lambda batch: batch["source"],
    keywords=lambda batch: {"so_far": batch["input"]},
)

EXPECT = {
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: elastic.attention",
    "pp": "refused: embed|encoder|decoder|so_far|memory|forward",
}
