"""The tiny decoder's data under a model of about 100 MB of state (8.9 M parameters with AdamW's
moments)."""

from dataclasses import replace
from pathlib import Path

from elastic.models.llama import Llama, LlamaConfig
from elastic.program import load_program

CONFIG = LlamaConfig(vocab_size=64, hidden=448, n_layers=4, n_heads=8, n_kv_heads=8, max_seq=16)
tiny = load_program(Path(__file__).resolve().parents[2] / "programs" / "tiny.py")
program = replace(tiny, model=lambda: Llama(CONFIG))
