"""A tiny decoder that draws in all ways that are keyed: dropout of the embedding, of features that
tp cuts and of the hidden state, by module and by function; whole branches left out; noise that all
samples of a step share; noise in the head."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.models.llama import Block, FeedForward, Llama, LlamaConfig, init_weights
from elastic.program import load_program

tiny = load_program(Path(__file__).parent / "tiny.py")


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.8) / 0.8


class Dropping(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        inner = F.dropout(F.silu(self.w1(x)) * self.w3(x), 0.2, self.training)
        return self.w2(inner)


class DroppingBlock(Block):
    def __init__(self, config: LlamaConfig, drop: nn.Module) -> None:
        super().__init__(config)
        self.mlp, self.drop, self.path = Dropping(config), drop, DropPath()

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.attn(self.attn_norm(x), documents=documents))
        return x + self.path(self.drop(self.mlp(self.mlp_norm(x))))


class Embedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.dropout1d(super().forward(ids).transpose(1, 2), 0.1, self.training).transpose(1, 2)


class Head(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            hidden = hidden + 0.1 * torch.randn_like(hidden)
            hidden = hidden * (1 + 0.1 * torch.rand(hidden.shape[-1], device=hidden.device))
        return super().forward(hidden)


def model(block: type[Block] = DroppingBlock) -> Llama:
    made = tiny.model()
    config = load_config()
    drop = nn.Dropout(0.1)  # one for all blocks
    made.layers = nn.ModuleList(block(config, drop) for _ in range(config.n_layers))
    made.embed = Embedding(made.embed.num_embeddings, made.embed.embedding_dim)
    made.head = Head(made.head.in_features, made.head.out_features, bias=False)
    return made


def load_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64, hidden=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_hidden=64, max_seq=16
    )


program = replace(tiny, model=model, init=init_weights)
