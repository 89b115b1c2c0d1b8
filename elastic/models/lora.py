"""Low-rank adapters (LoRA, Hu et al. 2021): a program of which only small matrices beside its
linear layers are trained.

```python
whole = causal_lm("models/qwen3", dataset=..., optimizer=...)
program = lora(whole, ("q_proj", "v_proj"), r=16, alpha=32)
```
The elastic state is what is trained: copies, checkpoints and re-layouts carry adapters only. The
frozen weights are read by each rank from the program's `weights`, again in each new layout. (A
program without `weights` keeps them in its state.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic.errors import SpecError
from elastic.program import Adapter, Program, Weights

BASE, DOWN, UP = "base_layer", "lora_A", "lora_B"
SHOWN = 6
# what a linear layer's style means for the two matrices beside it: one takes the layer's input, the
# other gives its output. One that is whole and sees a part of the sequence, or gives one, has a
# part of its gradient on each rank: "sequence" adds them up
STYLES = {
    "colwise": {UP: "colwise"}, "colwise_gather": {UP: "colwise_gather"},
    "rowwise": {DOWN: "rowwise"}, "rowwise_scatter": {DOWN: "rowwise_scatter", UP: "sequence"},
    "sequence_colwise_gather": {DOWN: "sequence", UP: "sequence_colwise_gather"},
    "sequence_colwise_loss": {DOWN: "sequence", UP: "sequence_colwise_loss"},
    "summed": {DOWN: "summed", UP: "summed"}, "sequence": {DOWN: "sequence", UP: "sequence"},
}  # fmt: skip
# fields of peft's LoraConfig: those that say how adapters are made, or nothing of it; values that
# are as it is done here anyway; why others are not done
TAKEN = (
    "r", "lora_alpha", "target_modules", "use_rslora", "task_type", "auto_mapping", "peft_version",
    "base_model_name_or_path", "revision", "inference_mode", "megatron_core", "qalora_group_size",
)  # fmt: skip
AS_HERE = (("bias", "none"), ("init_lora_weights", "True"), ("peft_type", "LORA"),
           ("peft_type", "PeftType.LORA"))  # fmt: skip
NOT_HERE = {
    "lora_dropout": "adapters have no dropout here; take 0",
    "use_dora": "DoRA needs the norms of whole rows of the frozen weights, of which a rank has "
    "parts; take use_rslora, or neither",
}
AROUND = ("gather", "scatter")  # styles of what a layer is given or gives: its adapters are inside


class LoraLinear(nn.Module):
    """base_layer(x) + scale * lora_B(lora_A(x)); lora_B begins at 0."""

    def __init__(self, base: nn.Linear, r: int, scale: float) -> None:
        super().__init__()
        self.base_layer, self.scale = base, scale
        device, dtype = base.weight.device, base.weight.dtype
        self.lora_A = nn.Linear(base.in_features, r, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(r, base.out_features, bias=False, device=device, dtype=dtype)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        # of a sequence that was gathered for layers cut by columns
        whole = x.to_local() if isinstance(x, DTensor) else x
        return self.base_layer(x) + self.lora_B(self.lora_A(whole)) * self.scale  # type: ignore[no-any-return]


def lora(
    program: Program,
    targets: Collection[str],
    r: int = 8,
    *,
    alpha: float = 16.0,
    rslora: bool = False,
) -> Program:
    """The same program with everything frozen but adapters on the linear layers whose names end in
    one of `targets`, scaled by alpha / r; with `rslora` (Kalajdzievski 2023) by alpha / sqrt(r),
    so that a larger r does not make them learn more slowly.

    Raises SpecError where a target names none, one whose weight is tied, or one whose tp style
    adapters cannot follow.
    """
    if r < 1:
        raise SpecError(f"lora: r={r}; the rank of the adapters is at least 1")
    with torch.device("meta"):
        base: nn.Module = program.model()
    names = _linears(base, tuple(targets))
    _check_not_tied(base, names)
    adapter = Adapter(r, alpha, tuple(targets), names, rslora)

    def build() -> nn.Module:
        model: nn.Module = program.model()
        model.requires_grad_(False)
        for name in names:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            model.set_submodule(name, LoraLinear(linear, r, adapter.scale))
        return model

    def init(model: nn.Module) -> None:
        assert program.init is not None
        program.init(model)
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.reset()

    return replace(
        program,
        model=build,
        init=init if program.init is not None else None,
        tp=_tp(base, program.tp, set(names)),
        weights=_weights(program.weights) if program.weights is not None else None,
        adapter=adapter,
    )


def lora_of_peft(program: Program, config: Any) -> Program:
    """`lora` as a LoraConfig of peft says it, or the mapping of its adapter_config.json. peft is
    not imported. Raises SpecError for a field that says what is not done here."""
    said = dict(config if isinstance(config, Mapping) else config.to_dict())
    targets = said.get("target_modules")
    if not isinstance(targets, Collection) or isinstance(targets, str) or not targets:
        raise SpecError(
            f"lora: target_modules is {targets!r}; name the linear layers, as in ['q_proj', "
            "'v_proj']"
        )
    for name, value in said.items():
        if name in TAKEN or not value or (name, str(value)) in AS_HERE:
            continue
        reason = NOT_HERE.get(name, "it has no counterpart here; leave it out")
        raise SpecError(f"lora: {name} is {str(value)[:40]!r}: {reason}")
    return lora(
        program,
        sorted(targets),
        int(said.get("r", 8)),
        alpha=float(said.get("lora_alpha", 8)),
        rslora=bool(said.get("use_rslora")),
    )


def base_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(f".{BASE}.", ".")


def _linears(model: nn.Module, targets: tuple[str, ...]) -> tuple[str, ...]:
    found: list[str] = []
    for target in targets:
        mine = [
            name
            for name, _ in model.named_modules()
            if name == target or name.endswith("." + target)
        ]
        linear = [name for name in mine if type(model.get_submodule(name)) is nn.Linear]
        if not linear:
            layers = [name for name, module in model.named_modules() if type(module) is nn.Linear]
            kinds = dict.fromkeys(name.rpartition(".")[2] for name in layers)
            what = f"{type(model.get_submodule(mine[0])).__name__} modules" if mine else "no module"
            there = ", ".join([*kinds][:SHOWN]) or "none"
            raise SpecError(f"lora: '{target}' names {what}; linear layers of this model: {there}")
        found += linear
    return tuple(dict.fromkeys(found))


def _check_not_tied(model: nn.Module, names: tuple[str, ...]) -> None:
    every = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    for layer in names:
        mine = f"{layer}.weight", id(model.get_submodule(layer).weight)
        if other := next((name for name, key in every if key == mine[1] and name != mine[0]), ""):
            raise SpecError(
                f"lora: the weight of {layer} is also {other}, which its adapters do not change; "
                "leave it out of the targets"
            )


def _tp(model: nn.Module, plan: Mapping[str, str], names: set[str]) -> dict[str, str]:
    """A pattern that meets a layer with an adapter is written out. Raises SpecError for a style
    that adapters cannot follow."""
    out: dict[str, str] = {}
    for pattern, style in plan.items():
        met = [name for name, _ in model.named_modules() if _matches(pattern, name)]
        if names.isdisjoint(met):
            out[pattern] = style
            continue
        for name in met:
            if name not in names or style in AROUND:
                out[name] = style
                continue
            if style not in STYLES:
                raise SpecError(
                    f"lora: {name} has the tp style '{style}', which its adapters cannot follow; "
                    "leave it out of the targets"
                )
            out[f"{name}.{BASE}"] = style
            out |= {f"{name}.{part}": kind for part, kind in STYLES[style].items()}
    return out


def _matches(pattern: str, name: str) -> bool:
    parts, words = pattern.split("."), name.split(".")
    return len(parts) == len(words) and all(map(fnmatchcase, words, parts))


def _weights(weights: Weights) -> Weights:
    def fresh(name: str, shape: tuple[int, ...]) -> Tensor:
        if f".{DOWN}." not in f".{name}" and f".{UP}." not in f".{name}":
            if weights.fresh is None:
                raise SpecError(
                    f"{weights.path}: it has no tensor {weights.name(base_name(name))}; weights "
                    "of another model?"
                )
            return weights.fresh(base_name(name), shape)  # type: ignore[no-any-return]
        value = torch.zeros(shape)
        return nn.init.kaiming_uniform_(value, a=math.sqrt(5)) if f"{DOWN}." in name else value

    return Weights(weights.path, lambda name: weights.name(base_name(name)), fresh)


# ------------------------------------------------------------------------------------ peft's folder

ADAPTER_FILE = "adapter_model.safetensors"
# kept with a run whose script has a model of peft: {name in that file: name in the model}
ADAPTER_NAMES = "adapter_names.json"


def peft_name(name: str) -> str:
    """A parameter's name in an adapter folder of peft."""
    return f"base_model.model.{name}"


def peft_config(adapter: Adapter, weights: Weights | None) -> dict[str, Any]:
    """adapter_config.json, as peft's LoraConfig reads it."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": adapter.r, "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0, "bias": "none", "target_modules": list(adapter.targets),
        "fan_in_fan_out": False, "inference_mode": True, "use_rslora": adapter.rslora,
        "base_model_name_or_path": None if weights is None else str(Path(weights.path)),
    }  # fmt: skip
