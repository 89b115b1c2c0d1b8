"""The policies against what this package asks of S3, as worker and as driver: judged by moto's own
evaluation of policies."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.client import BaseClient
from support.places import ROOT
from support.storage.faulty_proxy import FaultyProxy, denied
from support.waiting import until

from elastic.cluster.ray_train.script_checkpoints import (
    ReportedCheckpoints,
    ReportedRetention,
    key_in,
)
from elastic.ledger.lease import Lease, Times
from elastic.storage.s3 import ACTIONS, S3Storage
from elastic.types import Box, CopyRemoved, CopyStored, Layout, Plan, ShardStored, WorkerId
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.hosting.aggregate import CheckpointParts
from elastic.worker.hosting.checkpoint_orders import CheckpointCommitter

PLAN = Plan(1, Layout(), (WorkerId("a", 0),), (8,), (4,))
ITEMS = [(Box("w", (0,), (64,), "float32"), torch.arange(64.0))]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """What was asked of S3: right and kind of resource."""
    calls: set[tuple[str, str]] = set()
    real = BaseClient._make_api_call

    def noted(client: Any, operation: str, arguments: dict[str, Any]) -> Any:
        calls.add(
            (
                ACTIONS[operation].partition(" ")[0],
                "bucket" if "Key" not in arguments and "Delete" not in arguments else "object",
            )
        )
        return real(client, operation, arguments)

    monkeypatch.setattr(BaseClient, "_make_api_call", noted)
    return calls


def refused(who: str, calls: set[tuple[str, str]]) -> list[str]:
    from moto.iam.access_control import IAMPolicy

    policy = IAMPolicy((ROOT / "deploy" / "iam" / f"aws-{who}.json").read_text())
    bucket = "arn:aws:s3:::REPLACE-BUCKET"
    places = {
        "bucket": bucket,
        "object": f"{bucket}/elastic/run/checkpoints/step-00000005.g0001/commit.json",
    }
    found = {
        right: policy.is_action_permitted(right, places[kind]).name for right, kind in sorted(calls)
    }
    return [right for right, answer in found.items() if answer != "PERMITTED"]


@pytest.mark.e2e
def test_a_worker_saves_and_loads_and_may_remove_nothing(
    s3: S3Storage, asked: set[tuple[str, str]], small_parts: int
) -> None:
    checkpoint_writer.write_shard(s3, 5, 1, rank=0, items=ITEMS)
    # the lowest living rank does, where there is no driver
    uri = checkpoint_writer.commit(s3, 5, 1, world_size=1, epoch=1, meta={})
    assert checkpoint_index.verify(uri) == []
    assert refused("worker", asked) == [] and len(asked) >= 3
    s3.delete_folder("checkpoints/step-00000005.g0001")
    assert refused("worker", asked) == ["s3:DeleteObject"] and refused("head", asked) == []


def test_a_driver_commits_removes_and_cleans_up(s3: S3Storage, asked: set[tuple[str, str]]) -> None:
    for step in (5, 10):
        checkpoint_writer.write_shard(s3, step, 1, rank=0, items=ITEMS)
    copies = CheckpointCommitter(s3, 1, {})
    copies.commit(CheckpointParts(PLAN, 5, {0: ShardStored(1, 5, 0, 8, 0.1, 0.0, 1)}))
    stored = copies._news.get(timeout=60)
    assert isinstance(stored, CopyStored)
    copies.remove(stored.copy.uri)
    assert isinstance(copies._news.get(timeout=60), CopyRemoved)
    copies.clean()
    copies.close()
    assert ("s3:DeleteObject", "object") in asked and refused("head", asked) == []


def test_where_nothing_may_be_removed_a_run_is_resumed_and_taken_over(
    s3: S3Storage, proxy: FaultyProxy
) -> None:
    proxy.faults.append(denied("DELETE|POST.*delete", times=10_000))
    quick = Times(renew_s=0.05, ttl_s=600.0)
    for epoch in (1, 2, 3):
        lease = Lease(s3, "r", quick)
        until(lambda lease=lease: lease.sign.n >= 2, "signs of life")  # type: ignore[misc]
        assert lease.epoch == epoch and lease.certain
        lease.release()
    assert len(s3.list("lease/")) > 6, "none was removed"
    lease = Lease(s3, "r", quick)
    other = replace(lease.sign, epoch=5, n=0, boot="other-boot", host="elsewhere")
    s3.put(other.key, json.dumps(asdict(other)).encode())
    until(lambda: lease.lost, "the sign of a newer epoch")


def test_a_scripts_reported_checkpoints_are_removed_by_the_driver(
    s3: S3Storage, proxy: FaultyProxy, asked: set[tuple[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("x")
    stored = ReportedCheckpoints(s3)
    proxy.faults.append(denied("DELETE|POST.*delete", times=10_000))  # to its workers
    keys = [key_in(1, n, "epoch") for n in (1, 2, 3, 4)]
    for key in keys[:3]:
        stored.add(key, tmp_path)
        stored.commit(key)
    stored.add(keys[3], tmp_path)  # others of its ranks are at it
    assert len(s3.list("reported/")) == 3 * 2 + 1
    proxy.faults.clear()
    ReportedRetention(s3).close()
    left = {key.split("/")[1].removesuffix(".json") for key in s3.list("reported/")}
    assert left == {key.split("/")[1] for key in keys[1:]}
    assert refused("head", asked) == []
