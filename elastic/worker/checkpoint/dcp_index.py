"""DCP's index (`.metadata`), so that torch.distributed.checkpoint.load reads what
checkpoint_writer.py wrote.

The one private name of torch that checkpoints need, `_StorageInfo`, is here: DCP's FileSystemReader
expects it in the index. tests/worker/checkpoint/test_checkpoint_writer.py loads through DCP and
fails when it changes.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from elastic.worker.checkpoint.checkpoint_format import BlobEntry, Manifest, shard_name

OPTIM = "optim."


def metadata(manifests: Sequence[Manifest], shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The pickle of DCP's Metadata over all ranks' blobs; the first of equal boxes counts.

    Optimizer state has two names, ours and that of torch's `get_optimizer_state_dict`
    (`optim.state.<parameter>.<entry>`).
    """
    # slow to import, and only a committer needs it
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    chunks: dict[str, list[BlobEntry]] = {fqn: [] for fqn in shapes}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for manifest in manifests:
        for entry in manifest.entries:
            index = MetadataIndex(entry.box.fqn, torch.Size(entry.box.offsets))
            if index not in storage:
                chunks[entry.box.fqn].append(entry)
                storage[index] = _StorageInfo(shard_name(manifest.rank), entry.offset, entry.length)
    names: dict[str, tuple[str, ...]] = {fqn: (fqn,) for fqn in shapes}  # a flat state dict
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for fqn, shape in shapes.items():
        tensors[fqn] = whole = _tensor(shape, chunks[fqn])
        if fqn.startswith(OPTIM):
            kind, parameter = fqn.removeprefix(OPTIM).split(".", 1)
            alias = f"{OPTIM}state.{parameter}.{kind}"
            names[alias], tensors[alias] = ("optim", "state", parameter, kind), whole
            for chunk in whole.chunks:
                storage[MetadataIndex(alias, chunk.offsets)] = storage[
                    MetadataIndex(fqn, chunk.offsets)
                ]
    return pickle.dumps(Metadata(tensors, names, storage))


def _tensor(shape: tuple[int, ...], entries: list[BlobEntry]) -> TensorStorageMetadata:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunks = [
        ChunkStorageMetadata(torch.Size(entry.box.offsets), torch.Size(entry.box.sizes))
        for entry in entries
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, entries[0].box.dtype)), torch.Size(shape), chunks
    )
