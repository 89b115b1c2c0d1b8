"""torch.compile of the repeated blocks, one by one: equal blocks share their compiled code.

What is compiled lies in a folder on the node's own disk and serves later generations and processes;
in memory it is forgotten between generations, since it knows the groups of the generation that it
was made in. A rehearsal (Prepare) fills the folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from elastic.errors import SpecError
from elastic.version import COMPILED, own_folder
from elastic.worker.parallel.activation_checkpointing import WrittenBuffers, written_by

CACHE, THREADS, COMPILER = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "CXX"


def settle_compiler(device: torch.device) -> None:
    """Where compiled code is kept; before the first is made. Raises SpecError where nothing can be
    compiled here."""
    compiler = os.environ.get(COMPILER, "g++")
    if shutil.which(compiler) is None:
        raise SpecError(
            f"compile: true needs a C++ compiler, and there is no '{compiler}' here; install one, "
            "or set CXX"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise SpecError(
            "compile: true needs the package triton on a GPU, which is not installed; take "
            "compile: false"
        )
    if not os.environ.get(CACHE):
        os.environ[CACHE] = own_folder(COMPILED)  # torch unpickles what it finds there
    if device.type == "cpu":
        os.environ.setdefault(THREADS, "1")  # the workers of a node are as many as its cores


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """The blocks' forward passes are compiled when they are first called; names of modules and
    parameters stay."""
    forget_compiled()
    for block in blocks:
        plain = block.forward
        block.forward = torch.compile(plain)
        if written := written_by(plain):
            block.forward = UnlessItWrites(plain, block.forward, written)


class UnlessItWrites:
    """The forward pass of a block that is computed again: compiled, unless its first call in
    training writes buffers. Compiled, the pass that is done again would write them a second time;
    such a block is left as it is."""

    def __init__(
        self, plain: Callable[..., Any], compiled: Callable[..., Any], written: WrittenBuffers
    ) -> None:
        self.plain, self.written = plain, written
        self.chosen, self.tried = compiled, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.tried or not torch.is_grad_enabled():
            return self.chosen(*args, **kwargs)
        self.tried, drawn = True, torch.get_rng_state()
        before = self.written.noted()
        found = self.chosen(*args, **kwargs)
        if not before.changed():
            return found
        before.put_back()
        torch.set_rng_state(drawn)
        self.chosen = self.plain
        return self.plain(*args, **kwargs)


def forget_compiled() -> None:
    """What is in memory; the folder stays."""
    torch.compiler.reset()
