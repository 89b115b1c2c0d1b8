"""A reference decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied
head.

Written so that any layout can cut it. The forward pass is a plain chain of modules: a pipeline
stage deletes blocks and puts pass-through modules in the place of `embed`, `norm` and `head` (its
input is then the hidden state). No size is read but from the tensors themselves, so a
tensor-parallel rank with fewer local heads runs the same code. Building it reads no value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.errors import SpecError
from elastic.models.attention import attention, positions, where

INIT_STD = 0.02


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a decoder. `ffn_hidden` 0 = 8/3 of hidden, rounded up to 32; `head_dim` 0 = hidden /
    n_heads."""

    vocab_size: int = 256
    hidden: int = 128
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    ffn_hidden: int = 0
    head_dim: int = 0
    max_seq: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        if not self.head_dim:
            if self.hidden % self.n_heads:
                raise SpecError(
                    f"LlamaConfig: hidden={self.hidden} is no multiple of n_heads={self.n_heads}; "
                    "set head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.n_heads)
        if not self.ffn_hidden:
            object.__setattr__(self, "ffn_hidden", -(-self.hidden * 8 // (3 * 32)) * 32)
        if self.n_heads % self.n_kv_heads:
            raise SpecError(
                f"LlamaConfig: n_heads={self.n_heads} is no multiple of "
                f"n_kv_heads={self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise SpecError(
                f"LlamaConfig: head_dim={self.head_dim} is odd; rotary positions turn pairs"
            )


@lru_cache(maxsize=16)
def _rotary_table(
    seq: int, head_dim: int, theta: float, *, device: torch.device, part: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """cos and sin [seq, head_dim]; RoFormer (Su et al. 2021), section 3.2.2, halves turned as in
    the public Llama weights. `part`: of the sequence, as `elastic.models.attention.where` says;
    `positions` are its own."""
    # a table first made while evaluating also serves training
    with torch.inference_mode(False), torch.no_grad():
        inverse = theta ** (
            -torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
        )
        angle = torch.outer(positions(seq, torch.device("cpu")).double(), inverse)
        table = torch.cat((angle, angle), dim=-1)
        return table.cos().float().to(device), table.sin().float().to(device)


def rotate(x: Tensor, theta: float) -> Tensor:
    """Turn each pair (i, i + head_dim/2) of x [batch, heads, seq, head_dim] by its position's
    angle."""
    cos, sin = _rotary_table(x.shape[-2], x.shape[-1], theta, device=x.device, part=where())
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class LlamaAttention(nn.Module):
    """Causal self-attention with grouped queries over the heads that are local to this rank."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        self.wq = nn.Linear(config.hidden, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.hidden, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.hidden, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, seq, heads * head_dim] -> [batch, heads, seq, head_dim]."""
        heads, rest = divmod(x.shape[-1], self.head_dim)
        if rest:
            raise SpecError(
                f"tensor parallelism cuts a head: {x.shape[-1]} columns per rank, "
                f"head_dim={self.head_dim}"
            )
        return x.view(x.shape[0], x.shape[1], heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        q = rotate(self._heads(self.wq(x)), self.theta)
        k = rotate(self._heads(self.wk(x)), self.theta)
        v = self._heads(self.wv(x))
        out = attention(q, k, v, documents=documents).transpose(1, 2)
        return self.wo(out.reshape(out.shape[0], out.shape[1], q.shape[1] * self.head_dim))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: w1 is the gate, w3 goes up, w2 comes down."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden, config.ffn_hidden, bias=False)
        self.w3 = nn.Linear(config.hidden, config.ffn_hidden, bias=False)
        self.w2 = nn.Linear(config.ffn_hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attn = LlamaAttention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), documents=documents)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]. `documents`: ids [batch, seq] of packed
    documents, which do not see each other (`Program.keywords` gives them)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    @property
    def flop_per_token(self) -> float:
        """Of the whole model at max_seq, also when this object is only a pipeline stage of it."""
        return flop_per_token(self.config)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, documents)
        x = self.norm(x)
        return self.head(x)  # type: ignore[no-any-return]


@torch.no_grad()
def init_weights(model: Llama) -> None:
    """Fill a materialized model, parameter by parameter in named order: the same torch seed gives
    the same values.

    Normal of 0.02 as in GPT-2, the two projections that write to the residual stream scaled by
    1/sqrt(2 * n_layers) (Radford et al. 2019, section 2.3); norms are 1. A tie that `to_empty`
    broke is made again.
    """
    config = model.config
    if config.tied:
        model.head.weight = model.embed.weight
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        residual = name.endswith(("attn.wo.weight", "mlp.w2.weight"))
        parameter.normal_(0.0, INIT_STD * ((2 * config.n_layers) ** -0.5 if residual else 1.0))


def tp_plan(vocab: bool = False, sequence: bool = False) -> dict[str, str]:
    """Patterns for Program.tp; tp may be any divisor of n_kv_heads. `vocab` also cuts embedding and
    head by vocabulary rows (both or neither, so that it holds for a tied head too). `sequence`:
    between the cut modules each tp rank has a part of the sequence only (Korthikanti et al. 2022,
    section 4.2.2); with `vocab` the logits stay cut for the loss."""
    plan = {f"layers.*.attn.{name}": "colwise" for name in ("wq", "wk", "wv")} | {
        "layers.*.attn.wo": "rowwise"
    }
    plan |= {
        "layers.*.mlp.w1": "colwise",
        "layers.*.mlp.w3": "colwise",
        "layers.*.mlp.w2": "rowwise",
    }
    if not sequence:
        return plan | ({"embed": "vocab", "head": "colwise_gather"} if vocab else {})
    plan |= {
        "layers.*.attn.wo": "rowwise_scatter",
        "layers.*.mlp.w2": "rowwise_scatter",
        "norm": "sequence",
    }
    for name in ("attn", "mlp"):
        plan |= {f"layers.*.{name}_norm": "sequence", f"layers.*.{name}": "gather"}
    ends = (
        {"embed": "vocab_scatter", "head": "sequence_colwise_loss"}
        if vocab
        else {"embed": "scatter", "head": "gather"}
    )
    return plan | ends


def n_params(config: LlamaConfig) -> int:
    """Number of parameters, a tied head counted once."""
    width = config.head_dim * (config.n_heads + config.n_kv_heads)
    block = 2 * config.hidden * width + 3 * config.hidden * config.ffn_hidden + 2 * config.hidden
    return (
        config.n_layers * block
        + config.hidden
        + config.vocab_size * config.hidden * (1 if config.tied else 2)
    )


def flop_per_token(config: LlamaConfig, seq: int = 0) -> float:
    """Training FLOP per token, forward and backward, without recomputation: 6 N + 12 L H Q T with N
    the weights that are multiplied (head included, embedding lookup not). PaLM (Chowdhery et al.
    2022), appendix B. `seq` 0 = max_seq."""
    width = config.head_dim * (config.n_heads + config.n_kv_heads)
    block = 2 * config.hidden * width + 3 * config.hidden * config.ffn_hidden
    weights = config.n_layers * block + config.vocab_size * config.hidden
    return 6.0 * weights + 12.0 * config.n_layers * config.n_heads * config.head_dim * (
        seq or config.max_seq
    )


def loss_sum(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy in float32, summed over the tokens of batch["target"] [batch, seq] that are not
    -100."""
    logits = output.float().reshape(-1, output.shape[-1])
    return F.cross_entropy(logits, batch["target"].reshape(-1), ignore_index=-100, reduction="sum")


@torch.no_grad()
def generate(
    model: nn.Module, prompt_ids: Sequence[int], n: int, *, temperature: float = 1.0, seed: int = 0
) -> list[int]:
    """Prompt and `n` sampled tokens. `temperature` 0 = the likeliest token. Each token sees the
    last `max_seq` ones."""
    config = getattr(model, "config", None)
    window = config.max_seq if isinstance(config, LlamaConfig) else 1024
    device = next(model.parameters()).device
    draw = torch.Generator().manual_seed(seed)
    ids = [int(i) for i in prompt_ids]
    for _ in range(n):
        logits = model(torch.tensor([ids[-window:]], device=device))[0, -1].float().cpu()
        if temperature <= 0:
            ids.append(int(logits.argmax()))
            continue
        ids.append(
            int(torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=draw))
        )
    return ids
