"""Checkpoints of a run that trains and removes them while they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic import api
from elastic.cli.command_line import main
from elastic.errors import SpecError, StateLost
from elastic.storage import open_storage
from elastic.storage.local import LocalStorage
from elastic.types import Box
from elastic.worker.checkpoint import checkpoint_index, checkpoint_verbs, checkpoint_writer

BOX = Box("model.w", (0,), (1 << 20,), "float32")
READS = ("read", "read_into", "read_parts")


def saved(path: Path, *steps: int) -> list[str]:
    """Of a run that trains; the newest is the last."""
    run, uris = open_storage(path), list[str]()
    for step in steps:
        items = [(BOX, torch.full(BOX.sizes, float(step)))]
        checkpoint_writer.write_shard(run, step, 1, rank=0, items=items)
        uris.append(checkpoint_writer.commit(run, step, 1, world_size=1, epoch=1, meta={}))
    return uris


def at_first_read(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """What happens when the first byte of a shard is asked for."""
    left = [do]
    for name in READS:
        real = getattr(LocalStorage, name)

        def read(self: Any, key: str, *given: Any, real: Any = real, **named: Any) -> Any:
            if key.endswith(".distcp") and left:
                left.pop()()
            return real(self, key, *given, **named)

        monkeypatch.setattr(LocalStorage, name, read)


def test_a_copy_that_the_run_removes_while_it_is_verified_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, newest = saved(tmp_path / "runs" / "r", 5, 10)
    at_first_read(monkeypatch, lambda: checkpoint_index.remove(newest))
    assert main(["checkpoint", "verify", "r", "--storage", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out == (
        "step 10: the run removed it while it was read\nstep 5: every byte is as it was written\n"
    )


def test_an_export_says_that_the_run_removed_the_copy_and_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, newest = saved(tmp_path / "r", 5, 10)
    run, to = open_storage(tmp_path / "r"), tmp_path / "out"
    write, calls = checkpoint_verbs.write_files, list[str]()

    def written(storage: Any, *given: Any, **named: Any) -> Any:
        storage.put("model-00001-of-00002.safetensors", b"of a file before")
        calls.append(storage.uri)
        return write(storage, *given, **named)

    monkeypatch.setattr(checkpoint_verbs, "write_files", written)
    at_first_read(monkeypatch, lambda: checkpoint_index.remove(newest))
    with pytest.raises(SpecError, match=r"step-00000010.g0001: the run removed it .*keep_every"):
        api.export(run, None, str(to))
    assert calls and not list(to.glob("*.safetensors"))
    assert api.export(run, None, str(to))["step"] == 5


def test_an_export_of_a_damaged_copy_says_so_and_is_not_in_the_way_either(tmp_path: Path) -> None:
    uri, newest = saved(tmp_path / "r", 5, 10)
    shard = next(Path(newest).glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    run = open_storage(tmp_path / "r")
    with pytest.raises(StateLost, match="is truncated or altered"):
        api.export(run, None, str(tmp_path / "out"))
    assert api.export(run, 5, str(tmp_path / "out"))["from"] == uri
