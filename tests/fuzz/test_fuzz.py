"""A small number of the inputs of run.py; and that the runner notices what it looks for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.fuzz import fuzzing
from support.fuzz.fuzzing import fuzz
from support.fuzz.target import Target
from support.fuzz.targets import opened

SMOKE = {"cluster": 40, "job": 60, "drill": 200, "dcp-index": 200}  # of others 300: YAML is slow
NAMES = [
    "journal", "journal-segment", "journal-part", "journal-state", "lease", "marker", "manifest",
    "manifests", "checkpoint", "inbox", "job", "set", "cluster", "drill", "hardware", "trace", "dcp-index",
    "safetensors", "safetensors-index", "rank-link", "rank-hello", "wire-numbers", "wire-tensors",
    "wire-metas", "wire-addresses", "wire-calls",
]  # fmt: skip


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    with opened() as found:
        yield {target.name: target for target in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_none_is_refused_in_words(targets: dict[str, Target], name: str) -> None:
    found = fuzz(targets[name], SMOKE.get(name, 300), seed=1)
    assert not found.failures, str(found)
    assert found.refused + found.taken == found.n and (found.refused or name == "checkpoint")


def test_every_reader_is_tried(targets: dict[str, Target]) -> None:
    assert list(targets) == NAMES


def test_a_traceback_a_hang_and_another_meaning_are_noticed(
    targets: dict[str, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzing, "MOST_S", 0.2)

    def raises(data: bytes) -> bytes:
        if data != b"{}":
            raise KeyError("missing")
        return data

    def hangs(data: bytes) -> bytes:
        while data != b"{}":
            pass
        return data

    plain = Target("plain", [b"{}"], raises, (ValueError,))
    assert "KeyError" in fuzz(plain, 3).failures[0]
    assert "took more than" in fuzz(replace(plain, read=hangs), 1).failures[0]
    kept = replace(plain, read=lambda data: data, kept=lambda found, good: found == good)
    assert any("something else than was written" in text for text in fuzz(kept, 50).failures)
    assert plain.made(random.Random("a")) == plain.made(random.Random("a")), (
        "the seed makes it again"
    )
