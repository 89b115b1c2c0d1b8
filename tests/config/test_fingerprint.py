"""What a run may not change on its way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT

from elastic.config.fingerprint import JOB_KEYS, batch_changed, differences, fingerprint
from elastic.config.optimization import LrSchedule
from elastic.types import Job, ModelProfile, OptimizerSpec, TensorSpec

MODEL = ModelProfile(1, 6, (TensorSpec("w", (2, 3), "float32"),), (OptimizerSpec(("exp_avg",)),))
JOB = {
    "global_batch": 8,
    "seed": 1,
    "clip_grad_norm": 1.0,
    "precision": "float32",
    "reduce_dtype": "float32",
    "steps": 10,
}
CODE = "x = 1\n\ndef f():\n    return x\n"


def mark(
    tmp_path: Path,
    code: str = CODE,
    job: dict[str, Any] = JOB,
    n: int | None = 9,
    model: ModelProfile = MODEL,
) -> Any:
    file = tmp_path / "program.py"
    file.write_text(code)
    return fingerprint(file, Job.from_plain(job), model, n_samples=n)


def test_what_does_not_matter(tmp_path: Path) -> None:
    was = mark(tmp_path)
    assert differences(was, mark(tmp_path, "# words\nx  =  1\ndef f(): return x\n")) == ""
    assert differences(was, mark(tmp_path, job={**JOB, "steps": 99, "layout": "tp=2"})) == ""
    assert differences(was, mark(tmp_path, n=None)) == ""
    # it does not depend on the number of steps
    for kind, more in (("constant", {}), ("cosine", {"decay_steps": 8})):
        job = {**JOB, "lr_schedule": LrSchedule(kind=kind, warmup_steps=2, **more).model_dump()}  # type: ignore[arg-type]
        assert differences(mark(tmp_path, job=job), mark(tmp_path, job={**job, "steps": 99})) == ""
    assert differences({}, was) == ""  # of a run before there were fingerprints


def test_other_training_data_and_a_decay_that_ends_elsewhere_are_told(tmp_path: Path) -> None:
    first, other = (
        {"train": {"jsonl": name, "seq": 8}, "validation": {"": {"rows": name}}}
        for name in ("a", "b")
    )
    was = mark(tmp_path, job={**JOB, "data": first})
    assert (
        differences(
            was, mark(tmp_path, job={**JOB, "data": {**first, "validation": {}, "cache_gb": 3}})
        )
        == ""
    )
    said = differences(was, mark(tmp_path, job={**JOB, "data": other}))
    assert said == "data.train ({'jsonl': 'a', 'seq': 8}, now {'jsonl': 'b', 'seq': 8})"
    assert differences(was, mark(tmp_path)) == "data.train ({'jsonl': 'a', 'seq': 8}, now None)"
    for kind, falls in (("linear", "2 to 10, now 2 to 40"), ("wsd", "9 to 10, now 36 to 40")):
        job = {**JOB, "lr_schedule": LrSchedule(kind=kind, warmup_steps=2).model_dump()}  # type: ignore[arg-type]
        said = differences(mark(tmp_path, job=job), mark(tmp_path, job={**job, "steps": 40}))
        assert said == f"the steps in which lr_schedule falls ({falls})"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"code": CODE.replace("1", "2")}, "the code of its program.py"),
        ({"job": {**JOB, "seed": 2}}, "seed (1, now 2)"),
        ({"job": {**JOB, "global_batch": 4}}, "global_batch (8, now 4)"),
        ({"job": {**JOB, "clip_grad_norm": None}}, "clip_grad_norm (1.0, now None)"),
        ({"job": {**JOB, "precision": "float16"}}, "precision (float32, now float16)"),
        ({"job": {**JOB, "reduce_dtype": "bfloat16"}}, "reduce_dtype (float32, now bfloat16)"),
        ({"n": 10}, "samples in the dataset (9, now 10)"),
        (
            {"model": replace(MODEL, optimizers=(OptimizerSpec(("momentum",)),))},
            "what its optimizer keeps",
        ),
        (
            {"model": replace(MODEL, specs=(TensorSpec("w", (2, 4), "float32"),))},
            "names, shapes or dtypes of tensors",
        ),
        (
            {"code": "x = (", "n": 1},
            "the code of its program.py, samples in the dataset (9, now 1)",
        ),
    ],
)
def test_what_differs_is_said_in_one_line(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    assert differences(mark(tmp_path), mark(tmp_path, **change)) == says


SECRET = "zq7-planted"


def with_args(tmp_path: Path, *args: str, **job: Any) -> Any:
    return mark(tmp_path, job={**JOB, **job, "args": list(args)})


def test_a_secret_among_the_arguments_is_not_kept_and_another_one_is_told(tmp_path: Path) -> None:
    first = ["--lr", "3", "--hf-token", SECRET, f"--api-key={SECRET}", f"s3://me:{SECRET}@host/x"]
    was = with_args(tmp_path, *first)
    assert SECRET not in str(was) and was["args"][:3] == first[:3]
    assert differences(was, with_args(tmp_path, *first)) == ""
    for i in (3, 4, 5):
        args = [
            text.replace(SECRET, "another") if place == i else text
            for place, text in enumerate(first)
        ]
        said = differences(was, with_args(tmp_path, *args))
        assert said.startswith("args (") and SECRET not in said and "another" not in said
    # salted
    assert (
        was["args"][3] != with_args(tmp_path, "--lr", "3", "--hf-token", SECRET, seed=2)["args"][3]
    )
    assert was["args"][3] != was["args"][4].partition("=")[2]


def test_marks_that_were_recorded_with_secrets_or_without_paths_still_compare(
    tmp_path: Path,
) -> None:
    now = with_args(
        tmp_path,
        "--hf-token",
        SECRET,
        data={"train": {"tokens": "/data/x.bin", "end_token": "<end>"}},
    )
    was = {
        **now,
        "args": ["--hf-token", SECRET],
        "data.train": {"tokens": "***", "end_token": "***"},
    }
    assert differences(was, now) == ""
    said = differences({**was, "args": ["--hf-token", "old" + SECRET]}, now)
    assert said.startswith("args (") and SECRET not in said
    assert "data.train" in differences(
        {**was, "data.train": {"tokens": "***", "end_token": "***", "seq": 8}}, now
    )


def test_the_page_names_what_may_not_change() -> None:
    """And what may not, whatever is allowed."""
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    said = text.split("hold a fingerprint:", 1)[1].split("On a Ray cluster the data", 1)[0]
    listed, _, allowed = said.partition("`--allow-changed`")
    missing = [key for key in (*JOB_KEYS, "data.train", "optimizer") if f"`{key}`" not in listed]
    assert not missing
    assert "never with other shapes, nor with another `global_batch`" in allowed
    assert batch_changed("r", {"global_batch": 8}, {"global_batch": 16})
