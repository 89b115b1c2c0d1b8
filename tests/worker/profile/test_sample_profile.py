"""What one sample asks of a model, traced without computing anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.places import PROGRAMS
from torch import Tensor, nn

from elastic.data.collate import collate
from elastic.ledger.journal import Line, decode, encode, parse_line, write_line
from elastic.models.attention import attention
from elastic.models.llama import Llama, LlamaConfig, flop_per_token, loss_sum, tp_plan
from elastic.policy.state.fold import State, fold
from elastic.program import Program, load_program
from elastic.types import (
    DriverStarted,
    Job,
    ModelProfile,
    Node,
    NodePrepared,
    NodeReady,
    Pool,
    SampleProfile,
)
from elastic.worker.parallel.activation_checkpointing import checkpoint_blocks
from elastic.worker.profile.sample_profile import sample_profile
from elastic.worker.program.model_profile import block_names
from elastic.worker.step.loss_scale import profile_of

TINY = load_program(PROGRAMS / "tiny.py")


def profile(program: Program, sample: Any = None, **job: Any) -> SampleProfile:
    dataset: Any = program.dataset and program.dataset()
    found = sample_profile(program, Job.from_plain(job), dataset[0] if sample is None else sample)
    assert found is not None
    return found


def rows(seq: int) -> dict[str, Tensor]:
    return {"input": torch.zeros(seq, dtype=torch.int64), "target": torch.arange(seq) % 7}


def test_a_large_model_takes_no_memory_and_its_numbers_are_those_of_the_formulas() -> None:
    config = LlamaConfig(
        vocab_size=128256,
        hidden=4096,
        n_layers=4,
        n_heads=32,
        n_kv_heads=8,
        ffn_hidden=14336,
        max_seq=65536,
    )
    program = replace(
        TINY, model=lambda: Llama(config), loss=loss_sum, tp=tp_plan(vocab=True, sequence=True)
    )
    found = profile(program, rows(65536), precision="bfloat16")
    full = 65536 * 4096 * 2
    kept = dict(found.kept_bytes)
    assert kept["full"] == found.hidden_bytes == full
    assert found.key_value_bytes == 2 * 65536 * 8 * 128 * 2
    # logits, log-softmax, gradient
    assert found.ends_bytes == pytest.approx(3 * 65536 * 128256 * 4, rel=0.1)
    assert full * 5 < kept["selective"] < kept["none"] / 2 < full * 15
    # of 12 L H Q T, which counts what the mask leaves out
    causal = 12 * config.n_layers * 4096 * 65536 / 2
    assert found.flop == pytest.approx((flop_per_token(config, 65536) - causal) * 65536, rel=0.02)
    assert (found.sequence, found.no_cp, found.sequence_parallel, found.loss_parallel) == (
        65536,
        "",
        True,
        True,
    )


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_trace_counts_what_a_real_pass_keeps(mode: str) -> None:
    model, batch = TINY.model(), collate([TINY.dataset()[0]])  # type: ignore[misc]
    blocks = [model.get_submodule(name) for name in block_names(model, TINY.blocks)]
    known = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *batch.values())}
    seen: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        seen.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    checkpoint_blocks(blocks, mode)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = model.embed(batch["input"])
        for block in blocks:
            output = block(output)
    real = sum(x.untyped_storage().nbytes() for at, x in seen.items() if at not in known)
    assert dict(profile(TINY).kept_bytes)[mode] * len(blocks) == pytest.approx(real, rel=0.1)


class Plain(nn.Module):
    """Blocks that attend by themselves; `ours`: how many of the two call elastic.attention."""

    def __init__(self, ours: int) -> None:
        super().__init__()
        self.ours = ours
        self.embed, self.layers = (
            nn.Embedding(64, 8),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(2)),
        )
        for i, layer in enumerate(self.layers):
            layer.register_forward_hook(
                lambda module, args, out, i=i: self.attend(out[:, None], i)[:, 0]
            )

    def attend(self, x: Tensor, i: int) -> Tensor:
        return (
            attention(x, x, x)
            if i < self.ours
            else F.scaled_dot_product_attention(x, x, x, is_causal=True)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def test_why_a_sequence_cannot_be_cut() -> None:
    assert profile(TINY).no_cp == ""
    assert (
        profile(replace(TINY, model=lambda: Plain(0))).no_cp
        == "the model does not call elastic.attention"
    )
    assert (
        profile(replace(TINY, model=lambda: Plain(1))).no_cp
        == "block 1 does not call elastic.attention"
    )
    assert (
        profile(replace(TINY, model=lambda: Plain(2))).no_cp
        == "the model does not take positions from elastic.positions"
    )

    def mean(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch["target"].flatten())

    def shifted(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(
            output[:, :-1].flatten(0, 1), batch["input"][:, 1:].flatten(), reduction="sum"
        )

    for loss in (mean, shifted):
        assert "the sum over the parts of its sequence" in profile(replace(TINY, loss=loss)).no_cp
    masked = rows(16) | {"target": torch.full((16,), -100)}
    assert "says nothing of its parts" in profile(TINY, masked).no_cp


def test_what_cannot_run_without_values_is_not_known() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x[torch.nonzero(x)])

    assert sample_profile(replace(TINY, model=Odd), Job(), rows(16)) is None


def test_transformers_are_run_with_their_masks() -> None:
    pytest.importorskip(
        "transformers", reason="the program needs transformers (it is in the extra 'test')"
    )
    found = profile(load_program(PROGRAMS / "hf_qwen3.py"))
    assert found.flop > 0 and dict(found.kept_bytes)["none"] > dict(found.kept_bytes)["full"] > 0


def test_the_first_node_that_is_prepared_tells_the_planner() -> None:
    model, pool = profile_of(TINY, Job()), Pool("p")
    start = DriverStarted("r", 1, {"global_batch": 4, "steps": 1}, (pool,), model)
    sample = profile(TINY)
    state = State()
    for event in (start, NodeReady(Node("a", "p")), NodePrepared("a", (1,), 0, sample)):
        (line,) = (parse_line(write_line(Line(0.0, 1, ((0.0, event),)))),)
        state = fold(state, line.events[0][1], 0.0)
    assert state.model == replace(model, sample=sample)
    again = fold(state, replace(start, attached=True), 1.0)
    assert again.model is not None and again.model.sample == sample
    other = fold(state, NodePrepared("a", (1,), 0, replace(sample, sequence=1)), 1.0)
    assert other.model is not None and other.model.sample == sample


def test_profiles_that_older_versions_wrote_are_read() -> None:
    data = encode(DriverStarted("r", 1, {}, (), ModelProfile(2, 8, ())))
    del data["model"]["sample"]
    assert decode(data).model == ModelProfile(2, 8, ())
    assert decode({"kind": "NodePrepared", "node_id": "a", "pids": [1]}) == NodePrepared("a", (1,))
