"""As tiny.py, with a tied head."""

from dataclasses import replace
from pathlib import Path

from elastic.models.llama import Llama, LlamaConfig
from elastic.program import load_program

BASE = load_program(Path(__file__).with_name("tiny.py"))
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden=32,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    ffn_hidden=64,
    max_seq=16,
    tied=True,
)
program = replace(BASE, model=lambda: Llama(CONFIG))
