"""As tiny.py, with sequence parallelism, and logits that stay cut over tp for the loss."""

from dataclasses import replace
from pathlib import Path

from elastic.models.llama import tp_plan
from elastic.program import load_program

BASE = load_program(Path(__file__).with_name("tiny.py"))
program = replace(BASE, tp=tp_plan(vocab=True, sequence=True))
