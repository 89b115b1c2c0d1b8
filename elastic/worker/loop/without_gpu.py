"""A script that is written for GPUs, up to its loop: on a machine that has none, as the driver runs
it on the head of a cluster and `elastic plan` anywhere, and with a Trainer that would put the whole
model on one."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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


def answered() -> AbstractContextManager[None]:
    """Within it transformers takes arguments for GPUs here too, as it will in the workers, and a
    Trainer leaves its model in the memory of the host."""
    return _replaced({} if torch.cuda.is_available() else ANSWERS)


def unplaced() -> AbstractContextManager[None]:
    """Within it a Trainer leaves its model in the memory of the host."""
    return _replaced({})


@contextmanager
def _replaced(answers: Mapping[str, object]) -> Iterator[None]:
    finder = _Finder(answers)
    if loaded := sys.modules.get(ARGUMENTS):
        finder.answer(loaded)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module, own, places in finder.replaced:
            vars(module).update(own)
            module.TrainingArguments.place_model_on_device = places


class _Finder(MetaPathFinder):
    """Finds the module of the arguments as it would be found, and replaces its questions once it
    has run."""

    def __init__(self, answers: Mapping[str, object]) -> None:
        self.replaced: list[tuple[ModuleType, dict[str, object], object]] = []
        self._answers, self._asks = answers, False

    def answer(self, module: ModuleType) -> None:
        own = {name: vars(module)[name] for name in self._answers if name in vars(module)}
        places = module.TrainingArguments.place_model_on_device
        self.replaced.append((module, own, places))
        vars(module).update((name, self._answers[name]) for name in own)
        module.TrainingArguments.place_model_on_device = False

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
