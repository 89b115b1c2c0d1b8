"""docs/optimization.md, executed: its jobs load, its optimizer is made, its guards are those that
there are."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.places import ROOT

from elastic.config.job import load_job
from elastic.config.optimization import Guards
from elastic.errors import ElasticError
from elastic.program import load_program
from elastic.types import Job
from elastic.worker.__main__ import parser
from elastic.worker.program.guards import MEMORY
from elastic.worker.program.job_program import with_job
from elastic.worker.program.model_profile import trace
from elastic.worker.program.optimizers import JobOptimizer

TEXT = (ROOT / "docs" / "optimization.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
BARE = load_program(ROOT / "tests" / "programs" / "tiny_bare.py")


def job_of(tmp_path: Path, *parts: str) -> dict[str, Any]:
    keys: dict[str, str] = {}
    for part in parts:  # later blocks replace keys of the first
        for key, body in re.findall(r"^(\w+):(.*(?:\n .*)*)", part, re.MULTILINE):
            keys[key] = body
    (tmp_path / "program.py").write_text("")
    (tmp_path / "job.yaml").write_text("\n".join(f"{key}:{body}" for key, body in keys.items()))
    return load_job(tmp_path).plain()


def test_the_job_of_the_page_trains(tmp_path: Path) -> None:
    job = job_of(tmp_path, BLOCKS[0])
    program = with_job(BARE, Job.from_plain(job))
    assert [kept.entries for kept in trace(program).optimizers] == [("exp_avg", "exp_avg_sq")]
    assert program.lr_factor is not None and program.optimizer is not None
    assert [program.lr_factor(step) for step in (0, 19, 200)] == pytest.approx([0.05, 1.0, 0.1])
    named = list(program.model().named_parameters())
    optimizer = program.optimizer(named)
    assert [(g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        (0.1, (0.9, 0.95)),
        (0.0, (0.9, 0.95)),
    ]
    assert len(optimizer.param_groups[1]["params"]) == sum("norm" in name for name, _ in named) > 0


def test_the_two_optimizers_of_the_page_share_the_parameters(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    exec(
        re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[0],
        {"torch": torch},
        found,
    )
    ours = replace(BARE, optimizer=found["optimizers"])
    for program in (with_job(BARE, Job.from_plain(job_of(tmp_path, BLOCKS[0], BLOCKS[3]))), ours):
        profile = trace(program)
        assert [kept.entries for kept in profile.optimizers] == [
            ("momentum_buffer",),
            ("exp_avg", "exp_avg_sq"),
        ]
        split = {spec.fqn: spec.optimizer for spec in profile.specs}
        assert (split["layers.0.attn.wo.weight"], split["embed.weight"]) == (0, 1)


def test_muon_and_adamw_in_the_line_of_the_page(tmp_path: Path) -> None:
    profile = trace(with_job(BARE, Job.from_plain(job_of(tmp_path, BLOCKS[0], BLOCKS[1]))))
    whole = {spec.fqn for spec in profile.specs if profile.kept_of(spec).form}
    assert whole == {s.fqn for s in profile.specs if s.fqn[:7] == "layers." and len(s.shape) == 2}
    more = re.findall(r"^optimizer: muon\+adamw +# or with settings: (.*)$", TEXT, re.MULTILINE)[0]
    given = job_of(tmp_path, BLOCKS[0], f"optimizer: {more}\n")["optimizer"]
    made = JobOptimizer(given, BARE.blocks)(list(BARE.model().named_parameters()))
    assert isinstance(made, dict)
    assert {g["lr"] for one in made.values() for g in one.param_groups} == {3e-4}


@pytest.mark.slow  # imports torchao
def test_the_states_of_8_bits_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="it is in the extra 'test'")
    given = job_of(tmp_path, BLOCKS[0], BLOCKS[2])["optimizer"]
    made = JobOptimizer(given, BARE.blocks)(list(BARE.model().named_parameters()))
    assert type(made).__name__ == "AdamW8bit" and len(made.param_groups) == 2


def test_the_larger_batch_has_twice_the_rate(tmp_path: Path) -> None:
    program = with_job(BARE, Job.from_plain(job_of(tmp_path, BLOCKS[0], BLOCKS[4])))
    assert program.lr_factor is not None and program.lr_factor(19) == pytest.approx(2.0)


def test_the_guards_of_the_page_are_all_there_are(tmp_path: Path) -> None:
    job = job_of(tmp_path, BLOCKS[0], BLOCKS[5])
    assert all(job["guards"].values()) and MEMORY in with_job(BARE, Job.from_plain(job)).extra_state
    rows = re.findall(r"^\| `(\w+)`", TEXT, re.MULTILINE)
    assert set(Guards.__pydantic_fields__) <= set(rows) and {"skip", "rollback", "stop"} <= set(
        rows
    )


@pytest.mark.parametrize(
    "name",
    [n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type) and n != "Optimizer"],
)
def test_the_page_names_what_passes_and_what_is_refused(name: str) -> None:
    passes, refused = (
        part.replace("\n", " ")
        for part in re.findall(r"on the whole\. (.*?) pass\. (.*?) are refused", TEXT, re.DOTALL)[0]
    )
    keywords = {"lr": 0.1} if name == "SGD" else {}
    try:
        trace(
            with_job(
                BARE,
                Job(steps=4, global_batch=2, optimizer={"path": f"torch.optim.{name}", **keywords}),
            )
        )
    except ElasticError:
        assert re.search(rf"\b{name}\b", refused), f"{name} is refused"
    else:
        assert re.search(rf"\b{name}\b", passes), f"{name} passes"


def test_the_page_is_linked() -> None:
    assert "(optimization.md)" in (ROOT / "docs" / "program.md").read_text()
    assert JobOptimizer({"path": "torch.optim.AdamW"}).parts[""].kind is torch.optim.AdamW


def test_muon_and_adamw_are_asked_for_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    monkeypatch.chdir(tmp_path)
    Path("muon").mkdir()
    for language, name, body in re.findall(
        r"^```(python|yaml)\n# (muon/\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL
    ):
        assert name.endswith(".py" if language == "python" else ".yaml")
        Path(name).write_text(body)
    found = []
    for line in re.findall(r"^torchrun .*$", TEXT, re.MULTILINE):
        words = shlex.split(line)
        given = parser().parse_args(words[words.index("elastic.worker") + 1 :])
        job = Job.from_plain(load_job(given.job, given.overrides).plain())
        assert job.steps * job.global_batch * 128 == 153_600 and "153,600 tokens" in TEXT
        profile = trace(with_job(load_program(tmp_path / "muon" / "program.py"), job))
        found.append({kept.name for kept in profile.optimizers if kept.owned or kept.entries})
    assert found == [{"muon", "adamw"}, {""}]
