"""The job as a noun: made from the checked spec or from plain data, and back."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT

from elastic.config.job import JobSpec, job_data, job_of
from elastic.config.optimization import (
    BlockNorm,
    GradNorm,
    LossSpike,
    LrSchedule,
    NoiseScaleSettings,
)
from elastic.ledger.journal import built, plain
from elastic.policy.state.fold import State, fold
from elastic.types import DriverStarted, Job, LrCurve, ModelProfile, NotFiniteRule, Pool
from elastic.types.typed_job import OLDER, TOLD

JOBS = sorted(path.parent.name for path in (ROOT / "jobs").glob("*/job.yaml"))
FULL: dict[str, Any] = {
    "steps": 10, "global_batch": 8, "seed": 3, "layout": {"2": "tp=2", "4": "pp=2,dp_shard=2"},
    "schedule": "gpipe", "optimizer": {"path": "torch.optim.AdamW", "lr": 0.1},
    "lr_schedule": {"kind": "wsd", "warmup_steps": 2}, "lr_scaling": "sqrt", "base_global_batch": 4,
    "noise_scale": {"every": 5}, "guards": {"not_finite": "skip", "loss_spike": {"z": 6},
    "grad_norm": {"most": 5}, "block_norm": {"least": 1e-3}}, "data": {"train": {"tokens": "t",
    "seq": 8}, "validation": {"a": {"jsonl": "a"}, "b": "rows"}, "cache_gb": 3},
    "drill": [{"at_step": 3, "kill": "any"}, {"at_step": 4, "partition": "any", "from": "driver"}],
    "pools": [{"name": "p", "max_nodes": 4, "usd_per_node_h": 1.5}], "trusted_axes": ["pp"],
    "on_demand_floor": "copy", "trackers": {"wandb": {"project": "p"}, "mlflow": None},
    "metrics_port": "127.0.0.1:9400",
}  # fmt: skip


def spec_of(**data: Any) -> JobSpec:
    return job_of({"steps": 1, "global_batch": 1, **data}, Path("program.py"))


@pytest.mark.parametrize("name", JOBS)
def test_every_job_comes_back_as_it_was(name: str) -> None:
    data, where = job_data(ROOT / "jobs" / name)
    spec = job_of(
        {"steps": 1, "global_batch": 1, **data}, ROOT / "jobs" / name / "program.py", where
    )
    assert spec.job().plain() == spec.plain()
    assert json.dumps(spec.job().plain()) == json.dumps(spec.plain()), "in the same order too"


def test_what_nests_is_typed() -> None:
    spec = spec_of(**FULL)
    job = Job.from_plain(json.loads(json.dumps(spec.plain())))
    assert job == spec.job() and job.plain() == spec.plain()
    assert (
        job.guards.not_finite == NotFiniteRule("skip") and job.guards.of("loss_spike").in_a_row == 8
    )
    assert job.guards.loss_spike is not None and (
        job.guards.loss_spike.z,
        job.guards.loss_spike.window,
    ) == (6, 64)
    assert (
        job.lr_schedule == LrCurve("wsd", 2)
        and job.noise_scale is not None
        and job.noise_scale.every == 5
    )
    assert job.pools == (Pool("p", max_nodes=4, usd_per_node_h=1.5),)
    assert job.data.cache_gb == 3 and job.data.train == {"tokens": "t", "seq": 8}
    assert job.drill[1] == {"at_step": 4, "partition": "any", "from": "driver"}
    assert job.layout_of("tp=2").schedule == "gpipe" and job.options == {
        "schedule": "gpipe",
        "offload": False,
    }


def test_the_defaults_of_job_yaml_are_those_of_the_noun() -> None:
    spec = spec_of()
    plain = Job(
        name=spec.name,
        folder=spec.folder,
        program=spec.program,
        steps=1,
        global_batch=1,
        pools=spec.job().pools,
    )
    assert spec.job() == plain
    assert {one.name for one in fields(Job)} == {*JobSpec.model_fields, *TOLD}
    given = {"loss_spike": LossSpike(), "grad_norm": GradNorm(z=1), "block_norm": BlockNorm(most=1)}
    rules = {"loss_spike": {}, "grad_norm": {"z": 1}, "block_norm": {"most": 1}}
    assert spec_of(guards=given).job().guards == Job.from_plain({"guards": rules}).guards
    curve, noise = LrSchedule(kind="cosine").model_dump(), NoiseScaleSettings().model_dump()
    told = {"lr_schedule": {"kind": "cosine"}, "noise_scale": {}}
    assert Job.from_plain({"lr_schedule": curve, "noise_scale": noise}) == Job.from_plain(told)


def test_plain_data_of_an_older_version() -> None:
    found = Job.from_plain(
        {"steps": 5, "global_batch": 2, "seed": None, "guards": None, "gone": [1]}
    )
    assert (found.steps, found.global_batch, found.seed, found.min_workers, found.layout) == (
        5,
        2,
        0,
        1,
        "auto",
    )
    assert (
        not found.verify_copies
        and not found.check_numbers_every
        and found.purpose == "fastest"
        and not found.eval_samples
    )
    assert {key: getattr(Job(), key) for key in OLDER} == {
        "verify_copies": True, "check_numbers_every": "auto", "purpose": "auto", "eval_samples": 64,
        "batch_norm": "auto",
    }  # fmt: skip
    assert Job.from_plain(found.plain()) == found, (
        "and it stays so where its state is written and read again"
    )


def test_what_a_running_job_is_told_is_kept_and_stands_nowhere_else() -> None:
    told = {
        "fingerprint": {"tensors": "x"},
        "computes_in": "",
        "n_samples": 7,
        "restarted": True,
        "cwd": "/home/me",
        "keys_in": "by --set",
        "phase": 1,
        "lengths": [7, 9],
    }
    assert {*told} == {*TOLD}
    plain = spec_of(steps=4, phases=[{"from_step": 2, "global_batch": 9}]).plain()
    assert Job.from_plain({**plain, **told}).plain() == {**plain, **told}
    assert not {*TOLD} & {*spec_of().job().plain()}


def test_a_state_is_written_with_the_job_as_a_driver_has_it() -> None:
    job = spec_of(**FULL, args=["--hf-token", "hf-secret-1"], script="train.py").plain()
    state = fold(State(), DriverStarted("r", 1, job, (), ModelProfile(1, 1, ())), 0.0)
    written = plain(state)["job"]
    assert written == {**job, "args": ["--hf-token", "***"]}
    assert built(State, json.loads(json.dumps(plain(state)))).job == Job.from_plain(written)
