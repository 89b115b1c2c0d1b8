"""The same with 6 layers of width 320 (7.7 M parameters): a step of which the fixed costs are a
smaller part."""

from dataclasses import replace
from pathlib import Path

from elastic.models.llama import Llama, LlamaConfig
from elastic.program import load_program

CONFIG = LlamaConfig(vocab_size=512, hidden=320, n_layers=6, n_heads=10, n_kv_heads=10, max_seq=128)
quickstart = load_program(
    Path(__file__).resolve().parents[3] / "jobs" / "quickstart" / "program.py"
)
program = replace(quickstart, model=lambda: Llama(CONFIG), tp_limit=CONFIG.n_kv_heads)
