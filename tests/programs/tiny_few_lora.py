"""As tiny.py, with adapters in one block only: of four pipeline stages three have nothing to
train."""

from pathlib import Path

from elastic.models.lora import lora
from elastic.program import load_program

BASE = load_program(Path(__file__).with_name("tiny.py"))
program = lora(BASE, ("layers.1.attn.wq", "layers.1.attn.wo"), r=4)
