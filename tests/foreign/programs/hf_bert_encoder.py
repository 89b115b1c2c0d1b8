"""BERT's encoder of transformers in a model of one's own, the pattern from its root."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel

import elastic

CONFIG = BertConfig(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=8,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


class Tagger(BertModel):
    def __init__(self):
        super().__init__(CONFIG, add_pooling_layer=False)
        self.tags = nn.Linear(32, 48)

    def forward(self, ids):
        return self.tags(super().forward(ids).last_hidden_state)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % 48
        return {"input": ids[:-1], "target": ids[1:]}


def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


program = elastic.Program(
    model=Tagger,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
    blocks="encoder.layer.*",
)

EXPECT = {
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: elastic.attention",
    "pp": "refused: embeddings|forward|Tagger",
}
