"""Freed shards go back to the system, also when something small was allocated behind them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.worker.process import allocator
from elastic.worker.process.allocator import CUDA_SETTING, settle_cuda_allocator

HOLE = """
import sys
import torch

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

if sys.argv[1] == "settled":
    from elastic.worker.process.allocator import CUDA_SETTING, settle_allocator
    assert settle_allocator()
del_me = torch.ones(30 << 18)  # 30 MiB: when it is freed, glibc raises its own threshold
del del_me
blocks, between = [], []
for _ in range(12):
    blocks.append(torch.ones(20 << 18))
    between.append(torch.ones(1 << 12))
full = resident_mb()
blocks.clear()
print(full - resident_mb())
"""


def test_cuda_is_asked_for_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    settle_cuda_allocator()
    assert os.environ["PYTORCH_ALLOC_CONF"] == f"{CUDA_SETTING},pinned_max_cached_size_mb:64"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    settle_cuda_allocator()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "backend:native"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    settle_cuda_allocator()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_pinned_memory_is_rounded_unless_a_limit_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    for settings, rounded in (
        ("expandable_segments:True", True), ("pinned_max_cached_size_mb:64", False),
        ("a:1,pinned_max_round_threshold_mb:8", False),
    ):  # fmt: skip
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
        assert allocator.rounds_pinned() is rounded


def test_a_torch_that_does_not_know_the_limit_on_pinned_memory_is_not_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CUDA build would refuse to start. The installed one knows it."""
    assert allocator.knows_pinned_setting()
    header = tmp_path / "include" / "c10" / "core" / "AllocatorConfig.h"
    header.parent.mkdir(parents=True)
    monkeypatch.setattr(
        allocator, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )
    assert allocator.cuda_environment() == {"PYTORCH_ALLOC_CONF": CUDA_SETTING}, (
        "there is no header"
    )
    header.write_text("size_t pinned_use_background_threads();")
    assert allocator.cuda_environment() == {"PYTORCH_ALLOC_CONF": CUDA_SETTING}
    header.write_text("size_t pinned_max_cached_size();")
    assert "pinned_max_cached_size_mb:64" in allocator.cuda_environment()["PYTORCH_ALLOC_CONF"]


@pytest.mark.e2e
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is of glibc")
@pytest.mark.parametrize(
    ("how", "least_mb", "most_mb"), [("settled", 230, 260), ("as it is", -10, 200)]
)
def test_freed_blocks_go_back(how: str, least_mb: float, most_mb: float) -> None:
    """Without the setting the same program keeps part of its memory: the test would notice that the
    setting does nothing."""
    done = subprocess.run(
        [sys.executable, "-c", HOLE, how], capture_output=True, text=True, check=True, timeout=300
    )
    assert least_mb <= float(done.stdout) <= most_mb
