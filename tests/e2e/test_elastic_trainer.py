"""ElasticTrainer(...).fit() with a Program, on Arrow, JSON lines and Parquet that the library
`datasets` reads and that are tokenized once: through a kill, and what its Result holds.
(A growth and a notice, as of any run: the scenario "main path".)"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.e2e.runs import (
    POOLS,
    PROGRAM,
    TOLERANCE,
    events,
    plans,
    slow_until_grown,
    survivors_kept_their_processes,
    went_on_as_if_nothing_happened,
)
from support.reference import train_alone

import elastic
from elastic.data.open_datasets import dataset_of
from elastic.data.sources.text_folder import python_stdlib_folder
from elastic.errors import SpecError
from elastic.ledger.journal import read
from elastic.observe.metrics.step_rows import read_rows
from elastic.program import load_program
from elastic.types import DrillAsked, DriverStarted, Job, PlanEntered

ray_train = pytest.importorskip("ray.train")
datasets = pytest.importorskip("datasets", reason="the extra `datasets`")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.e2e
STEPS, N_FILES = 30, 45
SEQ, VOCAB = 16, 64  # of the program


def written(folder: Path) -> dict[str, Any]:
    """Some sources of the standard library, a third in each format, and a tokenizer of its most
    frequent words."""
    files = sorted(python_stdlib_folder().glob("*.py"))[:N_FILES]
    texts = [path.read_text("utf-8", "replace") for path in files]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["<unk>", "<|endoftext|>"]
    words.train_from_iterator(
        texts, tokenizers.trainers.WordLevelTrainer(vocab_size=VOCAB, special_tokens=special)
    )
    words.save(str(folder / "tokenizer.json"))
    parts = [[{"body": text} for text in texts[i::3]] for i in range(3)]
    datasets.Dataset.from_list(parts[0]).save_to_disk(folder / "arrow")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in parts[1]))
    datasets.Dataset.from_list(parts[2]).to_parquet(folder / "rows.parquet")
    mixture = {
        "arrow": {"dataset": str(folder / "arrow"), "weight": 1},
        "json": {"dataset": str(folder / "rows.jsonl"), "weight": 2},
        "parquet": {"dataset": str(folder / "rows.parquet"), "weight": 3},
    }
    more = {"text": "body", "tokenizer": str(folder), "seq": SEQ}
    return {"train": {"mixture": mixture, **more}, "cache": str(folder / "cache")}


@pytest.mark.parametrize("grows", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_fit_through_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool) -> None:
    drill: list[dict[str, Any]] = [{"at_step": 8, "kill": "any-spot"}]
    drill += [{"at_step": 12, "add": "spot"}] * grows
    job = {
        "steps": STEPS, "global_batch": 12, "seed": 3, "clip_grad_norm": 1.0, "peer_every": 4,
        "durable_every": 0, "eval_every": 20, "pools": POOLS[:1], "budget_usd": 1000,
        "drill": drill, "data": written(tmp_path),
    }  # fmt: skip
    config = ray_train.RunConfig(
        name="run", storage_path=str(tmp_path), logging_config=ray_train.LoggingConfig("ERROR")
    )
    told: list[int] = []
    trainer = elastic.ElasticTrainer(
        load_program(PROGRAM),
        on_step=lambda row: told.append(row["step"]),
        job=job,
        scaling_config=ray_train.ScalingConfig(num_workers=(1, 4)),
        run_config=config,
    )
    folder = tmp_path / "run"
    with slow_until_grown(folder / "journal.jsonl", tmp_path / "slow"):
        result = trainer.fit()
    summary, lines = (
        json.loads((folder / "report.json").read_text()),
        read(folder / "journal.jsonl"),
    )
    alone = _as_alone(lines, tmp_path, monkeypatch)
    went_on_as_if_nothing_happened(summary, lines, STEPS)
    causes = {t["cause"] for t in summary["transitions"]}
    assert causes == {"start", "loss", *["growth"] * grows}
    asked = [e.drill for e in events(lines, DrillAsked)]
    survivors_kept_their_processes(lines, {n for d in asked for n in d.get("kill", ())})
    assert any(len({r.node_id for r in p.ranks}) < len(p.ranks) for p in plans(lines)), (
        "workers of one node share what it has"
    )

    assert isinstance(result, ray_train.Result)
    assert (result.error, result.path) == (None, str(folder))
    assert (result.metrics["step"], result.metrics["outcome"]) == (STEPS, "succeeded")
    assert result.metrics["tokens"] == summary["tokens"]
    assert set(told) == set(range(1, STEPS + 1)) and told[-1] == STEPS
    rows = read_rows((folder / "metrics.csv").read_text())
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    frame = result.metrics_dataframe
    assert list(frame["step"]) == list(range(1, STEPS + 1))
    assert max(abs(a - b) for a, b in zip(frame["train_loss"], alone, strict=True)) < TOLERANCE
    assert [
        step for step, loss in zip(frame["step"], frame["validation_loss"]) if not math.isnan(loss)
    ] == [20, STEPS]
    assert Path(result.checkpoint.path).name.startswith(f"step-{STEPS:08d}")
    with pytest.raises(SpecError, match="run 'run' is done"):
        trainer.fit()


def _as_alone(lines: list[Any], place: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The losses of one process on that data, for the judge; it is mixed as the job says, and was
    made once, before the first step."""
    program = load_program(PROGRAM)
    (started,) = events(lines, DriverStarted)
    dataset = dataset_of(program, Job.from_plain(dict(started.job)))
    seen = [dataset.source(i)[0] for i in range(len(dataset))]
    assert [round(6 * seen.count(part) / len(seen), 2) for part in range(3)] == [1, 2, 3]
    alone = train_alone(
        replace(program, dataset=lambda: dataset),
        {"seed": 3, "global_batch": 12, "clip_grad_norm": 1.0},
        STEPS,
    )
    monkeypatch.setattr("support.e2e.runs.alone", lambda steps: alone)
    monkeypatch.setattr("support.e2e.runs.N_SAMPLES", len(dataset))
    built = sorted((place / "cache" / "built").iterdir())
    kinds = [path.name.rpartition("-")[0] for path in built]
    assert kinds == ["arrow-tokens"] * 3 + ["datasets"] * 2, "Arrow is mapped where it lies"
    entered_s = min(s for line in lines for s, e in line.events if isinstance(e, PlanEntered))
    for path in built:
        assert path.stat().st_ctime < entered_s, "it was made anew"
    return alone
