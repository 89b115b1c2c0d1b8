"""The tiny program, whose blocks stall in a process that says so in its environment."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.models.llama import Llama
from elastic.program import load_program

tiny = load_program(Path(__file__).parent / "tiny.py")
STANDS = "ELASTIC_TEST_STANDS"


def stand(module: Any, args: Any) -> None:
    while os.environ.get(STANDS):
        time.sleep(0.01)


def model() -> Llama:
    made = tiny.model()
    for layer in made.layers:
        layer.register_forward_pre_hook(stand)
    return made


program = replace(tiny, model=model)
