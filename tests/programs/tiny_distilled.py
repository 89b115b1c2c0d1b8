"""tiny.py learns beside a frozen teacher that is wider and has fewer blocks; its weights lie in a
file that the first process to import this writes."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from elastic.models.distillation import distilled
from elastic.models.llama import Llama, LlamaConfig, init_weights
from elastic.program import Program, Weights, load_program

STUDENT = load_program(Path(__file__).with_name("tiny.py"))
CONFIG = LlamaConfig(
    vocab_size=64, hidden=48, n_layers=2, n_heads=4, n_kv_heads=4, ffn_hidden=64, max_seq=16
)
FILE = Path(tempfile.gettempdir()) / f"elastic-tiny-teacher-{os.getuid()}" / "model.safetensors"


def written() -> Path:
    if not FILE.exists():
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = Llama(CONFIG)
            init_weights(model)
        weights = {name: 3 * p.detach() for name, p in model.named_parameters()}
        FILE.parent.mkdir(exist_ok=True)
        mine = FILE.with_name(f"{os.getpid()}.part")
        save_file(weights, mine)
        mine.rename(FILE)
    return FILE


def read(model: Llama) -> None:
    model.load_state_dict(load_file(written()), strict=False)


teacher = Program(
    model=lambda: Llama(CONFIG),
    init=read,
    loss=STUDENT.loss,
    tp=STUDENT.tp,
    tp_limit=4,
    weights=Weights(written()),
)
program = distilled(STUDENT, teacher, temperature=2.0, share=0.7)
own = distilled(STUDENT, replace(teacher, weights=None))
