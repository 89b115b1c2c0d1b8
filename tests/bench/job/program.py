"""The quickstart's program with the shape of the published measurement: 4 layers, width 192, 128
tokens (2.2 M parameters)."""

from dataclasses import replace
from pathlib import Path

from elastic.models.llama import Llama, LlamaConfig
from elastic.program import load_program

CONFIG = LlamaConfig(vocab_size=512, hidden=192, n_layers=4, n_heads=6, n_kv_heads=6, max_seq=128)
quickstart = load_program(
    Path(__file__).resolve().parents[3] / "jobs" / "quickstart" / "program.py"
)
program = replace(quickstart, model=lambda: Llama(CONFIG), tp_limit=CONFIG.n_kv_heads)
