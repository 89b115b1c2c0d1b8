"""A layout that computes another function is refused before the start where that is known. Where it
shows later: the scenario "wrong layout"."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.e2e.shell import Shell
from support.places import FOREIGN

LOOP = """
import torch, elastic
class Net(torch.nn.Sequential):
    def forward(self, x):
        h = self[0](x)
        return self[1](h / h.norm(dim=-1, keepdim=True))
model = Net(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, tp = torch.randn(16, 4), {"0": "colwise", "1": "rowwise"}
with elastic.loop(model=model, optimizer=optimizer, dataset=data, tp=tp, steps=3, global_batch=4) as run:
    for x in run:
        run.backward(run.model(x).sum())
        run.step()
"""


@pytest.mark.whole  # worker/equivalence/test_tp_of_loops.py has the refusal, the one above its line
def test_a_loops_model_that_tp_computes_otherwise_is_refused_in_one_line(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    pools = [{"name": "spot", "market_type": "spot", "gpus_per_node": 2, "max_nodes": 1}]
    shell.job(program=None, script="train.py", layout="tp=2", pools=pools)
    (tmp_path / "tiny" / "train.py").write_text(LOOP)
    code, _, err = shell.here("run", "tiny", "--json")
    assert code == 2 and err.splitlines()[-1].startswith(
        "elastic: layout 'tp=2': no tp: tp=2: it computes another function: the weighted sum of "
        "what run.model(...) gives for 4 samples is "
    ), err


NEGATIVES = """
import torch, elastic
model = torch.nn.Linear(4, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(16, 4)
with elastic.loop(model=model, optimizer=optimizer, dataset=data, steps=3, global_batch=4) as run:
    for x in run:
        scores = run.model(x) @ run.model(x.flip(1)).T
        run.backward((scores.logsumexp(1) - scores.diagonal()).sum())
        run.step()
"""


@pytest.mark.e2e
def test_a_loops_body_that_sees_other_samples_is_refused_in_one_line(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    pools = [{"name": "spot", "market_type": "spot", "max_nodes": 2}]
    shell.job(program=None, script="train.py", pools=pools)
    (tmp_path / "tiny" / "train.py").write_text(NEGATIVES)
    code, _, err = shell.here("run", "tiny", "--json")
    line = err.splitlines()[-1]
    assert code == 2 and line.startswith(
        "elastic: layout 'dp_shard=2': no dp: train.py:9: in run.backward the loss of 4 samples is "
    ), err


# what is said of each program: tests/foreign/test_foreign_layouts.py; that a command refuses it:
# tests/certify/checks/test_job_check.py
@pytest.mark.whole
@pytest.mark.parametrize(
    ("program", "layout", "said"),
    [
        (
            "residual_outside",
            "pp=2",
            "no pp: between layers.0 and layers.1 `forward` adds to the hidden state",
        ),
        ("batchnorm_by_hand", "dp_shard=2", "no dp: layers.0 (batchnorm_by_hand.py:"),
        ("tp_forgets_out", "tp=2", "no tp: tp=2: it "),
        ("stochastic_depth", "dp_shard=2", "they would wait for each other's weights"),
    ],
)
def test_it_is_refused_in_one_line(tmp_path: Path, program: str, layout: str, said: str) -> None:
    shell = Shell(tmp_path)
    pools = [{"name": "spot", "market_type": "spot", "gpus_per_node": 2, "max_nodes": 1}]
    shell.job(program=str(FOREIGN / f"{program}.py"), layout=layout, pools=pools)
    code, _, err = shell.here("run", "tiny", "--json")
    *before, line = err.splitlines()
    assert all(told.startswith(("start: ", "compares what each layout")) for told in before), err
    assert code == 2 and line.startswith("elastic: ") and said in line, err
