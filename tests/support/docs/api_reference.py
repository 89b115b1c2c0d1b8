"""docs/api.md: what `import elastic` gives, from the signatures and docstrings.

python tests/support/docs/api_reference.py    # writes the page anew
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

import elastic
from elastic.models.experts import Experts, MixtureOfExperts
from elastic.worker.loop.loop import Run

PAGE = Path(__file__).resolve().parents[3] / "docs" / "api.md"
INTRO = """# Python API

You want to call it from Python: `import elastic`. What a name takes and gives is here, as its docstring says it; the page in the heading
has the examples. `import elastic` imports neither torch nor Ray.
"""
SECTIONS = (  # heading, page with examples, names
    ("A program of your own", "program.md", ("Program", "Weights", "attention", "positions")),
    ("Your own loop", "loop.md", ("loop", "Run")),
    ("A script with a Trainer of transformers", "huggingface.md", ("prepare_trainer",)),
    ("A script that is started over", "script.md", ("log",)),
    ("Start a run", "program.md", ("run", "Options", "Result")),
    ("In the place of a TorchTrainer", "ray-train.md", ("ElasticTrainer", "train_loop")),
    ("Layouts, pools, plans", "layouts.md", ("Layout", "Pool", "Plan")),
    ("Mixtures of experts in plain torch", "layouts.md", ("MixtureOfExperts", "Experts")),
    (
        "Errors",
        "troubleshooting.md",
        ("ElasticError", "SpecError", "InfeasiblePlan", "NoCapacity", "StateLost", "ProgramError",
         "InternalError"),
    ),
)  # fmt: skip


GIVEN = ("Run", "Plan")  # not made by a user
ELSEWHERE = {"Run": Run, "MixtureOfExperts": MixtureOfExperts, "Experts": Experts}


def of(name: str) -> Any:
    return ELSEWHERE.get(name) or getattr(elastic, name)


def signature(name: str, made: Any) -> str:
    """`name(a, *, b=1)`, one parameter a line where it is long."""
    parameters = [p for p in inspect.signature(made).parameters.values() if p.name != "self"]
    texts = [_parameter(p) for p in parameters]
    named = [k for k, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
    if named:
        texts.insert(named[0], "*")
    line = f"{name}({', '.join(texts)})"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + ")"


def _parameter(p: inspect.Parameter) -> str:
    annotation = "" if p.annotation is p.empty else f": {p.annotation}"
    if p.default is p.empty:
        return ("**" if p.kind is p.VAR_KEYWORD else "") + p.name + annotation
    default = getattr(p.default, "__name__", None) or repr(p.default)
    return f"{p.name}{annotation} = {'...' if '<' in default else default}"


def methods(made: type) -> Iterator[str]:
    """Public methods and properties of a class whose docstring says something."""
    for name, member in vars(made).items():
        plain = member.fget if isinstance(member, property) else member
        text = inspect.getdoc(plain) if callable(plain) else None
        fields = getattr(made, "__dataclass_fields__", {})
        if name.startswith("_") or name in fields or not text or inspect.isclass(plain):
            continue
        called = name if isinstance(member, property) else signature(name, plain)
        yield f"`.{called}`\n\n{text}\n"


def entry(name: str) -> str:
    made = of(name)
    parts = [f"### {name}"]
    if inspect.isclass(made) and issubclass(made, BaseException):
        return "\n\n".join([*parts, inspect.getdoc(made) or ""]) + "\n"
    if name in ELSEWHERE and name not in GIVEN:
        parts.append(f"`from {made.__module__} import {name}`")
    if name not in GIVEN:
        parts.append(f"```\n{signature(name, made)}\n```")
    parts.append(f"```\n{inspect.getdoc(made)}\n```")
    if inspect.isclass(made) and not issubclass(made, nn.Module):  # else torch calls them
        parts += methods(made)
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def page() -> str:
    found = [INTRO]
    for title, where, names in SECTIONS:
        found += [f"## {title} ([{where}]({where}))\n", *map(entry, names)]
    return "\n".join(found)


def missing() -> list[str]:
    """Exported names that are on no row."""
    shown = {name for _, _, names in SECTIONS for name in names}
    return sorted(set(elastic.__all__) - shown - {"__version__"})


if __name__ == "__main__":
    PAGE.write_text(page())
