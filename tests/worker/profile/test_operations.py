"""Products, attention and moved bytes of a traced sample are those that one computes by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.places import PROGRAMS
from support.worker.forks import printed
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from elastic.models.llama import Llama, LlamaConfig, flop_per_token, loss_sum, tp_plan
from elastic.program import Program, load_program
from elastic.types import Attention, Job, Matmul, SampleProfile
from elastic.worker.profile.sample_profile import traced_sample
from elastic.worker.program.model_profile import n_expert_params

TINY = load_program(PROGRAMS / "tiny.py")
SEQ, HIDDEN, FFN, VOCAB = 32, 64, 96, 50
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden=HIDDEN,
    n_layers=3,
    n_heads=8,
    n_kv_heads=2,
    ffn_hidden=FFN,
    max_seq=SEQ,
)
SAMPLE = {
    "input": torch.zeros(SEQ, dtype=torch.int64),
    "target": torch.zeros(SEQ, dtype=torch.int64),
}


def traced(program: Program, sample: Any = None, **job: Any) -> SampleProfile:
    found = traced_sample(program, Job.from_plain(job), SAMPLE if sample is None else sample)
    assert found is not None
    return found


def llama(config: LlamaConfig = CONFIG, **plan: bool) -> Program:
    return replace(TINY, model=lambda: Llama(config), loss=loss_sum, tp=tp_plan(**plan))


def test_the_products_of_a_decoder() -> None:
    found = traced(llama(vocab=True))
    assert set(found.matmuls) == {
        Matmul(SEQ, HIDDEN, HIDDEN, 1, "n"),  # queries
        Matmul(SEQ, HIDDEN, 2 * 8, 2, "n"),  # keys and values
        Matmul(SEQ, HIDDEN, HIDDEN, 1, "k"),  # output of the attention
        Matmul(SEQ, HIDDEN, FFN, 2, "n"),
        Matmul(SEQ, FFN, HIDDEN, 1, "k"),
    }
    assert found.attentions == (Attention(SEQ, SEQ, 8, 2, 8, causal=True),)
    assert found.ends_matmuls == (Matmul(SEQ, HIDDEN, VOCAB, 1, "n"),)
    assert found.tokens == found.sequence == SEQ
    left_out = 12 * CONFIG.n_layers * HIDDEN * SEQ / 2  # by the mask
    assert found.flop == (flop_per_token(CONFIG, SEQ) - left_out) * SEQ


@pytest.mark.parametrize("plan", [{}, {"sequence": True}])
def test_a_head_that_tp_leaves_whole_is_not_cut(plan: dict[str, bool]) -> None:
    found = traced(llama(**plan))
    assert found.ends_matmuls == (Matmul(SEQ, HIDDEN, VOCAB),)
    assert {one.cut for one in found.matmuls} == {"n", "k"}


def test_numbers_of_a_mean_block_do_not_depend_on_how_many_there_are_nor_on_who_came_before() -> (
    None
):
    one, six = (traced(llama(replace(CONFIG, n_layers=n))) for n in (1, 6))
    again = traced(llama(replace(CONFIG, n_layers=1)))
    names = ("matmuls", "attentions", "moved_bytes", "n_ops", "ends_matmuls", "ends_moved_bytes")
    assert len({tuple(getattr(found, name) for name in names) for found in (one, six, again)}) == 1


def test_products_are_those_that_torch_counts() -> None:
    found = traced(llama())
    whole = [(CONFIG.n_layers, one) for one in found.matmuls] + [
        (1, one) for one in found.ends_matmuls
    ]
    ours = sum(2 * times * one.rows * one.k * one.n * one.count for times, one in whole)
    with FlopCounterMode(display=False) as counter:
        Llama(CONFIG)(SAMPLE["input"][None])
    theirs = counter.get_flop_counts()["Global"]
    assert ours == sum(flop for op, flop in theirs.items() if op.__name__ == "mm") > 0


def convolutions() -> nn.Module:
    made = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ConvTranspose2d(8, 2, 2, stride=2))
    return nn.ModuleDict({"layers": made})["layers"]


def test_a_convolution_is_the_product_of_its_patches() -> None:
    program = Program(
        model=convolutions, optimizer=TINY.optimizer, loss=lambda output, batch: output.sum()
    )
    found = traced(program, {"input": torch.zeros(4, 10, 10)})
    assert found.ends_matmuls == (Matmul(8 * 8, 2 * 9, 4, count=2), Matmul(8 * 8, 8, 2 * 4))
    with FlopCounterMode(display=False) as counter:
        convolutions()(torch.zeros(1, 4, 10, 10))
    assert found.flop == 3 * counter.get_total_flops()


class Few(nn.Module):
    """One block whose operations can be counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.layers[0].register_forward_hook(
            lambda module, args, out: F.relu(out).add_(1.0).transpose(1, 2).transpose(1, 2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.layers[0](self.embed(tokens))
        return x


def test_bytes_that_other_operations_move() -> None:
    program = Program(model=Few, optimizer=TINY.optimizer, loss=lambda output, batch: output.sum())
    found = traced(program)
    size = SEQ * 8 * 4
    assert found.matmuls == (Matmul(SEQ, 8, 8),) and found.attentions == ()
    # the hook is registered before the trace's own
    assert (found.moved_bytes, found.n_ops) == (2 * size + 2 * size, 2)
    # rows of the table, their copy, ids; the sum
    assert found.ends_moved_bytes == (size + size + SEQ * 8) + (size + 4)
    half = traced(program, precision="bfloat16")
    assert half.moved_bytes == found.moved_bytes / 2


def test_a_mask_leaves_nothing_out_and_classes_are_no_tokens() -> None:
    class Masked(Few):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.layers[0](self.embed(tokens)).view(1, SEQ, 2, 4).transpose(1, 2)
            x = F.scaled_dot_product_attention(
                x, x, x, attn_mask=torch.ones(SEQ, SEQ, dtype=torch.bool)
            )
            return x.sum((1, 2))

    program = Program(
        model=Masked, optimizer=TINY.optimizer, loss=lambda output, batch: output.sum()
    )
    found = traced(program)
    assert found.tokens == 0 and found.sequence == SEQ
    # the product, and both halves of the attention
    assert found.flop == 3 * (2 * SEQ * 8 * 8 + 4 * SEQ * SEQ * 8)


def test_as_many_classes_as_positions_are_no_tokens_either() -> None:
    class Classes(Few):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.layers[0](self.embed(tokens)).sum(2)  # type: ignore[no-any-return]

    program = Program(
        model=Classes, optimizer=TINY.optimizer, loss=lambda output, batch: output.sum()
    )
    assert traced(program).tokens == SEQ
    assert traced(program, SAMPLE | {"target": torch.tensor(3)}).tokens == 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_experts_of_transformers(precision: str) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="the model is of transformers (it is in the extra 'test')"
    )
    from elastic.models.huggingface import causal_lm

    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    program = causal_lm(config, dataset=list, optimizer=TINY.optimizer)
    found = traced(program, {"input_ids": torch.zeros(SEQ, dtype=torch.int64)}, precision=precision)
    experts = Counter({one: one.count for one in found.matmuls if one.experts})
    assert experts == {Matmul(2 * SEQ, 16, 48, experts=4): 1, Matmul(2 * SEQ, 24, 16, experts=4): 1}
    with torch.device("meta"):
        model = program.model()
    assert n_expert_params(model) == 2 * 4 * (16 * 48 + 24 * 16)


def test_experts_that_are_modules_of_their_own() -> None:
    block = nn.ModuleDict(
        {"experts": nn.ModuleList(nn.Linear(3, 5) for _ in range(4)), "gate": nn.Linear(3, 4)}
    )
    assert n_expert_params(block) == 4 * (3 * 5 + 5)
    assert n_expert_params(nn.ModuleList([nn.Linear(3, 3)])) == 0


LARGE = """
import resource, sys, time
import torch
from elastic.models.llama import Llama, LlamaConfig, loss_sum, tp_plan, n_params
from elastic.program import Program
from elastic.types import Job
from elastic.worker.program.model_profile import trace
from elastic.worker.profile.sample_profile import traced_sample
config = LlamaConfig(128256, 16384, 126, 128, 8, 53248, max_seq=8192)
adamw = lambda named: torch.optim.AdamW([p for _, p in named])
program = Program(lambda: Llama(config), adamw, loss=loss_sum, tp=tp_plan(True, True), tp_limit=8)
ids = torch.zeros(8192, dtype=torch.int64)
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
profile = trace(program)
sample = traced_sample(program, Job(precision="bfloat16"), {"input": ids, "target": ids})
took, grown = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert profile.n_params == n_params(config) and sample.matmuls[0].rows == 8192
print(profile.n_params, took, grown * 1024)
"""


@pytest.mark.slow
def test_405_billion_parameters_in_seconds_and_without_their_memory() -> None:
    """In a process of its own, whose largest memory is known; its CPU time, so that a busy machine
    does not count."""
    n_params, took_s, grown_bytes = map(float, printed(LARGE).split())
    assert n_params > 405e9 and took_s < 5 and grown_bytes < 500e6
