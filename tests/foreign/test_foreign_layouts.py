"""What each layout does to programs that people write: it computes what one process does, or is
closed with the reason.

All of them are asked of one process, as a run asks before it starts
(elastic/worker/equivalence/layout_check.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from support.foreign import subjects
from support.places import ROOT

JOB = {"steps": 10, "global_batch": 16, "seed": 1, "n_samples": 64, "batch_norm": "auto"}
MOST_S = 900.0


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Name -> what was found of it, for each program that a test of this session asks for."""
    out = tmp_path_factory.mktemp("layouts") / "found"
    found = [
        getattr(item, "callspec", None)
        for item in request.session.items
        if item.path == request.path
    ]
    names = [callspec.params["name"] for callspec in found if callspec is not None]
    asked = [
        {"job": JOB | {"program": str(subjects.path_of(name))}, "tps": [2], "most_s": MOST_S}
        for name in names
    ]
    root = ROOT
    done = subprocess.run(
        [sys.executable, "-m", "elastic.worker.equivalence.layout_check", str(out)],
        input=json.dumps(asked), text=True,
            timeout=MOST_S,
        cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(names, map(json.loads, out.read_text().splitlines()), strict=True))


def refusal(found: dict[str, Any], axis: str) -> str:
    """Why an axis is closed; '' = nothing is said."""
    if "error" in found:
        assert not re.match(r"\w+(Error|Exception): ", found["error"]), (
            "the run would start without knowing more than this"
        )
        return str(found["error"])
    return str(found["structure"][f"no_{axis}"])


@pytest.mark.e2e
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", subjects.names())
def test_each_layout_computes_the_same_or_is_closed(
    name: str, verdicts: dict[str, dict[str, Any]]
) -> None:
    found, (_, expect) = verdicts[name], subjects.load(name)
    for axis, said in expect.items():
        why, equal = refusal(found, axis), axis in (found.get("equal") or {})
        if said == "equal":
            assert equal and not why, f"{axis}: {why or found.get('skipped')}"
        elif said == "no plan" or (
            axis == "pp" and not why and name in ("albert_list", "albert_loop")
        ):
            assert not equal  # there is no Program.tp; a single block cannot be spread
        else:
            place = said.removeprefix("refused: ")
            assert why and not equal, f"{axis}: expected a refusal that names {place}"
            assert re.search(place, why) or f"{name}.py:" in why, f"{axis}: {why}"
            assert "\n" not in why and len(why) < 500
