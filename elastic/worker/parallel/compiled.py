"""torch.compile of the repeated blocks, one by one: equal blocks share their compiled code.

What is compiled lies in a folder on the node's own disk and serves later generations and processes;
in memory it is forgotten between generations, since it knows the groups of the generation that it
was made in. A rehearsal (Prepare) fills the folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence

import torch
from torch import nn

from elastic.errors import SpecError

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
    os.environ.setdefault(
        CACHE, os.path.join(tempfile.gettempdir(), f"elastic-compiled-{os.getuid()}")
    )
    if device.type == "cpu":
        os.environ.setdefault(THREADS, "1")  # the workers of a node are as many as its cores


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """The blocks' forward passes are compiled when they are first called; names of modules and
    parameters stay."""
    forget_compiled()
    for block in blocks:
        block.forward = torch.compile(block.forward)


def forget_compiled() -> None:
    """What is in memory; the folder stays."""
    torch.compiler.reset()
