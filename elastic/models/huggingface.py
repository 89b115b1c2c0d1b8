"""Causal language models of Hugging Face's transformers as a Program. Nothing is fetched: from a
config or a local folder.

```python
program = causal_lm(
    "models/smollm",
    dataset=lambda: Tokens(...),
    optimizer=lambda named: AdamW([p for _, p in named], 1e-5),
)
```
A sample is {"input_ids": int64 [seq]} with, if some tokens are not to be learned, {"labels": int64
[seq]} (-100 = left out; not shifted: the shift is done here), and, where it is padded,
{"attention_mask": int64 [seq]} (0 = padding, left or right). All samples have one length. Rows of
the job's `data` ({"input", "target"}: already shifted) will do as well; with the "position" of
packed ones (0 at the first token of each document) documents do not see each other.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elastic.errors import SpecError
from elastic.models.attention import wanted
from elastic.models.blocks import blocks_of
from elastic.models.hf_sequence import documents_of, follow_layout, why_whole
from elastic.models.hf_stages import fill_plain_buffers, passes_through, stage_factory
from elastic.models.lora import ADAPTER_NAMES, peft_name
from elastic.program import Program, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

IGNORED = -100
# transformers' names of tensor-parallel styles -> those of elastic.Program.tp
STYLES = {
    "colwise": "colwise", "rowwise": "rowwise", "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "vocab", "replicated_with_grad_allreduce": "summed",
}  # fmt: skip
BESIDE = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template*", "*.tiktoken", "spiece.model", "sentencepiece*",
)  # fmt: skip
# weights that are not read here, or a download that is not complete
OTHERS = (
    "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf",
    ".cache/huggingface/download/**/*.incomplete",
)  # fmt: skip


def causal_lm(
    source: str | Path | PreTrainedConfig,
    dataset: Callable[[], Any] | None,
    optimizer: Callable[[Any], Any],
    **more: Any,
) -> Program:
    """A Program for any model that `AutoModelForCausalLM` knows, in float32.

    source: a config (random weights, under the job's seed), or a local folder with config.json and,
    for pretrained weights, safetensors: each rank reads its own part of them. more: other fields of
    `elastic.Program` (validation, lr_factor ...). Blocks are found in the module tree; tp follows
    the model's own plan where elastic has all of its styles, else tp = 1; pipeline stages are
    possible where the model without its blocks releases the hidden state it is called with; parts
    of sequences (cp) where its attention is causal and no more (`hf_sequence.why_whole`). Raises
    SpecError where transformers or files are missing.
    """
    config, folder = _config(source)
    direct = folder is not None and not _converted(config)
    build = model_factory(config, None if direct else folder)
    with torch.device("meta"):
        model = build()
    blocks = blocks_of(model)
    fields: dict[str, Any] = {
        "blocks": blocks, "tp": tp_hints(model), "tp_limit": tp_limit(config), "loss": loss_sum,
        "count": count,
        "inputs": lambda batch: batch["input_ids" if "input_ids" in batch else "input"],
        "keywords": keywords, "pipeline": passes_through(model, blocks),
        "stage": stage_factory(model, blocks), "buffers": fill_plain_buffers,
        "weights": Weights(folder) if folder is not None and direct else None,
        "files": lambda: folder_files(config, type(model).__name__, source),
        "before_cut": before_cut, "no_cp": why_whole(model),
    }  # fmt: skip
    if "keywords" in more and "before_cut" not in more:
        fields["no_cp"] = (
            "causal_lm was given keywords without before_cut, and both say which positions a part "
            "has"
        )
    return Program(model=build, dataset=dataset, optimizer=optimizer, **(fields | more))


def keywords(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of rows that are padded: the mask, and positions that begin at the first token. Of rows with
    positions of their own: those, by which transformers keeps packed documents apart."""
    mask = batch.get("attention_mask")
    if mask is not None:
        return {"attention_mask": mask, "position_ids": _behind_padding(mask)}
    if "position" not in batch:
        return {}
    found = {"position_ids": batch["position"]}
    if "document" in batch and wanted():  # four dimensions: handed to the attention as it is
        found["attention_mask"] = batch["document"][:, None, None]
    return found


def _behind_padding(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def before_cut(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Program.before_cut: targets that are shifted, positions in the whole sequence, and which
    tokens see each other (those of one document; padding is one more), all int64 [batch, seq]."""
    own = ("labels", "attention_mask", "document")
    whole = {key: value for key, value in batch.items() if key not in own}
    mask, ids = batch.get("attention_mask"), batch["input_ids" if "input_ids" in batch else "input"]
    whole["target"] = next_tokens(batch)
    if mask is not None:
        whole |= {"position": _behind_padding(mask), "document": mask.long()}
    elif "position" in batch:
        whole["document"] = documents_of(batch["position"])
    else:
        whole["position"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return whole


def next_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """[batch, seq]: what each token is followed by, -100 where that is not to be learned."""
    labels = _labels(batch)
    return labels if "target" in batch else nn.functional.pad(labels, (0, 1), value=IGNORED)


def loss_sum(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of each next token, summed over the batch (left out: tokens labeled -100,
    padding, and the first token after padding). `output`: logits [batch, seq, vocab], or the
    model's output that holds them."""
    logits = getattr(output, "logits", output).float()
    logits = logits if "target" in batch else logits[:, :-1]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), _labels(batch).flatten(), ignore_index=IGNORED, reduction="sum"
    )


def count(batch: Mapping[str, Tensor]) -> int:
    """Tokens that `loss_sum` sums over."""
    return int((_labels(batch) != IGNORED).sum())


def _labels(batch: Mapping[str, Tensor]) -> Tensor:
    """[batch, seq - 1]: what each token but the last is followed by; [batch, seq] of rows that tell
    it themselves."""
    if "target" in batch:
        return batch["target"]
    labels = (batch["labels"] if "labels" in batch else batch["input_ids"])[:, 1:]
    mask = batch.get("attention_mask")
    return labels if mask is None else labels.masked_fill(mask[:, 1:] * mask[:, :-1] == 0, IGNORED)


# ---------------------------------------------------------------------------------------- the model


def model_factory(config: PreTrainedConfig, folder: Path | None = None) -> Callable[[], nn.Module]:
    """Builds the model in float32; with the weights in `folder`, unless it is built on the meta
    device."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.use_cache = False  # of keys and values: for generation only

    def build() -> nn.Module:
        mine = copy.deepcopy(config)  # its modules keep it, and it changes with the layout
        if folder is not None and torch.get_default_device().type != "meta":
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=mine, dtype=torch.float32, local_files_only=True
            )
        else:
            model = AutoModelForCausalLM.from_config(mine, dtype=torch.float32)
        follow_layout(model)
        return model.train()  # type: ignore[no-any-return]

    return build


def tp_hints(model: nn.Module) -> dict[str, str]:
    """The model's own tensor-parallel plan in elastic's words; empty where it has none, or a style
    that elastic has not."""
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    names = {name for name, _ in model.named_modules()}
    used = {
        pattern: style
        for pattern, style in plan.items()
        if any(_named(pattern, name) for name in names)
    }
    if not set(used.values()) <= set(STYLES):
        return {}
    hints = {pattern: STYLES[style] for pattern, style in used.items()}
    tied = getattr(model.config, "tie_word_embeddings", False)
    if not tied and "lm_head" not in used:
        return {pattern: style for pattern, style in hints.items() if style != "vocab"}
    return hints


def _named(pattern: str, name: str) -> bool:
    parts, words = pattern.split("."), name.split(".")
    return len(parts) == len(words) and all(part in ("*", word) for part, word in zip(parts, words))


def tp_limit(config: PreTrainedConfig) -> int:
    """tp must divide the number of heads, and of key-value heads; 1 where the config does not tell
    them."""
    n_heads = int(getattr(config, "num_attention_heads", 1) or 1)
    return math.gcd(n_heads, int(getattr(config, "num_key_value_heads", None) or n_heads))


def folder_files(config: PreTrainedConfig, architecture: str, source: Any) -> dict[str, bytes]:
    """What `from_pretrained` wants beside the weights: config.json, and what a folder holds of
    tokenizers and generation.

    Raises SpecError for a kind of model that transformers stores under other names.
    """
    if _converted(config):
        raise SpecError(
            f"transformers stores models of type {config.model_type} otherwise than it names "
            "them; export without --job"
        )
    config = copy.deepcopy(config)
    config.architectures, config.dtype = [architecture], torch.float32
    found = {"config.json": config.to_json_string().encode()}
    if isinstance(source, str | Path):
        for file in sorted(Path(source).expanduser().iterdir()):
            if file.is_file() and any(file.match(pattern) for pattern in BESIDE):
                found[file.name] = file.read_bytes()
    return found


def files_of(model: nn.Module, *beside: Any) -> Callable[[], dict[str, bytes]] | None:
    """`Program.files` of a model that a script has made, whose weights are exported as it names
    them, or of an adapter of peft, which is exported alone; `beside`: its tokenizer or processor.
    None where it is no model of transformers or peft."""
    if "peft" in sys.modules and getattr(model, "peft_config", None):
        return lambda: _saved_adapter(model, beside)
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    return lambda: _saved(model, beside)


def _saved_adapter(model: Any, beside: Iterable[Any]) -> dict[str, bytes]:
    """adapter_config.json, and ADAPTER_NAMES. Raises SpecError where a file of peft would not hold
    all that is trained."""
    from peft import PeftModel, get_peft_model_state_dict

    active = model.active_adapters if isinstance(model, PeftModel) else model.active_adapters()
    if len(active) != 1:
        raise SpecError(f"of peft's adapters {', '.join(active)} one has to be active, not all")
    state = model.state_dict()
    named = {id(tensor): name for name, tensor in state.items()}
    # beside a model that it was added to, transformers' add_adapter
    begin = "" if isinstance(model, PeftModel) else peft_name("")
    names = {}
    for name, tensor in get_peft_model_state_dict(model, state, active[0]).items():
        if id(tensor) not in named:
            raise SpecError(f"peft makes '{name}' of several tensors of the model as it saves it")
        names[begin + name] = named[id(tensor)]
    saved = {state[name].data_ptr() for name in names.values()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.data_ptr() not in saved:
            raise SpecError(
                f"'{name}' is trained too, and peft saves the adapter alone: name its module in "
                "modules_to_save, or freeze it"
            )
    config = copy.deepcopy(model.peft_config[active[0]])
    config.inference_mode = True
    return {**_files_by(config, *beside), ADAPTER_NAMES: json.dumps(names).encode()}


def _saved(model: Any, beside: Iterable[Any]) -> dict[str, bytes]:
    """Raises SpecError where transformers would take the weights for others."""
    config = copy.deepcopy(model.config)
    if name := _renamed(config, model.state_dict()):
        raise SpecError(
            f"transformers would rename '{name}' while it loads a model of type "
            f"{config.model_type}; export without --job, which writes the weights alone"
        )
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    generation = model.generation_config if model.can_generate() else None
    return _files_by(config, generation, *beside)


def _files_by(*parts: Any) -> dict[str, bytes]:
    """What their save_pretrained writes, by paths."""
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            if part is not None:
                part.save_pretrained(folder)
        files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _renamed(config: PreTrainedConfig, names: Iterable[str]) -> str | None:
    """A name that is another one after loading."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    changes = get_checkpoint_conversion_mapping(config.model_type) or []
    return next((n for n in names if any(c.rename_source_key(n)[0] != n for c in changes)), None)


def _converted(config: PreTrainedConfig) -> bool:
    """Are tensors of this kind of model stored otherwise than it names and shapes them? Then
    transformers loads them."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return bool(get_checkpoint_conversion_mapping(config.model_type))


def _config(source: str | Path | PreTrainedConfig) -> tuple[PreTrainedConfig, Path | None]:
    try:
        from transformers import AutoConfig, PreTrainedConfig
    except ImportError as error:
        raise SpecError(
            "elastic.models.huggingface needs transformers: pip install 'elastic-ray[huggingface]'"
        ) from error
    if isinstance(source, PreTrainedConfig):
        return source, None
    folder = Path(source).expanduser()
    if not (folder / "config.json").is_file():
        raise SpecError(
            f"causal_lm('{source}'): no config.json there; give a local folder (nothing is "
            "fetched) or a config"
        )
    weights = any(folder.glob("*.safetensors"))
    if not weights and (other := next((p.name for end in OTHERS for p in folder.glob(end)), "")):
        raise SpecError(
            f"causal_lm('{source}'): {other}, but no safetensors there; complete the download, or "
            "convert it (save_pretrained of transformers writes safetensors); for random weights "
            "give its config (AutoConfig.from_pretrained)"
        )
    return AutoConfig.from_pretrained(folder, local_files_only=True), folder if weights else None
