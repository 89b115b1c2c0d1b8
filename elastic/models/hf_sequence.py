"""Models of transformers over cut sequences (context parallelism).

Where a layout cuts the sequences the model attends by `elastic.attention`, through transformers'
own `AttentionInterface`; its positions come with the batch. Else it attends as its config says, and
nothing here is called. What `elastic.attention` does not compute is refused: by the config where
that says it, else by what the model gives its attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from elastic.errors import SpecError
from elastic.models.attention import attention, wanted, where

NAME = "elastic"
FULL, SLIDING = "full_attention", "sliding_attention"  # of transformers' layer types
# keyword arguments of attention that do not change what it computes
HARMLESS = {"position_ids", "position_embeddings", "past_key_values", "use_cache",
    "output_attentions", "output_hidden_states",
            "cache_position", "return_dict", "logits_to_keep", "output_router_logits"}  # fmt: skip
ONE_OF_ITS_OWN = "what each token sees depends on more than its document and its position"
# config key, the value that changes nothing, what any other one means
KEYS: tuple[tuple[str, Any, str], ...] = (
    ("is_encoder_decoder", False, "the decoder attends to an encoder"),
    ("add_cross_attention", False, "the decoder attends to an encoder"),
    ("is_causal", True, "its attention is not causal"),
    ("use_bidirectional_attention", False, "its attention is not causal"),
    ("alibi", False, "its attention has a bias"),
    ("attn_logit_softcapping", None, "its scores are capped"),
    ("attention_dropout", 0.0, "elastic.attention has no dropout; set it to 0"),
    ("attn_pdrop", 0.0, "elastic.attention has no dropout; set it to 0"),
)


def follow_layout(model: nn.Module) -> None:
    """From each forward pass on the model attends by `elastic.attention` inside of
    `elastic.models.attention.over`, else as its config says."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    config: Any = model.config
    own = config._attn_implementation

    def choose(module: Any, arguments: tuple[Any, ...]) -> None:
        now = NAME if wanted() else own
        if module.config._attn_implementation != now:
            module.config._attn_implementation = now

    model.register_forward_pre_hook(choose)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None = None, **named: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention function: query [batch, heads, seq, head_dim], key and value [batch,
    kv_heads, seq, head_dim] -> [batch, seq, heads, head_dim]. attention_mask: ids of documents, int
    [batch, 1, 1, seq], or none. Raises SpecError for what `elastic.attention` does not compute."""
    scale = named.pop("scaling", None)
    if not (
        causal
        if (causal := named.pop("is_causal", None)) is not None
        else getattr(module, "is_causal", True)
    ):
        raise _refused(module, "its attention is not causal")
    window = named.pop("sliding_window", None)
    if window is not None and window < query.shape[2] * where()[1]:
        raise _refused(module, f"its attention has a sliding window of {window}")
    if attention_mask is not None and (
        attention_mask.dtype != torch.int64 or attention_mask.shape[1:3] != (1, 1)
    ):
        raise _refused(module, f"it gives its attention a mask of its own: {ONE_OF_ITS_OWN}")
    strange = [
        name
        for name, given in named.items()
        if given is not None and given is not False and name not in HARMLESS
    ]
    strange = [name for name in strange if name != "dropout" or named[name]]
    if strange:
        raise _refused(
            module, f"it gives its attention '{strange[0]}', which elastic.attention does not know"
        )
    documents = attention_mask[:, 0, 0] if attention_mask is not None else None
    return attention(query, key, value, documents=documents, scale=scale).transpose(
        1, 2
    ).contiguous(), None


def _refused(module: nn.Module, why: str) -> SpecError:
    kind = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
    return SpecError(
        f"cp > 1: the sequences of this model stay whole: model_type={kind}: {why}; take cp=1"
    )


def why_whole(model: nn.Module) -> str:
    """Program.no_cp: what in the config of a model of transformers keeps its sequences whole; empty
    where nothing does."""
    config: Any = model.config
    found = _by_config(config.get_text_config()) or _by_modules(
        model, f"model_type={config.model_type}"
    )
    return f"the sequences of this {type(model).__name__} stay whole: {found}" if found else ""


def _by_config(config: Any) -> str:
    for key, harmless, why in KEYS:
        value = getattr(config, key, None)
        if value is not None and value != harmless:
            return f"{key}={value}: {why}"
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    slides = SLIDING in kinds if kinds else getattr(config, "use_sliding_window", True)
    if (
        window
        and slides
        and window < (getattr(config, "max_position_embeddings", None) or window + 1)
    ):
        return (
            f"sliding_window={window}: {ONE_OF_ITS_OWN}; set it to None where no sample is longer"
        )
    if others := sorted(set(kinds or ()) - {FULL, SLIDING}):
        return f"layer_types has '{others[0]}': {ONE_OF_ITS_OWN}"
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        kind = str(one.get("rope_type", ""))
        if "dynamic" in kind or kind == "longrope":
            return (
                f"rope_parameters.rope_type={kind}: it turns by the longest position that it is "
                "given"
            )
    return ""


def _by_modules(model: nn.Module, kind: str) -> str:
    if not model._can_set_attn_implementation():  # type: ignore[operator]
        return f"{kind}: it does not attend through transformers' AttentionInterface"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return f"{kind}: it takes no position_ids"
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()):
        return f"{kind}: it convolves over the sequence"
    return ""


def documents_of(position: Tensor) -> Tensor:
    """Ids of packed documents by transformers' own rule: one begins where a position does not
    follow the one before. int64 [batch, seq] -> int64 [batch, seq]."""
    return (torch.diff(position, prepend=position[:, :1] - 1) != 1).cumsum(-1)
