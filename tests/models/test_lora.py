"""Adapters: what is trained, how tensor parallelism cuts them, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.places import PROGRAMS

from elastic.errors import SpecError
from elastic.models.llama import tp_plan
from elastic.models.lora import LoraLinear, lora, lora_of_peft, peft_config
from elastic.program import Program, load_program
from elastic.reshard.rank_boxes import boxes, reread_boxes
from elastic.types import Layout
from elastic.worker.program.model_profile import trace


@pytest.fixture(scope="module")
def base() -> Program:
    return load_program(PROGRAMS / "tiny.py")


@pytest.mark.slow
def test_only_adapters_are_trained_and_the_start_is_the_base_model(base: Program) -> None:
    program = lora(base, ("wq", "wo"), r=2)
    profile = trace(program)
    trained = {spec.fqn for spec in profile.specs if spec.trainable}
    assert len(trained) == 4 * 2 * 2 and all(".lora_" in fqn for fqn in trained)
    model, plain = program.model(), base.model()
    assert program.init is not None and base.init is not None
    program.init(model)
    plain.load_state_dict(
        {
            k.replace(".base_layer", ""): v
            for k, v in model.state_dict().items()
            if ".lora_" not in k
        }
    )
    ids = torch.arange(16)[None]
    assert torch.equal(model(ids), plain(ids))


def test_tp_cuts_the_side_that_the_layer_is_cut_on(base: Program) -> None:
    program = lora(base, ("wq", "wo"))
    cut = {spec.fqn: spec.tp_dim for spec in trace(program).specs}
    layer = "layers.1.attn."
    assert cut[f"{layer}wq.base_layer.weight"] == 0 and cut[f"{layer}wq.lora_B.weight"] == 0
    assert cut[f"{layer}wq.lora_A.weight"] is None and cut[f"{layer}wo.lora_B.weight"] is None
    assert cut[f"{layer}wo.base_layer.weight"] == cut[f"{layer}wo.lora_A.weight"] == 1
    assert cut[f"{layer}wk.weight"] == 0 and trace(program).tp_limit == 2


def test_a_style_that_adapters_cannot_follow_is_refused(base: Program) -> None:
    with pytest.raises(
        SpecError,
        match=r"^lora: head has the tp style 'vocab', which its adapters cannot follow; leave it out",
    ):
        lora(replace(base, tp={"head": "vocab"}), ("head",))


def test_with_sequence_parallelism_gradients_of_what_is_whole_are_added_up(base: Program) -> None:
    around = lora(replace(base, tp=tp_plan(sequence=True)), ("wo", "head")).tp
    assert around["head"] == "gather" and "head.base_layer" not in around
    assert (
        around["layers.0.attn.wo.lora_A"] == "rowwise_scatter"
        and around["layers.0.attn.wo.lora_B"] == "sequence"
    )
    cut = lora(replace(base, tp=tp_plan(vocab=True, sequence=True)), ("head",)).tp
    assert (
        cut["head.lora_A"] == "sequence"
        and cut["head.lora_B"] == cut["head.base_layer"] == "sequence_colwise_loss"
    )


def test_frozen_weights_are_no_part_of_the_state(base: Program) -> None:
    profile = trace(lora(base, ("wq",)))
    frozen = replace(
        profile, specs=tuple(replace(s, reread=not s.trainable) for s in profile.specs)
    )
    for rank in range(4):
        mine = boxes(frozen, Layout(dp_shard=2, tp=2), (4,), rank)
        assert (
            all(".lora_" in box.fqn or box.fqn == "elastic.rng" for box in mine) and len(mine) > 20
        )
        both = {b.fqn for b in mine} | {
            b.fqn for b in reread_boxes(frozen, Layout(dp_shard=2, tp=2), (4,), rank=rank)
        }
        assert both == {b.fqn for b in boxes(profile, Layout(dp_shard=2, tp=2), (4,), rank)}


def test_a_target_whose_weight_is_tied_is_refused() -> None:
    """Merged, the adapters of a head would be added to the embeddings too."""
    tied = load_program(PROGRAMS / "tiny_tied.py")
    with pytest.raises(SpecError, match=r"^lora: the weight of head is also embed\.weight, which"):
        lora(tied, ("wq", "head"))
    assert lora(tied, ("wq",)).adapter is not None


def test_targets_that_name_nothing_are_refused(base: Program) -> None:
    with pytest.raises(
        SpecError,
        match=r"lora: 'q_proj' names no module; linear layers of this model: wq, wk, wv, wo, w1, w3",
    ):
        lora(base, ("q_proj",))
    with pytest.raises(SpecError, match="lora: 'attn_norm' names RMSNorm modules"):
        lora(base, ("attn_norm",))
    with pytest.raises(SpecError, match="r=0"):
        lora(base, ("wq",), r=0)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_the_scale_of_adapters(base: Program, rslora: bool, scale: float) -> None:
    program = lora(base, ("wq",), r=4, alpha=8, rslora=rslora)
    layer = program.model().get_submodule("layers.0.attn.wq")
    assert isinstance(layer, LoraLinear) and program.adapter is not None
    assert layer.scale == program.adapter.scale == scale
    assert peft_config(program.adapter, None)["use_rslora"] is rslora
    torch.nn.init.ones_(layer.lora_B.weight)
    x = torch.ones(1, layer.base_layer.in_features)
    more = layer(x) - layer.base_layer(x)
    torch.testing.assert_close(more, scale * layer.lora_A(x).sum() * torch.ones_like(more))


def test_a_configuration_of_peft_is_taken_or_refused_by_name(base: Program) -> None:
    said = {"r": 4, "lora_alpha": 8, "target_modules": ["wq", "wo"], "use_rslora": True}
    mine = lora(base, ("wo", "wq"), r=4, alpha=8, rslora=True)
    assert lora_of_peft(base, said).adapter == mine.adapter
    assert lora_of_peft(base, peft_config(mine.adapter, None)).adapter == mine.adapter
    for more, says in (
        ({"use_dora": True}, "^lora: use_dora is 'True': DoRA needs the norms of whole rows"),
        ({"lora_dropout": 0.05}, "lora_dropout is '0.05': adapters have no dropout here"),
        ({"bias": "all"}, "bias is 'all': it has no counterpart here"),
        ({"rank_pattern": {"wq": 2}}, "rank_pattern is .*: it has no counterpart here"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"target_modules": "all-linear"}, "target_modules is 'all-linear'; name the linear"),
        ({"target_modules": None}, "target_modules is None"),
    ):
        with pytest.raises(SpecError, match=says):
            lora_of_peft(base, said | more)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_configuration_object_of_peft(base: Program) -> None:
    peft = pytest.importorskip("peft", reason="it is in the extra 'test'")
    given = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["wq"], use_rslora=True)
    assert (
        lora_of_peft(base, given).adapter == lora(base, ("wq",), r=2, alpha=3, rslora=True).adapter
    )
    with pytest.raises(SpecError, match="use_dora"):
        lora_of_peft(base, peft.LoraConfig(target_modules=["wq"], use_dora=True))
