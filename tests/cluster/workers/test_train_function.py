"""A train function on its way to the workers: by value, with what it uses of the user's file."""

from __future__ import annotations

import gc
import threading
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
import torch
from torch.utils.data import DataLoader, DistributedSampler

from elastic.cluster.workers.train_function import as_they_are, keep_as_they_are, loaded, pickled
from elastic.errors import SpecError
from elastic.worker.loop.loop import here
from elastic.worker.loop.script_host import capture

TEXT = """
import ray.train.torch
from ray.train.torch import prepare_data_loader
SEEN.append("ran")
GAIN = 3
class Net:
    gain = GAIN
def train(config):
    net = ray.train.torch.prepare_model(Net(), parallel_strategy="fsdp")
    raise ValueError([net.gain, config["lr"], prepare_data_loader("loader")])
"""


def functions(text: str, **more: Any) -> dict[str, Any]:
    """Of a file that is run as `__main__`: it cannot be imported."""
    module = types.ModuleType("__main__")
    module.__dict__.update(more)
    exec(text, module.__dict__)
    return module.__dict__


def test_what_arrives_is_the_function_and_not_the_file() -> None:
    """With its configuration; what Ray Train would have prepared is given back as it is."""
    seen: list[str] = []
    data = pickled(functions(TEXT, SEEN=seen)["train"], {"lr": 0.5})
    with as_they_are():
        for _ in range(2):
            with pytest.raises(ValueError, match=r"\[3, 0.5, 'loader'\]"):
                loaded(data)()
    assert seen == ["ran"]
    with pytest.raises(RuntimeError, match="outside of a Ray Train training function"):
        loaded(data)()


def test_what_resumes_from_a_checkpoint_may_stay_and_finds_none() -> None:
    """By either name; elsewhere Ray Train's own answer stays."""
    text = (
        "import ray.train\nfrom ray.train import get_checkpoint\n"
        "def train():\n    raise ValueError([ray.train.get_checkpoint(), get_checkpoint()])\n"
    )
    own = ray.train.get_checkpoint
    data = pickled(functions(text)["train"], None)
    with as_they_are(), pytest.raises(ValueError, match=r"\[None, None\]"):
        loaded(data)()
    assert ray.train.get_checkpoint is own


def test_in_a_worker_it_stays_so() -> None:
    text = "import ray.train.torch\ndef train():\n    ray.train.torch.prepare_model(1)\n"
    data = pickled(functions(text)["train"], None)
    with as_they_are():  # restores what the test changes
        keep_as_they_are()
        gc.collect()
        loaded(data)()


def test_each_start_has_a_configuration_of_its_own() -> None:
    text = "def train(config):\n    config['n'] += 1\n    raise ValueError(config['n'])\n"
    data = pickled(functions(text)["train"], {"n": 1})
    for _ in range(2):
        with pytest.raises(ValueError, match="2"):
            loaded(data)()


def test_a_function_without_a_configuration() -> None:
    loaded(pickled(functions("def train():\n    pass\n")["train"], None))()


def test_what_cannot_be_sent_is_said_in_one_line() -> None:
    train = functions("def train():\n    LOCK.acquire()\n", LOCK=threading.Lock())["train"]
    with pytest.raises(SpecError, match=r"ElasticTrainer\(train\): it holds what cannot be sent"):
        pickled(train, None)


def test_a_file_that_makes_a_trainer_is_no_script_for_elastic_run(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    file = tmp_path / "train.py"
    file.write_text(
        "import elastic\n"
        "def train():\n    with elastic.loop(model=1, optimizer=2, dataset=3):\n        pass\n"
        "elastic.ElasticTrainer(train).fit()\n"
    )
    with pytest.raises(SpecError) as caught:
        capture(file, [], 0)
    assert f"{file}, line 5: ElasticTrainer.fit() starts a run by itself: start this file with" in (
        str(caught.value)
    )


IN_LOOP = """
import ray.train, ray.train.torch, torch
from ray.train import get_context, report
def train():
    where = get_context()
    OUT.append((where.get_world_rank(), where.get_world_size(), str(ray.train.torch.get_device())))
    for checkpoint in (None, "a folder", "another"):
        report({"loss": 2, "train_loss": 1.0, "note": "text", "best": True}, checkpoint=checkpoint)
def prepares(loader):
    assert len(torch.utils.data.DistributedSampler(range(6))) == 6
    prepared = ray.train.torch.prepare_data_loader(loader)
    assert prepared is loader
    prepared.sampler.set_epoch(3)
"""


def test_in_its_loop_a_function_reports_and_knows_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers that every step has, and what is none, are left out; of a checkpoint it is said once
    that nobody stores it. Outside of a loop Ray Train's own words."""
    out: list[Any] = []
    logged: list[Any] = []
    space = functions(IN_LOOP, OUT=out)
    with as_they_are():
        exec(IN_LOOP, space)
        with pytest.raises(RuntimeError, match="`get_context` cannot be used outside of a Ray"):
            space["train"]()
        run = SimpleNamespace(rank=0, world_size=3, log=logged.append)
        host = SimpleNamespace(run=run, device=torch.device("meta"))
        monkeypatch.setattr(here, "host", host, raising=False)
        space["train"]()
        space["prepares"](DataLoader([1, 2, 3], shuffle=True))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        DistributedSampler([1, 2, 3])  # type: ignore[arg-type]
    assert out == [(0, 3, "meta")] and logged == [{"loss": 2}] * 3
    assert capsys.readouterr().out.count("is not stored: elastic makes checkpoints by itself") == 1
