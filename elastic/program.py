"""Program: the user's model, data, loss and parallel hints.

Only callables and plain data: importing this module imports neither torch nor ray.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.errors import SpecError

TP_STYLES = ("colwise", "rowwise", "colwise_gather", "vocab")


@dataclass(frozen=True)
class Program:
    """What to train.

    model:      builds the plain `nn.Module`; called under the meta device, so it must not read parameter values.
    init:       fills a materialised model's parameters and buffers; called once, on CPU, under the job's seed.
    optimizer:  (name, parameter) pairs -> optimizer; it must be element-wise (AdamW, SGD, Adafactor without factoring ...).
    dataset:    map-style: `len()` and `[sample id]` -> dict of tensors (or arrays) of equal shape per key.
    loss:       (output, batch) -> sum over the batch's tokens (or samples), a scalar tensor.
    count:      batch -> number of tokens (or samples) that `loss` summed over; default: elements of batch["target"]
                that are not -100, else the number of samples.
    inputs:     batch -> the model's input; default: batch["input"], else batch["input_ids"].
    metrics:    (output, batch) -> dict of sums over the batch; added over ranks.
    evaluate:   (model, batch) -> dict of sums with its own "count".
    validation: like dataset; its loss is reported every `eval_every` steps and at the end.
    blocks:     module-name pattern of the repeated blocks: FSDP units and pipeline cut points, as in "layers.*".
    tp:         module-name pattern -> "colwise", "rowwise", "colwise_gather" (output gathered), "vocab" (embedding rows).
    tp_limit:   tp must divide it (the number of key-value heads, say); 0 = only the shapes decide.
    lr_factor:  optimizer step (from 0) -> factor on the optimizer's own learning rates.
    sample:     (model) -> text; a sample of what the finished model does, shown in the report.
    extra_state: objects with state_dict() that travel with the model.
    """

    model: Callable[[], Any]
    optimizer: Callable[[Any], Any]
    dataset: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    init: Callable[[Any], Any] | None = None
    validation: Callable[[], Any] | None = None
    count: Callable[[Any], Any] | None = None
    inputs: Callable[[Any], Any] | None = None
    metrics: Callable[[Any, Any], Mapping[str, Any]] | None = None
    evaluate: Callable[[Any, Any], Mapping[str, Any]] | None = None
    blocks: str = "layers.*"
    tp: Mapping[str, str] = field(default_factory=dict)
    tp_limit: int = 0
    lr_factor: Callable[[int], float] | None = None
    sample: Callable[[Any], str] | None = None
    extra_state: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, style in self.tp.items():
            if style not in TP_STYLES:
                raise SpecError(f"Program.tp['{pattern}'] is '{style}'; it must be one of {', '.join(TP_STYLES)}")


def load_program(path: str | Path) -> Program:
    """The `program` of a program.py (a Program, or a function of no arguments that returns one).

    Raises SpecError when the file is missing, has no `program`, or raises while it is imported.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise SpecError(f"{path}: no such file; a job folder needs a program.py that defines `program`")
    name = "elastic_program_" + hashlib.sha256(str(path).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SpecError:
        raise
    except Exception as error:  # a boundary: the user's file may raise anything
        raise SpecError(f"{path}: importing it raised {type(error).__name__}: {error}") from error
    program = getattr(module, "program", None)
    if callable(program) and not isinstance(program, Program):
        program = program()
    if not isinstance(program, Program):
        raise SpecError(f"{path}: it must define `program = elastic.Program(...)`; found {type(program).__name__}")
    return program
