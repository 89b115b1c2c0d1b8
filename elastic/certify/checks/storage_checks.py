"""A checkpoint to the configured storage: written, verified and read back, every byte compared;
beside plain bytes there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from elastic.certify.harness.lab import remove
from elastic.certify.tasks import Task
from elastic.scenarios.check import Bound, Check, judge
from elastic.scenarios.limit import Failed, Limit
from elastic.storage import Storage, open_storage
from elastic.types import Box
from elastic.worker.checkpoint import checkpoint_format, checkpoint_index, checkpoint_writer

RANKS, COLUMNS = 2, 4096  # each rank has two float32 tensors
# 268 MB in all, 67 MB to remote storage, 8 MB where it is slow
ROWS, ROWS_REMOTE, ROWS_LEAST = 4096, 1024, 128
PASSES = 6.0  # over the bytes, about: plain ones and ours, each written and read, and verified
PROBE_BYTES = 4 << 20
PIECE = 16 << 20
HALF = (
    "half of what tests/bench/baselines.json allows at least (0.6), since it is measured only "
    "once here"
)
BOUNDS = (
    Bound("content_equal", "every element that was read against the one that was written", least=1),
    Bound("damaged_files", "elastic checkpoint verify: every byte against its digest", most=0),
    Bound("save_vs_plain", HALF, least=0.3),
    Bound("load_vs_plain", HALF, least=0.3),
)
Items = list[tuple[Box, torch.Tensor]]


def task(storage_uri: str) -> Task:
    return Task(("checkpoint",), partial(_work, storage_uri), least_s=10.0, weight=0.7)


def _work(uri: str, limit: Limit) -> Iterator[Check]:
    own = f"certify-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    storage = open_storage(open_storage(uri).uri_of(own))
    try:
        yield checkpoint(storage, limit, _rows(storage, limit))
    finally:
        remove(storage)


def _rows(storage: Storage, limit: Limit) -> int:
    """As many as fit into half of the time, by the speed of a first small file."""
    data = bytes(PROBE_BYTES)
    seconds = _seconds(lambda: storage.put("probe", data))
    bytes_per_row = 4 * COLUMNS * 2 * RANKS
    fitting = int(limit.left_s / 2 / PASSES * PROBE_BYTES / seconds) // bytes_per_row
    return max(ROWS_LEAST, min(fitting, ROWS_REMOTE if storage.remote else ROWS))


def checkpoint(storage: Storage, limit: Limit, rows: int) -> Check:
    """Saves, verifies and loads; `storage` is empty."""
    shards = [_items(rank, (rows, COLUMNS)) for rank in range(RANKS)]
    n_bytes = sum(tensor.nbytes for items in shards for _, tensor in items)
    plain_save_s = _seconds(lambda: _write_plain(storage, shards))
    limit.look("a checkpoint is written")
    save_s = _seconds(lambda: _save(storage, shards))
    limit.look("the checkpoint is verified")
    problems, found = list[str](), checkpoint_index.find(storage)
    if not found:
        raise Failed(f"{storage.uri}: the checkpoint that was just committed is not there")
    verify_s = _seconds(lambda: problems.extend(checkpoint_index.verify(found[0].uri)))
    limit.look("the checkpoint is read")
    plain_load_s = _seconds(lambda: _read_plain(storage, n_bytes))
    equal, load_s, why = _load(found[0].uri, shards)
    figures = {
        "content_equal": equal, "damaged_files": len(problems), "bytes": n_bytes,
        "save_gb_per_s": n_bytes / save_s / 1e9, "load_gb_per_s": n_bytes / load_s / 1e9,
        "verify_gb_per_s": n_bytes / verify_s / 1e9, "save_vs_plain": plain_save_s / save_s,
        "load_vs_plain": plain_load_s / load_s,
    }  # fmt: skip
    check = judge("checkpoint", figures, BOUNDS)
    said = "; ".join(text for text in (check.why, why, *problems[:2]) if text)
    return Check(check.name, check.verdict, check.figures, check.bounds, why=said)


def _items(rank: int, shape: tuple[int, int]) -> Items:
    generator = torch.Generator().manual_seed(rank)
    fqns = [f"model.t{rank}.{i}" for i in range(2)]
    return [
        (Box(fqn, (0, 0), shape, "float32"), torch.randn(shape, generator=generator))
        for fqn in fqns
    ]


def _seconds(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return max(1e-9, time.perf_counter() - began)


def _save(storage: Storage, shards: list[Items]) -> None:
    for rank, items in enumerate(shards):
        checkpoint_writer.write_shard(storage, 1, 1, rank=rank, items=items)
    checkpoint_writer.commit(storage, 1, 1, world_size=len(shards), epoch=1, meta={})


def _load(uri: str, shards: list[Items]) -> tuple[int, float, str]:
    """Whether all is equal, the seconds, and what the reader said if it refused. Reads into memory
    that is there."""
    out = [(box, torch.ones_like(tensor)) for items in shards for box, tensor in items]
    began = time.perf_counter()
    try:
        checkpoint_index.open_checkpoint(uri).fill(out)
    except checkpoint_format.Damaged as error:
        return 0, max(1e-9, time.perf_counter() - began), str(error)
    seconds = time.perf_counter() - began
    wanted = [tensor for items in shards for _, tensor in items]
    return int(all(torch.equal(got, tensor) for (_, got), tensor in zip(out, wanted))), seconds, ""


def _write_plain(storage: Storage, shards: list[Items]) -> None:
    for rank, items in enumerate(shards):
        with storage.create(f"plain-{rank}") as file:
            for _, tensor in items:
                view = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                for at in range(0, len(view), PIECE):
                    file.write(view[at : at + PIECE])


def _read_plain(storage: Storage, n_bytes: int) -> None:
    """Into memory that nobody has touched before, as that of a state that is built."""
    n = 0
    for rank in range(RANKS):
        whole = memoryview(torch.empty(storage.size(f"plain-{rank}"), dtype=torch.uint8).numpy())  # type: ignore[arg-type]
        for at in range(0, len(whole), PIECE):
            n += storage.read_into(f"plain-{rank}", at, whole[at : at + PIECE])
    if n != n_bytes:
        raise Failed(f"{storage.uri}: {n_bytes} plain bytes were written, {n} came back")
