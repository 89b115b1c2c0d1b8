"""Arrow, JSON lines and Parquet read by the library `datasets`, tokenized once, through a kill and a
growth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.e2e.runs import (
    POOLS,
    PROGRAM,
    events,
    job,
    plans,
    run,
    slow_until_grown,
    survivors_kept_their_processes,
    went_on_as_if_nothing_happened,
)
from support.reference import train_alone

from elastic.config.job import load_job
from elastic.data.open_datasets import dataset_of
from elastic.data.sources.text_folder import python_stdlib_folder
from elastic.program import load_program
from elastic.types import DrillAsked

datasets = pytest.importorskip("datasets", reason="the extra `datasets`")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.e2e
STEPS, N_FILES = 30, 45
SEQ, VOCAB = 16, 64  # of the program


def write(folder: Path) -> dict[str, Any]:
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


def test_exact_in_order_and_tokenized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drill = [{"at_step": 8, "kill": "any-spot"}, {"at_step": 12, "add": "spot"}]
    folder = job(tmp_path, STEPS, drill, data=write(tmp_path), pools=POOLS[:1])
    with slow_until_grown(folder / "runs" / "run" / "journal.jsonl", tmp_path / "slow"):
        summary, lines = run(folder)

    program, spec = load_program(PROGRAM), load_job(folder).job()
    dataset = dataset_of(program, spec)
    seen = [dataset.source(i)[0] for i in range(len(dataset))]
    assert [round(6 * seen.count(part) / len(seen), 2) for part in range(3)] == [1, 2, 3]
    alone = train_alone(
        replace(program, dataset=lambda: dataset),
        {"seed": 3, "global_batch": 12, "clip_grad_norm": 1.0},
        STEPS,
    )
    monkeypatch.setattr("support.e2e.runs.alone", lambda steps: alone)
    monkeypatch.setattr("support.e2e.runs.N_SAMPLES", len(dataset))
    went_on_as_if_nothing_happened(summary, lines, STEPS)
    assert {t["cause"] for t in summary["transitions"]} == {"start", "loss", "growth"}
    asked = [e.drill for e in events(lines, DrillAsked)]
    survivors_kept_their_processes(lines, {n for d in asked for n in d.get("kill", ())})
    assert any(len({r.node_id for r in p.ranks}) < len(p.ranks) for p in plans(lines)), (
        "workers of one node share what it has"
    )

    built = sorted(path for path in (tmp_path / "cache" / "built").iterdir())
    kinds = [path.name.rpartition("-")[0] for path in built]
    assert kinds == ["arrow-tokens"] * 3 + ["datasets"] * 2, "Arrow is mapped where it lies"
    entered_s = min(path.stat().st_ctime for path in (folder / "runs" / "run").iterdir())
    for path in built:
        assert path.stat().st_ctime - entered_s < 60, "nobody has made it anew"
