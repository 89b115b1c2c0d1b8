"""The tiny program; each of its nodes writes down when it computes a loss of a step."""

import os
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from elastic.program import load_program

slow = load_program(Path(__file__).parent / "tiny_slow.py")
FOLDER, NODE = "ELASTIC_TEST_WATCHED", "ELASTIC_TEST_NODE"  # of its environment


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    folder, node = os.environ.get(FOLDER), os.environ.get(NODE)
    # a node that tries its layout out is nobody who trains
    if folder and node and dist.is_initialized() and dist.get_backend() != "fake":
        with open(Path(folder, node), "a") as file:
            file.write(f"{time.time()}\n")
    return slow.loss(output, batch)


program = replace(slow, loss=loss)
