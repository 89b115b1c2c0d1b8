"""As tiny_wide.py, with adapters in the blocks: `frozen_weights: nf4` has something to pack."""

from pathlib import Path

from elastic.models.lora import lora
from elastic.program import load_program

BASE = load_program(Path(__file__).with_name("tiny_wide.py"))
program = lora(BASE, ("wq", "wv", "wo", "w1", "w2"), r=4, alpha=16)
