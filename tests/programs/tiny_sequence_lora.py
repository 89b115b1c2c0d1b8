"""As tiny_sequence.py, with adapters on layers that take gathered sequences and give parts, and on
the uncut head."""

from pathlib import Path

from elastic.models.lora import lora
from elastic.program import load_program

BASE = load_program(Path(__file__).with_name("tiny_sequence.py"))
program = lora(BASE, ("wq", "wo", "w3", "w2", "head"), r=4)
