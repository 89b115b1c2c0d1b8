"""What the pages of docs/ show, trained in the layouts that they promise: the losses are those of
one process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from support.docs.pages import block
from support.loop_reference import train_script_alone
from support.places import PROGRAMS
from support.reference import train_alone
from support.worker.chain import job_of, pass_through
from support.worker.worker_pool import Pool

from elastic.program import Program, load_program
from elastic.storage import open_storage
from elastic.types import Layout, StepDone, parse_layout
from elastic.worker.checkpoint import checkpoint_index

pytestmark = pytest.mark.e2e
STEPS, TOLERANCE = 60, 1e-4  # so many that no layout comes to the end before the next is entered


def agree(steps: list[StepDone], alone: list[float]) -> None:
    assert [e.step for e in steps] == list(range(1, len(alone) + 1))
    assert max(abs(e.train_loss - loss) for e, loss in zip(steps, alone, strict=True)) < TOLERANCE


def job_with(program: Path, steps: int = STEPS, **more: Any) -> dict[str, Any]:
    return job_of("tiny.py", steps) | {"program": str(program)} | more


def passes(
    pool: Pool, folder: Path, layouts: list[Layout], reference: Program | None = None, **more: Any
) -> None:
    """The program of the folder goes through the layouts."""
    job = job_with(folder / "program.py", **more)
    program = reference or load_program(folder / "program.py")
    agree(
        pass_through(pool, job, folder / "run", layouts, every=3), train_alone(program, job, STEPS)
    )


def test_the_loop_of_the_page_in_its_layouts(pool: Pool, tmp_path: Path) -> None:
    """loop.md: replicated and sharded, while workers come and go."""
    (tmp_path / "train.py").write_text(block("loop.md", "python"))
    job = job_with(PROGRAMS / "tiny.py", 40, script=str(tmp_path / "train.py"), args=[], seed=1)
    layouts = [Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2), Layout(dp_replicate=3)]
    steps = pass_through(pool, job, tmp_path / "run", layouts, every=3, n_blocks=0)
    agree(steps, train_script_alone(tmp_path / "train.py", [], 1, 40))


@pytest.mark.whole  # as tests/worker/program/test_two_optimizers.py does
def test_two_optimizers_in_their_layouts(pool: Pool, tmp_path: Path) -> None:
    """optimization.md."""
    base = (
        "from elastic.program import load_program\nbase = "
        f"load_program({str(PROGRAMS / 'tiny_bare.py')!r})\n"
    )
    given = "from dataclasses import replace\nprogram = replace(base, optimizer=optimizers)\n"
    (tmp_path / "program.py").write_text(
        "import torch\n" + base + block("optimization.md", "python") + given
    )
    passes(pool, tmp_path, [Layout(dp_shard=3), Layout(pp=2, tp=2), Layout(dp_replicate=2)])


@pytest.mark.whole  # its layouts: tests/docs/test_pages_in_layouts.py; live moves: test_chain.py
def test_the_program_of_program_md_in_every_layout_that_it_names(
    pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(block("program.md", "python"))
    passes(pool, tmp_path, [Layout(dp_replicate=2, tp=2), Layout(pp=4), Layout(pp=2, dp_shard=2)])


@pytest.mark.whole  # as tests/worker/session/test_chain.py does
def test_the_program_of_layouts_md_through_the_layouts_of_its_job(
    pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(block("layouts.md", "python", 1))
    layouts = yaml.safe_load(block("layouts.md", "yaml"))["layout"]
    assert len(layouts) == 3
    passes(pool, tmp_path, [parse_layout(text) for text in layouts.values()])


@pytest.mark.whole  # as tests/worker/program/test_weights.py does
def test_weights_of_a_folder_in_its_layouts(pool: Pool, tmp_path: Path) -> None:
    """models.md."""
    tiny = load_program(PROGRAMS / "tiny.py")
    torch.manual_seed(5)
    model = tiny.model()
    tiny.init(model)
    save_file(
        {name: p.detach().clone() for name, p in model.named_parameters()},
        tmp_path / "model.safetensors",
    )
    base = (
        "import elastic\nfrom elastic.program import load_program\nbase = "
        f"vars(load_program({str(PROGRAMS / 'tiny.py')!r}))\n"
    )
    base += (
        "fields = {key: value for key, value in base.items() if key not in ('weights', 'init')}\n"
    )
    shown = block("models.md", "python")
    assert shown.count("...") == shown.count("/models/mine") == 1
    (tmp_path / "program.py").write_text(
        base + shown.replace("...", "**fields").replace("/models/mine", str(tmp_path))
    )

    def loaded(fresh: torch.nn.Module) -> None:
        fresh.load_state_dict(model.state_dict())

    passes(
        pool, tmp_path, [Layout(tp=2), Layout(pp=2), Layout(dp_shard=3)], replace(tiny, init=loaded)
    )


# that plain DCP reads copies: tests/worker/standalone/test_standalone_run.py
@pytest.mark.whole
def test_plain_dcp_loads_a_copy(pool: Pool, tmp_path: Path) -> None:
    """checkpoints.md: a copy of a layout that cuts every tensor."""
    job = job_with(PROGRAMS / "tiny.py", 8)
    pass_through(pool, job, tmp_path / "run", [Layout(dp_shard=2, tp=2)], every=3)
    uri = checkpoint_index.find(open_storage(str(tmp_path / "run")))[0].uri
    shown, n = re.subn(
        r'checkpoint_id="[^"]+"', f"checkpoint_id={uri!r}", block("checkpoints.md", "python")
    )
    shown, m = re.subn(r"512, 192", "64, 32", shown)
    assert (n, m) == (1, 1)
    space: dict[str, Any] = {}
    with pytest.warns(UserWarning, match="torch.distributed"):
        exec(shown, space)
    from support.reference import train

    wanted = train(load_program(PROGRAMS / "tiny.py"), job, 8).model.state_dict()["head.weight"]
    torch.testing.assert_close(space["state"]["model.head.weight"], wanted, atol=2e-4, rtol=1e-3)
