"""torch.compile per block: through live changes of the layout, and refused where there is no
compiler."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from support.reference import train
from support.worker.chain import job_of
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool
from torch import nn

from elastic.errors import SpecError
from elastic.program import load_program
from elastic.types import Layout, Plan, Resume, StepDone
from elastic.worker.parallel import compiled

PATIENCE_S = 300.0  # a cold compiler on a busy machine
LAYOUTS = [
    Layout(dp_shard=2), Layout(tp=2), Layout(dp_shard=2, activation_checkpointing="selective"),
    Layout(pp=2, activation_checkpointing="full"),
]  # fmt: skip


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "no-such-compiler"])
def test_without_a_compiler_it_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(
        SpecError,
        match=f"^compile: true needs a C[+][+] compiler, and there is no '{compiler}' here[^\n]*$",
    ):
        compiled.settle_compiler(torch.device("cpu"))


def test_the_folder_is_one_on_this_node_unless_the_user_says_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    compiled.settle_compiler(torch.device("cpu"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiled.settle_compiler(torch.device("cpu"))
    own = tmp_path / f"elastic-compiled-{os.getuid()}"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compiled.settle_compiler(torch.device("cpu"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own), "of all processes"


@pytest.mark.parametrize("planted", ["open to all", "a link", "a link to nothing"])
def test_compiled_code_is_not_loaded_from_a_folder_that_another_user_may_have_filled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: str
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    own = tmp_path / f"elastic-compiled-{os.getuid()}"
    if planted == "open to all":
        own.mkdir()
        own.chmod(0o777)
    else:
        own.symlink_to(tmp_path / ("theirs" if planted == "a link" else "nowhere"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CXX", "true")
    found = []
    for home in ("home", "file"):  # in the second one no cache can be made
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        compiled.settle_compiler(torch.device("cpu"))
        found.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        assert stat.S_IMODE(found[-1].lstat().st_mode) == 0o700
    assert found[0] == tmp_path / "home" / "elastic" / "compiled"
    assert found[1].parent == tmp_path and found[1] != own
    assert not list((tmp_path / "theirs").iterdir())


def test_each_block_is_compiled_and_what_was_is_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        torch, "compile", lambda forward: said.append(forward.__self__.name) or forward
    )
    monkeypatch.setattr(torch.compiler, "reset", lambda: said.append("reset"))

    class Block(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    blocks = [Block("a"), Block("b")]
    compiled.compile_blocks(blocks)
    assert said == ["reset", "a", "b"]
    assert all("forward" in vars(block) for block in blocks)


@pytest.mark.whole
@pytest.mark.timeout(1800)
def test_compiled_blocks_in_a_chain_of_layouts(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=60) | {"compile": True}
    workers = pool.open(job, tmp_path)
    plans: list[Plan] = []
    for number, layout in enumerate(LAYOUTS, 1):
        resume = live(plans[-1]) if plans else Resume()
        plans.append(plan(number, layout, workers, job["global_batch"], resume=resume))
        pool.enter(plans[-1])
        pool.wait(
            lambda: pool.events(StepDone, number),  # noqa: B023
            f"a step of generation {number}",
            PATIENCE_S,
        )
    pool.wait(
        lambda: any(e.step == job["steps"] for e in pool.events(StepDone)),
        "the last step",
        PATIENCE_S,
    )
    alone = train(load_program(job["program"]), job, job["steps"])
    steps = pool.events(StepDone)
    assert [e.train_loss for e in steps] == pytest.approx(alone.losses, abs=1e-4)
    assert len({e.generation for e in steps}) == len(LAYOUTS)
