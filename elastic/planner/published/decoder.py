"""The profile of a decoder from its dimensions alone: for published models, and for plans without a
program.

Products and parameters as in Vaswani et al. 2017 (section 3) with the changes of Llama (Touvron et
al. 2023, section 2.2) where the dimensions say so. Kept and moved bytes are those of a usual
implementation with fused attention, counted tensor by tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.types import (
    DTYPE_BYTES,
    Attention,
    Matmul,
    ModelProfile,
    OptimizerSpec,
    SampleProfile,
    TensorSpec,
)

ADAM = OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",))


@dataclass(frozen=True)
class Decoder:
    """Dimensions. `gated`: the MLP has three matrices (SwiGLU), else two with a bias (GELU).
    `experts`: of each block's MLP, 0 = it is dense; a token goes through `active` of them.
    `window`: keys that every second block sees at most, 0 = all. `fused`: attention never writes
    its scores; else they are kept (Korthikanti et al. 2022, equation 1).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    gated: bool = True
    tied: bool = False
    head_dim: int = 0
    experts: int = 0
    active: int = 0
    window: int = 0
    fused: bool = True
    dtype: str = "float32"  # of the parameters and their moments
    compute: str = "bfloat16"
    # of a logit, at the end of the loss: as computed, in float32, its log-softmax, its gradient
    logit_bytes: int = 14

    @property
    def width(self) -> int:
        """Of a head."""
        return self.head_dim or max(1, self.hidden // self.heads)

    @property
    def attention_params(self) -> int:
        """Of a block."""
        return self.hidden * self.width * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_params(self) -> int:
        """Of a block, all experts and their router."""
        one = self.hidden * self.ffn * (3 if self.gated else 2)
        return one * max(1, self.experts) + (self.hidden * self.experts if self.experts else 0)

    @property
    def n_params(self) -> int:
        """All of them, norms and biases left out of account: under 0.1 %."""
        ends = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * (self.attention_params + self.mlp_params + 2 * self.hidden) + ends

    @property
    def active_params(self) -> int:
        """Those that a token goes through, embedding left out, head counted."""
        mlp = self.mlp_params if not self.experts else self.mlp_params * self.active // self.experts
        return self.layers * (self.attention_params + mlp) + self.vocab * self.hidden

    def profile(self) -> ModelProfile:
        """With everything in it that the cost formulas read."""
        return ModelProfile(
            self.layers, self.n_params, self._specs(), (ADAM,), 6.0 * self.active_params,
            self.kv_heads, n_expert_params=self.layers * self.mlp_params if self.experts else 0,
            n_experts=self.experts, sample=self.sample(),
        )  # fmt: skip

    def sample(self) -> SampleProfile:
        """Of one sequence."""
        size, s, h = DTYPE_BYTES[self.compute], self.seq, self.hidden
        matmuls, head = self._matmuls(), Matmul(s, h, self.vocab, cut="n")
        attentions = self._attentions()
        scores = sum(a.count * a.flop for a in attentions)
        products = sum(m.count * m.flop for m in matmuls)
        flop = 3 * (self.layers * (products + scores) + head.flop)
        return SampleProfile(
            flop=flop,
            kept_bytes=self._kept(size),
            hidden_bytes=s * h * size,
            ends_bytes=s * self.vocab * self.logit_bytes,
            sequence=s,
            key_value_bytes=2 * s * self.kv_heads * self.width * size,
            sequence_parallel=True,
            loss_parallel=True,
            matmuls=matmuls,
            attentions=attentions,
            ends_matmuls=(head,),
            moved_bytes=self._moved(size),
            ends_moved_bytes=s * self.vocab * (2 * size + 3 * 4) + 4 * s * h * size,
            n_ops=24 + (120 if self.experts else 0),
            tokens=s,
        )

    @property
    def _widths(self) -> tuple[int, int]:
        """Of the queries, and of the keys."""
        return self.heads * self.width, self.kv_heads * self.width

    def _matmuls(self) -> tuple[Matmul, ...]:
        s, h, (wide, narrow) = self.seq, self.hidden, self._widths
        into = 2 if self.gated else 1
        made = [Matmul(s, h, wide + 2 * narrow, cut="n"), Matmul(s, wide, h, cut="k")]
        if not self.experts:
            return (*made, Matmul(s, h, into * self.ffn, cut="n"), Matmul(s, self.ffn, h, cut="k"))
        rows = s * self.active
        return (
            *made, Matmul(s, h, self.experts), Matmul(rows, h, into * self.ffn, cut="n",
            experts=self.experts), Matmul(rows, self.ffn, h, cut="k", experts=self.experts),
        )  # fmt: skip

    def _attentions(self) -> tuple[Attention, ...]:
        whole = Attention(self.seq, self.seq, self.heads, self.kv_heads, self.width)
        if not self.window or self.window >= self.seq:
            return (whole,)
        return replace(whole, count=0.5), replace(whole, window=self.window, count=0.5)

    def _rows(self) -> int:
        """Tokens that the MLP computes, one that goes through several experts counted as often."""
        return self.seq * (self.active if self.experts else 1)

    def _kept(self, size: int) -> tuple[tuple[str, int], ...]:
        """Inputs of both norms, of the products and of attention, and what the activation needs;
        `selective` keeps the outputs of products and attention and the block's input."""
        s, h, (wide, narrow) = self.seq, self.hidden, self._widths
        qkv, mlp, rows = wide + 2 * narrow, (2 if self.gated else 1) * self.ffn, self._rows()
        scores = 0 if self.fused else int(2.5 * size) * self.heads * s * s
        spread = rows * h if self.experts else 0
        none = size * (s * (4 * h + qkv + wide) + spread + rows * (mlp + self.ffn)) + scores
        selective = size * (s * (2 * h + qkv + wide) + spread + rows * mlp)
        return (("none", none), ("selective", selective), ("full", s * h * size))

    def _moved(self, size: int) -> int:
        """Reads and writes of eager operations: norms, residual sums, rotary positions, the
        activation; of attention's scores where they are not fused (scaled and masked, softmax,
        dropout: four passes). Llama's norms and positions (`gated`) are sequences of operations in
        float32 (15 and 20 accesses of an element), LayerNorm is one."""
        s, h, rows = self.seq, self.hidden, self._rows()
        turned = (self.heads + self.kv_heads) * self.width
        mlp = rows * self.ffn * (5 if self.gated else 4)
        around = 30 * h + 20 * turned if self.gated else 4 * h + 4 * turned
        scores = 0 if self.fused else 4 * self.heads * s * s
        spread = 4 * rows * h if self.experts else 0
        return size * (s * (around + 6 * h) + mlp + scores + spread)

    def _specs(self) -> tuple[TensorSpec, ...]:
        h, (wide, narrow) = self.hidden, self._widths
        made = [TensorSpec("embed.weight", (self.vocab, h), self.dtype, 0, -1)]
        for i in range(self.layers):
            made.append(TensorSpec(f"layers.{i}.qkv", (wide + 2 * narrow, h), self.dtype, 0, i))
            made.append(TensorSpec(f"layers.{i}.out", (h, wide), self.dtype, 1, i))
            made.append(TensorSpec(f"layers.{i}.mlp", (self.mlp_params // h, h), self.dtype, 0, i))
            made.append(TensorSpec(f"layers.{i}.norms", (2, h), self.dtype, None, i))
        tied_to = "embed.weight" if self.tied else None
        made.append(TensorSpec("head.weight", (self.vocab, h), self.dtype, 0, self.layers, tied_to))
        return tuple(made)
