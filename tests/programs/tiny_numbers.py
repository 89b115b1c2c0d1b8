"""As tiny_loss_parallel.py, with numbers of the validation set that are made of cut logits."""

from dataclasses import replace
from pathlib import Path

from elastic.program import load_program

BASE = load_program(Path(__file__).with_name("tiny_loss_parallel.py"))
program = replace(
    BASE,
    metrics=lambda output, batch: {"squares": output.square().sum()},
    evaluate=lambda model, batch: {
        "own": model(batch["input"]).square().sum(),
        "count": len(batch["input"]),
    },
)
