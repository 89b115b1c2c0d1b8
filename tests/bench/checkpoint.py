"""Checkpoints: what a save costs the step, and how fast bytes go to storage and back, next to bare
files and bare S3 calls.

Stall: a run of two workers on the embedded cluster that saves every few steps. Speeds: one process
and the same bytes, one after the other within each round; figures are medians of the rounds'
ratios, `_spread` their least and greatest. Raw: a file written in 16 MiB pieces and synced; read
into memory that is there already, by one thread (`load_vs_raw`) and by as many as ours
(`_threads`). All is in the page cache, so that reads are as hard to match as can be. `dcp_*`: plain
DCP in place of ours.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

import torch
from report import finish, options
from trial import PROGRAM, ROOT, Clock, Failed, running

from elastic.storage import Storage, open_storage
from elastic.types import Box, CopyFailed, CopyStored, StepDone
from elastic.worker.checkpoint import checkpoint_index, checkpoint_reader, checkpoint_writer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MOST_S = 300.0
PIECE = 16 << 20
SEVERAL = 3  # copies at least, for a stall to be told
Items = list[tuple[Box, torch.Tensor]]


@dataclass(frozen=True)
class Size:
    """`shape` and `n_tensors`: of what goes to the disk; one such tensor goes to the object
    storage. `every`: steps from one save of the run to the next; `first`: the first step that
    counts; `steps`: the last."""

    shape: tuple[int, int]
    n_tensors: int
    rounds: int
    rounds_s3: int
    program: Path
    every: int
    first: int
    steps: int

    def job(self) -> dict[str, Any]:
        return {
            "name": "checkpoint", "steps": self.steps, "global_batch": 8, "seed": 1,
            "eval_samples": 12, "layout": "dp_shard=2", "min_workers": 2,
            "durable_every": self.every, "program": str(self.program), "pools": [{"name": "owned",
            "market_type": "owned", "max_nodes": 2}],
        }  # fmt: skip

    def items(self, n: int) -> Items:
        torch.manual_seed(0)
        made = [torch.randn(self.shape) for _ in range(n)]
        return [
            (Box(f"t{i}", (0, 0), self.shape, "float32"), tensor) for i, tensor in enumerate(made)
        ]


WHOLE = Size((4096, 8192), 4, 5, 3, PROGRAM, every=8, first=12, steps=80)  # 537 MB
SMOKE = Size(
    (512, 8192), 2, 1, 1, ROOT / "tests" / "programs" / "tiny.py", every=4, first=5, steps=24
)


def pieces(items: Items) -> list[memoryview]:
    out = []
    for _, tensor in items:
        memory: Any = tensor.view(-1).view(torch.uint8).numpy()
        view = memoryview(memory)
        out += [view[at : at + PIECE] for at in range(0, len(view), PIECE)]
    return out


def seconds(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def write_raw(path: Path, parts: Sequence[memoryview]) -> None:
    with path.open("wb", buffering=0) as file:
        for part in parts:
            file.write(part)
        os.fsync(file.fileno())


def read_raw(path: Path, parts: Sequence[memoryview], threads: int) -> None:
    def one(k: int) -> None:
        with path.open("rb", buffering=0) as file:
            file.seek(k * PIECE)
            if file.readinto(parts[k]) != len(parts[k]):
                raise Failed(f"{path}: fewer bytes than were written")

    if threads == 1:
        for k in range(len(parts)):
            one(k)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, range(len(parts))))


def save(storage: Storage, step: int, items: Items) -> str:
    checkpoint_writer.write_shard(storage, step, 1, rank=0, items=items)
    return checkpoint_writer.commit(storage, step, 1, world_size=1, epoch=1, meta={})


def load(uri: str, items: Items) -> None:
    checkpoint_index.open_checkpoint(uri).fill(items)


def digests(items: Items) -> list[int]:
    return [crc32(part) for part in pieces(items)]


def on_disk(clock: Clock, root: Path, size: Size) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    items, storage = size.items(size.n_tensors), open_storage(root / "run")
    written, equal = digests(items), True
    parts, n_bytes = pieces(items), sum(tensor.nbytes for _, tensor in items)
    state = {box.fqn: tensor for box, tensor in items}
    took: dict[str, list[float]] = {}

    def note(name: str, what: Callable[[], object]) -> None:
        took.setdefault(name, []).append(seconds(what))

    for step in range(size.rounds):
        clock.look(f"round {step} on disk")
        uri = storage.uri_of(f"checkpoints/step-{step:08d}.g0001")
        order: list[tuple[str, Callable[[], object]]] = [
            ("raw_save", partial(write_raw, root / "raw", parts)),
            ("save", partial(save, storage, step, items)),
        ]
        # neither always finds the disk as the other left it
        for name, what in order if step % 2 else order[::-1]:
            note(name, what)
        note("raw_load", lambda: read_raw(root / "raw", parts, 1))
        note("raw_load_threads", lambda: read_raw(root / "raw", parts, checkpoint_reader.THREADS))
        for _, tensor in items:
            tensor.zero_()
        note("load", partial(load, uri, items))
        equal = equal and digests(items) == written
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            note("dcp_save", lambda: dcp.save(state, checkpoint_id=root / "dcp", no_dist=True))
            note("dcp_load", lambda: dcp.load(state, checkpoint_id=root / "dcp", no_dist=True))
        for name in ("dcp", "run"):
            shutil.rmtree(root / name)
        (root / "raw").unlink()
    gbps = {
        f"{name}_gbps": round(n_bytes / median(values) / 1e9, 2) for name, values in took.items()
    }
    return {
        **ratios("save_vs_raw", took["raw_save"], took["save"]), **ratios("load_vs_raw",
        took["raw_load"], took["load"]), **ratios("load_vs_raw_threads", took["raw_load_threads"],
        took["load"]), **ratios("dcp_save_vs_raw", took["raw_save"], took["dcp_save"]),
        **ratios("dcp_load_vs_raw", took["raw_load"], took["dcp_load"]), **gbps, "bytes": n_bytes,
        "contents_equal": equal,
    }  # fmt: skip


def ratios(name: str, raw: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Speed of ours as a share of raw's: 1.0 = as fast."""
    found = sorted(a / b for a, b in zip(raw, ours))
    return {
        name: round(median(found), 3),
        f"{name}_spread": [round(found[0], 3), round(found[-1], 3)],
    }


# ----------------------------------------------------------------------------------- object storage


def on_s3(clock: Clock, root: Path, size: Size) -> dict[str, Any]:
    """A Ceph radosgw on loopback where it is installed, else moto; next to bare boto3 put_object
    and get_object."""
    import boto3
    import radosgw

    with ExitStack() as stack:
        name = "radosgw" if radosgw.installed() else "moto"
        if name == "radosgw":
            server = stack.enter_context(radosgw.running(root / "radosgw"))
            os.environ.update(server.environment)
        else:
            from support.storage.s3_server import running_s3

            stack.enter_context(running_s3())
        client, bucket = boto3.session.Session().client("s3"), "elastic-bench"
        client.create_bucket(Bucket=bucket)
        items, storage = size.items(1), open_storage(f"s3://{bucket}/run")
        data, written, equal = b"".join(pieces(items)), digests(items), True
        took: dict[str, list[float]] = {"raw_save": [], "save": [], "raw_load": [], "load": []}
        for step in range(size.rounds_s3):
            clock.look(f"round {step} on {name}")
            took["raw_save"].append(
                seconds(lambda: client.put_object(Bucket=bucket, Key="raw", Body=data))
            )
            took["save"].append(seconds(partial(save, storage, step, items)))
            took["raw_load"].append(
                seconds(lambda: client.get_object(Bucket=bucket, Key="raw")["Body"].read())
            )
            uri = storage.uri_of(f"checkpoints/step-{step:08d}.g0001")
            items[0][1].zero_()
            took["load"].append(seconds(partial(load, uri, items)))
            equal = equal and digests(items) == written
            storage.delete_folder()
        return {
            "s3_server": name, "s3_bytes": len(data), "s3_contents_equal": equal,
            **ratios("s3_save_vs_raw", took["raw_save"], took["save"]),
            **ratios("s3_load_vs_raw", took["raw_load"], took["load"]),
        }  # fmt: skip


# -------------------------------------------------------------------------------------------- stall


def stall(clock: Clock, size: Size) -> dict[str, Any]:
    with running(size.job(), clock) as trial:
        trial.until(
            lambda: bool(trial.steps) and trial.steps[-1][1] >= size.steps - 2,
            f"step {size.steps - 2}",
        )
        lines = trial.lines()
    events = [event for line in lines for _, event in line.events]
    steps = [event for event in events if isinstance(event, StepDone) and event.step >= size.first]
    saved = [
        e
        for e in events
        if isinstance(e, CopyStored) and e.copy.kind == "durable" and e.copy.step >= size.first
    ]
    if len(saved) < SEVERAL:
        raise Failed(f"only {len(saved)} checkpoints were stored")
    step_s = median(step.step_time_s for step in steps if step.step % size.every)
    stall_s = median(event.stall_s for event in saved)
    # the copy is written behind this one
    after = [step.step_time_s for step in steps if step.step % size.every == 1]
    return {
        "stall_share": round(stall_s / step_s, 4), "stall_ms": round(1e3 * stall_s, 3),
        "step_ms": round(1e3 * step_s, 1), "n_saves": len(saved), "n_left_out": sum(isinstance(e,
        CopyFailed) for e in events),
        "step_behind_which_it_is_written_vs_others": round(median(after) / step_s, 3),
        "processes_left": 0,
    }  # fmt: skip


def measure(clock: Clock, size: Size) -> Mapping[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        root = Path(folder)
        return {**stall(clock, size), **on_disk(clock, root, size), **on_s3(clock, root, size)}


if __name__ == "__main__":
    given = options(__doc__, MOST_S, WHOLE.rounds)
    size = SMOKE if given.smoke else replace(WHOLE, rounds=max(WHOLE.rounds, given.repeats))
    sys.exit(finish("checkpoint", given, lambda clock: measure(clock, size)))
