"""Scripts that people have, made elastic by a handful of lines: each through a notice, a kill and a
growth, losses as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.e2e.runs import (
    SLOW,
    SOON_S,
    TOLERANCE,
    events,
    lost_only_what_no_copy_had,
    run,
    slow_until_grown,
    survivors_kept_their_processes,
)
from support.loop_reference import train_script_alone
from support.places import ROOT

from elastic.sim.replay import replay
from elastic.types import DigestChecked, DrillAsked, StepDone

# that each is trained: below; a loop script in a run: the scenario "loop script"; its kill and its
# growth: tests/worker/loop
pytestmark = pytest.mark.e2e
JOBS = ROOT / "jobs"
STEPS, SEED = 60, 5
PAUSE = f"""\
        import os, time
        until = time.monotonic() + 6.0
        while time.monotonic() < until and os.path.exists(os.environ["{SLOW}"]):
            time.sleep(0.05)
"""  # until the node that is added is in
POOLS = [
    {"name": "spot", "market_type": "spot", "gpus_per_node": 1, "max_nodes": 2, "notice_s": 20},
    {"name": "on-demand", "market_type": "on-demand", "gpus_per_node": 1, "max_nodes": 1},
]
DRILL = [
    {"at_step": 8, "notice": "any-spot", "deadline_s": SOON_S},
    {"at_step": 20, "kill": "any-spot"},
    {"at_step": 24, "add": "spot"},
]


def slowed(name: str, folder: Path, pause_s: float) -> Path:
    """The script with steps long enough that nodes can come and go between them."""
    text = (JOBS / name / "train.py").read_text()
    (step,) = [line for line in text.splitlines(keepends=True) if "run.step(" in line]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "train.py"
    file.write_text(text.replace(step, f"{PAUSE}        time.sleep({pause_s})\n{step}"))
    return file


def elastic_run(script: Path, args: list[str]) -> tuple[dict[str, Any], list[Any]]:
    folder = script.parent
    job = {
        "script": script.name, "args": args, "steps": STEPS, "seed": SEED, "pools": POOLS,
        "drill": DRILL, "peer_every": 4, "durable_every": 0, "storage": str(folder / "runs"),
    }  # fmt: skip
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    with slow_until_grown(folder / "runs" / "run" / "journal.jsonl", folder / "slow"):
        return run(folder)


def check(summary: dict[str, Any], lines: list[Any], alone: list[float]) -> None:
    assert summary["outcome"] == "succeeded", summary["reason"]
    assert summary["samples_exact"] is True
    last = {e.step: e.train_loss for e in events(lines, StepDone)}
    assert sorted(last) == list(range(1, STEPS + 1))
    worst = max(abs(last[i + 1] - loss) for i, loss in enumerate(alone))
    assert worst < TOLERANCE, f"train loss is off by {worst}"
    assert alone[-1] < 0.7 * alone[0], "it has learned something"
    by_cause = {t["cause"]: t for t in summary["transitions"]}
    assert set(by_cause) == {"start", "notice", "loss", "growth"}
    assert by_cause["notice"]["steps_lost"] == by_cause["growth"]["steps_lost"] == 0
    lost_only_what_no_copy_had(by_cause["loss"], lines)
    assert all(e.ok for e in events(lines, DigestChecked)) and events(lines, DigestChecked)
    hit = {
        name
        for e in events(lines, DrillAsked)
        for kind in ("notice", "kill")
        for name in e.drill.get(kind, ())
    }
    survivors_kept_their_processes(lines, hit)
    assert replay(lines).identical


def test_the_script_learns_in_one_process() -> None:
    alone = train_script_alone(JOBS / "nanogpt" / "train.py", [], SEED, 20)
    assert alone[-1] < 0.9 * alone[0]


@pytest.mark.whole
def test_a_loop_like_nanogpts(tmp_path: Path) -> None:
    script = slowed("nanogpt", tmp_path / "nanogpt", 0.1)
    alone = train_script_alone(JOBS / "nanogpt" / "train.py", [], SEED, STEPS)
    check(*elastic_run(script, []), alone)


@pytest.mark.whole
def test_a_fine_tuning_script_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    args = [
        str(tmp_path / "model"),
        str(Path(pytest.__file__).parent.parent / "_pytest" / "config" / "__init__.py"),
    ]
    script = slowed("huggingface", tmp_path / "huggingface", 0.15)
    alone = train_script_alone(JOBS / "huggingface" / "train.py", args, SEED, STEPS)
    check(*elastic_run(script, args), alone)
