"""As tiny_loss_parallel.py, with adapters, also on the head whose logits stay cut."""

from pathlib import Path

from elastic.models.lora import lora
from elastic.program import load_program

BASE = load_program(Path(__file__).with_name("tiny_loss_parallel.py"))
program = lora(BASE, ("wv", "w1", "w2", "head"), r=4)
