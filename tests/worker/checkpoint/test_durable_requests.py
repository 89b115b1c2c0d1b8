"""What a checkpoint of many ranks asks of object storage: one request for each manifest, and a few
for all files."""

from __future__ import annotations

import pytest
import torch
from support.storage.faulty_proxy import FaultyProxy

from elastic.storage.s3 import S3Storage
from elastic.types import Box
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer

N_RANKS = 6


@pytest.mark.slow
def test_sizes_are_asked_once_for_all_files(s3: S3Storage, proxy: FaultyProxy) -> None:
    for rank in range(N_RANKS):
        checkpoint_writer.write_shard(
            s3,
            5,
            1,
            rank=rank,
            items=[(Box("model.w", (2 * rank, 0), (2, 3), "float32"), torch.ones(2, 3))],
        )
    proxy.clear()
    uri = checkpoint_writer.commit(s3, 5, 1, world_size=N_RANKS, epoch=1, meta={})
    assert proxy.count("^HEAD") == 0 and proxy.count(r"^GET .*rank-\d+\.json") == N_RANKS
    assert proxy.count("list-type=2") <= 5, "twice for the fence, once for the sizes"
    proxy.clear()
    assert checkpoint_index.open_checkpoint(uri).tensors == {
        "model.w": ((2 * N_RANKS, 3), "float32")
    }
    assert proxy.count("^HEAD") == 0 and proxy.count("list-type=2") == 1
    assert len(proxy.seen) == N_RANKS + 3, "marker, list and index besides the manifests"
