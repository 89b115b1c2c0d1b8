"""Checkpoints of plain torch.distributed.checkpoint: what it saves comes back, and a malicious
index is refused by name."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import get_state_dict

from elastic.errors import ElasticError, SpecError
from elastic.types import Box
from elastic.worker.checkpoint.checkpoint_format import Damaged
from elastic.worker.checkpoint.foreign_dcp import Record, _dtype, open_plain, read_index

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 300), nn.LayerNorm(300), nn.Linear(300, 1000).to(torch.bfloat16)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.randn(4, 5)).sum().backward()
    model[2](torch.randn(4, 300, dtype=torch.bfloat16)).sum().backward()
    model[1](torch.randn(4, 300)).sum().backward()
    optimizer.step()
    return model, optimizer


def whole(fqn: str, tensor: torch.Tensor) -> Box:
    return Box(
        fqn, (0,) * tensor.ndim, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    )


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optim": moments, "step": 3},
        checkpoint_id=tmp_path / "plain",
        no_dist=True,
    )
    return tmp_path / "plain", {"model": weights, "optim": moments}


def test_what_dcp_saved_comes_back(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, state = saved
    checkpoint = open_plain(str(folder))
    assert "step" not in checkpoint.tensors and checkpoint.tensors["model.2.weight"] == (
        (1000, 300),
        "bfloat16",
    )
    for name, tensor in state["model"].items():
        assert torch.equal(checkpoint.read(whole(f"model.{name}", tensor)), tensor)
    for fqn, entries in state["optim"]["state"].items():
        for entry, tensor in entries.items():
            assert torch.equal(checkpoint.read(whole(f"optim.state.{fqn}.{entry}", tensor)), tensor)
    part = checkpoint.read(Box("model.2.weight", (10, 5), (100, 20), "bfloat16"))
    assert torch.equal(part, state["model"]["2.weight"][10:110, 5:25])


def test_a_truncated_or_missing_file_is_named(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = saved
    shard = folder / "__0_0.distcp"
    os.truncate(shard, shard.stat().st_size - 4000)
    with pytest.raises(Damaged, match=r"__0_0\.distcp: truncated"):
        open_plain(str(folder))
    shard.unlink()
    with pytest.raises(Damaged, match=r"__0_0\.distcp: missing"):
        open_plain(str(folder))
    (folder / ".metadata").unlink()
    with pytest.raises(SpecError, match=r"it has no \.metadata"):
        open_plain(str(folder))


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.what = function, arguments

    def __reduce__(self) -> Any:
        return self.what


EVIL = [
    (Calls(os.mkdir, "executed"), "posix.mkdir"),
    (Calls(eval, "1"), "builtins.eval"),
    (Calls(getattr, {}, "x"), "builtins.getattr"),
    (Metadata({}, Calls(os.system, "mkdir executed"), {}), "posix.system"),
    (Metadata({}, None, Calls(exec, "1")), "builtins.exec"),
    (Metadata({}, {}, {}, StorageMeta(Calls(os.mkdir, "executed"))), "posix.mkdir"),
    (Calls(torch.load, "x"), "torch.serialization.load"),
    (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
]


@pytest.mark.parametrize(("value", "name"), EVIL, ids=[name for _, name in EVIL])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_malicious_index_is_refused_by_name(
    value: Any, name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(value, protocol)
    name = name.replace("builtins", "__builtin__") if protocol < 3 else name
    with pytest.raises(
        SpecError, match=rf"x/\.metadata: it asks for {name.replace('.', '[.]')}, which no index"
    ):
        read_index(data, "x/.metadata")
    assert list(tmp_path.iterdir()) == []


def test_opcodes_that_import_by_number_or_name_are_refused(tmp_path: Path) -> None:
    for data in (b"cos\nsystem\n(S'x'\ntR.", b"(S'x'\nios\nsystem\n."):  # GLOBAL + REDUCE, INST
        with pytest.raises(SpecError, match=r"it asks for os\.system"):
            read_index(data, "f")
    with pytest.raises(SpecError, match="persistent object"):
        read_index(b"Px\n.", "f")
    with pytest.raises(Damaged, match="f: not readable"):
        read_index(b"\x82\x01.", "f")  # EXT1: an extension code that nobody has registered


@pytest.mark.parametrize(
    "data", [b"", b"abc", pickle.dumps({}), pickle.dumps(Metadata({}))[:-9], b"(" * 50_000]
)
def test_what_is_no_index_is_called_so(data: bytes) -> None:
    with pytest.raises(Damaged, match="f: "):
        read_index(data, "f")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "a/b"])
def test_an_index_that_points_elsewhere_is_refused(
    saved: tuple[Path, dict[str, Any]], name: str
) -> None:
    folder, _ = saved
    index = pickle.loads((folder / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(SpecError, match="its file is called .*: refused"):
        open_plain(str(folder))


# --------------------------------------------------------------- an index that is small and endless


def by_hand(first: bytes, again: bytes, times: int = 64) -> bytes:
    """Opcodes: `first`, then `again` for the value of it twice, and so on; the last value is the
    key of a dict."""
    lines = [b"\x80\x04}", first, b"\x94"]
    for k in range(times):
        lines += [b"0", again.replace(b"%", b"h" + bytes([k])), b"\x94"]
    return b"".join([*lines, b"K\x01s."])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (by_hand(b"(t", b"%%\x86"), "a tuple in it stands for more than 100,000 items"),
        (by_hand(b"(t", b"(%%t"), "a tuple in it stands for more than 100,000 items"),
        (by_hand(b"(t", b"ctorch\nSize\n(](%%etR"),
        "a size in it is made of other things than numbers"), (by_hand(b"V" + b"x" * 99 + b"\n",
        b"cpathlib\nPath\n%%\x86R"), "a path in it is no short text"),
        (b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".", "not readable"),
        (b"\x80\x02r\xff\xff\xff\xff.", "not readable"),
    ],
)  # fmt: skip
def test_a_bomb_in_an_index_is_one_line(data: bytes, says: str) -> None:
    with pytest.raises(ElasticError, match=f"^x/index: .*{says}") as error:
        read_index(data, "x/index")
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


def test_legal_tuples_are_read() -> None:
    deep = ("a", ("b", (1, 2, 3)), tuple(range(1000)))
    index = read_index(pickle.dumps(Metadata({}, {"x": deep})), "f")
    assert index["planner_data"] == {"x": deep}


@pytest.mark.parametrize("what", ["name", "file", "dtype", "sizes", "chunks"])
def test_odd_values_in_an_index_are_one_line(saved: tuple[Path, dict[str, Any]], what: str) -> None:
    folder, _ = saved
    index = pickle.loads((folder / ".metadata").read_bytes())
    bomb: Any = []
    for _ in range(64):
        bomb = [bomb, bomb]
    fqn = "model.0.weight"
    about = index.state_dict_metadata[fqn]
    if what == "name":
        index.planner_data[fqn] = (bomb,)
    if what == "file":
        for info in index.storage_data.values():
            info.relative_path = bomb
    if what == "dtype":
        index.state_dict_metadata[fqn] = replace(about, properties=bomb)
    if what == "sizes":
        about.chunks[0] = replace(about.chunks[0], sizes=bomb)
    if what == "chunks":
        for name in index.state_dict_metadata:
            if hasattr(index.state_dict_metadata[name], "chunks"):
                index.state_dict_metadata[name] = replace(about, chunks=about.chunks * 5000)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ElasticError) as error:
        open_plain(str(folder))
    assert (
        ".metadata" in str(error.value)
        and len(str(error.value)) < 600
        and "\n" not in str(error.value)
    )


def test_properties_without_anything_in_them_are_one_line() -> None:
    with pytest.raises(SpecError, match=r"here: dtype \(a NoneType\) is not known"):
        _dtype(Record(), "here")
