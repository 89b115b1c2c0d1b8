"""What pipeline stages tell each other of their tensors goes without pickle, in torch's own part of
it too."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.reference import train
from support.worker.chain import job_of
from support.worker.plans import plan
from support.worker.worker_pool import Pool
from torch.distributed.pipelining import PipelineStage, _utils

from elastic.errors import PeerGarbled, ProgramError
from elastic.program import load_program
from elastic.types import Layout, StepDone
from elastic.worker.parallel.pipeline import _Stage
from elastic.worker.process_groups import wire
from elastic.worker.process_groups.wire import TensorMeta

OBJECTS = [name for name in dir(dist) if "_object" in name and callable(getattr(dist, name))]
CPU = torch.device("cpu")
SEEN: dict[str, Any] = {}
from_torch_2_12 = pytest.mark.skipif(
    not hasattr(PipelineStage, "_send_meta"), reason="torch 2.11 has no metadata of stages"
)


def no_objects() -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an object is sent")

    for name in OBJECTS:
        SEEN[name] = getattr(dist, name)
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, refuse)


def objects_again() -> None:
    for name, function in SEEN.items():
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, function)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(pp=2), Layout(pp=2, schedule="interleaved1f1b")], ids=str
)
def test_stages_train_where_no_object_can_be_sent(
    pool: Pool, tmp_path: Path, layout: Layout
) -> None:
    assert {
        "send_object_list",
        "recv_object_list",
        "broadcast_object_list",
        "all_gather_object",
    } <= set(OBJECTS)
    job = job_of("tiny.py", steps=3)
    workers = pool.open(job, tmp_path, n=2)
    for worker in workers:
        pool.patch(worker, no_objects)
    pool.enter(plan(1, layout, workers, 12))
    pool.quiesced(1, 2)
    for worker in workers:
        pool.patch(worker, objects_again)
    alone = train(load_program(job["program"]), job, 3)
    assert [e.train_loss for e in pool.events(StepDone)] == pytest.approx(alone.losses, abs=1e-4)


METAS = (
    TensorMeta((2, 3), (3, 1), torch.bfloat16, True),
    None,
    TensorMeta((2, 3), (1, 2), torch.float8_e4m3fn, False),
    TensorMeta((), (), torch.int64, False),
    TensorMeta((0, 4), (4, 1), torch.bool, False),
    TensorMeta((5, 1 << 20), (0, 1), torch.float32, True),
)


def test_shapes_arrive_as_they_were() -> None:
    assert wire.tensor_metas(json.dumps(wire.rows_of(METAS)).encode(), 0) == METAS
    assert wire.tensor_metas(b"[]", 0) == ()


@pytest.mark.parametrize(
    "words",
    [
        b"\x80\x04K\x01.", b"", b"\xff", b"[" * 100_000, b"{}", b"1", b"[1]", b"[[]]", b'["abcd"]',
        b'[{"shape": [1]}]', b'[[[-1], [1], "int8", true]]', b'[[[1], [-1], "int8", true]]',
        b'[[[1.0], [1], "int8", true]]', b'[[[true], [1], "int8", true]]',
        b'[[[1], ["1"], "int8", true]]', b'[[[1], [], "int8", true]]', b'[[1, 1, "int8", true]]',
        b'[[[1], [1], "object", true]]', b'[[[1], [1], ["int8"], true]]',
        b'[[[1], [1], null, true]]', b'[[[1], [1], "int8", 1]]', b'[[[1], [1], "int8", null]]',
        b'[[[1], [1], "int8"]]', b'[[[1], [1], "int8", true, 0]]',
        b'[[[68719476736], [1], "int16", true]]', b'[[[2], [68719476736], "int8", true]]',
        b'[[[99999999999], [1], "int8", true]]',
        b'[[[68719476736, 68719476736], [0, 0], "int8", true]]',
        b'[[[68719476736], [0], "int16", true]]',
        b'[[[68719476736], [1], "int8", true], [[1], [1], "int8", true]]',
        b"[" + b"9" * 10_000 + b"]", json.dumps([[[1] * 65, [1] * 65, "int8", True]]).encode(),
    ],
)  # fmt: skip
def test_only_shapes_are_taken(words: bytes) -> None:
    with pytest.raises(PeerGarbled, match="rank 3"):
        wire.tensor_metas(words, 3)


def test_where_a_rank_listens_arrives_as_it_was() -> None:
    told = wire.addresses(b'[true, [["127.0.0.1", 29500], ["", 1]], ["AAE="]]', 0)
    assert told == (True, [("127.0.0.1", 29500), ("", 1)], ["AAE="])
    assert wire.addresses(b"[false, [], []]", 0) == (False, [], [])


@pytest.mark.parametrize(
    "words",
    [
        b"", b"\xff", b"[]", b"{}", b"[[]]", b"[1, [], []]", b"[true, []]", b"[true, {}, []]",
        b"[true, [], 0]", b'[true, ["ab"], []]', b'[true, [["a"]], []]',
        b'[true, [["a", "1"]], []]', b'[true, [["a", true]], []]', b'[true, [[1, 1]], []]',
        b'[true, [["a", 1, 2]], []]', b'[["127.0.0.1", 29500]]', b'[true, [["a", 1.5]], []]',
        b"[true, [null], []]", b"[true, [], [1]]", b"[true, [], [], []]", b"[true, [], [null]]",
    ],
)  # fmt: skip
def test_only_addresses_are_taken(words: bytes) -> None:
    with pytest.raises(PeerGarbled, match="rank 3"):
        wire.addresses(words, 3)


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        (TensorMeta((1 << 36, 2), (2, 1), torch.int8, False), "1 tensors of 137438953472 bytes"),
        (TensorMeta((1,), (1,), torch.float8_e8m0fnu, False), "float8_e8m0fnu"),
        (TensorMeta((1,) * 65, (1,) * 65, torch.int8, False), "torch.int8 of 65 dimensions"),
    ],
)
def test_what_the_other_stage_would_not_take_is_not_sent(meta: TensorMeta, why: str) -> None:
    with pytest.raises(ProgramError, match=why):
        wire.rows_of([None, meta])


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is sent waits here until it is received."""
    sent: list[torch.Tensor] = []

    def passed(how: Any, tensor: torch.Tensor, peer: int, group: Any) -> torch.Tensor:
        if how is dist.isend:
            sent.append(tensor)
            return tensor
        return tensor.copy_(sent.pop(0))

    monkeypatch.setattr(wire, "_pass", passed)
    monkeypatch.setattr(_Stage, "_peer", lambda self, stage: (stage, None))
    return sent


def stage_at(index: int) -> Any:
    stage: Any = object.__new__(_Stage)
    stage.stage_index, stage.device = index, CPU
    return stage


def test_lengths_of_words_are_looked_at_before_they_are_read(line: list[torch.Tensor]) -> None:
    for length in (0, -1, wire.WORDS_MOST + 1):
        line.append(torch.tensor([length]))
        with pytest.raises(PeerGarbled, match=f"rank 1 announced {length} bytes"):
            wire.receive_metas(1, None, CPU)  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="too many"):
        wire.send_metas(METAS[:1] * 60_000, 1, None, device=CPU)  # type: ignore[arg-type]
    assert not line


@from_torch_2_12
def test_torch_gets_what_it_would_have_sent(line: list[torch.Tensor]) -> None:
    metas = tuple(m and _utils._TensorMeta(torch.Size(m.shape), *m[1:]) for m in METAS)
    for said, source, to in (
        (_utils._StageForwardMeta(tuple(filter(None, metas))), 0, 1),
        (_utils._StageBackwardMeta(metas), 1, 0),
        (_utils._StageBackwardMeta(()), 1, 0),
    ):
        stage_at(source)._send_meta(said, to)
        heard = stage_at(to)._recv_meta(source)
        assert heard == said and type(heard) is type(said) and not line
        assert all(
            meta is None or type(meta.shape) is torch.Size
            for meta in getattr(heard, fields(heard)[0].name)
        )


@from_torch_2_12
def test_only_a_gradient_may_be_missing_and_nothing_be_a_dtensor(line: list[torch.Tensor]) -> None:
    stage_at(0)._send_meta(_utils._StageForwardMeta((None,)), 1)  # type: ignore[arg-type]
    with pytest.raises(PeerGarbled, match="rank 0 announced no tensor"):
        stage_at(1)._recv_meta(0)
    cut = _utils._DTensorMeta(torch.Size((1,)), (1,), torch.float32, True)
    with pytest.raises(ProgramError, match="stage 0 hands a DTensor to stage 1"):
        stage_at(0)._send_meta(_utils._StageForwardMeta((cut,)), 1)
    assert not line


@from_torch_2_12
def test_torch_still_has_the_private_names_that_are_replaced() -> None:
    """Under other names torch would go back to pickle."""
    assert list(inspect.signature(PipelineStage._send_meta).parameters) == [
        "self",
        "meta",
        "dst_stage",
    ]
    assert list(inspect.signature(PipelineStage._recv_meta).parameters) == ["self", "src_stage"]
    assert [f.name for f in fields(_utils._TensorMeta)] == [
        "shape",
        "stride",
        "dtype",
        "requires_grad",
    ]
    assert [f.name for f in fields(_utils._StageForwardMeta)] == ["forward_metas"]
    assert [f.name for f in fields(_utils._StageBackwardMeta)] == ["backward_metas"]
    assert hasattr(_utils._DTensorMeta, "placements") and not hasattr(
        _utils._TensorMeta, "placements"
    )


def test_torch_has_no_other_way_to_send_an_object_between_stages() -> None:
    """Every function of torch's stages that sends or reads an object is one that is replaced."""
    base = [cls for cls in PipelineStage.__mro__ if cls.__module__ == PipelineStage.__module__]
    found = {
        name
        for cls in base
        for name, function in vars(cls).items()
        if inspect.isfunction(function) and "object_list" in inspect.getsource(function)
    }
    assert found in ({"_send_meta", "_recv_meta"}, {"_shape_inference"}), found
