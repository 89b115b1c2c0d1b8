"""`if run.rank == 0: run.model(x)` in a loop: the rank and the line are named at once, and the run
ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.e2e.shell import PROGRAMS, Shell, last_line

from elastic.ledger.journal import read
from elastic.types import StepDone, WorkerFailed

pytestmark = pytest.mark.e2e
NAMED_WITHIN_S = 30.0  # far above what it takes on a busy machine, below what silence is given
OWN = "dist.all_reduce(torch.ones(1))"
SCRIPT = """
import elastic
import torch
import torch.distributed as dist

blocks = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
model = torch.nn.Sequential(torch.nn.Linear(8, 16), blocks, torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(960, 8)
rows = list(zip(x, x.sum(1, keepdim=True)))
job = {"steps": 200, "global_batch": 24, "layout": "dp_shard=2", "checkpoint_every": 0}
with elastic.loop(model=model, optimizer=optimizer, dataset=rows, **job) as run:
    for x, y in run:
        if BEFORE and run.rank == 0 and run.step_index == 9:
            print(run.model(x).sum())
        run.backward((run.model(x) - y).square().sum())
        run.step()
        if not BEFORE and run.rank == 0 and run.step_index == 9:
            print(run.model(x).sum())
"""


@pytest.mark.parametrize(
    "before",
    [True, pytest.param(False, marks=pytest.mark.whole)],
    ids=["before the step", "behind it"],
)
def test_a_call_of_one_rank_ends_the_run_with_its_line(shell: Shell, before: bool) -> None:
    """Before the step the ranks hang; behind it they may meet in each other's collectives and come
    to a commit, which is refused."""
    file = shell.root / "train.py"
    file.write_text(SCRIPT.replace("BEFORE", str(before)))
    code, out, _ = shell.here("run", "--script", "train.py", "--local", "--run-name", "r", "--json")
    line = file.read_text().splitlines().index("            print(run.model(x).sum())") + 1
    line += 0 if before else 4
    where = "step 10" if before else "behind run.step() of step 10"
    said = f"{where}: rank 0 calls run.model at {file}, line {line}, rank 1 does not;"
    summary = last_line(out)
    assert code == 1 and said in summary["reason"], out[-2000:]
    assert len(summary["transitions"]) == 1, "it was not tried again"
    lines = read(Path(shell.root / "elastic_runs" / "r" / "journal.jsonl"))
    failed = [at_s for one in lines for at_s, e in one.events if isinstance(e, WorkerFailed)]
    steps = [(at_s, e.step) for one in lines for at_s, e in one.events if isinstance(e, StepDone)]
    assert max(step for _, step in steps) in (9, 10)
    assert failed[0] - max(at_s for at_s, _ in steps) < NAMED_WITHIN_S


# how it is seen: tests/worker/loop/test_set_on_modules.py
@pytest.mark.whole
def test_a_mode_that_one_rank_sets_ends_the_run_by_its_name(shell: Shell) -> None:
    """The calls are the same, the function is another one."""
    file = shell.root / "train.py"
    text = SCRIPT.replace("BEFORE", "True")
    sets = 'getattr(run.model, "1").eval()'
    file.write_text(text.replace("print(run.model(x).sum())", sets, 1))
    code, out, _ = shell.call("run", "--script", "train.py", "--local", "--run-name", "r", "--json")
    said = "step 10: rank 0 has set 1.training = 0 in run.model, rank 1 has not: every rank must"
    assert code == 1 and said in last_line(out)["reason"], out[-2000:]


# how it is seen: tests/worker/process/test_call_log.py, tests/cluster/backend/test_unequal_crash.py
@pytest.mark.whole
def test_a_call_by_which_gloo_ends_a_process_is_named_too(shell: Shell) -> None:
    """Blocks of two sizes: one rank's forward pass meets the backward pass of the other."""
    text = SCRIPT.replace("BEFORE", "True")
    text = text.replace("blocks, torch.nn.Linear(16, 1))", "blocks, torch.nn.Linear(16, 64), more)")
    more = "more = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])"
    text = text.replace("model = torch", f"{more}\nmodel = torch")
    text = text.replace(
        '"checkpoint_every": 0}', '"checkpoint_every": 0, "blocks": ["1.*", "3.*"]}'
    )
    text = text.replace(
        "        if True and run",
        "        loss = run.model(x).square().sum()\n        if True and run",
    )
    text = text.replace("(run.model(x) - y).square().sum()", "loss")
    file = shell.root / "train.py"
    file.write_text(text)
    code, out, _ = shell.call("run", "--script", "train.py", "--local", "--run-name", "r", "--json")
    line = text.splitlines().index("            print(run.model(x).sum())") + 1
    said = f"step 10: rank 0 calls run.model at {file}, line {line}, rank 1 does not;"
    summary = last_line(out)
    assert code == 1 and said in summary["reason"], out[-2000:]
    assert len(summary["transitions"]) == 1, "it was not tried again"
    lines = read(Path(shell.root / "elastic_runs" / "r" / "journal.jsonl"))
    kinds = [e.kind for one in lines for _, e in one.events if isinstance(e, WorkerFailed)]
    assert "process" in kinds, "no process has died: the script does not show it"


# how it is seen: tests/worker/session/test_stall_site.py; that nothing is tried again: above
@pytest.mark.whole
def test_a_collective_of_one_ranks_script_ends_the_run_with_its_line(shell: Shell) -> None:
    file = shell.root / "train.py"
    text = SCRIPT.replace("BEFORE", "True").replace("print(run.model(x).sum())", OWN, 1)
    file.write_text(text)
    code, out, _ = shell.call("run", "--script", "train.py", "--local", "--run-name", "r", "--json")
    line = file.read_text().splitlines().index(f"            {OWN}") + 1
    said = f"rank 0 waits in a collective of the script's own at {file}, line {line} (all_reduce),"
    summary = last_line(out)
    assert code == 1 and said in summary["reason"], out[-2000:]
    assert len(summary["transitions"]) == 1, "it was not tried again"
    lines = read(Path(shell.root / "elastic_runs" / "r" / "journal.jsonl"))
    failed = [at_s for one in lines for at_s, e in one.events if isinstance(e, WorkerFailed)]
    steps = [at_s for one in lines for at_s, e in one.events if isinstance(e, StepDone)]
    assert failed[0] - max(steps) < 10.0 + NAMED_WITHIN_S, "ten seconds, and what it takes to see"


# how it is seen: tests/worker/hosting/test_absent_ranks.py; what is done: tests/policy/faults/test_recurring_breaks.py
@pytest.mark.whole
def test_a_branch_of_one_rank_within_the_model_ends_the_run_at_the_second_time(
    shell: Shell,
) -> None:
    """Both ranks call the model equally often; one leaves out a block of it, in one step."""
    text = SCRIPT.replace("BEFORE", "True").replace("print(run.model(x).sum())", "skips.append(1)")
    text = text.replace("run.step()\n", "run.step()\n        skips.clear()\n", 1)
    text = text.replace(
        "blocks = torch",
        """skips = []

class Blocks(torch.nn.Sequential):
    def forward(self, x):
        for i, block in enumerate(self):
            x = x if skips and i == 1 else block(x)
        return x

blocks = torch""",
    ).replace("blocks = torch.nn.Sequential(", "blocks = Blocks(")
    (shell.root / "train.py").write_text(text)
    code, out, _ = shell.call("run", "--script", "train.py", "--local", "--run-name", "r", "--json")
    summary = last_line(out)
    said = "step 10 has failed 2 times in a row, the program's ranks do not match: "
    assert code == 1 and summary["reason"].startswith(said), out[-2000:]
    assert "rank 0 stood at " in summary["reason"] and "train.py, line " in summary["reason"]
    assert len(summary["transitions"]) == 2, "it was tried once more"
    lines = read(Path(shell.root / "elastic_runs" / "r" / "journal.jsonl"))
    orders = [type(order).__name__ for one in lines for order in one.decision.actions]
    assert "Quarantine" not in orders


# how it is seen: tests/worker/hosting/test_absent_ranks.py
@pytest.mark.whole
def test_an_early_stage_that_leaves_out_a_block_ends_the_run_at_the_second_time(
    shell: Shell,
) -> None:
    """Its shards do not come to the same collectives, and the other stage waits for messages."""
    job = shell.job(
        program=str(PROGRAMS / "tiny_odd_stage.py"), layout="pp=2,dp_shard=2,microbatch_size=1",
        steps=40, durable_every=0, pools=[{"name": "spot", "market_type": "spot",
        "gpus_per_node": 2, "max_nodes": 2}],
    )  # fmt: skip
    code, out, _ = shell.call("run", job, "--local", "--run-name", "r", "--json")
    summary = last_line(out)
    said = " has failed 2 times in a row, the program's ranks do not match: "
    assert code == 1 and said in summary["reason"], out[-2000:]
    assert len(summary["transitions"]) == 2, "it was tried once more"
