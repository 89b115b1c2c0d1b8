"""What a plan is made for: jobs whose data lies elsewhere or is of unequal length, published
models, pools of files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.places import PROGRAMS, ROOT

from elastic.api.planning.model_source import (
    OF_A_SCRIPT,
    Subject,
    machines_of,
    made_up_data,
    of_job,
    of_model,
    of_script,
)
from elastic.cli.command_line import main
from elastic.config.clusters import load_cluster
from elastic.config.hardware import PLACE
from elastic.data.open_datasets import dataset_of
from elastic.errors import SpecError
from elastic.program import load_program
from elastic.types import Job


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path))


def job(folder: Path, program: str, text: str) -> Path:
    shutil.copy(PROGRAMS / program, folder / "program.py")
    shutil.copy(PROGRAMS / "tiny.py", folder)  # others read it
    (folder / "job.yaml").write_text(text)
    return folder


def test_a_job_with_its_pools(tmp_path: Path) -> None:
    text = (
        "steps: 10\nglobal_batch: 8\npools: [{name: a, accelerator_type: A100, gpus_per_node: 4, "
        "max_nodes: 3}]\n"
    )
    found = of_job(str(job(tmp_path, "tiny.py", text)), ["steps=20"])
    assert (found.steps, found.tokens, found.notes) == (20, 20 * 8 * found.sample_tokens, ())
    # int64 of what goes in and what shall come out
    assert found.sample_bytes == found.sample_tokens * 8 * 2
    machines = machines_of(found, {"a": 2})
    assert [(each.group.pool, each.group.n_gpus, each.price_from) for each in machines] == [
        ("a", 8, "the job")
    ]
    with pytest.raises(SpecError, match="no such pool; did you mean a"):
        machines_of(found, {"aa": 2})


def test_validations_are_counted_where_there_is_something_to_validate_with(tmp_path: Path) -> None:
    text = "steps: 10\nglobal_batch: 8\neval_every: 2\n"
    (tmp_path / "bare").mkdir()
    folder = job(tmp_path / "bare", "tiny_bare.py", text)
    own = "from dataclasses import replace\nimport tiny\nprogram = replace(tiny.program, validation=None)\n"
    (folder / "program.py").write_text(own)
    bare = of_job(str(folder), [])
    assert bare.job.eval_every == 0
    found = of_job(str(job(tmp_path, "tiny.py", text)), [])
    assert found.job.eval_every == 2


@pytest.mark.slow
def test_a_cluster_file_says_the_floor_and_the_price_of_the_head(tmp_path: Path) -> None:
    """As in a run there: where the job does not say them itself."""
    told = "on_demand_floor: 1\n    head_usd_per_h: 0.5"
    text = (ROOT / "cluster_configs" / "laptop.yaml").read_text()
    file = tmp_path / "cluster.yaml"
    file.write_text(text.replace("on_demand_floor: 1", told))
    folder = str(job(tmp_path, "tiny.py", "steps: 10\nglobal_batch: 8\n"))
    found = of_job(folder, cluster=load_cluster(file))
    assert (found.job.on_demand_floor, found.job.head_usd_per_h) == (1, 0.5)
    assert found.pools == load_cluster(file).pools
    own = of_job(
        folder, ["on_demand_floor=2", "head_usd_per_h=0.1"], cluster=load_cluster(file)
    ).job
    assert (own.on_demand_floor, own.head_usd_per_h) == (2, 0.1)


def test_paid_pools_without_a_limit_are_told_of(tmp_path: Path) -> None:
    text = (
        "steps: 10\nglobal_batch: 8\npools: [{name: a, accelerator_type: A100, usd_per_node_h: "
        "4.0, max_nodes: 3}]\n"
    )
    folder = str(job(tmp_path, "tiny.py", text))
    (found,) = machines_of(of_job(folder), {})
    assert found.notes[-1].startswith(
        "elastic run refuses this: keys 'budget_usd' and 'max_nodes' are missing"
    )
    (found,) = machines_of(of_job(folder, ["budget_usd=5"]), {})
    assert not any("refuses" in note for note in found.notes)


def test_a_folder_without_a_program(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("steps: 10\nglobal_batch: 8\n")
    with pytest.raises(
        SpecError,
        match="it has no program.py, which says what is trained; or plan a model by its sizes",
    ):
        of_job(str(tmp_path))


def test_what_a_run_would_refuse_is_refused_in_its_words(tmp_path: Path) -> None:
    wrong = (PROGRAMS / "tiny.py").read_text() + (
        "\nfrom dataclasses import replace\n"
        "program = replace(program, model=lambda: torch.nn.Sequential(Llama(CONFIG), "
        "torch.nn.Linear(65, 2)), tp={}, init=None)\n"
    )
    folder = job(tmp_path, "tiny.py", "steps: 3\nglobal_batch: 6\n")
    (folder / "program.py").write_text(wrong)
    with pytest.raises(SpecError) as found:
        of_job(str(folder))
    assert str(found.value).startswith(f"{folder / 'program.py'}: RuntimeError: mat1 and mat2")
    assert str(found.value).endswith("over the first sample: input [1, 16], target [1, 16]")


def test_a_drill_that_names_what_can_never_be_is_refused_as_by_a_run(tmp_path: Path) -> None:
    """On the job's own pools: of a cluster file's a real run carries out no drill of the job."""
    text = (
        "steps: 10\nglobal_batch: 8\npools: [{name: a, market_type: owned, max_nodes: 2}]\n"
        "drill: [{at_step: 3, kill: a-3}]\n"
    )
    folder = str(job(tmp_path, "tiny.py", text))
    with pytest.raises(SpecError) as found:
        of_job(folder, drilled=True)
    assert str(found.value).startswith("the drill, at_step 3: there is never a node 'a-3'; nodes")
    assert of_job(folder).pools
    assert main(["plan", folder]) == 2, "a plan of the job's own pools asks"


def test_samples_of_unequal_length_count_as_the_first(tmp_path: Path) -> None:
    found = of_job(
        str(job(tmp_path, "tiny_unequal.py", "steps: 10\nglobal_batch: 8\nmicrobatch_tokens: 64\n"))
    )
    assert found.model.sample is not None
    assert found.job.microbatch_tokens is None
    assert f"like the first, of {found.model.sample.tokens} tokens" in found.notes[-1]
    assert "planned for what elastic run would start" in found.notes[0]


def test_remote_tokens_are_made_up() -> None:
    program = load_program(PROGRAMS / "tiny.py")
    remote = {
        "data": {"train": {"tokens": "s3://BUCKET/tokens", "seq": 48}},
        "steps": 1,
        "global_batch": 1,
    }
    with made_up_data(Job.from_plain(remote)) as job:
        sample = dataset_of(program, job)[0]
        assert [len(column) for column in sample.values()] == [48, 48]
    assert remote["data"] == {"train": {"tokens": "s3://BUCKET/tokens", "seq": 48}}
    for data in (
        {"train": {"tokens": "here", "seq": 48}},
        {"train": {"tokens": "s3://b/t", "seq": 8, "pack": "document"}},
        {},
    ):
        with made_up_data(Job.from_plain({"data": data})) as job:
            assert job.data.plain() == data


def batch_note(batch: int) -> str:
    found: Subject = of_model("gpt2-124m", batch)
    return "; ".join(found.notes)


def test_the_batch_of_a_published_model() -> None:
    assert of_model("gpt2-124m").job.global_batch == 512
    assert batch_note(0).startswith("a step has 512 sequences (0.524 M tokens)")
    assert batch_note(512) == ""
    assert "2.0 times that of its own training" in batch_note(1024)
    own = "layers=2,hidden=64,heads=4,ffn=256,vocab=512,seq=128"
    assert "as is usual" in of_model(own).notes[0]
    assert of_model(own, 10**6).notes == ()
    assert of_model("gpt2-124m", 8, "float16").job.precision == "float16"


def test_a_script_is_planned_by_the_first_call_of_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the same model in a program, but for the loss; also where its body asks for its step
    first; of a job, or by itself with its arguments. One that enters no loop is told how a plan is made."""
    texts = {"program.py": PROGRAM, "train.py": LOOP.replace("STEP", "run.step_index")}
    for name, text in texts.items():
        (tmp_path / name).write_text(NET + text)
    keys = "steps: 4\nglobal_batch: 8\n"
    (tmp_path / "job.yaml").write_text(keys)
    program = of_job(str(tmp_path)).model.sample
    (tmp_path / "job.yaml").write_text(keys + "script: train.py\n")
    found = of_job(str(tmp_path))
    script = found.model.sample
    assert program is not None and script is not None
    assert script.matmuls == program.matmuls and script.tokens == program.tokens == 5
    assert 0.9 * program.flop < script.flop <= program.flop
    assert OF_A_SCRIPT in found.notes
    (tmp_path / "job.yaml").unlink()
    args = ["plan", "--script", str(tmp_path / "train.py"), "--gpus", "H100:2", "--json"]
    assert main([*args, "--set", "steps=4", "--set", "global_batch=8", "--", "--wide"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["model"]["name"], data["model"]["global_batch"]) == ("train", 8)
    assert data["model"]["n_params"] == found.model.n_params and OF_A_SCRIPT in data["notes"]
    assert main([*args[:3], str(tmp_path), "--gpus", "H100:2"]) == 2, "a folder without a job.yaml"
    (tmp_path / "train.py").write_text("import torch")
    with pytest.raises(SpecError, match=r"train.py does not enter elastic.loop: .* elastic plan"):
        of_script(str(tmp_path / "train.py"))
    with pytest.raises(SpecError, match=r"train.py: a file; elastic run --script starts it, `scr"):
        of_job(str(tmp_path / "train.py"))


NET = """
import torch, elastic
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


rows = [{"input": torch.arange(5) + i % 8, "target": torch.arange(5)} for i in range(32)]
"""
PROGRAM = """
program = elastic.Program(
    model=Net, dataset=lambda: rows, loss=lambda output, batch: loss(output, batch["target"]),
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
"""
LOOP = """
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with elastic.loop(model=net, optimizer=optimizer, dataset=rows) as run:
    for batch in run:
        rate = STEP
        run.backward(loss(run.model(batch["input"]), batch["target"]))
        run.step()
"""
