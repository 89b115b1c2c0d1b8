"""A scaling study: which runs it starts, what it reads of them, and when it stops them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.api.tiny_job import PROGRAM

from elastic.api.profiling import scaling
from elastic.api.running.options import Options
from elastic.config.job import JobSpec
from elastic.driver import drive
from elastic.errors import ElasticError, SpecError
from elastic.ledger.journal import Journal
from elastic.sim.scripted_faults import Delays
from elastic.sim.sim_backend import SimBackend
from elastic.storage import LocalStorage
from elastic.types import (
    DriverStarted,
    Job,
    ModelProfile,
    OptimizerSpec,
    Pool,
    ProfileAsked,
    TensorSpec,
)

MODEL = ModelProfile(
    4,
    1000,
    (TensorSpec("w", (100, 10), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg",), ("step",)),),
    tp_limit=2,
)
POOLS = (Pool("spot", "CPU", 2, "spot", 0.9, 0, 3),)


@dataclass
class Started:
    """What stands in for `run_job`: the simulator, and rows as the driver's thread gives them."""

    storage: LocalStorage
    steps: int = 40
    outcome: str = "succeeded"
    ends_at: int = 0  # the step at which the profile has
    specs: list[JobSpec] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)  # at which step each was told to

    def __call__(self, spec: JobSpec, options: Options) -> Any:
        self.specs.append(spec)
        name = str(options.run_name)
        run = LocalStorage(Path(self.storage.uri) / name)
        (key,) = run.list("inbox/")
        order = json.loads(run.get(key))["profile"]
        run.delete(key)
        keys = {**spec.job().plain(), "steps": self.steps, "global_batch": 8}
        start = DriverStarted(name, 1, keys, POOLS, MODEL)
        folder = Path(self.storage.uri) / name
        job = Job.from_plain(keys)
        drive(
            SimBackend(POOLS, job, [], delays=Delays()), Journal(folder / "journal.jsonl", 1), start
        )
        said = {
            "schema": 1, "rank": 0, "worker": "a/0", "at": "", "generation": 1, "steps": [5, 6, 7],
            "step_s": 0.1, "parts": {"compute": 0.1}, "collectives": {}, "on_device": False,
        }  # fmt: skip
        run.put(f"profiles/{order['profile_id']}/rank-0.json", json.dumps(said).encode())
        for step in range(1, self.steps + 1):
            if step == self.ends_at:
                asked = ProfileAsked(order["profile_id"], order["steps"], order["ranks"])
                lines = Journal(folder / "journal.jsonl", 1)
                lines.append(1e6, [(1e6, asked)])
                lines.close()
            assert options.on_step is not None
            options.on_step({"step": step})
            if run.list("inbox/"):
                self.stopped.append(step)
                break
        return SimpleNamespace(outcome=self.outcome, reason="no luck")


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "program.py").write_text(PROGRAM)
    (tmp_path / "tiny" / "job.yaml").write_text(
        "steps: 400\nglobal_batch: 8\ndrill: [{at_step: 3, kill: any}]\n"
    )
    made = Started(LocalStorage(tmp_path / "elastic_runs"))
    monkeypatch.setattr(scaling, "run_job", made)
    return made


def study(started: Started, *workers: int, **more: Any) -> scaling.ScalingStudy:
    return scaling.scaling_study("tiny", scaling.ScalingRequest(workers, **more))


def test_each_run_has_exactly_so_many_workers_and_no_drill(started: Started) -> None:
    found = study(started, 1, 2, 4)
    assert [(spec.min_workers, spec.max_workers) for spec in started.specs] == [
        (1, 1), (2, 2), (4, 4),
    ]  # fmt: skip
    assert all(spec.drill == [] for spec in started.specs)
    rows = found.plain()["scale"]
    assert [row["workers"] for row in rows] == [1, 2, 4]
    assert len({row["run"] for row in rows}) == 3
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["tokens_per_step"] / row["step_s"])
        assert row["linear_tokens_per_s"] == pytest.approx(row["workers"] * rows[0]["tokens_per_s"])
        assert row["efficiency"] == row["tokens_per_s"] / row["linear_tokens_per_s"]
        # not the first two, the three that were traced and the one behind them
        assert row["steps"] == 40 - 2 - 4
        assert row["parts"] == {"compute": 0.1}


def test_a_run_is_stopped_when_enough_is_measured(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "LOOK_S", 0.0)
    started.ends_at = 7
    study(started, 1)
    assert started.stopped == [7 + scaling.MEASURED + 1]


def test_too_few_steps_and_a_run_that_fails_are_one_line(started: Started) -> None:
    started.steps = 6
    with pytest.raises(ElasticError, match="made 6 steps, too few to measure; give it more"):
        study(started, 1)
    started.outcome = "failed"
    with pytest.raises(ElasticError, match="at 1 worker run '.*' has failed: no luck"):
        study(started, 1)


def test_the_picture(started: Started, tmp_path: Path) -> None:
    found = study(started, 1, png=tmp_path / "it.png")
    assert (tmp_path / "it.png").exists() and f"picture: {tmp_path}/it.png" in found.lines()
    with pytest.raises(SpecError, match="cannot be written .*; give a file that ends in .png"):
        study(started, 1, png=tmp_path / "it.nonsense")
