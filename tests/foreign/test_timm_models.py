"""Models of timm, unchanged: each layout computes what one process does, or is closed with the
place named.

timm is no dependency of the tests, since it wants torchvision, of which PyPI has no build for the
CPU build of torch. To run them: `pip install --no-deps timm torchvision`, in the version that
belongs to this torch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT

pytestmark = pytest.mark.e2e
JOB = {"steps": 10, "global_batch": 16, "seed": 1, "n_samples": 64, "batch_norm": "auto"}
MOST_S = 600.0
# torchvision registers two operations of its own that only a build for this torch has; without them
# it cannot be imported
PROGRAM = """
import torch

try:
    import torchvision
except RuntimeError:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import timm

import elastic


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return {{"input": torch.randn(3, 32, 32, generator=draw), "target": torch.tensor(index % 10)}}


def loss(logits, batch):
    return torch.nn.functional.cross_entropy(logits, batch["target"], reduction="sum")


program = elastic.Program(
    model=lambda: timm.create_model({name!r}, num_classes=10, **{more!r}), dataset=Images, loss=loss,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3), blocks={blocks!r}, tp={tp!r},
)
"""
VIT = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 48, "num_heads": 3}
SWIN = {
    "img_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 24,
    "depths": (2, 2),
    "num_heads": (2, 4),
}
MLP = {"blocks.*.mlp.fc1": "colwise", "blocks.*.mlp.fc2": "rowwise"}
VIT_POOL = "refused: (pool[a-z0-9_]*|vision_transformer).py"
# a module of timm's without parameters: every stage would call it
POOL = "refused: adaptive_avgmax_pool.py"
# name -> model, its sizes, blocks, plan for tp, what is expected of dp, tp and pp
MODELS: dict[str, tuple[str, dict[str, Any], str, dict[str, str], dict[str, str]]] = {
    "vit": ("vit_tiny_patch16_224", VIT, "blocks.*", MLP, {"dp": "equal", "tp": "equal",
    "pp": VIT_POOL}), "vit, heads cut": (
        "vit_tiny_patch16_224", VIT, "blocks.*", MLP | {"blocks.*.attn.qkv": "colwise",
        "blocks.*.attn.proj": "rowwise"}, {"tp": "refused: attention.py|attn"},
    ), "resnet": ("resnet10t", {}, "layer[1-4]", {}, {"dp": "equal", "pp": POOL}),
    "resnet, groupnorm": ("resnet50_gn", {"layers": (1, 1, 1, 1)}, "layer[1-4]", {}, {"dp": "equal",
    "pp": POOL}), "convnext": (
        "convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32), "conv_mlp": False},
        "stages.*", {"stages.*.blocks.*.mlp.fc1": "colwise",
        "stages.*.blocks.*.mlp.fc2": "rowwise"}, {"dp": "equal", "tp": "equal", "pp": "equal"},
    ),
    "swin": (
        "swin_tiny_patch4_window7_224", SWIN, "layers.*",
        {"layers.*.blocks.*.mlp.fc1": "colwise", "layers.*.blocks.*.mlp.fc2": "rowwise"},
        {"dp": "equal", "tp": "equal", "pp": "equal"},
    ),
    "mixer": (
        "mixer_s16_224", {"img_size": 32}, "blocks.*",
        {"blocks.*.mlp_channels.fc1": "colwise", "blocks.*.mlp_channels.fc2": "rowwise"},
        {"dp": "equal", "tp": "equal", "pp": "refused: mlp_mixer.py"},
    ),
    "efficientnet": ("efficientnet_b0", {}, "blocks.*", {}, {"dp": "equal"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    if find_spec("timm") is None:
        pytest.skip("timm is not installed (pip install --no-deps timm torchvision)")
    asked = []
    for name, more, blocks, tp, expect in MODELS.values():
        file = tmp_path_factory.mktemp("timm") / "program.py"
        file.write_text(PROGRAM.format(name=name, more=more, blocks=blocks, tp=tp))
        asked.append({"job": JOB | {"program": str(file)}, "tps": [2], "axes": [*expect]})
    out: Path = tmp_path_factory.mktemp("layouts") / "found"
    done = subprocess.run(
        [sys.executable, "-m", "elastic.worker.equivalence.layout_check", str(out)],
        input=json.dumps(asked), text=True,
            timeout=MOST_S,
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(MODELS, map(json.loads, out.read_text().splitlines()), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_timm_is_equal_or_refused_by_name(
    name: str, verdicts: dict[str, dict[str, Any]]
) -> None:
    found, expect = verdicts[name], MODELS[name][-1]
    assert "error" not in found, found
    for axis, said in expect.items():
        why = found["structure"][f"no_{axis}"]
        assert (axis in (found["equal"] or {})) == (said == "equal") == (not why), (
            f"{axis}: {why or found['skipped']}"
        )
        assert not why or (re.search(said.removeprefix("refused: "), why) and "\n" not in why), (
            f"{axis}: {why}"
        )
