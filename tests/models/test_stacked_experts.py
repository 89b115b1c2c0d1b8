"""Stacked experts: which modules are, and what balances them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.errors import ProgramError
from elastic.models.experts import Experts, MixtureOfExperts, TokenCounts, expert_modules


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = MixtureOfExperts(8, 4, 6, top_k=2)
        self.own = Experts(8, 4, 4)
        self.own.n_experts = 0  # tells no count
        self.plain = nn.Linear(8, 8)


def filled(module: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.5)
    return module


def test_experts_begin_as_linear_layers_do() -> None:
    torch.manual_seed(3)
    made = Experts(16, 4, 6)
    for weight, fan_in in ((made.w1, 16), (made.w3, 16), (made.w2, 4)):
        assert weight.abs().max() <= fan_in**-0.5 and weight.std() > 0.5 * fan_in**-0.5


def test_experts_are_known_by_their_looks_or_named() -> None:
    assert expert_modules(Pair()) == {"one.experts": 6}
    assert expert_modules(Pair(), ("own", "one.experts")) == {"one.experts": 6, "own": 4}
    with pytest.raises(ProgramError, match="Program.experts names plain, a Linear"):
        expert_modules(Pair(), ("plain",))


@pytest.mark.parametrize(("kind", "name", "n"), [
    ("MixtralConfig", "num_local_experts", 4), ("Qwen3MoeConfig", "num_experts", 8),
    ("GptOssConfig", "num_local_experts", 4),
])  # fmt: skip
def test_those_of_transformers(kind: str, name: str, n: int) -> None:
    transformers = pytest.importorskip("transformers", reason="it is in the extra 'test'")
    config = getattr(transformers, kind)(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, **{name: n},
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = expert_modules(model)
    assert found == {f"model.layers.{i}.mlp.experts": n for i in range(2)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ffn", [4, 5])
def test_each_token_gets_the_weighted_sum_of_its_experts(ffn: int, dtype: torch.dtype) -> None:
    """Grouped, and one expert after the other where torch has no grouped products."""
    experts = filled(Experts(8, ffn, 3)).to(dtype)
    x, index = torch.randn(5, 8, dtype=dtype), torch.tensor([[0, 2]] * 5)
    weights = torch.rand(5, 2, dtype=dtype)
    each = [
        (nn.functional.silu(x @ experts.w1[e]) * (x @ experts.w3[e])) @ experts.w2[e]
        for e in (0, 2)
    ]
    wanted = weights[:, :1] * each[0] + weights[:, 1:] * each[1]
    torch.testing.assert_close(experts(x, index, weights), wanted)


def test_the_loss_that_balances_is_of_each_sequence() -> None:
    """Its gradient is that of the formula, and does not depend on which sequences stand
    together."""
    mixture = filled(MixtureOfExperts(8, 4, 6, top_k=2, balance=0.7))
    x = torch.randn(3, 5, 8)

    def gradient(rows: torch.Tensor) -> torch.Tensor:
        mixture.zero_grad()
        (mixture(rows) * 0.0).sum().backward()
        assert mixture.gate.weight.grad is not None
        return mixture.gate.weight.grad.clone()

    whole = gradient(x)
    torch.testing.assert_close(whole, sum(gradient(one[None]) for one in x))
    mixture.zero_grad()
    scores = mixture.gate(x).softmax(-1)
    often = nn.functional.one_hot(scores.topk(2)[1], 6).sum(-2).float().mean(1) * 6 / 2
    (0.7 * 5 * (often * scores.mean(1)).sum()).backward()
    torch.testing.assert_close(whole, mixture.gate.weight.grad)


def test_the_bias_of_what_is_chosen_too_often_falls() -> None:
    mixture = filled(MixtureOfExperts(8, 4, 4, top_k=1, bias_rate=0.25))
    mixture.expert_bias.zero_()
    counts = TokenCounts([mixture])
    counts.begin(1.0)
    mixture(torch.randn(2, 3, 8))  # what a pipeline is first called with, or evaluated
    with counts.counting():
        mixture(torch.randn(2, 7, 8))
        mixture.eval()(torch.randn(2, 5, 8))
    (found,) = counts.of_step()
    assert int(found.sum()) == 14
    mixture.rebalance(torch.tensor([9, 1, 3, 3]))
    assert mixture.expert_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("ffn", [4, 8])
def test_a_mixture_runs_without_values(ffn: int) -> None:
    """As the planner and the checks before the start run it."""
    with torch.device("meta"):
        mixture = MixtureOfExperts(8, ffn, 6, top_k=2, balance=0.1, bias_rate=0.1)
        assert mixture(torch.ones(2, 3, 8)).shape == (2, 3, 8)
