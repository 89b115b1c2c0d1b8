"""What a run is refused for before it starts: its drill, its layout, and what it began with."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.api.tiny_job import MODEL, PROGRAM, START, prepared
from support.places import PROGRAMS
from support.storage.remote_folder import Remote
from torch.utils.data import IterableDataset

from elastic.api.running import start_checks
from elastic.config.fingerprint import fingerprint
from elastic.config.job import drill_entry, job_of, load_job
from elastic.errors import SpecError
from elastic.ledger.journal import Journal, Line, read
from elastic.observe import terminal
from elastic.program import Program, load_program
from elastic.storage import open_storage
from elastic.types import (
    DriverStarted,
    Job,
    ModelProfile,
    OptimizerSpec,
    Pool,
    TensorSpec,
    parse_layout,
)
from elastic.worker.hosting import resume_checks
from elastic.worker.program.model_profile import trace
from elastic.worker.standalone.standalone_run import StandaloneOptions, StandaloneRun


@pytest.mark.parametrize(
    ("where", "text", "place"),
    [
        ("my_job/job.yaml", "", "in job.yaml"),
        ("--set", "with elastic.loop() as run: pass", "in elastic.loop(...)"),
        ("--set", "t = elastic.prepare_trainer(t)", "in elastic.prepare_trainer(...)"),
        ("--set", "", "by --set"),
        (
            "ElasticTrainer(job=...)",
            "with elastic.loop() as run: pass",
            "in ElasticTrainer(job=...",
        ),
        ("job", "", "in job={...}"),
    ],
)
def test_where_a_run_is_given_its_keys(tmp_path: Path, where: str, text: str, place: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    keys = {"steps": 2, "global_batch": 4, "script": str(script)}
    found = start_checks.keys_in(job_of(keys, script, where), restarted=not text)
    assert found.startswith(place)


@pytest.mark.parametrize(
    ("keys", "remote", "told"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"verify_copies": True}, True, False),
        ({"verify_copies": False}, True, False),
    ],
    ids=str,
)
def test_that_checkpoints_come_back_over_the_network_is_said_where_nobody_has_asked_for_it(
    tmp_path: Path, keys: dict[str, Any], remote: bool, told: bool
) -> None:
    spec = job_of({"steps": 2, "global_batch": 4, **keys}, tmp_path / "job.yaml")
    storage = Remote(tmp_path) if remote else open_storage(tmp_path)
    model = ModelProfile(1, 0, (TensorSpec("w", (1000, 1000), "float32"),))
    said = start_checks.reads_back(spec, storage, model)
    assert bool(said) == told
    if told:
        assert f"from {tmp_path}, about 4.0 MB each (verify_copies)" in said


TWO = r"storage_quota_gb=0.016 \(16.0 MB\) is less than two checkpoints \(16.3 MB\): the newest"


@pytest.mark.parametrize(
    ("quota_gb", "every", "said"),
    [
        (0.016, "auto", TWO), (0.016, 1, TWO), (0.01633, "auto", ""), (None, "auto", ""),
        (0.012, 2, ""), (0.012, 0, ""),
        (0.008, 3, r"storage_quota_gb=0.008 \(8.0 MB\) is less than one checkpoint \(8.2 MB\); r"),
    ],
)  # fmt: skip
def test_a_quota_of_less_than_two_checkpoints_is_wrong_input(
    tmp_path: Path, quota_gb: float | None, every: str | int, said: str
) -> None:
    """The newest stays until the next is stored, which would never be; one is enough where there is
    but that of the last step. What is read again from its source is in none."""
    keys = {
        "steps": 2, "global_batch": 4, "storage_quota_gb": quota_gb, "checkpoint_every": every,
    }  # fmt: skip
    spec = job_of(keys, tmp_path / "job.yaml")
    base = TensorSpec("base", (9000, 1000), "float32", trainable=False, reread=True)
    moments = OptimizerSpec(("exp_avg",))
    model = ModelProfile(1, 0, (TensorSpec("w", (1000, 1000), "float32"), base), (moments,))
    if not said:
        resume_checks.check_quota(spec, model, stored=False)
        if quota_gb == 0.012:  # a stop has stored one, which stays until that of the last step is
            with pytest.raises(SpecError, match="is less than two checkpoints"):
                resume_checks.check_quota(spec, model, stored=True)
        return
    with pytest.raises(SpecError, match=said) as caught:
        resume_checks.check_quota(spec, model, stored=False)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_it_is_told_before_a_worker_starts_also_under_torchrun(folder: Path) -> None:
    (folder / "program.py").write_text((PROGRAMS / "tiny.py").read_text())
    (folder / "job.yaml").write_text("steps: 4\nglobal_batch: 8\nstorage_quota_gb: 1.0e-6\n")
    said = r"storage_quota_gb=1e-06 \(1.0 kB\) is less than two checkpoints"
    with pytest.raises(SpecError, match=said):
        prepared(folder)._start(1, [])
    model = trace(load_program(folder / "program.py"))
    start = DriverStarted("tiny", 1, {}, (), model)
    with pytest.raises(SpecError, match=said):
        StandaloneRun(load_job(folder), StandaloneOptions(), {})._may_go_on(
            start, [], None, found=resume_checks.FoundCopies((), {}, ())
        )


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            {"kill": "spot-3"},
            "the drill, at_step 5: there is never a node 'spot-3'; nodes here are spot-1 to "
            "spot-2, od-1; or give",
        ),
        ({"notice": ["any", "spot"]}, "there is never a node 'spot'"),
        ({"hang": "od-1-1"}, "there is never a node 'od-1-1'"),
        ({"kill": "rank:3"}, "'rank:3', but there are at most 3 workers, rank:0 to rank:2"),
    ],
)
def test_a_drill_names_nodes_that_there_can_be(entry: dict[str, object], said: str) -> None:
    spot, on_demand = (
        Pool("spot", "CPU", 1, "spot", max_nodes=2),
        Pool("od", "CPU", 1, "on-demand", max_nodes=1),
    )
    wrong = drill_entry({"at_step": 5, **entry})
    good = drill_entry(
        {"at_step": 1, "kill": ["spot-2", "od-1", "any-spot", "partner", "rank:2", "any"]}
    )
    with pytest.raises(SpecError, match=said):
        start_checks.check_drill([good, wrong], (spot, on_demand), embedded=True)
    start_checks.check_drill([good], (spot, on_demand), embedded=True)
    if "rank" not in said:
        start_checks.check_drill([wrong], (spot, on_demand), embedded=False)
    with pytest.raises(
        SpecError,
        match=r"'any-spot', but no pool is of the spot market \(od is on-demand\); take any",
    ):
        start_checks.check_drill(
            [drill_entry({"at_step": 1, "kill": "any-spot"})], (on_demand,), embedded=False
        )
    more = [
        drill_entry({"at_step": 1, "add": "spot"}),
        drill_entry({"at_step": 2, "kill": "spot-3"}),
    ]
    start_checks.check_drill(more, (spot, on_demand), embedded=True)
    with pytest.raises(SpecError, match="at_step 3: no pool 'c' to add to; pools are spot, od"):
        start_checks.check_drill(
            [drill_entry({"at_step": 3, "add": "c"})], (spot, on_demand), embedded=False
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"job": {**START.job, "global_batch": 4}},
            "was started with global_batch=8, the job says 4: .* change it back",
        ),
        ({"job": {**START.job, "seed": 4}}, r"started with other values: seed \(3, now 4\)"),
        (
            {"model": replace(MODEL, specs=(TensorSpec("w", (2, 3), "float32"),))},
            r"w was \[2, 2\], it is \[2, 3\]",
        ),
        (
            {"model": replace(MODEL, specs=(*MODEL.specs, TensorSpec("b", (2,), "float32")))},
            r"b was not there, it is \[2\]",
        ),
    ],
)
def test_a_run_goes_on_as_it_began(change: dict[str, object], said: str) -> None:
    before = [Line(0.0, 1, ((0.0, START),))]
    resume_checks.check_same(before, replace(START, epoch=2, job={**START.job, "steps": 9}), {})
    resume_checks.check_same([], replace(START, **change), {})
    with pytest.raises(SpecError, match=said):
        resume_checks.check_same(before, replace(START, **change), {})


def test_a_loop_that_is_done_is_told_where_its_steps_stand() -> None:
    for script, more in (
        (False, "; --set steps=N"),
        (True, r"; more steps \(or epochs\) in elastic"),
    ):
        with pytest.raises(SpecError, match=rf"run 'a' is done \(9 steps\){more}"):
            resume_checks.check_not_done("a", 9, 9, succeeded=True, script=script)
    resume_checks.check_not_done("a", 10, 9, succeeded=True, script=True)


def test_a_changed_program_is_refused_unless_it_is_accepted() -> None:
    def started(code: str) -> DriverStarted:
        return replace(START, job={**START.job, "fingerprint": {"program": code, "seed": 3}})

    before = [Line(0.0, 1, ((0.0, started("a")),))]
    resume_checks.check_same(before, started("a"), {})
    with pytest.raises(
        SpecError, match=r"other values: the code of its program\.py; .* --allow-changed"
    ):
        resume_checks.check_same(before, started("b"), {})
    resume_checks.check_same(before, started("b"), {}, allow_changed=True)
    accepted = [*before, Line(1.0, 2, ((1.0, started("b")),))]
    resume_checks.check_same(accepted, started("b"), {})
    loop = replace(started("b"), job={**started("b").job, "script": "/home/me/train.py"})
    with pytest.raises(
        SpecError, match=r"other values: the code of its train\.py; .*allow_changed"
    ):
        resume_checks.check_same(before, loop, {})
    # without a journal, its newest checkpoint knows
    with pytest.raises(SpecError, match="program"):
        resume_checks.check_same([], started("b"), {"fingerprint": {"program": "a"}})


def test_a_run_over_a_file_of_tokens_and_with_secret_arguments_is_resumed(folder: Path) -> None:
    def started(*args: str, tokens: str = "/data/x.bin") -> DriverStarted:
        data = {"train": {"tokens": tokens, "end_token": "<end>", "seq": 8}}
        job: dict[str, Any] = {**START.job, "args": [*args], "data": data}
        return replace(
            START,
            job=job
            | {
                "fingerprint": fingerprint(
                    folder / "program.py", Job.from_plain(job), MODEL, n_samples=9
                )
            },
        )

    journal = Journal(folder / "journal.jsonl", 1)
    journal.append(0.0, [(0.0, started("--hf-token", "hf_1", "--lr", "3"))], None)
    journal.close()
    before = read(folder / "journal.jsonl")
    for meta in (
        {},
        {"fingerprint": started("--hf-token", "hf_1", "--lr", "3").job["fingerprint"]},
    ):
        resume_checks.check_same(before, started("--hf-token", "hf_1", "--lr", "3"), meta)
        resume_checks.check_same([], started("--hf-token", "hf_1", "--lr", "3"), meta)
    for other in (
        started("--hf-token", "hf_2", "--lr", "3"),
        started("--hf-token", "hf_1", "--lr", "4"),
    ):
        with pytest.raises(SpecError, match="was started with other values: args"):
            resume_checks.check_same(before, other, {})
    with pytest.raises(SpecError, match=r"data\.train .*/data/x\.bin.*/data/y\.bin"):
        resume_checks.check_same(
            before, started("--hf-token", "hf_1", "--lr", "3", tokens="/data/y.bin"), {}
        )


def test_a_layout_that_the_model_cannot_be_cut_into_is_wrong_input() -> None:
    def check(layout: str, profile: ModelProfile, script: str = "") -> None:
        spec: Any = SimpleNamespace(least_layouts=lambda: [parse_layout(layout)], script=script)
        spec.each_phase = lambda: [spec]
        resume_checks.check_layouts(spec, profile)

    plain = ModelProfile(n_blocks=2, n_params=1, specs=(), tp_limit=1)
    with pytest.raises(
        SpecError, match="tp=2, but tp must divide 1 for this model; give Program.tp"
    ):
        check("tp=2", plain)
    with pytest.raises(SpecError, match=r"give elastic.loop\(tp=...\) the modules to cut"):
        check("tp=2", plain, script="train.py")
    with pytest.raises(SpecError, match="pp=4, but the program's `blocks` matches only 2"):
        check("pp=4", plain)
    check("dp_shard=2,pp=2", plain)
    check("tp=4", ModelProfile(n_blocks=2, n_params=1, specs=(), tp_limit=8))
    with pytest.raises(SpecError, match="take a tp that divides it"):
        check("tp=3", ModelProfile(n_blocks=2, n_params=1, specs=(), tp_limit=8))


@pytest.mark.parametrize(
    ("off_s", "told"),
    [(3600.0, "3600 s behind that of"), (-3600.0, "3600 s ahead of that of"), (2.0, "")],
)
def test_a_clock_that_is_not_the_storages_is_told(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    off_s: float,
    told: str,
) -> None:
    """Ahead of the true time it would spend the deadline unseen."""
    storage = open_storage(str(folder / "runs"))
    monkeypatch.setattr(storage, "modified_s", lambda key: time.time() + off_s)
    resume_checks.taken(storage, "r").release()
    assert (told in caplog.text) if told else ("clock" not in caplog.text)


class Unread:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": (Path("/nowhere") / str(index)).read_bytes()}


class Moves(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was read")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"metrics": lambda out, batch: {"right": (out.argmax(-1) == batch["target"]).float().mean()}},
         r"Program.metrics\['right'\] is 1 for one sample and for the same sample twice: a mean"),
        ({"log": lambda out, batch: {"top": out.max()}}, r"Program.log\['top'\] is [0-9.]+ for one"),
        ({"metrics": lambda out, batch: {"x": batch["lables"].sum()}},
         r"Program.metrics raised KeyError: 'lables' \(test_start_checks.py:\d+\)"),
        ({"metrics": lambda out, batch: out.sum()}, "Program.metrics returned Tensor; it must return"),
    ],
)  # fmt: skip
def test_numbers_beside_the_loss_are_sums_too(given: dict[str, Any], says: str) -> None:
    tiny = load_program(PROGRAMS / "tiny.py")
    job = Job(global_batch=4, program="p.py")
    with pytest.raises(SpecError, match=f"p.py: {says}"):
        resume_checks.check_loss(job, replace(tiny, **given))


def test_numbers_beside_the_loss_that_are_sums_are_taken() -> None:
    tiny = load_program(PROGRAMS / "tiny.py")
    sums = {
        "metrics": lambda out, batch: {"right": (out.argmax(-1) == batch["target"]).sum().item()},
        "log": lambda out, batch: {"none": 0.0, "all": out.abs().sum()},
    }
    resume_checks.check_loss(Job(global_batch=4, program="p.py"), replace(tiny, **sums))


@pytest.mark.parametrize("draw", [torch.rand, lambda n: torch.from_numpy(np.random.rand(n))])
def test_a_mean_is_found_where_the_dataset_draws(draw: Callable[[int], torch.Tensor]) -> None:
    """Crops and noise: each read of a sample gives another one."""

    class Noisy:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input": draw(4).float(), "target": draw(1).float()}

    def program(loss: Callable[[torch.Tensor, Any], torch.Tensor]) -> Program:
        return Program(
            model=lambda: torch.nn.Linear(4, 1),
            optimizer=lambda named: torch.optim.SGD((p for _, p in named), lr=0.1),
            dataset=Noisy,
            loss=loss,
        )

    job, state = Job(global_batch=4, program="p.py"), torch.get_rng_state()
    resume_checks.check_loss(
        job, program(lambda out, batch: (out - batch["target"]).square().sum())
    )
    with pytest.raises(SpecError, match=r"p.py: Program.loss returned .* a mean, it seems"):
        resume_checks.check_loss(
            job, program(lambda out, batch: (out - batch["target"]).square().mean())
        )
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loss_that_is_a_mean_is_wrong_input_before_anything_starts() -> None:
    tiny = load_program(PROGRAMS / "tiny.py")
    job = Job(global_batch=4, program="p.py")
    resume_checks.check_loss(job, tiny)
    mean = replace(tiny, loss=lambda output, batch: output.float().mean())
    with pytest.raises(SpecError, match=r"p.py: Program.loss returned .* a mean, it seems"):
        resume_checks.check_loss(job, mean)
    resume_checks.check_loss(job, replace(mean, dataset=Moves))  # a stream is not touched
    unread = replace(tiny, dataset=Unread)
    with pytest.raises(SpecError, match=r"sample 0 cannot be read: FileNotFound.*_checks.py:\d+"):
        resume_checks.check_loss(job, unread)


@pytest.mark.parametrize(("n_samples", "said"), [(5, 1), (12, 0), (0, 0)])
def test_a_dataset_that_is_smaller_than_a_step_is_told(n_samples: int, said: int) -> None:
    spec: Any = SimpleNamespace(global_batch=12)
    notes = resume_checks.with_few(MODEL, spec, n_samples).notes
    assert len(notes) == said
    assert not said or "has 5 samples and a step takes 12 (global_batch)" in notes[0]


@pytest.mark.parametrize(
    ("steps", "saved", "succeeded", "said"),
    [
        (12, 12, True, "run 'one' is done (12 steps); --set steps=N with more of them"),
        (300, 617, False, "run 'one' is at step 617 of now 300 steps; --set steps=N with more"),
    ],
)
def test_a_run_with_nothing_left_to_do_says_so(
    steps: int, saved: int, succeeded: bool, said: str
) -> None:
    with pytest.raises(SpecError) as refused:
        resume_checks.check_not_done("one", steps, saved, succeeded=succeeded)
    assert said in str(refused.value)
    assert refused.value.exit_code == (0 if succeeded else 2), "what is done is no wrong input"


@pytest.mark.parametrize(
    ("steps", "saved", "succeeded"),
    [(12, 0, True), (13, 12, True), (12, 12, False), (12, 0, False)],
)
def test_a_run_with_steps_or_its_end_left_continues(
    steps: int, saved: int, succeeded: bool
) -> None:
    resume_checks.check_not_done("one", steps, saved, succeeded=succeeded)


@pytest.mark.parametrize("show", [True, False])
def test_a_start_says_what_has_taken_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: bool
) -> None:
    monkeypatch.setattr(terminal, "START_LEAST_S", 0.0)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "job.yaml").write_text("steps: 4\nglobal_batch: 8\nname: tiny\n")
    stream = io.StringIO()
    prepared(tmp_path, stream=stream, show=show)
    assert ("start: the program was read in " in stream.getvalue()) == show
