"""What job.yaml can say, elastic.loop can say too, by the same names; and what is misspelled is one
clear line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

import elastic
from elastic.api.running.entry import loaded
from elastic.config.job import BY_START, JobSpec
from elastic.config.key_names import DOCUMENTED
from elastic.errors import SpecError
from elastic.types import ModelProfile
from elastic.worker.program.job_program import with_job
from elastic.worker.program.model_profile import trace

TEXT = """
import torch, elastic
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
keys = {keys!r}
with elastic.loop(model=model, optimizer=optimizer, dataset=torch.ones(16, 4), **keys) as run:
    pass
"""
SAID: dict[str, Any] = {  # another value than the default, for each key that a script's job can have
    "name": "other", "steps": 7, "global_batch": 12, "seed": 5, "eval_every": 3, "eval_samples": 9,
    "clip_grad_norm": 2.0, "noise_scale": {"every": 4}, "guards": {"loss_spike": {"do": "stop"}},
    "precision": "bfloat16", "reduce_dtype": "bfloat16", "layout": "dp_shard=2",
    "activation_checkpointing": "full", "zero_stage": 2, "compile": True, "offload": True,
    "min_workers": 2, "max_workers": 4, "replica_every": 3, "checkpoint_every": 4,
    "peer_replicas": 2, "copies_across_zones": True, "copy_link_share": 0.5, "keep_last": 3,
    "keep_every": 8, "keep_best": 1, "storage_quota_gb": 2.0, "verify_copies": False,
    "storage": "runs", "budget_usd": 3.0, "head_usd_per_h": 0.1, "max_nodes": 3, "deadline_h": 2.0,
    "on_demand_floor": 1, "waiting_usd_per_h": 1.0, "max_silence_s": 20.0, "orphan_lease_s": 60.0,
    "purpose": "cheapest", "pools": [{"name": "p", "market_type": "on-demand", "max_nodes": 4}],
    "trusted_axes": ["dp"], "rebalance": False, "across_zones": True, "check_numbers_every": 5,
    "drill": [{"at_step": 2, "kill": "any"}], "data": {"loader_workers": 1},
    "schedule": "1f1b", "virtual_stages": 2, "float8": True,
    "trackers": {"mlflow": {"experiment": "e"}}, "metrics_port": 9500,
    "batch_norm": {"group": 4},
}  # fmt: skip
NOT_FOR_SCRIPTS = {  # keys that are refused for a script, wherever they stand
    "optimizer", "lr_schedule", "lr_scaling", "base_global_batch", "microbatch_size", "microbatch_tokens",
    "phases", "frozen_weights",
}  # fmt: skip


def job_of_loop(folder: Path, keys: dict[str, Any], **more: Any) -> JobSpec:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(TEXT.format(keys=keys))
    (folder / "job.yaml").write_text(yaml.safe_dump({"script": "train.py", "name": "job", **more}))
    return loaded(folder)[0]


def test_each_key_of_a_job_can_be_said_in_a_script(tmp_path: Path) -> None:
    known = {DOCUMENTED.get(key, key) for key in JobSpec.__pydantic_fields__}
    assert {*SAID} | {*BY_START} | NOT_FOR_SCRIPTS == known
    said = {key: value for key, value in SAID.items() if key != "name"}
    by_script = job_of_loop(tmp_path, said)
    by_file = job_of_loop(tmp_path, {}, **said)
    assert by_script.plain() == by_file.plain()
    default = JobSpec(name="job", folder="f", program="p", steps=1, global_batch=1).plain()
    same = {key for key in SAID if by_script.plain()[_stored(key)] == default[_stored(key)]}
    assert same == {"name"}, "each value is another one than the default"


def _stored(key: str) -> str:
    return {documented: stored for stored, documented in DOCUMENTED.items()}.get(key, key)


def test_the_job_file_comes_before_the_script(tmp_path: Path) -> None:
    """Also where the two use the two names of a key."""
    keys = {"steps": 5, "global_batch": 4, "checkpoint_every": 2, "eval_every": 2}
    job = job_of_loop(tmp_path, keys, durable_every=8, eval_every=3)
    assert (job.steps, job.durable_every, job.eval_every) == (5, 8, 3)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"evaluate_every": 3}, "unknown keyword 'evaluate_every'; did you mean 'eval_every'?"),
        ({"stps": 3}, "elastic.loop(stps=...): unknown keyword 'stps'; did you mean 'steps'?"),
        ({"xyzzy": 3}, "unknown keyword 'xyzzy'; keywords are model, optimizer, dataset, blocks"),
        ({"script": "a.py"}, "elastic.loop(script=...): it is this script; leave it out"),
        ({"eval_every": -1}, "train.py: elastic.loop(...): key 'eval_every': "),
        ({"pools": [{"nam": "p"}]}, "elastic.loop(...): unknown key 'pools.0.nam'; did you mean"),
        ({"peer_every": 3, "replica_every": 4}, "are two names of one key"),
    ],
)
def test_keywords_that_are_wrong(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        job_of_loop(tmp_path, {"steps": 3, "global_batch": 4, **keys})
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (elastic.Program, "elastic.Program(modle=...): unknown keyword 'modle'; did you mean"),
        (elastic.Options, "elastic.Options(modle=...): unknown keyword 'modle'; keywords are"),
        (elastic.ElasticTrainer, "elastic.ElasticTrainer(modle=...): unknown keyword 'modle';"),
    ],
)
def test_unknown_keywords_are_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        make(modle=1)
    assert said in str(caught.value)


def samples() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.ones(16, 4))


def loop_of(dataset: Any) -> elastic.loop:
    model = torch.nn.Linear(4, 1)
    return elastic.loop(model=model, optimizer=torch.optim.SGD(model.parameters()), dataset=dataset)


def test_of_a_data_loader_its_dataset_is_taken() -> None:
    data = samples()
    assert loop_of(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)).dataset is data
    assert loop_of(data).dataset is data
    model = torch.nn.Linear(4, 1)
    validated = elastic.loop(
        model=model, optimizer=torch.optim.SGD(model.parameters()), dataset=data,
        validation=torch.utils.data.DataLoader(data), evaluate=lambda model, batch: 0.0,
    )  # fmt: skip
    assert validated.validation is data


def test_a_data_loader_that_does_more_is_refused() -> None:
    data = samples()
    with pytest.raises(SpecError, match="the DataLoader has a collate_fn of its own"):
        loop_of(torch.utils.data.DataLoader(data, collate_fn=list))
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 16, 16)
    with pytest.raises(SpecError, match="the DataLoader has a WeightedRandomSampler; the order is"):
        loop_of(torch.utils.data.DataLoader(data, sampler=weighted))
    of_a_kind = [[0, 2], [1, 3]]  # its own batches, which would get lost
    with pytest.raises(SpecError, match="the DataLoader has a list; the order is elastic's"):
        loop_of(torch.utils.data.DataLoader(data, batch_sampler=of_a_kind))


class Curriculum(torch.utils.data.SequentialSampler):
    pass


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (Curriculum, "Curriculum"),
        (partial(RandomSampler, replacement=True), r"RandomSampler\(replacement=True\)"),
        (partial(RandomSampler, num_samples=3), r"RandomSampler\(num_samples=3\)"),
        (partial(RandomSampler, num_samples=16), ""),
        (RandomSampler, ""),
    ],
)
def test_a_sampler_with_an_order_of_its_own_is_refused(
    sampler: Callable[[Any], Any], said: str
) -> None:
    data = samples()
    batches = torch.utils.data.BatchSampler(sampler(data), 4, drop_last=False)
    for own in ({"sampler": sampler(data)}, {"batch_sampler": batches}):
        loader = torch.utils.data.DataLoader(data, **own)
        if said:
            with pytest.raises(SpecError, match=f"has a {said}; the order is elastic's"):
                loop_of(loader)
        else:
            assert loop_of(loader).dataset is data


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (lambda data: SubsetRandomSampler(range(12)), "SubsetRandomSampler of 12"),
        (lambda data: SequentialSampler(range(12)), "SequentialSampler of 12"),
        (lambda data: RandomSampler(range(12)), "RandomSampler of 12"),
        (lambda data: DistributedSampler(Subset(data, range(12)), 2, 0), "DistributedSampler of 1"),
    ],
)
def test_a_sampler_of_some_of_the_samples_is_refused(
    sampler: Callable[[Any], Any], said: str
) -> None:
    """The others may be those that it is validated with."""
    data = samples()
    batches = torch.utils.data.BatchSampler(sampler(data), 4, drop_last=False)
    for own in ({"sampler": sampler(data)}, {"batch_sampler": batches}):
        with pytest.raises(SpecError, match=rf"has a {said}\d* of the 16 samples; .*Subset\(data"):
            loop_of(DataLoader(data, **own))
    assert loop_of(DataLoader(data, sampler=DistributedSampler(data, 2, 0))).dataset is data
    assert len(loop_of(DataLoader(Subset(data, range(12)), shuffle=True)).dataset) == 12


class Counted(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """It says how many there are, and has none of them by its number."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(16, 4))

    def __len__(self) -> int:
        return 16


def test_an_iterable_dataset_that_has_a_length_is_refused() -> None:
    for given in (Counted(), DataLoader(Counted(), batch_size=4)):
        with pytest.raises(SpecError, match="dataset is a Counted without __getitem__; it must be"):
            loop_of(given)


def test_steps_must_be_said_somewhere(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(TEXT.format(keys={"global_batch": 4}))
    said = r"'steps' is missing; give it to elastic.loop\(steps=...\), or by --set steps=N"
    with pytest.raises(SpecError, match=said):
        elastic.api.run_script(str(file))


def test_what_others_call_it_is_told_what_it_is_here(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="get_world_size'; it is run.world_size inside the l"):
        _ = elastic.get_world_size  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
        _ = elastic.nothing  # type: ignore[attr-defined]
    (tmp_path / "train.py").write_text(TEXT.format(keys={}).replace("pass", "run.world_size"))
    (tmp_path / "job.yaml").write_text("script: train.py\nsteps: 1\nglobal_batch: 2\n")
    with pytest.raises(SpecError, match="run.world_size was asked for before .* global_batch, and"):
        loaded(tmp_path)


def profiled(folder: Path, model: str, more: str = "") -> ModelProfile:
    """As a run has it of a loop over this model."""
    text = TEXT.replace("torch.nn.Linear(4, 1)", model).replace("keys =", f"{more}\nkeys =")
    (folder / "train.py").write_text(text.format(keys={"steps": 3, "global_batch": 16}))
    (folder / "job.yaml").write_text(yaml.safe_dump({"script": "train.py", "name": "job"}))
    spec, program = loaded(folder)
    return trace(with_job(program, spec.job()))


def test_a_model_that_cannot_be_copied_is_told_of_elastic_loop(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        profiled(tmp_path, "torch.nn.Linear(4, 1)", "import threading; model.a = threading.Lock()")
    said = str(caught.value)
    assert "elastic.loop: a copy of the model (copy.deepcopy) raised TypeError: cannot pi" in said
    assert "Program" not in said and "\n" not in said


def test_a_note_names_a_keyword_of_elastic_loop(tmp_path: Path) -> None:
    found = profiled(
        tmp_path, "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))"
    )
    assert found.notes[-1].endswith("by default; batch_norm of elastic.loop says another, or step")
