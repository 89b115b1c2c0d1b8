"""How well a drill is predicted: two runs of one job on the embedded cluster with different drills;
each is simulated with what the other has measured (`elastic simulate JOB --drill FILE --calibrate
RUN`) and compared with what came.

    python tests/bench/predict.py [--json] [--repeats 2]

Three minutes a repeat. Steps and transitions wait rather than compute, so that two cores are
enough; a machine that others use measures them all the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from report import finish, options
from trial import LEFT_OUT, ROOT, Clock, Failed

sys.path.insert(0, str(ROOT / "tests"))

from support.e2e import prediction
from support.e2e.prediction import Deviations, deviations, transitions

MOST_S = 1200.0
DRILLS = {"first": prediction.FIRST_DRILL, "other": prediction.OTHER_DRILL}


def answer(folder: Path, *words: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
    done = subprocess.run(
        [sys.executable, "-m", "elastic", *words, "--json"], cwd=folder, text=True, check=False,
        capture_output=True, env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"elastic {' '.join(words)}: {done.stderr.strip()[-600:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def both_ways(folder: Path, names: Sequence[str], clock: Clock) -> list[tuple[bool, Deviations]]:
    """Are the transitions as predicted, and how far the times are off."""
    (folder / "timed").mkdir()
    (folder / "timed" / "job.yaml").write_text(json.dumps(prediction.JOB))
    for name in names:
        clock.look(f"run {name}")
        (folder / f"{name}.yaml").write_text(json.dumps(DRILLS[name]))
        answer(folder, "run", "timed", "--run-name", name, "--drill", f"{name}.yaml")
    found = []
    for known, asked in ((names[0], names[-1]), (names[-1], names[0]))[: len(names)]:
        mine = answer(folder, "simulate", "timed", "--drill", f"{asked}.yaml", "--calibrate", known)
        its = answer(folder, "ledger", asked)
        same = transitions(mine) == transitions(its)
        if len(mine["transitions"]) != len(its["transitions"]):
            raise Failed(f"{transitions(mine)} were predicted, {transitions(its)} came")
        found.append((same, deviations(mine, its)))
    return found


def main() -> int:
    given = options(__doc__, MOST_S, repeats=1)
    # in the smallest size a run predicts itself
    names = ["first"] if given.smoke else list(DRILLS)

    def measure(clock: Clock) -> dict[str, Any]:
        found: list[tuple[bool, Deviations]] = []
        for _ in range(given.repeats):
            with tempfile.TemporaryDirectory(prefix="elastic-predict-") as folder:
                found += both_ways(Path(folder), names, clock)
        for same, one in found:
            if not given.json:
                print("\n".join([f"transitions {'exact' if same else 'differ'}", *one.lines()]))
        return {
            "transitions_exact": sum(same for same, _ in found) / len(found),
            "wall_off": median(abs(one.wall) for _, one in found),
            "pause_off": median(one.worst_pause for _, one in found),
            "category_points_off": median(one.worst_category for _, one in found),
        }

    return finish("predict", given, measure)


if __name__ == "__main__":
    sys.exit(main())
