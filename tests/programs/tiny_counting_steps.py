"""As tiny.py, with optimizers that count beside the state of their parameters: in their groups, on
the object, and in the state under a text."""

from dataclasses import replace
from pathlib import Path

from programs import counting_optimizers as own

from elastic.program import load_program


def optimizers(named_parameters):
    named = dict(named_parameters)
    matrices = {n for n, p in named.items() if n.startswith("layers.") and p.ndim == 2}
    by = {
        "attention": (own.GroupStep, {n for n in matrices if ".attn." in n}),
        "up": (own.GroupStepLamb, {n for n in matrices if ".mlp.w1" in n}),
        "down": (own.StateCount, {n for n in matrices if ".mlp.w2" in n}),
        "gate": (own.ScheduleFree, {n for n in matrices if ".mlp.w3" in n}),
        "norms": (own.OwnCount, {n for n in named if "norm" in n}),
    }
    rest = set(named).difference(*(names for _, names in by.values()))
    made = {
        key: kind([p for n, p in named.items() if n in names], lr=4e-3)
        for key, (kind, names) in by.items()
    }
    # embedding and head: pipeline stages in the middle have nothing of it
    return made | {"ends": own.GroupStep([p for n, p in named.items() if n in rest])}


program = replace(
    load_program(Path(__file__).with_name("tiny.py")), optimizer=optimizers, lr_factor=None
)
