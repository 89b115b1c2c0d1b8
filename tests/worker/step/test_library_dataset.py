"""A `datasets.Dataset` of the library of that name as the data of a program, a script and a
trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.loop_reference import train_script_alone
from support.places import PROGRAMS
from support.reference import train
from support.worker.chain import job_of, pass_through
from support.worker.worker_pool import Pool

from elastic.cluster.ray_train.dataset_rows import materialise
from elastic.data.sources.parquet import Rows
from elastic.errors import SpecError
from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import Layout

datasets = pytest.importorskip("datasets", reason="the extra `datasets`")

LAYOUTS = [Layout(dp_shard=2), Layout(cp=2)]


@pytest.mark.e2e
def test_in_every_layout(pool: Pool, tmp_path: Path) -> None:
    """What one process trains on the same numbers, without the library."""
    job = job_of("tiny_library_rows.py", 7)
    got = pass_through(pool, job, tmp_path / "run", LAYOUTS, every=2)
    want = train(load_program(PROGRAMS / "tiny.py"), {**job, "program": ""}, 7).losses
    assert [e.step for e in got] == list(range(1, 8))
    assert [e.train_loss for e in got] == pytest.approx(want, rel=2e-4)


def test_in_a_script(tmp_path: Path) -> None:
    text = """
import elastic, datasets, torch
from torch import nn
model = nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = datasets.Dataset.from_dict({"x": [[float(i), 1.0, 2.0] for i in range(16)]})
with elastic.loop(model=model, optimizer=optimizer, dataset=data, steps=5, global_batch=4) as run:
    for batch in run:
        run.backward(run.model(batch["x"]).square().sum())
        run.step()
"""
    (tmp_path / "train.py").write_text(text)
    losses = train_script_alone(tmp_path / "train.py", [], 0, 5)
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_in_a_trainer_it_is_written_as_rows(tmp_path: Path) -> None:
    given = datasets.Dataset.from_dict(
        {"ids": [[i, i + 1] for i in range(3000)], "score": [i / 2 for i in range(3000)]}
    )
    run = open_storage(str(tmp_path))
    where = materialise({"train": given}, run)["train"]
    rows = Rows(open_storage(where))
    assert len(rows) == 3000
    assert rows[2999]["ids"].tolist() == [2999, 3000] and float(rows[7]["score"]) == 3.5
    for column, says in (
        (["text"] * 3, r"datasets\['validation'\]: column 'x' holds text"),
        ([[1], [1, 2], [3]], r"column 'x' has rows of different shapes"),
    ):
        with pytest.raises(SpecError, match=says):
            materialise({"validation": datasets.Dataset.from_dict({"x": column})}, run)
    with pytest.raises(SpecError, match="it is a IterableDataset, not a ray.data.Dataset nor"):
        materialise({"train": given.to_iterable_dataset()}, run)
