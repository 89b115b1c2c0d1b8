"""Frozen layers in 4 bits: what they lose, how they are cut and read, what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.places import PROGRAMS

from elastic.errors import SpecError
from elastic.models.llama import Llama, LlamaConfig
from elastic.models.nf4 import BLOCK, PACKED, Nf4Linear, in_nf4, pack, unpack
from elastic.planner.cost.memory import Step, state_parts
from elastic.planner.cost.model_cost import NF4_BYTES, ModelCost
from elastic.program import Program, Weights, load_program
from elastic.reshard.rank_boxes import boxes
from elastic.types import Job, Layout
from elastic.worker.program.job_program import with_job
from elastic.worker.program.model_profile import trace
from elastic.worker.program.weights import cut, fill

pytestmark = pytest.mark.slow  # the first of them imports torchao
quantization = pytest.importorskip("torchao.quantization", reason="it is in the extra 'test'")
ADAMW = {"path": "torch.optim.AdamW", "lr": 1e-2}
NF4 = Job(steps=3, global_batch=12, optimizer=ADAMW, frozen_weights="nf4")


@pytest.fixture(scope="module")
def plain() -> Program:
    return load_program(PROGRAMS / "tiny_qlora.py")


@pytest.fixture(scope="module")
def program(plain: Program) -> Program:
    return with_job(plain, NF4)


def test_values_are_those_of_torchao_up_to_its_scales_of_8_bits() -> None:
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(1))
    packed = pack(weight)
    assert packed.shape == (128, 256 // BLOCK * PACKED) and packed.dtype == torch.uint8
    assert PACKED / BLOCK == NF4_BYTES
    theirs = quantization.to_nf4(weight).get_original_weight()
    torch.testing.assert_close(unpack(packed, torch.float32), theirs, atol=0.03, rtol=0.02)
    apart = (unpack(packed, torch.float32) - weight).norm() / weight.norm()
    assert apart <= 1.001 * (theirs - weight).norm() / weight.norm() < 0.1
    assert unpack(packed, torch.bfloat16).dtype == torch.bfloat16
    assert not unpack(pack(torch.zeros(2, 64)), torch.float32).any()


def test_a_part_of_the_bytes_is_that_part_of_the_weights() -> None:
    weight = torch.randn(8, 256)
    packed, whole = pack(weight), unpack(pack(weight), torch.float32)
    assert torch.equal(unpack(packed[3:5], torch.float32), whole[3:5])
    assert torch.equal(unpack(packed[:, 2 * PACKED :], torch.float32), whole[:, 2 * BLOCK :])
    assert torch.equal(pack(weight[3:5, BLOCK:]), packed[3:5, PACKED:])


def test_a_product_keeps_no_more_than_the_bytes() -> None:
    linear = torch.nn.Linear(128, 32)
    packed = Nf4Linear(linear.requires_grad_(False))
    x = torch.randn(2, 3, 128, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = packed(x)
    assert [t.dtype for t in kept] == [torch.uint8]
    weight = unpack(packed.weight, torch.float32)
    assert torch.equal(out, F.linear(x, weight) + linear.bias)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(grad, 2 * out @ weight)


def test_only_frozen_layers_of_the_blocks_are_packed(plain: Program, program: Program) -> None:
    before, after = trace(with_job(plain, replace(NF4, frozen_weights=None))), trace(program)
    assert before.n_params == after.n_params and before.tp_limit == after.tp_limit == 2
    assert {s.fqn for s in after.specs if s.dtype == "uint8"} == program.packed
    assert len(program.packed) == 4 * 7 and "layers.3.attn.wk.weight" in program.packed
    assert not {"embed.weight", "head.weight"} & program.packed
    assert [s.trainable for s in before.specs] == [s.trainable for s in after.specs]
    columns = {s.fqn: s.tp_dim for s in after.specs}
    assert columns["layers.0.attn.wo.base_layer.weight"] == 1


def test_a_model_begins_with_the_values_that_it_would_have(
    plain: Program, program: Program
) -> None:
    models = []
    for one in (with_job(plain, replace(NF4, frozen_weights=None)), program):
        model = one.model()
        assert one.init is not None
        one.init(model)
        models.append(dict(model.named_parameters()))
    for name, value in models[0].items():
        wanted = pack(value) if name in program.packed else value
        assert torch.equal(models[1][name], wanted), name


@pytest.mark.parametrize("layout", [Layout(dp_shard=3), Layout(tp=2), Layout(pp=2, tp=2)], ids=str)
def test_each_rank_packs_its_own_part_of_a_file(
    program: Program, tmp_path: Path, layout: Layout
) -> None:
    with torch.device("cpu"):
        whole = load_program(PROGRAMS / "tiny_wide.py").model().state_dict()
    save_file({name: t.contiguous() for name, t in whole.items()}, str(tmp_path / "w.safetensors"))
    named = Weights(
        tmp_path / "w.safetensors",
        lambda name: name.replace(".base_layer.", "."),
        lambda name, shape: torch.zeros(shape),
    )
    read = replace(program, weights=named)
    profile, n = trace(read), 0
    assert {s.fqn for s in profile.specs if not s.reread and not s.trainable} == program.packed
    for rank in range(layout.world_size):
        mine = {
            box.fqn: (box, torch.empty(box.sizes, dtype=getattr(torch, box.dtype)))
            for box in boxes(profile, layout, (4 // layout.pp,) * layout.pp, rank)
            if box.fqn.startswith("model.")
        }
        fill(read, profile.specs, mine, seed=0)
        for fqn, (box, tensor) in mine.items():
            if (name := fqn.removeprefix("model.")) in program.packed:
                n += 1
                packed = pack(whole[named.name(name)])
                assert torch.equal(tensor, cut(packed, box)), fqn
    assert n >= 28


def test_the_planner_sees_a_quarter_of_bfloat16(plain: Program, program: Program) -> None:
    step = Step(1, 12, 12, dtype="float32")
    costs = [ModelCost.of(trace(one)) for one in (with_job(plain, replace(NF4, frozen_weights=None)), program)]  # fmt: skip
    held = [
        state_parts(cost, Layout(dp_shard=2), cost.computed(step.compute_bytes)) for cost in costs
    ]
    packed = sum(128 * 128 * 5 + 2 * 64 * 128 for _ in range(4))
    saved = packed * (4 - NF4_BYTES) / 2
    assert held[0]["parameters"] - held[1]["parameters"] == pytest.approx(saved)
    assert held[0]["optimizer"] == pytest.approx(held[1]["optimizer"])
    assert held[1]["gathered"] < held[0]["gathered"]
    assert costs[1].element_bytes == pytest.approx(4.0)
    assert costs[1].computed(2) == pytest.approx((1 + costs[1].packed) / 2), "bytes stay bytes"
    assert costs[1].copied_bytes < 0.35 * costs[0].copied_bytes


def test_what_cannot_be_packed_is_one_line(plain: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_program(PROGRAMS / "tiny_wide.py")
    with pytest.raises(
        SpecError, match="^job.yaml: frozen_weights: nf4: the blocks of this program"
    ):
        with_job(whole, NF4)
    narrow = LlamaConfig(vocab_size=64, hidden=96, n_layers=1, n_heads=4, n_kv_heads=2)
    with pytest.raises(SpecError, match=r"layers.0.attn.wq has 96 inputs; blocks of 64 weights"):
        in_nf4(replace(whole, model=lambda: Llama(narrow).requires_grad_(False)))
    for key, value in (("script", "train.py"), ("float8", True)):
        with pytest.raises(SpecError, match=f"frozen_weights and {key} do not go together"):
            with_job(plain, replace(NF4, **{key: value}))
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(SpecError) as error:
        with_job(plain, NF4)
    assert str(error.value) == (
        "job.yaml: frozen_weights: nf4 needs torchao, which is not installed: pip install "
        "'elastic-ray[torchao]'"
    )
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(
        SpecError, match=r"needs torch 2.12 or newer \(this is 2.11.0\+cu130\): FSDP2"
    ):
        with_job(plain, NF4)


@pytest.mark.slow  # torch's compiler is imported
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # within torch's compiler
def test_a_compiled_layer_is_one_graph() -> None:
    """Forward and backward: it does not break off in torchao, of which it has a constant."""
    torch.manual_seed(1)
    layer = Nf4Linear(torch.nn.Linear(128, 64))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 128, requires_grad=True)
    assert torch.equal(compiled(x), layer(x))
    (mine,), (want,) = (torch.autograd.grad(f(x).sum(), [x]) for f in (compiled, layer))
    assert torch.equal(mine, want)
