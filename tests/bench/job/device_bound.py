"""The bench's program with steps as on an accelerator: the host waits for most of a step instead of
computing.

On a machine with few cores a node that prepares takes the time of those that train, and what is
measured is the scheduler. Here each forward waits in proportion to its samples, as a GPU's step
leaves its host's cores free for what happens beside it.
"""

import os
import time
from dataclasses import replace
from typing import Any

from elastic.models.llama import Llama
from elastic.program import load_program

SECONDS_PER_SAMPLE = float(os.environ.get("BENCH_SAMPLE_S", "0.25"))
base = load_program(__file__.replace("device_bound.py", "program.py"))


def _wait(module: Any, inputs: tuple[Any, ...]) -> None:
    if not inputs[0].is_meta:
        time.sleep(SECONDS_PER_SAMPLE * inputs[0].shape[0])


def model() -> Llama:
    built: Llama = base.model()
    built.register_forward_pre_hook(_wait)
    return built


program = replace(base, model=model)
