"""Whether a script enters elastic.loop is read from its text, under whatever name it imports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.api.running.entry import run, run_script
from elastic.config.script import check_starts_nothing, enters_loop, leaves_out, script_file
from elastic.errors import SpecError


def script(folder: Path, text: str) -> Path:
    file = folder / "train.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "enters"),
    [
        ("import elastic\nwith elastic.loop(model=m) as run: pass", True),
        ("import elastic as el\ndef main():\n    with el.loop(model=m) as run: pass", True),
        ("from elastic import loop\nwith loop(model=m) as run: pass", True),
        ("from elastic import Program, loop as ours\nwith ours(model=m) as run: pass", True),
        ("import elastic\nt = elastic.prepare_trainer(Trainer(model=m))\nt.train()", True),
        ("from elastic import prepare_trainer as p\np(t).train()", True),
        ("import torch\nloop(3)", False),
        ("import elastic\nelastic.run('job')  # elastic.loop(", False),
        ("import asyncio as elastic\nelastic.loop()", False),
        ("from other import loop\nloop()", False),
        ("'import elastic; elastic.loop()'", False),
    ],
)
def test_read_from_its_text(tmp_path: Path, text: str, enters: bool) -> None:
    assert enters_loop(script(tmp_path, text)) is enters


def test_what_is_no_script_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"--script .*/none.py: no such file; it must be a Python file"
    ):
        script_file(tmp_path / "none.py")
    with pytest.raises(SpecError, match=r"train.py, line 2: not Python: "):
        script_file(script(tmp_path, "import torch\nwith with\n"))
    assert script_file(script(tmp_path, "x = 1")) == (tmp_path / "train.py").resolve()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from ray.train.torch import TorchTrainer\nTorchTrainer(f).fit()", "line 2: TorchTrainer"),
        ("import ray.train.torch\nt = ray.train.torch.TorchTrainer(f)", "line 2: TorchTrainer"),
        ("from ray.train import torch as t\nt.TorchTrainer(f)", "line 2: TorchTrainer"),
        ("from ray.train.lightning import LightningTrainer as L\nL()", "line 2: LightningTrainer"),
        ("from ray import tune\ntune.Tuner(f)", "line 2: Tuner"),
    ],
)
def test_a_script_that_starts_workers_of_its_own_is_told_what_is_right_for_it(
    text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text(text)
    with pytest.raises(SpecError, match=said) as error:
        check_starts_nothing(tmp_path / "t.py")
    assert str(error.value).endswith("and run it: python t.py")
    with pytest.raises(SpecError, match=said):
        run_script(tmp_path / "t.py")
    (tmp_path / "job.yaml").write_text("script: t.py\n")
    with pytest.raises(SpecError, match=said):
        run(tmp_path)


def test_one_that_starts_a_run_of_ours_is_run_as_it_is(tmp_path: Path) -> None:
    for text in (
        "import elastic\nelastic.ElasticTrainer(f).fit()",
        "from elastic import run\nrun()",
    ):
        (tmp_path / "t.py").write_text(text)
        with pytest.raises(SpecError, match=r"run it as it is: python t\.py"):
            check_starts_nothing(tmp_path / "t.py")


@pytest.mark.parametrize(
    "text",
    [
        "from transformers import Trainer\nTrainer(model).train()",
        "import ray.train\nray.train.get_preemption_info()",
        "from ray.train.torch import TorchTrainer\nprint(TorchTrainer)",
    ],
)
def test_other_scripts_are_started(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(text)
    check_starts_nothing(tmp_path / "t.py")


@pytest.mark.parametrize(
    ("text", "certain"),
    [
        ("elastic.loop(model=m, steps=3)", True),
        ("elastic.prepare_trainer(t, global_batch=4)", True),
        ("elastic.loop(model=m, storage='runs')", False),
        ("elastic.prepare_trainer(t, storage=args.storage)", False),
        ("elastic.loop(**{'steps': 3})", True),
        ("elastic.loop(**{'storage': 3})", False),
        ("elastic.loop(**{'steps': 3, **more})", False),
        ("job = {'steps': 3}\nelastic.loop(**job)", True),
        ("job = {'steps': 3, 'storage': 'runs'}\nelastic.loop(**job)", False),
        ("job = {'steps': 3}\njob['storage'] = 'runs'\nelastic.loop(**job)", False),
        ("job = {'steps': 3}\njob.update(others)\nelastic.loop(**job)", False),
        ("job = {'steps': 3}\nadd_to(job)\nelastic.loop(**job)", False),
        ("job = keys()\nelastic.loop(**job)", False),
        ("elastic.loop(**vars(args))", False),
        ("elastic.loop(model=m)\nelastic.loop(**keys())", False),
        ("parser.add_argument('--storage')\nf(storage=1)\nelastic.loop(model=m)", True),
    ],
)
def test_what_a_script_certainly_leaves_out(tmp_path: Path, text: str, certain: bool) -> None:
    assert leaves_out(script(tmp_path, f"import elastic\n{text}\n"), "storage") is certain
