"""What the groups of a generation cost each rank: ranks are threads of this process, on gloo,
around one store.

`groups`: as they are; `meshes`: with a connection between each pair of ranks, as they were above 16
ranks. Nothing is trained; the groups to train in have eight ranks at most, but where a number of
ranks cannot be cut so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import median
from time import monotonic, process_time
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from support.worker.thread_ranks import joined

from elastic.types import ModelProfile, grid
from elastic.worker.process_groups import groups as module
from elastic.worker.process_groups.groups import Groups

COMMITS = 5
WORDS = 17  # numbers of a commit, and three of each rank


def groups(n: int, profile: ModelProfile) -> dict[str, float]:
    """CPU seconds of all threads for each rank; a commit by the clock, of ranks that share this
    machine; requests at the store and open descriptors for each rank."""
    fds, began_s = _open(), process_time()
    with joined(n) as ranks:
        formed_s = process_time() - began_s

        def commits(of: Groups, me: int) -> float:
            of.commit.barrier()
            took = []
            for _ in range(COMMITS):
                at_s = monotonic()
                of.commit.all_reduce(torch.ones(WORDS + 3 * n, dtype=torch.float64))
                took.append(monotonic() - at_s)
            return median(took)

        commit_s = median(ranks.all(commits))
        return {
            "groups_s": round(formed_s / n, 4), "commit_ms": round(1000 * commit_s, 2),
            "requests_n": round(sum(ranks.store.requests.values()) / n, 1),
            "open_n": round((_open() - fds) / n, 1),
            "answer_kb": round(ranks.store.n_bytes / n / 1e3, 1),
        }  # fmt: skip


def meshes(n: int, profile: ModelProfile) -> dict[str, float]:
    with mock.patch.object(grid, "MESH_MOST", n), mock.patch.object(module, "MESH_MOST", n):
        return {f"mesh_{name}": value for name, value in groups(n, profile).items()}


def _open() -> int:
    return len(os.listdir("/proc/self/fd"))
