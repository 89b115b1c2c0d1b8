"""Every job of the folder is read, built on the meta device, planned on its own pools, and has its
README."""

from __future__ import annotations

import pytest
import torch
from support.places import ROOT

from elastic.config.job import load_job
from elastic.config.pool_checks import check_fit
from elastic.planner.layout_choice import plan_layout
from elastic.program import load_program
from elastic.reshard.rank_boxes import boxes, reread_boxes
from elastic.types import Node, parse_layout
from elastic.worker.hosting.resume_checks import check_layouts
from elastic.worker.program.model_profile import build_meta, trace

JOBS = ROOT / "jobs"
# name -> parameters, tp limit, pipeline stages possible
EXPECTED = {
    "gpt2_124m": (124_439_808, 1), "llama3_8b_spot": (8_030_261_248, 8),
    "llama3_70b_3d": (70_553_706_496, 8), "qwen_lora": (754_944, 4), "mixed_pool": (1_150_000_000,
    8), "vit_digits": (202_058, 4), "quickstart": (1_600_000, 4),
    "digit_captions": (294_652, 4), "digit_student": (243_492, 4), "dpo": (3_213_824, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_a_job_is_read_planned_and_built(name: str) -> None:
    if "digit" in name:
        pytest.importorskip(
            "sklearn", reason="the job needs scikit-learn (it is in the extra 'test')"
        )
    job = load_job(JOBS / name)
    pools = [pool.pool() for pool in job.pools]
    check_fit(job, pools)
    program = load_program(job.program)
    model = build_meta(program)
    assert all(parameter.is_meta for parameter in model.parameters())
    profile = trace(program)
    n_params, tp_limit = EXPECTED[name]
    assert profile.n_params == pytest.approx(n_params, rel=0.15 if n_params % 10_000 == 0 else 0)
    assert profile.tp_limit == tp_limit and profile.pipeline
    check_layouts(job, profile)
    nodes = [
        Node(f"{pool.name}-{i}", pool.name, pool.gpus_per_node)
        for pool in pools
        for i in range(pool.max_nodes)
    ]
    choice = plan_layout(profile, job.job(), nodes)
    assert choice.layout.world_size >= job.min_workers and sum(choice.samples) == job.global_batch
    held = [
        (
            *boxes(profile, choice.layout, choice.layers, rank),
            *reread_boxes(profile, choice.layout, choice.layers, rank=rank),
        )
        for rank in (0, choice.layout.world_size - 1)
    ]
    share = sum(box.n_bytes for box in held[0])
    assert 0 < share < 4 * 4 * n_params / choice.layout.world_size * 1.5 + 2e9
    text = (JOBS / name / "README.md").read_text()
    assert name == "quickstart" or ("**Needs**" in text and "**Offline**" in text)


def test_every_folder_of_jobs_is_looked_at() -> None:
    assert {path.parent.name for path in JOBS.glob("*/job.yaml")} - {"nanogpt"} == set(EXPECTED)


def test_the_layouts_of_the_large_jobs_keep_tp_inside_a_node() -> None:
    for name in ("llama3_8b_spot", "llama3_70b_3d"):
        job = load_job(JOBS / name)
        for workers, text in dict(job.layout).items():  # type: ignore[arg-type]
            layout = parse_layout(text)
            assert (
                layout.world_size == int(workers)
                and layout.tp <= 8
                and job.global_batch % layout.dp == 0
            )


def test_digits_are_real_and_each_class_is_there() -> None:
    pytest.importorskip("sklearn", reason="the job needs scikit-learn (it is in the extra 'test')")
    program = load_program(JOBS / "vit_digits" / "program.py")
    assert program.dataset is not None and program.validation is not None
    train, validation = program.dataset(), program.validation()
    assert (len(train), len(validation)) == (1500, 297)
    classes = torch.stack([validation[i]["target"] for i in range(len(validation))])
    assert set(classes.tolist()) == set(range(10))
