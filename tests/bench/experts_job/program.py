"""The quickstart's model with eight experts, of which each token goes to two, in each block."""

from dataclasses import replace
from pathlib import Path

from elastic.models.experts import MixtureOfExperts
from elastic.models.llama import Llama
from elastic.program import load_program

QUICKSTART = Path(__file__).resolve().parents[3] / "jobs" / "quickstart" / "program.py"
quickstart = load_program(QUICKSTART)
CONFIG = quickstart.model().config


def model() -> Llama:
    made = Llama(CONFIG)
    for block in made.layers:
        block.mlp = MixtureOfExperts(CONFIG.hidden, CONFIG.ffn_hidden // 2, 8, top_k=2)
    return made


tp = {name: style for name, style in quickstart.tp.items() if "mlp" not in name}
program = replace(quickstart, model=model, tp=tp)
