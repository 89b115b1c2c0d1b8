"""float8 is refused in one line where it cannot be. What it computes was not run: that needs a
GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from elastic.errors import SpecError
from elastic.worker.parallel.float8 import check_float8

GPU = torch.device("cuda", 0)


def said(device: torch.device) -> str:
    with pytest.raises(SpecError) as error:
        check_float8(device)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a GPU that computes in float8" in said(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    assert "needs compute capability 8.9, A100 has 8.0; take float8: false" in said(GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs the package torchao, which is not installed" in said(GPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    check_float8(GPU)
