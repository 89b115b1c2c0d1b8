"""Weights from safetensors: any box of any tensor, shards of any layout, with no more memory than
the shard and a chunk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.places import PROGRAMS, TESTS

from elastic.errors import SpecError
from elastic.program import Program, Weights, load_program
from elastic.types import Box, Job, Layout
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program import safetensor_files
from elastic.worker.program.model_profile import trace
from elastic.worker.program.safetensor_files import SafetensorFiles
from elastic.worker.program.weights import cut
from elastic.worker.state.train_state import TrainState


def random_weights(
    name: str = "tiny.py", dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    model = load_program(PROGRAMS / name).model()
    return {
        fqn: torch.randn(p.shape, generator=draw).to(dtype) for fqn, p in model.named_parameters()
    }


def stored(folder: Path, tensors: dict[str, torch.Tensor], n_files: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    if n_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % n_files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def with_weights(path: Path, file: str = "tiny.py", **more: Any) -> Program:
    """Its init must not be called."""
    program = load_program(PROGRAMS / file)
    return replace(
        program,
        weights=Weights(path, **more),
        init=lambda model: pytest.fail("the whole model was initialized"),
    )


# ------------------------------------------------------------------------------------------- ranges


@pytest.mark.parametrize("run_bytes", [1, 4096])
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_any_box_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_bytes: int, chunk_bytes: int
) -> None:
    monkeypatch.setattr(safetensor_files, "RUN_BYTES", run_bytes)
    monkeypatch.setattr(safetensor_files, "CHUNK_BYTES", chunk_bytes)
    tensors = {
        "a": torch.randn(7, 5),
        "b": torch.randn(4, 3, 6).bfloat16(),
        "c": torch.tensor(2.5),
        "d": torch.arange(9),
    }
    asked: list[int] = []
    files = SafetensorFiles(stored(tmp_path / "w", tensors, 2), lambda: asked.append(1))
    boxes = [
        ("a", (0, 0), (7, 5)), ("a", (2, 1), (4, 3)), ("a", (6, 0), (1, 5)), ("b", (1, 0, 0), (3, 3,
        6)), ("c", (), ()), ("b", (1, 1, 0), (2, 2, 6)), ("b", (0, 0, 2), (4, 3, 3)), ("d", (4,),
        (5,)), ("a", (3, 5), (2, 0)),
    ]  # fmt: skip
    for name, offsets, sizes in boxes:
        target = torch.zeros(sizes)
        files.read_into(name, Box(name, offsets, sizes, "float32"), target)
        assert torch.equal(target, cut(tensors[name], Box(name, offsets, sizes, "float32")).float())
    files.close()
    n_rows = sum(sizes[0] for _, _, sizes in boxes if sizes and 0 not in sizes)
    few = len([sizes for _, _, sizes in boxes if sizes and 0 not in sizes])
    assert few == len(asked) if chunk_bytes > 64 else few < len(asked) <= n_rows, "of each chunk"


def test_who_reads_may_stop_between_chunks(tmp_path: Path) -> None:
    path = stored(tmp_path / "w", random_weights("tiny_tied.py", torch.bfloat16), 1)
    program = with_weights(path, "tiny_tied.py")
    groups = Groups(0, Layout(), torch.device("cpu"))
    state = TrainState(
        program, trace(program), groups, layout=Layout(), layers=(4,), rank=0, job=Job()
    )
    asked: list[int] = []

    def tick() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise ConnectionAbortedError("generation 3 was aborted")

    with pytest.raises(ConnectionAbortedError):
        state.fill_fresh(7, tick)
    assert len(asked) == 3
    state.frozen = {f: held for f, held in state.tensors.items() if f.startswith("model.")}
    with pytest.raises(ConnectionAbortedError):
        asked.clear()
        state.read_frozen(tick)
    assert len(asked) == 3


@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout(dp_shard=3), (4,)),
        (Layout(dp_shard=2, tp=2), (4,)),
        (Layout(pp=2, tp=2), (3, 1)),
        (Layout(), (4,)),
    ],
)
def test_each_rank_gets_its_boxes(
    tmp_path: Path, layout: Layout, layers: tuple[int, ...], n_files: int
) -> None:
    whole = random_weights("tiny_tied.py", torch.bfloat16)
    program = with_weights(stored(tmp_path / "w", whole, n_files), "tiny_tied.py")
    profile = trace(program)
    for rank in range(layout.world_size):
        groups = Groups(0, layout, torch.device("cpu"))
        try:
            if layout.world_size > 1:
                groups.pretend(rank)
            state = TrainState(
                program, profile, groups, layout=layout, layers=layers, rank=rank, job=Job()
            )
            state.fill_fresh(7)
            n = 0
            for fqn, (box, tensor) in state.tensors.items():
                if fqn.startswith("model."):
                    assert torch.equal(
                        tensor, cut(whole[fqn.removeprefix("model.")], box).float()
                    ), fqn
                    n += 1
                elif fqn.startswith("optim."):
                    assert not tensor.any()
            assert n >= 9
        finally:
            groups.close()


def test_names_and_values_that_are_not_there(tmp_path: Path) -> None:
    whole = random_weights()
    there = {f"transformer.{name}": value for name, value in whole.items() if name != "head.weight"}
    path = stored(tmp_path / "w", there)

    def fresh(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        assert name == "head.weight"
        return torch.randn(shape)

    found = []
    for layout in (Layout(), Layout(dp_shard=2)):
        program = with_weights(path, name=lambda name: f"transformer.{name}", fresh=fresh)
        groups = Groups(0, layout, torch.device("cpu"))
        try:
            if layout.world_size > 1:
                groups.pretend(0)
            state = TrainState(
                program, trace(program), groups, layout=layout, layers=(4,), rank=0, job=Job()
            )
            state.fill_fresh(7)
            found.append(state.tensors["model.head.weight"][1].clone())
        finally:
            groups.close()
    assert found[0].std() > 0.5 and torch.equal(found[1], found[0][:32])


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda w: w.pop("head.weight"),
            r"it has no tensor head\.weight; weights of another model\?",
        ),
        (
            lambda w: w.update({"head.weight": torch.zeros(2, 2)}),
            r"head\.weight is \[2, 2\], the program's head\.weight is",
        ),
        (
            lambda w: w.update({"head.weight": w["head.weight"].to(torch.int8)}),
            r"head\.weight is int8, without its scales; quantised weights are not read: give",
        ),
        (
            lambda w: w.update({"head.weight_qdata": w.pop("head.weight").to(torch.int8)}),
            r"no tensor head\.weight; it has head\.weight_qdata: quantised weights are not read",
        ),
        (
            lambda w: [w.pop(name) for name in list(w) if name != "head.weight"],
            r"\(and \d+ more of \d+ are missing\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_from_their_headers(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], says: str
) -> None:
    tensors = random_weights()
    change(tensors)
    with pytest.raises(SpecError, match=says) as caught:
        trace(with_weights(stored(tmp_path / "w", tensors)))
    assert "\n" not in str(caught.value)


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    path = stored(tmp_path / "w", random_weights(), 2)
    file = path / "model-1.safetensors"
    data = file.read_bytes()
    for broken in (data[:-1], data[:50], b"", b"\xff" * 100):
        file.write_bytes(broken)
        with pytest.raises(
            SpecError, match=r"model-1\.safetensors: no safetensors file that can be read"
        ):
            trace(with_weights(path))
    file.unlink()
    with pytest.raises(
        SpecError, match=r"model-1\.safetensors: missing; model\.safetensors\.index\.json names it"
    ):
        trace(with_weights(path))
    with pytest.raises(SpecError, match="nowhere: no such file or folder"):
        trace(with_weights(tmp_path / "nowhere"))


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["dp_shard=4", "tp=4"])
def test_loading_needs_the_shard_and_a_chunk(tmp_path: Path, layout: str) -> None:
    """A model of about 200 MB, a quarter of it per rank; measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "support" / "worker" / "load_peak.py"), str(tmp_path), layout],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model_bytes"] > 180e6 and found["shard_bytes"] < 0.35 * found["model_bytes"]
    assert found["right"]
    allowed = found["shard_bytes"] + 2 * safetensor_files.CHUNK_BYTES
    assert 0.5 * found["shard_bytes"] < found["peak_bytes"] < allowed, found
