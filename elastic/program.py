"""Program: the user's model, data, loss and parallel hints.

Only callables and plain data: importing this module imports neither torch nor ray.
"""

from __future__ import annotations

import hashlib
import importlib.util
import pickle
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

from elastic.errors import SpecError, known_keywords

# of an export, beside those that were trained
WEIGHT_TYPES = ("bfloat16", "int8", "float8")
TP_STYLES = (
    "colwise", "rowwise", "colwise_gather", "vocab", "summed", "sequence", "gather", "scatter",
    "rowwise_scatter", "vocab_scatter", "sequence_colwise_gather", "sequence_colwise_loss",
)  # fmt: skip
BRACKETS = re.compile(r"\\\[(.+?)\\\]")  # escaped


def same_name(name: str) -> str:
    return name


@dataclass(frozen=True)
class Weights:
    """First values that are read from safetensors, by each rank only its own part.

    path:  a local folder (with or without index), or one file.
    name:  name of a parameter in the program -> name in the files.
    fresh: (name, shape) -> values of a parameter that is not in the files, on the CPU; without it
           all must be there.
    rest:  in its place, () -> values by name of all parameters that are not in the files, made at
           once under the job's seed.
    """

    path: str | Path
    name: Callable[[str], str] = same_name
    fresh: Callable[[str, tuple[int, ...]], Any] | None = None
    rest: Callable[[], Mapping[str, Any]] | None = None


def missing_loss(output: Any, batch: Any) -> Any:
    """Program.loss is missing: give (output, batch) -> sum over the batch's tokens (or samples), a
    scalar tensor"""


@dataclass(frozen=True)
class Adapter:
    """What `elastic.models.lora.lora` has put on a program: rank, alpha, and the linear layers'
    names (ends and whole)."""

    r: int
    alpha: float
    targets: tuple[str, ...]
    modules: tuple[str, ...]
    rslora: bool = False

    @property
    def scale(self) -> float:
        """Of what the adapters give: alpha / r, with rsLoRA alpha / sqrt(r)."""
        return self.alpha / (sqrt(self.r) if self.rslora else self.r)


@known_keywords("elastic.Program")
@dataclass(frozen=True)
class Program:
    """What to train.

    model:      builds the plain `nn.Module`; called under the meta device, so it must not read
                parameter values.
    init:       fills a materialized model's parameters and buffers; called once, on CPU, under the
                job's seed.
    optimizer:  (name, parameter) pairs -> optimizer, or a dict of them by name; each must step
                each tensor by itself, and each trainable parameter must be in exactly one.
                Called with the whole model's parameters, in their whole shapes and without values,
                on every rank. None: the job's `optimizer` names one, or several.
    dataset:    map-style: `len()` and `[sample id]` -> dict of tensors (or arrays) of equal shape
                per key; a pair (x, y) counts as {"input": x, "target": y}. None: the job's
                `data.train` says what is read. An iterable one has state_dict() and
                load_state_dict() (docs/data.md).
    loss:       (output, batch) -> sum over the batch's tokens (or samples), a scalar tensor.
    count:      batch -> number of tokens (or samples) that `loss` summed over; default: elements of
                batch["target"] that are not -100, else the number of samples.
    inputs:     batch -> the model's input; default: batch["input"], else batch["input_ids"].
    keywords:   batch -> dict of keyword arguments that the model takes besides, on each pipeline
                stage (document ids, say).
    metrics:    (output, batch) -> dict of sums over the batch; of the validation set, reported per
                token beside its loss.
    log:        (output, batch) -> dict of sums over the batch; of every training step, told per
                token beside its loss, over all ranks.
    evaluate:   (model, batch) -> dict of sums with its own "count"; of the validation set. Needs
                the whole model: no pp.
    validation: like dataset; its loss is reported every `eval_every` steps and at the end.
    blocks:     module-name pattern of the repeated blocks: FSDP units and pipeline cut points, as
                in "layers.*". A list of patterns, in the order in which the model runs them, where
                there are several groups (["vision.layers.*", "text.layers.*"]); pipeline stages
                then hand on all that a later one needs, whatever stands between the blocks.
    tp:         module-name pattern -> "colwise", "rowwise", "colwise_gather" (output gathered),
                "vocab" (embedding rows), "summed" (whole on each rank and used for its part of the
                heads: gradients are added up). Sequence parallelism (dim 1 is the sequence, a part
                of it on each tp rank between the cut modules): "scatter", "vocab_scatter" (the
                embedding, whole or cut, gives a part), "sequence" (norms, of a part), "gather"
                (attention, feed-forward, an uncut head: their one positional input is made whole),
                "rowwise_scatter" (gives a part), "sequence_colwise_gather", "sequence_colwise_loss"
                (a cut head of a part; with the second the logits stay cut and `loss` must be
                torch's cross_entropy of them). elastic.models.llama.tp_plan has them all.
    experts:    module-name patterns of stacked experts, which ep shares out over ranks; () = found
                by what they look like (elastic.models.experts says how).
    tp_limit:   tp must divide it (the number of key-value heads, say); 0 = only the shapes decide.
    lr_factor:  optimizer step (from 0) -> factor on the optimizer's own learning rates; or the job
                has an `lr_schedule`.
    sample:     (model) -> text; a sample of what the finished model does, shown in the report.
    extra_state: name -> object with state_dict() and load_state_dict(), of numbers, texts, lists,
                dicts and tensors; it travels with the model. Every rank has its own object, and all
                of them must be equal after a step.
    pipeline:   may the blocks be spread over pipeline stages? Only where each is called once, in
                order, with exactly what the one before returned (residuals stand inside of the
                blocks). What is registered before the blocks is the first stage's, what is behind
                them the last one's. Whether it is so is checked before the start; False forbids it.
    stage:      (module cut for a stage, index, number of stages) -> module that is called with the
                hidden state (the first with the input) and gives the hidden state (the last the
                output); default: the cut module itself.
    weights:    where the first values are read from; `init` is then not called. Parameters that are
                frozen (no requires_grad) are no part of the elastic state then: who needs them
                reads them again.
    buffers:    (model) -> fills the buffers that are not in its state_dict, True when it could;
                default: they are taken from a whole model that is built for them.
    files:      () -> file name -> bytes: what an export puts beside the weights (config.json, a
                tokenizer).
    exports:    name of the module whose weights an export writes, under its own names; '' = the
                whole model (`elastic.models.distillation` sets it).
    adapter:    set by `elastic.models.lora.lora`.
    packed:     names of parameters that are bytes of 4-bit weights; set by the job's
                `frozen_weights`.
    before_cut: with cp > 1, (batch of whole sequences) -> what is cut and given to the model,
                `keywords` and `loss`: a dict of tensors. For what a part alone does not tell: the
                targets at its edges, positions behind padding.
    batch_dependent: a sample's result may depend on which others stand beside it (a loss over
                pairs; not BatchNorm: see the job's `batch_norm`). Then it computes something else
                in each layout and is refused with more than one data-parallel rank; True = it is
                known and wanted so: what is compared is then its evaluation mode.
    no_cp:      why the model cannot have parts of sequences; a layout with cp > 1 is then refused
                with it.

    With cp > 1 each rank has a part of every sequence. The sequence is dim 1 of the model's input
    ([batch, seq, ...]) and of its output; every tensor of the batch with that size in dim 1 is cut
    like it. The model calls `elastic.attention` and takes positions from `elastic.positions`; all
    else in it must act on each position alone. `loss` is a sum over positions (targets are shifted
    in the dataset, or by `before_cut`); `count` sees whole sequences. A model whose sequence is
    another dimension has cp = 1.
    """

    model: Callable[[], Any]
    optimizer: Callable[[Any], Any] | None = None
    dataset: Callable[[], Any] | None = None
    loss: Callable[[Any, Any], Any] = missing_loss
    init: Callable[[Any], Any] | None = None
    validation: Callable[[], Any] | None = None
    count: Callable[[Any], Any] | None = None
    inputs: Callable[[Any], Any] | None = None
    keywords: Callable[[Any], Mapping[str, Any]] | None = None
    metrics: Callable[[Any, Any], Mapping[str, Any]] | None = None
    log: Callable[[Any, Any], Mapping[str, Any]] | None = None
    evaluate: Callable[[Any, Any], Mapping[str, Any]] | None = None
    blocks: str | Sequence[str] = "layers.*"
    tp: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    tp_limit: int = 0
    lr_factor: Callable[[int], float] | None = None
    sample: Callable[[Any], str] | None = None
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    pipeline: bool = True
    stage: Callable[[Any, int, int], Any] | None = None
    weights: Weights | None = None
    buffers: Callable[[Any], bool] | None = None
    files: Callable[[], Mapping[str, bytes]] | None = None
    exports: str = ""
    adapter: Adapter | None = None
    packed: frozenset[str] = frozenset()
    before_cut: Callable[[Any], Mapping[str, Any]] | None = None
    batch_dependent: bool = False
    no_cp: str = ""

    # what errors say: before the name of a field, of how to train on a result of many samples, of
    # what builds the model, and of where keys of the job stand
    of: ClassVar[str] = "Program."
    anyway: ClassVar[str] = "Program.batch_dependent=True"
    builds: ClassVar[str] = "Program.model()"
    keys: ClassVar[str] = "in job.yaml"

    def __post_init__(self) -> None:
        if self.loss is missing_loss:
            raise SpecError(missing_loss.__doc__)
        if not isinstance(self.blocks, str):
            object.__setattr__(self, "blocks", self._patterns())
        for pattern, style in self.tp.items():
            if style not in TP_STYLES:
                raise SpecError(
                    f"{self.of}tp['{pattern}'] is '{style}'; it must be one of "
                    f"{', '.join(TP_STYLES)}"
                )

    def _patterns(self) -> tuple[str, ...]:
        found = tuple(self.blocks) if isinstance(self.blocks, list | tuple) else ()
        if not found or not all(isinstance(pattern, str) and pattern for pattern in found):
            raise SpecError(
                f"{self.of}blocks is {self.blocks!r}; it must be a pattern of module names, or a "
                "list of them"
            )
        if twice := [pattern for i, pattern in enumerate(found) if pattern in found[:i]]:
            raise SpecError(f"{self.of}blocks names '{twice[0]}' twice")
        return found


def patterns_of(blocks: str | Sequence[str]) -> tuple[str, ...]:
    """`Program.blocks` as a tuple of patterns."""
    return (blocks,) if isinstance(blocks, str) else tuple(blocks)


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """`layers.*.attn.w[qkv]`: `*` stands for one part of a module name, brackets as in file
    names."""
    parts = [
        BRACKETS.sub(_one_of, re.escape(p).replace(r"\*", "[^.]+")) for p in pattern.split(".")
    ]
    return re.compile(r"\.".join(parts) + r"\Z")


def in_blocks(name: str, blocks: str | Sequence[str]) -> bool:
    """Is the parameter or module in one of the modules that the patterns name?"""
    parts = name.split(".")
    around = [".".join(parts[:n]) for n in range(1, len(parts))]
    return any(pattern_regex(pattern).match(a) for pattern in patterns_of(blocks) for a in around)


def _one_of(brackets: re.Match[str]) -> str:
    inside = brackets[1].replace(r"\-", "-")
    return f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"


@contextmanager
def drawing(seed: int, *, in_torch: bool = True) -> Iterator[None]:
    """What Python, numpy and torch draw meanwhile on the CPU follows from the seed, and what is
    drawn afterwards does not know of it. Of those that are imported by then."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch") if in_torch else None
    before = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch_state = torch.default_generator.get_state() if torch is not None else None
    try:
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))
        if torch is not None:
            torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.default_generator.set_state(torch_state)


def generators(*, in_torch: bool = True) -> tuple[Any, ...]:
    """Where those generators are, to be compared: something has drawn where it differs."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch") if in_torch else None
    found: list[Any] = [random.getstate()]
    if numpy is not None:
        found.append(pickle.dumps(numpy.random.get_state(legacy=False)))
    if torch is not None:
        found.append(torch.default_generator.get_state().numpy().tobytes())
    return tuple(found)


def load_program(path: str | Path) -> Program:
    """The `program` of a program.py (a Program, or a function of no arguments that returns one).
    Its folder comes first on the path, as under `python program.py`: what stands beside it can be
    imported, also later. What it draws while it is imported is the same in every process.

    Raises SpecError when the file is missing, has no `program`, or raises while it is imported.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise SpecError(
            f"{path}: no such file; a job folder needs a program.py that defines `program`"
        )
    name = "elastic_program_" + hashlib.sha256(str(path).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent)
    sys.path[:] = [folder, *(each for each in sys.path if each != folder)]
    try:
        with drawing(0):
            spec.loader.exec_module(module)
    except SpecError:
        raise
    except Exception as error:  # a boundary: the user's file may raise anything
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)
        ]
        at = f" (line {lines[-1]})" if lines else ""
        raise SpecError(
            f"{path}: importing it raised {type(error).__name__}: {error}{at}"
        ) from error
    program = getattr(module, "program", None)
    if callable(program) and not isinstance(program, Program):
        with drawing(0):
            program = program()
    if not isinstance(program, Program):
        raise SpecError(
            f"{path}: it must define `program = elastic.Program(...)`; found "
            f"{type(program).__name__}"
        )
    return program
