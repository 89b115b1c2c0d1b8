"""`elastic simulate --drill`: what it answers, and what it refuses in one line. The whole way is in
tests/e2e/test_predicted_run.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.e2e.prediction import FIRST_DRILL, JOB, OTHER_DRILL, STEPS, transitions
from support.e2e.shell import PROGRAMS, Shell, last_line

from elastic.api.planning.model_source import of_job
from elastic.config.job import load_job
from elastic.driver import drive
from elastic.ledger.journal import Journal
from elastic.ledger.run_folder import JOURNAL
from elastic.sim.markets.calibration import Calibration
from elastic.sim.markets.drilled_run import DrilledBackend
from elastic.sim.scripted_faults import Delays
from elastic.types import DriverStarted


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job, both drills, and a run of the first."""
    tmp_path = tmp_path_factory.mktemp("recorded")
    # nothing trains: a program that waits in each pass would only be waited for
    name = Shell(tmp_path).job(**JOB | {"eval_every": 20, "program": str(PROGRAMS / "tiny.py")})
    for run, drill in (("first", FIRST_DRILL), ("other", OTHER_DRILL)):
        (tmp_path / f"{run}.yaml").write_text(json.dumps(drill))
    folder = tmp_path / "elastic_runs" / "first"
    folder.mkdir(parents=True)
    spec = load_job(tmp_path / name)
    job, pools = spec.job(), tuple(pool.pool() for pool in spec.pools)
    known = Calibration(Delays(prepare_s=6.0), {}, 1.0, {}, evaluation_s=0.5, data=0.5)
    model = of_job(tmp_path / name).model
    backend = DrilledBackend(
        pools, job, FIRST_DRILL, measured=known, step_s=lambda plan: 1.2 / len(plan.ranks)
    )
    start = DriverStarted("first", 1, job.plain(), pools, model)
    drive(backend, Journal(folder / JOURNAL, 1), start)
    return tmp_path


@pytest.fixture
def shell(recorded: Path, tmp_path: Path) -> Shell:
    """In a copy of it."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    return Shell(tmp_path)


def test_a_market_is_simulated_with_the_steps_that_a_run_measured(shell: Shell) -> None:
    """Half of which waited for data; of another batch they are others. A validation takes as long as
    a step does in the mean."""

    def simulated(*keys: str) -> dict[str, Any]:
        more = [word for key in ("steps=11000", *keys) for word in ("--set", key)]
        few = ("--compare", "on-demand", "--start-times", "1", "--json")
        code, out, err = shell.here("simulate", "tiny", "--calibrate", "first", *few, *more)
        assert code == 0, err
        return last_line(out)

    pool = "{name: spot, market_type: spot, accelerator_type: T4, usd_per_node_h: 1, max_nodes: 2}"
    same, other, gpus = map(simulated, ("seed=1", "global_batch=24", f"pools=[{pool}]"))
    assert same["ideal_h"] == pytest.approx(0.4 * 1.05 * 11000 / 3600, rel=0.01)
    assert all(0.3 < one["goodput"]["median"] <= 0.5 for one in same["policies"].values())
    told = [note for one in (same, other, gpus) for note in one["notes"] if "not as in" in note]
    assert [note.partition("; steps take")[0] for note in told] == [
        "not as in run first: global_batch", "not as in run first: GPUs (CPU there)"
    ]  # fmt: skip
    assert other["ideal_h"] != same["ideal_h"]


def test_a_drill_is_told_beforehand(shell: Shell) -> None:
    words = ("simulate", "tiny", "--drill", "other.yaml", "--calibrate", "first")
    code, out, err = shell.here(*words, "--json")
    assert code == 0, err
    found = last_line(out)
    assert (found["outcome"], found["steps"]) == ("succeeded", STEPS)
    assert [one[0] for one in transitions(found)] == ["start", "loss", "growth", "notice", "growth"]
    assert found["categories"]["reshard"]["gpu_seconds"] > 0 and found["totals"]["wall_s"] > 0
    assert "measured by run first: " in found["notes"][0]
    code, out, err = shell.here(*words)
    assert code == 0 and "succeeded: all" in out and "CATEGORY" in out and "growth" in out, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--drill", "other.yaml"], "--drill needs --calibrate RUN"),
        (["--drill", "none.yaml", "--calibrate", "first"], "none.yaml: no such file"),
        (["--drill", "slow.yaml", "--calibrate", "first"], "entry 1: slow is not simulated"),
        (["--drill", "other.yaml", "--calibrate", "nobody"], "no run 'nobody'"),
        (
            ["--drill", "other.yaml", "--calibrate", "first", "--trace", "t"],
            "--trace is of markets",
        ),
    ],
)
def test_what_is_wrong_is_one_line(shell: Shell, words: list[str], said: str) -> None:
    (shell.root / "slow.yaml").write_text('[{"at_step": 3, "slow": "any", "factor": 2.0}]')
    code, out, err = shell.here("simulate", "tiny", *words)
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err
