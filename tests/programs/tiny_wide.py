"""As tiny_bare.py, with matrices large enough for blocks of few bits: 4,096 elements and more, and rows
of two blocks of 64."""

from dataclasses import replace
from pathlib import Path

from elastic.models.llama import Llama, LlamaConfig
from elastic.program import load_program

CONFIG = LlamaConfig(
    vocab_size=64, hidden=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_hidden=128, max_seq=16
)
program = replace(
    load_program(Path(__file__).with_name("tiny_bare.py")), model=lambda: Llama(CONFIG)
)
