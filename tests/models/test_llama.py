"""The reference decoder against its definitions, and the properties that layouts rely on."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from elastic.errors import SpecError
from elastic.models import llama
from elastic.models.llama import (
    Llama,
    LlamaAttention,
    LlamaConfig,
    flop_per_token,
    generate,
    init_weights,
    loss_sum,
    rotate,
    tp_plan,
)

CONFIG = LlamaConfig(
    vocab_size=50, hidden=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_hidden=48, max_seq=16
)


def build(config: LlamaConfig = CONFIG, seed: int = 3) -> Llama:
    model = Llama(config)
    torch.manual_seed(seed)
    init_weights(model)
    return model


def tokens(batch: int = 2, seq: int = 12) -> Tensor:
    return torch.randint(
        0, CONFIG.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(5)
    )


def naive_attention(attention: LlamaAttention, x: Tensor) -> Tensor:
    """Each head, each position, written out: softmax(q k / sqrt(d)) v over the positions up to its
    own."""
    d, (batch, seq, _) = attention.head_dim, x.shape
    q, k, v = (w(x).view(batch, seq, -1, d) for w in (attention.wq, attention.wk, attention.wv))
    group = q.shape[2] // k.shape[2]
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(q.shape[2]):
            turned_q = rotate(q[None, None, b, :, h], attention.theta)[0, 0]
            turned_k = rotate(k[None, None, b, :, h // group], attention.theta)[0, 0]
            for t in range(seq):
                weights = torch.softmax(turned_k[: t + 1] @ turned_q[t] / math.sqrt(d), dim=0)
                out[b, t, h] = weights @ v[b, : t + 1, h // group]
    return attention.wo(out.reshape(batch, seq, -1))


def test_shapes_and_count() -> None:
    model = build()
    assert model(tokens()).shape == (2, 12, 50)
    assert model(tokens(batch=0)).shape == (0, 12, 50)
    assert model(tokens(batch=1, seq=1)).shape == (1, 1, 50)
    assert sum(p.numel() for p in model.parameters()) == llama.n_params(CONFIG)
    assert not list(model.buffers())


def test_attention_equals_the_naive_one() -> None:
    attention = build().layers[1].attn
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1)) * 3
    assert torch.allclose(attention(x), naive_attention(attention, x), atol=1e-6)


def test_block_is_pre_norm_with_a_gated_feed_forward() -> None:
    block = build().layers[2]
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(8)) * 3
    with torch.no_grad():
        block.attn_norm.weight.uniform_(0.5, 2.0)
        block.mlp_norm.weight.uniform_(0.5, 2.0)

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return y / (y.pow(2).mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * weight

    middle = x + block.attn(norm(x, block.attn_norm.weight))
    gate, up = (
        norm(middle, block.mlp_norm.weight) @ w.weight.T for w in (block.mlp.w1, block.mlp.w3)
    )
    by_hand = middle + (gate * torch.sigmoid(gate) * up) @ block.mlp.w2.weight.T
    assert torch.allclose(block(x), by_hand, atol=1e-5)


def test_rotary_turns_each_pair_by_its_own_angle() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, 1, 3, 4)
    y = torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(1, 1, 3, 4)
    for t in range(3):
        first, second = rotate(x, 100.0)[0, 0, t], rotate(y, 100.0)[0, 0, t]
        assert torch.allclose(first, torch.tensor([math.cos(t), 0.0, math.sin(t), 0.0]), atol=1e-6)
        assert torch.allclose(
            second, torch.tensor([0.0, math.cos(t / 10), 0.0, math.sin(t / 10)]), atol=1e-6
        )


def test_rotary_products_see_only_the_distance() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(2)).expand(
        2, 1, 1, 20, 8
    )
    products = rotate(q, 10000.0)[0, 0] @ rotate(k, 10000.0)[0, 0].T
    for distance in (0, 1, 5):
        diagonal = products.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)
    assert not torch.allclose(products.diagonal(-1)[0], products.diagonal(-5)[0], atol=1e-3)


def test_causal() -> None:
    model, x = build(), tokens()
    y = x.clone()
    y[:, 7] = (y[:, 7] + 1) % CONFIG.vocab_size
    before, after = model(x), model(y)
    assert torch.equal(before[:, :7], after[:, :7])
    # each later position does see it
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-4


def test_grouped_queries_equal_repeated_heads() -> None:
    grouped, full = build(), build(replace(CONFIG, n_kv_heads=4))
    state = grouped.state_dict()
    for name in state:
        if name.endswith(("wk.weight", "wv.weight")):
            state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    assert torch.allclose(grouped(tokens()), full(tokens()), atol=1e-6)


def test_heads_cut_over_ranks_add_up_to_the_whole() -> None:
    whole = build().layers[0].attn
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(4))
    parts = []
    for rank in range(2):
        part = LlamaAttention(CONFIG)
        for name in ("wq", "wk", "wv"):
            getattr(part, name).weight = nn.Parameter(getattr(whole, name).weight.chunk(2)[rank])
        part.wo.weight = nn.Parameter(whole.wo.weight.chunk(2, dim=1)[rank])
        parts.append(part(x))
    assert torch.allclose(parts[0] + parts[1], whole(x), atol=1e-6)


def test_a_cut_head_is_refused() -> None:
    attention = LlamaAttention(CONFIG)
    attention.wk.weight = nn.Parameter(attention.wk.weight[:4])
    with pytest.raises(SpecError, match="cuts a head"):
        attention(torch.zeros(1, 3, 32))


def test_two_stages_are_the_whole() -> None:
    whole, first, second = build(), build(), build()
    first.norm = first.head = second.embed = nn.Identity()
    for i in range(CONFIG.n_layers):
        del (second if i < 1 else first).layers._modules[str(i)]
    assert len(first.layers) == 1 and len(second.layers) == 2
    assert torch.equal(second(first(tokens())), whole(tokens()))


def test_built_on_meta_then_filled_equals_built_on_cpu() -> None:
    for config in (CONFIG, replace(CONFIG, tied=True)):
        with torch.device("meta"):
            model = Llama(config)
            assert all(p.is_meta for p in model.parameters())
            assert (model.head.weight is model.embed.weight) == config.tied
            assert model(torch.zeros(1, 12, dtype=torch.long)).is_meta
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        init_weights(model)
        assert torch.equal(model(tokens()), build(config)(tokens()))


def test_init_hangs_on_the_seed_alone() -> None:
    one, two, other = build(), build(), build(seed=4)
    for (name, a), b, c in zip(one.named_parameters(), two.parameters(), other.parameters()):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == ("norm" in name)
    assert one.layers[0].attn.wo.weight.std() < 0.6 * one.layers[0].attn.wq.weight.std()


def test_tied_head_is_the_embedding() -> None:
    model = build(replace(CONFIG, tied=True))
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
    assert sum(p.numel() for p in model.parameters()) == llama.n_params(model.config)
    loss_sum(model(tokens()), {"target": tokens()}).backward()
    # rows that are no input get the head's gradient
    assert (model.embed.weight.grad.abs().sum(dim=1) > 0).all()


def test_a_table_made_while_evaluating_serves_training() -> None:
    llama._rotary_table.cache_clear()
    model = build()
    with torch.inference_mode():
        model(tokens())
    loss_sum(model(tokens()), {"target": tokens()}).backward()
    assert model.layers[0].attn.wq.weight.grad is not None


def test_loss_is_a_sum_that_leaves_out_masked_targets() -> None:
    output, target = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(6)), tokens(2, 3)
    logp = output.log_softmax(-1)
    by_hand = -sum(logp[b, t, target[b, t]] for b in range(2) for t in range(3))
    assert torch.allclose(loss_sum(output, {"target": target}), by_hand)
    masked = target.clone()
    masked[0, 1] = -100
    assert torch.allclose(loss_sum(output, {"target": masked}), by_hand + logp[0, 1, target[0, 1]])
    parts = loss_sum(output[:1], {"target": target[:1]}) + loss_sum(
        output[1:], {"target": target[1:]}
    )
    assert torch.allclose(parts, by_hand)
    assert loss_sum(output[:0], {"target": target[:0]}) == 0
    assert loss_sum(output.bfloat16(), {"target": target}).dtype == torch.float32


def test_tp_plan_names_modules_that_exist() -> None:
    names = {name for name, _ in build().named_modules()}
    for vocab in (False, True):
        plan = tp_plan(vocab)
        assert {pattern.replace("*", "0") for pattern in plan} <= names
        assert ("embed" in plan) == ("head" in plan) == vocab
    linears = {
        name.replace("layers.0", "layers.*")
        for name in names
        if name.startswith("layers.0.") and ".w" in name
    }
    assert linears == set(tp_plan())


def test_flop_per_token_counts_what_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = build(replace(CONFIG, n_kv_heads=4)), tokens(2, 16)
    with FlopCounterMode(display=False) as counter:
        loss_sum(model(x), {"target": x}).backward()
    n_linear = flop_per_token(model.config) - 12 * 3 * 4 * 8 * 16
    counted = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if str(op) == "aten.mm"
    )
    assert counted / x.numel() == pytest.approx(n_linear, rel=1e-9)
    assert model.flop_per_token == flop_per_token(model.config, seq=16)


def test_generate() -> None:
    model = build()
    a, b, c = (generate(model, [1, 2, 3], 20, temperature=1.0, seed=seed) for seed in (0, 0, 1))
    assert a == b != c and a[:3] == [1, 2, 3] and len(a) == 23
    greedy = generate(model, [1, 2, 3], 1, temperature=0.0)
    assert greedy[3] == int(model(torch.tensor([[1, 2, 3]]))[0, -1].argmax())
    seen: list[list[int]] = []
    model.embed.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].tolist()))
    ids = generate(model, [1, 2, 3], 20)
    assert seen == [ids[max(0, end - 16) : end] for end in range(3, 23)]  # the last max_seq tokens


@pytest.mark.parametrize("fields", [{"n_heads": 5}, {"n_kv_heads": 3}, {"head_dim": 7}])
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(SpecError, match=next(iter(fields))):
        replace(CONFIG, **({"head_dim": 0} | fields))


def test_tables_do_not_land_on_meta() -> None:
    """The first forward of a process may come while the meta device is the default."""
    llama._rotary_table.cache_clear()
    x = torch.zeros(1, 1, 4, 8)
    with torch.device("meta"):
        rotate(x, 10.0)
    assert not rotate(x, 10.0).is_meta
