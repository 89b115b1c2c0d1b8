"""docs/ray-train.md: its scripts run as they stand there; what goes over to Ray Train and back
continues with the same losses."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.docs.pages import block, blocks
from support.e2e.runs import SLOW, SOON_S, slow_until_grown
from support.places import ROOT
from torch.nn.functional import cross_entropy

from elastic.data.order import sample_ids
from elastic.ledger.journal import read
from elastic.types import DrillAsked, StepDone
from elastic.worker.loop.script_host import INSTEAD

PAGE = ROOT / "docs" / "ray-train.md"
TINY = ROOT / "tests" / "programs" / "tiny.py"
LINES_MOST = 10
TOLERANCE = 2e-4  # fp32, over hundreds of steps of AdamW and other orders of summation
LEFT_OUT = ("RAY_ADDRESS", "ELASTIC_STORAGE", "RAY_TRAIN_V2_ENABLED")
POOLS = [
    {"name": "spot", "market_type": "spot", "gpus_per_node": 2, "max_nodes": 2, "notice_s": 20},
    {"name": "on-demand", "market_type": "on-demand", "gpus_per_node": 2, "max_nodes": 1},
]


def scripts() -> dict[str, str]:
    return {one.file: one.text for one in blocks("ray-train.md", "python")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in scripts().items():
        (tmp_path / name).write_text(text)
    return tmp_path


def change(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert text.count(old) == 1, (name, old)
    (folder / name).write_text(text.replace(old, new))


def run(folder: Path, name: str, *words: str) -> str:
    """Standard output of the script, which must end well."""
    env = {k: v for k, v in os.environ.items() if k not in LEFT_OUT}
    env |= {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    env |= {"RAY_AUTH_MODE": "disabled"}
    ended = subprocess.run(
        [sys.executable, name, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, f"{name}: {ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout


def last_word(said: str) -> str:
    return said.strip().splitlines()[-1].split()[-1]


def alone(steps: int, clip: float | None, seed: int = 0) -> list[float]:
    """The losses of one process that knows nothing of elastic."""
    space: dict[str, Any] = {"__name__": "page"}
    torch.manual_seed(seed)
    exec(re.sub(r"import ray\S*\n", "", scripts()["sums.py"]), space)
    model, data = space["Net"](), space["Sums"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    out = []
    for step in range(steps):
        rows = [data[i] for i in sample_ids(len(data), 24, seed, step=step)]
        loss = cross_entropy(
            model(torch.stack([r[0] for r in rows])), torch.stack([r[1] for r in rows])
        )
        optimizer.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        out.append(float(loss.detach()))
    return out


def journal_losses(journal: Path) -> dict[int, float]:
    return {
        e.step: e.train_loss
        for line in read(journal)
        for _, e in line.events
        if isinstance(e, StepDone)
    }


def off_by(found: list[float], wanted: list[float]) -> float:
    assert len(found) == len(wanted)
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


# ----------------------------------------------------------------------------------------- the text


def test_the_diff_of_the_page_is_that_of_its_scripts_and_small() -> None:
    before, after = (scripts()[name].splitlines() for name in ("sums.py", "sums_elastic.py"))
    shown = block("ray-train.md", "diff")
    assert shown.rstrip("\n") == (
        "\n".join(
            difflib.unified_diff(before, after, "sums.py", "sums_elastic.py", n=1, lineterm="")
        )
    )
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    assert (
        sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in codes if tag != "equal") <= LINES_MOST
    )
    assert PAGE.read_text().rstrip().endswith("```")


def test_each_call_of_the_script_has_its_counterpart_on_the_page() -> None:
    before = scripts()["sums.py"]
    table = PAGE.read_text().partition("What each call becomes:")[2].partition("```")[0]
    for call in (
        "ray.init", "prepare_model", "prepare_data_loader", "DataLoader", "report", "TorchTrainer",
        "batch_size=8", "checkpoint=", "loss.backward", "optimizer.step", "for epoch in range",
    ):  # fmt: skip
        assert call in before and call in table, call
    assert all(call in table for call in INSTEAD)


def test_every_field_of_ray_train_is_on_the_page() -> None:
    train = pytest.importorskip("ray.train")
    from dataclasses import fields

    text = PAGE.read_text()
    for kind in (train.ScalingConfig, train.RunConfig, train.FailureConfig, train.CheckpointConfig):
        for field in fields(kind):
            if not field.name.startswith("_") and field.name not in (
                "failure_config",
                "checkpoint_config",
                "local_dir",
            ):
                assert f"{field.name}`" in text, f"{kind.__name__}.{field.name}"


# -------------------------------------------------------------------------------------- the scripts


@pytest.mark.whole
def test_fit_through_a_kill_then_a_plain_ray_train_job_then_back(folder: Path) -> None:
    """ElasticTrainer -> TorchTrainer -> ElasticTrainer, on one curve of losses."""
    change(
        folder, "fit.py", '"steps": 200', '"drill": [{"at_step": 40, "kill": "any"}], "steps": 200'
    )
    out = folder / "out"
    checkpoint = last_word(run(folder, "fit.py", str(out)))
    wanted = alone(220, 1.0)
    losses = journal_losses(out / "fit" / "journal.jsonl")
    assert sorted(losses) == list(range(1, 201))
    assert off_by([losses[step] for step in sorted(losses)], wanted[:200]) < TOLERANCE
    assert [
        e
        for line in read(out / "fit" / "journal.jsonl")
        for _, e in line.events
        if isinstance(e, DrillAsked)
    ]
    reported = last_word(run(folder, "go_on.py", str(out), checkpoint))
    plain = json.loads((out / "losses.json").read_text())
    assert off_by(plain, wanted[200:]) < TOLERANCE  # the moments have come along
    run(folder, "resume.py", str(out), reported)
    resumed = json.loads((out / "resumed.json").read_text())
    assert off_by(resumed, plain[10:]) < TOLERANCE


@pytest.mark.whole
def test_the_train_function_through_a_kill_a_notice_and_a_growth(folder: Path) -> None:
    """The page's script as it is, but for a drill, which needs the embedded cluster, and a pause in
    each step in which nodes can come and go."""
    change(folder, "sums_elastic.py", "    ray.init()\n", "")
    drill = [
        {"at_step": 20, "notice": "any-spot", "deadline_s": SOON_S},
        {"at_step": 50, "kill": "any-spot"},
        {"at_step": 60, "add": "spot"},
    ]
    job = f"        job={{'drill': {drill}, 'pools': {POOLS}, 'peer_every': 4}},\n"
    slow = f"__import__('os').path.exists(__import__('os').environ['{SLOW}'])"
    pause = f"            __import__('time').sleep(2.0 if {slow} else 0.05)\n"
    change(folder, "sums_elastic.py", "        scaling_config", f"{job}        scaling_config")
    change(folder, "sums_elastic.py", "            run.step()", f"{pause}            run.step()")
    journal = folder / "results" / "sums" / "journal.jsonl"
    with slow_until_grown(journal, folder / "slow"):
        said = run(folder, "sums_elastic.py")
    assert "'outcome': 'succeeded'" in said
    losses = journal_losses(journal)
    assert sorted(losses) == list(range(1, 343))
    assert off_by([losses[step] for step in sorted(losses)], alone(342, None)) < TOLERANCE
    report = json.loads((folder / "results" / "sums" / "report.json").read_text())
    assert {t["cause"] for t in report["transitions"]} >= {"start", "notice", "loss", "growth"}


@pytest.mark.whole
def test_a_job_inside_a_torch_trainer(folder: Path) -> None:
    spec = {
        "name": "tiny",
        "program": str(TINY),
        "steps": 12,
        "global_batch": 12,
        "seed": 3,
        "clip_grad_norm": 1.0,
        "durable_every": 6,
    }
    (folder / "job").mkdir()
    (folder / "job" / "job.yaml").write_text(yaml.safe_dump(spec))
    loss, path = (
        run(folder, "hosted.py", str(folder / "out"), str(folder / "job"))
        .strip()
        .splitlines()[-1]
        .split()
    )
    from support.reference import train

    from elastic.program import load_program

    wanted = train(
        load_program(TINY), {"seed": 3, "global_batch": 12, "clip_grad_norm": 1.0}, 12
    ).losses[-1]
    assert abs(float(loss) - wanted) < TOLERANCE
    assert (Path(path) / ".metadata").is_file()
    assert (Path(path) / "commit.json").is_file()
    assert path.startswith(str(folder / "out" / "ray" / "hosted"))


@pytest.mark.whole
def test_rows_of_a_ray_data_dataset_have_the_losses_of_the_dataset_itself(folder: Path) -> None:
    loss = float(last_word(run(folder, "rows.py", str(folder / "out"))))
    assert abs(loss - alone(20, 1.0)[-1]) < TOLERANCE
    index = json.loads((folder / "out" / "rows" / "data" / "train" / "index.json").read_text())
    assert index["rows"] == 4096
    assert sorted(index["columns"]) == ["input", "target"]


@pytest.mark.whole
def test_the_script_before_it_was_changed_is_one_that_ray_train_runs(folder: Path) -> None:
    on_small_cluster(folder, "sums.py")
    run(folder, "sums.py")
    assert (folder / "results" / "sums").is_dir()


def on_small_cluster(folder: Path, name: str) -> None:
    change(folder, name, "ray.init()", "ray.init(num_cpus=3, include_dashboard=False)")
    change(folder, name, "num_workers=(2, 6)", "num_workers=2")


@pytest.mark.whole  # fit() in a run: tests/e2e/test_elastic_trainer.py; its session: tests/cluster/ray_train
def test_the_train_function_on_a_cluster_of_the_scripts_own(folder: Path) -> None:
    """`ray.init()` in it, as on the page; no line of the file runs in any other process, or
    twice."""
    name = "sums_elastic.py"
    on_small_cluster(folder, name)
    change(folder, name, "import elastic\n", "import elastic\nopen('ran', 'a').write('top\\n')\n")
    change(folder, name, "    ray.init(", "    open('ran', 'a').write('main\\n')\n    ray.init(")
    change(folder, name, 'epochs=config["epochs"]', "steps=20")
    said = run(folder, name)
    assert "'outcome': 'succeeded'" in said
    assert (folder / "ran").read_text().split() == ["top", "main"]
    losses = journal_losses(folder / "results" / "sums" / "journal.jsonl")
    assert off_by([losses[step] for step in sorted(losses)], alone(20, None)) < TOLERANCE
