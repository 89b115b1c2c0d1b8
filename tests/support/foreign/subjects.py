"""Programs as people write them, and which layouts compute what one process does: subjects of the
checks of layouts.

Each file in programs/ has a `program` and EXPECT: for dp (dp_shard), tp, cp and pp either "equal",
"refused: <regex>" (of the place that a refusal should name) or "no plan" (there is no Program.tp).
MAY_LACK, where there is one, is a regex of parameters that one step may leave without a gradient;
NO_BACKWARD_ON_THE_CPU: torch has none there for an operation of it.

"equal" is said of the output, and of each parameter's gradient, of the same samples. Where a model
draws random numbers for its activations (dropout, drop_path), it is said of all but the draws.
Where the ranks' draws decide what is called (stochastic_depth), they would wait for each other:
that is refused.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from support.places import FOREIGN as FOLDER
from support.places import ROOT

from elastic.program import Program

FAMILIES = ("dp", "tp", "cp", "pp")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.py"


def module(name: str) -> ModuleType:
    """The file, imported anew."""
    spec = importlib.util.spec_from_file_location(f"foreign_{name}", path_of(name))
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def load(name: str) -> tuple[Program, dict[str, str]]:
    """The program and what is expected of it."""
    found = module(name)
    return found.program, found.EXPECT


def found_with(broken: str, folder: Path, *questions: dict[str, Any]) -> list[dict[str, Any]]:
    """What the check says of programs after `broken` was run in its process."""
    code = (
        f"{broken}\nimport sys\nfrom elastic.worker.equivalence.layout_check import "
        "main\nsys.exit(main([sys.argv[1]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder / "found")], input=json.dumps(questions), text=True,
        timeout=600, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in (folder / "found").read_text().splitlines()]
