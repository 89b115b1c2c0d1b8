"""What tp makes of the model of a loop, whose loss nobody but its script can compute: compared by
what it gives at its first call, and by the gradients from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.foreign.subjects import found_with

from elastic.types import Job
from elastic.worker.equivalence import compare_values, layout_check

pytestmark = pytest.mark.e2e

SCRIPT = """
import sys
import torch, elastic
from torch import nn
from torch.nn import functional as F
try:
    from transformers.utils import ModelOutput as Base
except ImportError:
    Base = dict
from dataclasses import dataclass
@dataclass
class Output(Base):
    y: torch.Tensor = None
    more: tuple = None
case = sys.argv[1]
class Block(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("share", torch.full((8,), 0.5), persistent=False)
    def forward(self, x):
        return x + super().forward(x) * self.share
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 1)
        self.drop, self.layers = nn.Dropout(0.5), nn.Sequential(*(Block() for _ in range(6)))
    def forward(self, batch, *, scale):
        h = F.relu(self.up(batch["x"][0]))
        if case == "norm" or case == "evaluates otherwise" and not self.training:
            h = h / (1 + h.norm(dim=-1, keepdim=True))
        h = self.drop(self.down(h) * scale["by"])
        y = self.head(self.layers(h))
        return "text" if case == "text" else Output(y=y, more=(h, 3))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(64, 8)
data = [{"x": a, "t": a.sum().view(1)} for a in x]
tp = {"up": "colwise", "down": "rowwise"}
with elastic.loop(model=model, optimizer=optimizer, dataset=data, tp=tp, steps=3, global_batch=8) as run:
    for b in run:
        if case == "early":
            run.further
        if case in ("evaluates", "evaluates otherwise"):
            run.model.eval()
            with torch.no_grad():
                run.model({"x": [b["x"]]}, scale={"by": torch.tensor(1.0)})
            run.model.train()
        print("seen", run.step_index)
        if run.rank == 0:
            raise RuntimeError("it is done by one rank alone")
        out = run.model({"x": [b["x"]]}, scale={"by": torch.tensor(1.5)})
        run.backward((out["y"] - b["t"]).square().sum())
        run.step()
"""
NOT_SUMMED = (
    "from elastic.worker.parallel import parallelize; parallelize.STYLES['rowwise'] = "
    "parallelize.ColwiseParallel"
)


def asked(folder: Path, case: str, **more: Any) -> dict[str, Any]:
    (folder / "train.py").write_text(SCRIPT)
    file = str(folder / "train.py")
    job = {"steps": 3, "global_batch": 8, "seed": 1, "n_samples": 64, "program": file}
    return {"job": job | {"script": file, "args": [case]}, "axes": ["tp"]} | more


def test_it_is_compared_before_the_start(tmp_path: Path) -> None:
    cases = ("right", "norm", "early", "text")
    trusted = asked(tmp_path, "norm", trusted=["tp"])
    questions = (*(asked(tmp_path, case) for case in cases), trusted)
    large = asked(tmp_path, "right", model_bytes=1 << 50)
    right, norm, early, text, taken, unmade = found_with("", tmp_path, *questions, large)
    assert not right["structure"]["no_tp"] and set(right["equal"]) == {"tp"}, right
    said = norm["structure"]["no_tp"]
    assert said.startswith(
        "tp=2: it computes another function: the weighted sum of what run.model(...) gives for 4 "
        "samples is "
    ), norm
    assert ", in one process it is " in said and "; down is the first to give something" in said
    assert said.endswith("; look at its tp= and at what the cut modules do with sizes")
    assert early == {
        "error": "the body of its loop was not followed to its first run.model(...): it asks for "
        "run.further before; call run.model itself, with tensors, before what ends there"
    }
    assert text["skipped"].startswith("run.model(...) gives no numbers that are found (a str): let")
    assert not taken["structure"]["no_tp"] and "tp is trusted" in taken["structure"]["notes"][0]
    assert unmade["skipped"].startswith("its model has 1125899.9 GB")


def test_a_call_before_training_is_compared_in_its_mode(tmp_path: Path) -> None:
    cases = ("evaluates", "evaluates otherwise")
    right, other = found_with("", tmp_path, *(asked(tmp_path, case) for case in cases))
    assert not right["structure"]["no_tp"] and set(right["equal"]) == {"tp"}, right
    assert not right["structure"]["notes"] and not right["skipped"]
    said = other["structure"]["no_tp"]
    what = "the weighted sum of what its first run.model(...), before training, gives for 4 samples"
    assert said.startswith(f"tp=2: it computes another function: {what} is "), other


def test_a_large_one_is_compared_with_fewer_blocks_and_its_own_buffers(tmp_path: Path) -> None:
    large = (
        "from elastic.worker.equivalence import small_copy as own; own.WHOLE_MOST_PARAMETERS = 100"
    )
    questions = [asked(tmp_path, case) for case in ("right", "norm")]
    right, norm = found_with(large, tmp_path, *questions)
    assert set(right["equal"]) == {"tp"}, right
    assert norm["structure"]["no_tp"].startswith("tp=2: it computes another function"), norm


def test_ranks_that_are_lost_may_be_taken_as_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork may have gone wrong by what the script did before its loop."""
    question = asked(tmp_path, "right")
    job = Job.from_plain(question["job"])
    lost = compare_values.Compared("tp=2", compare_values.LOST)
    monkeypatch.setattr(layout_check, "compare", lambda *_, **__: lost)
    found = layout_check.check(layout_check.CheckRequest(job, axes=["tp"]))
    assert found.structure.no_tp.startswith("tp=2: its ranks lose each other")
    assert found.structure.no_tp.endswith("; trusted_axes: [tp] takes it as right")
    assert not found.steady


def test_what_is_broken_is_found(tmp_path: Path) -> None:
    (found,) = found_with(NOT_SUMMED, tmp_path, asked(tmp_path, "right"))
    assert found["structure"]["no_tp"].startswith("tp=2: it "), found
