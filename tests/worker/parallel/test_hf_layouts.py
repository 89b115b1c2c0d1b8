"""Models of transformers in layouts of every kind: a pairwise cover of axes here, the product of
them under `product`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.places import ROOT
from support.worker.layout_case import follow
from support.worker.worker_pool import Pool

from elastic.types import Evaluated, Layout

COVER = {
    "hf_tiny.py": [Layout(pp=2, tp=2), Layout(pp=2, dp_shard=2), Layout(dp_replicate=2, tp=2),
    Layout(cp=2)], "hf_qwen3.py": [Layout(dp_shard=2, tp=2), Layout(pp=2, tp=2), Layout(pp=3),
    Layout(cp=2, tp=2)], "hf_gpt2.py": [Layout(pp=2, dp_replicate=2), Layout(dp_shard=3),
    Layout(pp=4), Layout(pp=2, cp=2)], "hf_packed.py": [
        Layout(dp_shard=2, cp=2, activation_checkpointing="full"), Layout(tp=2),
        Layout(dp_replicate=2, cp=2), Layout(cp=4), Layout(pp=2, cp=2, schedule="interleaved1f1b",
        virtual_stages=2),
    ],
}  # fmt: skip
PRODUCT = [
    Layout(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)
    for pp in (1, 2, 4)
    for replicate in (1, 2)
    for shard in (1, 2, 3)
    for cp in (1, 2, 4)
    for tp in (1, 2)
    if pp * replicate * shard * cp * tp <= 4
]


# the model of huggingface.md in its layouts: tests/docs/test_pages_in_layouts.py
@pytest.mark.whole
@pytest.mark.parametrize("name", COVER)
def test_losses_are_those_of_one_process(pool: Pool, tmp_path: Path, name: str) -> None:
    follow(pool, tmp_path, name, COVER[name])


@pytest.mark.whole
@pytest.mark.parametrize("name", COVER)
def test_losses_are_those_of_one_process_in_every_layout(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    tps = (1,) if name == "hf_gpt2.py" else (1, 2)
    follow(pool, tmp_path, name, [layout for layout in PRODUCT if layout.tp in tps])


VIT = str(ROOT / "jobs" / "vit_digits" / "program.py")


@pytest.mark.whole
def test_a_vision_transformer_on_real_digits(pool: Pool, tmp_path: Path) -> None:
    """No language model: pictures in, classes out, a plain parameter beside the modules; and a
    metric of its own."""
    pytest.importorskip("sklearn", reason="the job needs scikit-learn (it is in the extra 'test')")
    layouts = [Layout(dp_shard=3), Layout(pp=2, tp=2), Layout(dp_replicate=2, tp=2)]
    follow(pool, tmp_path, VIT, layouts, eval_every=6, eval_samples=50)
    told = pool.events(Evaluated)
    assert [event.step for event in told] == [6, 12]
    assert 0.0 < told[0].metrics["accuracy"] < told[1].metrics["accuracy"] <= 1.0
    assert told[1].metrics["validation_loss"] < told[0].metrics["validation_loss"]
