"""The tests' tiny decoder with three blocks: next to nothing to compute, so that what a drill makes
of each unit of work is all that takes time."""

from dataclasses import replace
from pathlib import Path

from elastic.models.llama import Llama, LlamaConfig
from elastic.program import load_program

CONFIG = LlamaConfig(
    vocab_size=64, hidden=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_hidden=64, max_seq=16
)
tiny = load_program(Path(__file__).resolve().parents[2] / "programs" / "tiny.py")
program = replace(tiny, model=lambda: Llama(CONFIG))
