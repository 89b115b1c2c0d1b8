"""What a process does not let go of once its GPU is lost."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from elastic.worker.process import cuda_errors
from elastic.worker.process.fault_injection import MADE_UP
from elastic.worker.state.host_copy import HostCopies, HostMemory, Tensors

LOST = torch.AcceleratorError(MADE_UP)


@pytest.mark.parametrize(
    ("error", "held"), [(LOST, True), (RuntimeError("CUDA error: out of memory"), False)]
)
def test_nothing_is_freed_after_an_error_that_stays(
    error: RuntimeError, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing pinned memory would end the process."""
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(cuda_errors, "_held", kept)
    batch = {"input": torch.ones(3)}
    seen = weakref.ref(batch["input"])
    assert cuda_errors.holds_lost(error) is held
    del batch
    gc.collect()
    assert (seen() is not None) is held


def test_a_copy_that_meets_the_error_first_holds_its_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread drops the copy as soon as it has failed."""
    monkeypatch.setattr(cuda_errors, "_held", [])
    tensors: Tensors = {}
    copies = HostCopies(HostMemory(), tensors, frozenset())

    def fails(copy: object, non_blocking: bool = False) -> None:
        raise LOST

    monkeypatch.setattr(copies, "_copy", fails)
    copy = copies.take(1)
    assert copy is not None and copy.filled.wait(60)
    assert copy.lease._whole is not None
    buffer = weakref.ref(copy.lease._whole)
    copies.close()
    del copy
    gc.collect()
    assert buffer() is not None
