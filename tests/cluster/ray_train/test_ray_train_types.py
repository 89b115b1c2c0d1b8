"""Each field of Ray Train's configurations is a key of the job, or is refused by name in one
line."""

from __future__ import annotations

import pickle
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.places import PROGRAMS, ROOT

import elastic
from elastic.errors import SpecError
from elastic.program import Program, load_program

train = pytest.importorskip("ray.train")
from elastic.cluster.ray_train import train_types  # noqa: E402
from elastic.cluster.ray_train.train_types import (  # noqa: E402
    FinishedRun,
    pools,
    read_checkpoint,
    result_of,
    wanted,
)

TINY = PROGRAMS / "tiny.py"
Scaling, Run, Failure, Keep = (
    train.ScalingConfig,
    train.RunConfig,
    train.FailureConfig,
    train.CheckpointConfig,
)


def test_what_is_mapped() -> None:
    asked = wanted(
        Scaling(num_workers=(2, 8)),
        Run(name="r", storage_path="/s", checkpoint_config=Keep(num_to_keep=3)),
    )
    assert asked.job == {"min_workers": 2, "max_workers": 8, "storage": "/s", "keep_last": 3}
    assert (asked.run_name, asked.gpu, asked.show) == ("r", False, True)
    assert pools(asked, on_cluster=False) == [
        {
            "name": "workers",
            "accelerator_type": "CPU",
            "market_type": "owned",
            "gpus_per_node": 2,
            "max_nodes": 4,
        }
    ]
    asked = wanted(Scaling(num_workers=3), None)
    assert (asked.job["min_workers"], asked.job["max_workers"], asked.job["keep_every"]) == (
        3,
        3,
        1,
    )
    assert pools(asked, on_cluster=False)[0]["max_nodes"] == 3
    labels = {"ray.io/market-type": "spot", "elastic-pool": "cheap"}
    asked = wanted(
        Scaling(num_workers=1, use_gpu=True, accelerator_type="H100", label_selector=labels), None
    )
    assert asked.pool == {"accelerator_type": "H100", "market_type": "spot", "name": "cheap"}
    best = Keep(
        num_to_keep=2, checkpoint_score_attribute="validation_loss", checkpoint_score_order="min"
    )
    quiet = train.LoggingConfig(log_level="ERROR")
    asked = wanted(
        None,
        Run(checkpoint_config=best, failure_config=Failure(max_failures=-1), logging_config=quiet),
    )
    assert asked.job["keep_best"] == 2
    assert not asked.show


@pytest.mark.parametrize("n", [3, -1, 0])
def test_failures_that_may_be_many_are_taken_and_said_to_be_what_they_are_here(n: int) -> None:
    notes = wanted(None, Run(failure_config=Failure(max_failures=n))).notes
    assert [note.partition(": a node")[0] for note in notes] == (
        [f"FailureConfig(max_failures={n})"] if n else []
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_workers": 0}, r"num_workers=0\): 0 is Ray Train's local mode"),
        (
            {"resources_per_worker": {"CPU": 4}},
            r"resources_per_worker=\{'CPU': 4\}\): nodes are taken whole",
        ),
        (
            {"use_gpu": True, "resources_per_worker": {"GPU": 0.5}},
            r"\{'GPU': 0.5\}\): nodes .* a worker is one GPU",
        ),
        ({"resources_per_worker": {"disk": 1}}, r"\{'disk': 1\}"),
        ({"placement_strategy": "SPREAD"}, "placement_strategy='SPREAD'"),
        ({"accelerator_type": "H100"}, "accelerator_type='H100'.: it needs use_gpu=True"),
        (
            {"label_selector": {"zone": "a"}},
            r"label_selector=\{'zone': 'a'\}\): nodes are told apart by",
        ),
        ({"label_selector": [{"pool": "a"}, {"pool": "a"}]}, "workers are all alike"),
        ({"label_selector": {"ray.io/market-type": "!spot"}}, "'!spot'"),
        (
            {"num_workers": 1, "use_tpu": True, "resources_per_worker": {"TPU": 4}},
            "use_tpu=True.: elastic trains on CPUs",
        ),
        ({"topology": "4x4"}, "topology='4x4'"),
        (
            {"elastic_resize_monitor_interval_s": 5.0},
            "elastic_resize_monitor_interval_s=5.0.: nodes that come or go",
        ),
    ],
)
def test_what_is_refused_of_a_scaling_config(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says) as raised:
        wanted(Scaling(**{"num_workers": 2, **given}), None)
    assert str(raised.value).startswith("ScalingConfig(")
    assert "\n" not in str(raised.value)


class Hears(train.UserCallback):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"failure_config": Failure(max_preemption_failures=2)},
            r"FailureConfig\(max_preemption_failures=2\)",
        ),
        (
            {"failure_config": Failure(controller_failure_limit=0)},
            r"controller_failure_limit=0\): the driver is this process",
        ),
        (
            {"failure_config": Failure(relax_collectives_on_preemption=True)},
            "relax_collectives_on_preemption=True",
        ),
        ({"failure_config": Failure(preemption_grace_s=3.0)}, "preemption_grace_s=3.0"),
        (
            {"checkpoint_config": Keep(num_to_keep=1, checkpoint_score_attribute="loss")},
            "checkpoint_score_attribute='loss'",
        ),
        (
            {"checkpoint_config": Keep(checkpoint_score_attribute="validation_loss")},
            "checkpoint_score_order='max'",
        ),
        ({"callbacks": [Hears()]}, r"RunConfig\(callbacks=.*give ElasticTrainer.on_step"),
        (
            {"worker_runtime_env": {"pip": ["x"]}},
            r"RunConfig\(worker_runtime_env=\{'pip': \['x'\]\}\)",
        ),
    ],
)
def test_what_is_refused_of_a_run_config(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        wanted(None, Run(**given))


def test_a_filesystem_and_a_field_of_a_later_ray() -> None:
    import pyarrow.fs

    with pytest.raises(
        SpecError,
        match=r"storage_filesystem=.*: give storage_path as a folder, or an s3://, gs:// or az:// URI",
    ):
        wanted(None, Run(storage_path="b", storage_filesystem=pyarrow.fs.LocalFileSystem()))

    @dataclass
    class Later(Scaling):  # type: ignore[misc, valid-type]
        warp: int = 1

    assert wanted(Later(num_workers=2), None).job["min_workers"] == 2
    with pytest.raises(SpecError, match=r"Later\(warp=9\): this version of elastic does not know"):
        wanted(Later(num_workers=2, warp=9), None)
    for given in (({"num_workers": 2}, None), (None, "r")):
        with pytest.raises(SpecError, match="_config: it is a (dict|str); give a ray.train"):
            wanted(*given)


def test_a_cluster_file_says_what_the_nodes_are(tiny: Program, tmp_path: Path) -> None:
    file = ROOT / "cluster_configs" / "laptop.yaml"
    job = {"steps": 2, "global_batch": 4, "storage": str(tmp_path)}
    for given, says in (
        ({"job": {**job, "pools": [{"name": "a"}]}}, "pools'] and cluster both say"),
        ({"scaling_config": Scaling(num_workers=1, use_gpu=True)}, "a pool of cluster is of CPUs"),
        (
            {"scaling_config": Scaling(num_workers=1, label_selector={"pool": "a"})},
            "cluster and ScalingConfig both say",
        ),
        ({"job": {**job, "budget_usd": 1}}, "this process is on no Ray cluster; start that one"),
        ({"cluster": tmp_path / "no.yaml"}, "no.yaml: no such file"),
    ):
        with pytest.raises(SpecError, match=says):
            elastic.ElasticTrainer(tiny, **{"job": job, "cluster": file} | given).fit()


# ----------------------------------------------------------------------------------- ElasticTrainer


@pytest.fixture
def tiny() -> Program:
    return load_program(TINY)


def plain(config: dict[str, Any]) -> None:
    """A train function that does not enter the loop."""


def test_two_ways_at_once_and_what_is_no_program(tiny: Program, tmp_path: Path) -> None:
    job, gpu = {"steps": 2, "global_batch": 4}, Scaling(num_workers=1, use_gpu=True)
    for given, says in (
        ({"job": {**job, "min_workers": 3}, "scaling_config": Scaling(num_workers=2)},
        r"'min_workers'\]=3, and .* say 2"), ({"job": {**job, "storage": "/a"},
        "run_config": Run(storage_path="/b")}, "two ways at once"), ({"job": {**job,
        "pools": [{"name": "a"}]}, "scaling_config": gpu}, "a pool of job..pools.. is"), ({"job": {**job,
        "pools": [{"name": "a", "usd_per_node_h": 1.0}]}},
        r"ElasticTrainer\(job=...\): keys 'budget_usd'"), ({"job": {**job, "stepz": 2}},
        r"ElasticTrainer\(job=...\): unknown key 'stepz'"), ({"job": job,
        "run_config": Run(name="a/b", storage_path=str(tmp_path))}, r"RunConfig\(name='a/b'\)"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=says):
            elastic.ElasticTrainer(tiny, **given).fit()
    with pytest.raises(SpecError, match="two ways at once"):
        elastic.ElasticTrainer(tiny, job={**job, "data": {"train": "x"}}, datasets={"train": []})
    with pytest.raises(SpecError, match="plain does not enter elastic.loop"):
        elastic.ElasticTrainer(plain)
    with pytest.raises(SpecError, match=r"ElasticTrainer\(int\)"):
        elastic.ElasticTrainer(3)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="train_loop_config"):
        elastic.ElasticTrainer(tiny, train_loop_config={})
    with pytest.raises(SpecError, match="no such folder"):
        elastic.ElasticTrainer(tmp_path / "no")


@pytest.fixture
def in_a_loop(tmp_path: Path) -> Any:
    file = tmp_path / "train.py"
    file.write_text("def train(config):\n    import elastic\n    elastic.loop(**config)\n")
    return runpy.run_path(str(file))["train"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"torch_config": None}, r"torch_config=...\): processes meet by gloo, on GPUs by NCCL"),
        ({"dataset_config": 1}, "each worker reads its share of each step"),
        ({"validation_config": 1}, r"give elastic.loop\(validation=, evaluate=\)"),
        ({"metadata": {}}, r"is elastic.loop\(extra_state=...\)"),
        ({"datasets": {"train": 1}}, r"datasets=...\): give elastic.loop\(dataset=...\)"),
        ({"resume_from_checkpoint": 1}, r"load it into the model before elastic.loop\(model="),
    ],
)
def test_what_else_a_torch_trainer_takes_is_one_line(
    in_a_loop: Any, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=says) as raised:
        elastic.ElasticTrainer(train_loop_per_worker=in_a_loop, train_loop_config={}, **given)
    assert "\n" not in str(raised.value)


def test_a_train_function_by_the_name_that_a_torch_trainer_has_for_it(in_a_loop: Any) -> None:
    assert elastic.ElasticTrainer(train_loop_per_worker=in_a_loop).program is in_a_loop


def test_a_trainer_at_the_top_level_of_the_programs_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import elastic\nprogram = elastic.Program(model=lambda: 1, optimizer=lambda n: 1, "
        "dataset=lambda: [1], loss=lambda o, b: 1)\nelastic.ElasticTrainer(program, job={'steps': "
        "1, 'global_batch': 1}).fit()\n"
    )
    with pytest.raises(
        SpecError, match=r"mine.py:3: workers import this file .* __name__ == '__main__'"
    ):
        load_program(file)


def test_datasets_that_are_none(tiny: Program, tmp_path: Path) -> None:
    job = {"steps": 2, "global_batch": 4}
    for given, says in (
        (
            {"train": iter([1])},
            r"datasets\['train'\]: it is a list_iterator, .*: a stream has no sample ids",
        ),
        ({"train": [1]}, r"it is a list, not a ray.data.Dataset nor a datasets.Dataset$"),
        ({"test": 1}, r"datasets\['test'\]: a run reads 'train' and 'validation'"),
    ):
        trainer = elastic.ElasticTrainer(
            tiny, job=job, datasets=given, run_config=Run(name="r", storage_path=str(tmp_path))
        )
        with pytest.raises(SpecError, match=says):
            trainer.fit()


# --------------------------------------------------------------------------------------- in and out


def test_a_checkpoint_that_is_no_dcp_folder(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model.pt").write_bytes(b"x")
    seen: list[str] = []
    with pytest.raises(
        SpecError,
        match=r"c: no folder of torch.distributed.checkpoint \(it holds model.pt, no .metadata\)",
    ):
        read_checkpoint(train.Checkpoint(str(tmp_path / "c")), seen.append)
    with pytest.raises(SpecError, match="nothing is there"):
        read_checkpoint(train.Checkpoint(str(tmp_path / "no")), seen.append)
    with pytest.raises(SpecError, match="it is a str; give a ray.train.Checkpoint"):
        read_checkpoint(str(tmp_path), seen.append)
    (tmp_path / "c" / ".metadata").write_bytes(b"x")
    read_checkpoint(train.Checkpoint(str(tmp_path / "c")), seen.append)
    assert seen == [str(tmp_path / "c")]


@pytest.mark.parametrize(("kind", "scheme"), [("s3", "s3"), ("gcs", "gs"), ("abfs", "az")])
def test_a_checkpoint_in_object_storage_is_read_there(kind: str, scheme: str) -> None:
    fs = pytest.importorskip("pyarrow.fs")
    there = {
        "s3": lambda: fs.S3FileSystem(anonymous=True, region="us-east-1"),
        "gcs": lambda: fs.GcsFileSystem(anonymous=True),
        "abfs": lambda: fs.AzureFileSystem(account_name="a", account_key="aGk="),
    }[kind]()
    seen: list[str] = []
    read_checkpoint(train.Checkpoint("bucket/run/c", filesystem=there), seen.append)
    assert seen == [f"{scheme}://bucket/run/c"]


def test_a_run_becomes_a_result(tmp_path: Path) -> None:
    rows = [{"step": 1, "train_loss": 2.0}, {"step": 2, "train_loss": 1.0, "validation_loss": 3.0}]
    told = FinishedRun(
        str(tmp_path),
        {"outcome": "succeeded", "goodput": 0.9, "transitions": []},
        rows,
        [(str(tmp_path / "c"), 2)],
    )
    result = result_of(told)
    assert isinstance(result, train.Result)
    assert result.metrics == {
        "outcome": "succeeded",
        "goodput": 0.9,
        "step": 2,
        "train_loss": 1.0,
        "validation_loss": 3.0,
    }
    assert list(result.metrics_dataframe["train_loss"]) == [2.0, 1.0]
    assert (result.path, result.error, result.checkpoint.path) == (
        str(tmp_path),
        None,
        str(tmp_path / "c"),
    )
    assert result.best_checkpoints[0][1]["validation_loss"] == 3.0
    failed = result_of(FinishedRun(str(tmp_path), {}, [], [], "step 3: boom"))
    assert isinstance(failed.error, train.TrainingFailedError)
    assert "boom" in str(pickle.loads(pickle.dumps(failed.error)))
    assert failed.checkpoint is None


def test_a_failed_run_raises_as_ray_train_does(
    tiny: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastic.api import trainer
    from elastic.api.running.run import Result

    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "journal.jsonl").write_text("")
    ended = Result("r", "failed", {"reason": "step 3: boom"}, tmp_path / "r")
    monkeypatch.setattr(trainer, "run_job", lambda spec, options: ended)
    run = Run(name="r", storage_path=str(tmp_path))
    with pytest.raises(train.TrainingFailedError, match="step 3: boom"):
        elastic.ElasticTrainer(tiny, job={"steps": 2, "global_batch": 4}, run_config=run).fit()


def test_a_changed_file_may_be_resumed(
    tiny: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastic.api import trainer
    from elastic.api.running.run import Result

    allowed: list[bool] = []

    def asked(spec: Any, options: Any) -> Result:
        allowed.append(options.allow_changed)
        return Result(options.run_name, "succeeded", {"reason": ""}, tmp_path)

    monkeypatch.setattr(trainer, "run_job", asked)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "journal.jsonl").write_text("")
    job = {"steps": 2, "global_batch": 4}
    run = Run(name="r", storage_path=str(tmp_path))
    elastic.ElasticTrainer(tiny, job=job, run_config=run).fit()
    elastic.ElasticTrainer(tiny, job=job, run_config=run, allow_changed=True).fit()
    assert allowed == [False, True]


def test_a_stopped_run_says_how_to_resume_it(
    tiny: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command that started this process; a name that Ray has made has to be given first."""
    from elastic.api import trainer
    from elastic.api.running.run import Result
    from elastic.observe import find_runs

    monkeypatch.setattr(sys.modules["__main__"], "__file__", "fit.py", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "fit.py", "--lr", "1 0"])
    words: list[tuple[str, ...]] = []

    def stopped(spec: Any, options: Any) -> Result:
        words.append(options.words)
        return Result(options.run_name, "stopped", {"reason": "signal SIGINT"}, tmp_path)

    monkeypatch.setattr(trainer, "run_job", stopped)
    made_up, line = "ray_train_run-2026-11-26_17-00-00", "python fit.py --lr '1 0'"
    for name, first in (("r", ""), (made_up, f"give RunConfig(name='{made_up}'), then: ")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").write_text("")
        run = Run(name=name, storage_path=str(tmp_path))
        elastic.ElasticTrainer(tiny, job={"steps": 2, "global_batch": 4}, run_config=run).fit()
        assert capsys.readouterr().err.splitlines() == [
            f"elastic: run {name} stopped: signal SIGINT",
            f"elastic: to resume it: {first}{line}",
        ]
    # what `elastic status` is told too, where the command alone resumes it
    assert words == [("python", "fit.py", "--lr", "1 0"), ()]
    assert find_runs.again(words[0], "r") == line
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert find_runs.python_words() == ()


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (0, None)],
)
def test_who_was_told_to_end_does_not_go_on_behind_fit(
    tiny: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    raised: type[BaseException] | None,
) -> None:
    """After the lines that say how to resume; what `elastic stop` has stopped returns."""
    from elastic.api import trainer
    from elastic.api.running.run import Result

    def stopped(spec: Any, options: Any) -> Result:
        why = {"reason": "it was asked to"}
        return Result(options.run_name, "stopped", why, tmp_path, signal=number)

    monkeypatch.setattr(trainer, "run_job", stopped)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "fit.py", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "fit.py"])
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "journal.jsonl").write_text("")
    run = Run(name="r", storage_path=str(tmp_path))
    made = elastic.ElasticTrainer(tiny, job={"steps": 2, "global_batch": 4}, run_config=run)
    if raised is None:
        assert made.fit().metrics["reason"] == "it was asked to"
    else:
        with pytest.raises(raised) as caught:
            made.fit()
        assert not number or getattr(caught.value, "code", None) in (None, 128 + number)
    assert "elastic: to resume it: python fit.py" in capsys.readouterr().err


def test_what_train_loop_is_given() -> None:
    for config, says in (
        ({}, "key 'job' is missing; keys are job"),
        ({"job": "x", "jobs": 1}, "unknown key 'jobs'"),
        ({"job": str(TINY.parent / "no")}, "no such folder"),
    ):
        with pytest.raises(SpecError, match=says):
            train_types.train_loop(config)


def test_a_number_of_the_run_and_of_its_last_step_is_the_runs(tmp_path: Path) -> None:
    rows = [
        {"step": step, "tokens": 8 * step, "tokens_per_s": 100.0 * step, "train_loss": 1.0}
        for step in (1, 2)
    ]
    summary = {"tokens": 16, "tokens_per_s": 7.5, "goodput": 0.5}
    result = result_of(FinishedRun(str(tmp_path), summary, rows, []))
    assert result.metrics is not None and result.metrics_dataframe is not None
    assert result.metrics == {"step": 2, "train_loss": 1.0} | summary
    assert list(result.metrics_dataframe["tokens_per_s"]) == [100.0, 200.0]
