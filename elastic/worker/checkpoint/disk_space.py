"""Is there room for another checkpoint? Asked before the first byte is written, so that a full disk
harms nobody."""

from __future__ import annotations

from elastic.errors import ElasticError
from elastic.storage import Storage
from elastic.worker.checkpoint.checkpoint_format import MARKER, folder_of
from elastic.worker.checkpoint.checkpoint_index import committed

GB = 1e9
OVERHEAD = 1.02  # indexes and the framing of blobs
MARGIN_BYTES = 64 << 20  # left free for the journal and for others


class NoRoom(ElasticError):
    """The next copy would not fit the disk or the job's quota; the message has the numbers."""


def check_space(
    storage: Storage,
    copy: tuple[int, int],
    sizes: tuple[int, int],
    *,
    quota_gb: float | None = None,
    ordered: int = 0,
) -> None:
    """Raises NoRoom unless the copy (step, generation) fits; sizes: (this rank's bytes, all ranks'
    bytes). `ordered`: as write_shard.

    Once another rank has begun to write, only this rank's bytes are requested.
    """
    own_bytes, all_bytes = (int(size * OVERHEAD) for size in sizes)
    if quota_gb is not None:
        others = [found for found in committed(storage) if (found.step, found.generation) != copy]
        used = sum(found.n_bytes for found in others)
        if used + all_bytes > quota_gb * GB:
            hold, fewer = "copies hold", ", or lower keep_last"
            if len(others) == 1:  # which stays, whatever keep_last says
                hold, fewer = "copy holds", ""
            raise NoRoom(
                f"storage_quota_gb={quota_gb:g}: {len(others)} {hold} {used / GB:.2f} GB, the "
                f"copy of step {copy[0]} needs {all_bytes / GB:.2f} GB; raise it{fewer}"
            )
    free = storage.free_bytes()
    if free is None:
        return
    folder = folder_of(*copy, ordered)
    begun = any(not key.endswith(MARKER) for key in storage.list(f"{folder}/"))
    begun = begun or storage.is_written_to(folder)
    need = (own_bytes if begun else all_bytes) + MARGIN_BYTES
    if free < need:
        raise NoRoom(
            f"{storage.uri}: {free / GB:.2f} GB are free, the copy of step {copy[0]} needs "
            f"{need / GB:.2f} GB; free space there, or lower keep_last"
        )
