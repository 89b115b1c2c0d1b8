"""A script that is written for GPUs, on a machine that has none: the driver runs it up to its loop
on the head of a cluster, and `elastic plan` on any machine."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

# TrainingArguments(bf16=True) and (tf32=True) are refused by what these say of this machine
ARGUMENTS = "transformers.training_args"
ANSWERS = {
    "is_torch_bf16_gpu_available": lambda: True,
    "is_torch_tf32_available": lambda: True,
    "enable_tf32": lambda enable: None,
}
NO_GPU = re.compile(
    r"Found no NVIDIA driver|Torch not compiled with CUDA|No CUDA GPUs are available"
)
ADVICE = (
    "this machine has no GPU, and need not have one: elastic.loop puts the model and each batch on "
    "the GPU of its worker; leave .to('cuda') out, or write device = 'cuda' if "
    "torch.cuda.is_available() else 'cpu'"
)


@contextmanager
def answered() -> Iterator[None]:
    """Within it transformers takes arguments for GPUs here too, as it will in the workers."""
    if torch.cuda.is_available():
        yield
        return
    finder = _Finder()
    if loaded := sys.modules.get(ARGUMENTS):
        finder.answer(loaded)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module, own in finder.replaced:
            vars(module).update(own)


class _Finder(MetaPathFinder):
    """Finds the module of the arguments as it would be found, and replaces its questions once it
    has run."""

    def __init__(self) -> None:
        self.replaced: list[tuple[ModuleType, dict[str, object]]] = []
        self._asks = False

    def answer(self, module: ModuleType) -> None:
        own = {name: vars(module)[name] for name in ANSWERS if name in vars(module)}
        self.replaced.append((module, own))
        vars(module).update((name, ANSWERS[name]) for name in own)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ARGUMENTS or self._asks:
            return None
        self._asks = True
        try:
            found = importlib.util.find_spec(fullname)
        finally:
            self._asks = False
        if found is not None and found.loader is not None:
            run = found.loader.exec_module

            def run_and_answer(module: ModuleType) -> None:
                run(module)
                self.answer(module)

            found.loader.exec_module = run_and_answer  # type: ignore[method-assign]
        return found
