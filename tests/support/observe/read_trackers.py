"""What trackers have stored of a run, read back through their own libraries: run -> name -> values by
step, in the order in which they were written."""

from __future__ import annotations

import json
import os
import struct
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import pytest

BLOCK, WHOLE, LAST = 1 << 15, 1, 4  # of a LevelDB log
Told = dict[str, dict[str, list[tuple[int, float]]]]

WHERE = {  # environment of an offline store in a folder
    "wandb": lambda folder: {"WANDB_MODE": "offline", "WANDB_DIR": str(folder)},
    "mlflow": lambda folder: {"MLFLOW_TRACKING_URI": f"file:{folder}"},
    "trackio": lambda folder: {"TRACKIO_DIR": str(folder)},
}


def needed(library: str) -> pytest.MarkDecorator:
    absent = find_spec(library) is None
    return pytest.mark.skipif(absent, reason=f'pip install "elastic-ray[{library}]"')


def read_back(library: str, folder: Path, project: str) -> Told:
    return {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}[library](folder, project)


def _wandb(folder: Path, project: str) -> Told:
    from wandb.proto import wandb_internal_pb2

    found: Told = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        by_name: dict[str, list[tuple[int, float]]] = {}
        for data in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                assert record.run.project == project
                by_name = found.setdefault(record.run.run_id, defaultdict(list))
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    value = float(json.loads(item.value_json))
                    by_name[name].append((record.history.step.num, value))
    return found


def _records(data: bytes) -> Iterator[bytes]:
    """Of W&B's offline file, a LevelDB log behind a header of its own: its library writes and syncs
    such files, and has no function that reads one. Raises where a checksum is wrong."""
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        crc, n, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + 7 : at + 7 + n]
        assert crc == crc32(bytes([kind]) + body), "a record is damaged"
        at, parts = at + 7 + n, parts + body
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""


def _mlflow(folder: Path, project: str) -> Told:
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{folder}")
    experiment = client.get_experiment_by_name(project)
    found: Told = {}
    for run in client.search_runs([experiment.experiment_id]):
        assert run.info.status in ("FINISHED", "KILLED", "RUNNING")
        found[run.data.tags["elastic.run"]] = {
            name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
    return found


def _trackio(folder: Path, project: str) -> Told:
    os.environ["TRACKIO_DIR"] = str(folder)
    from trackio import sqlite_storage, utils
    from trackio.sqlite_storage import SQLiteStorage

    # read when the library is imported, which another test of this process may have done
    utils.TRACKIO_DIR = sqlite_storage.TRACKIO_DIR = folder
    found: Told = {}
    for run in SQLiteStorage.get_runs(project):
        by_name = found.setdefault(run, defaultdict(list))
        for one in SQLiteStorage.get_logs(project, run):
            for name, value in one.items():
                if name not in ("step", "timestamp"):
                    by_name[name].append((one["step"], value))
    return found
