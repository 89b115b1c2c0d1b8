"""What a step does over a group, done once before it.

NCCL connects ranks in the call that first needs it (`NCCL_RUNTIME_CONNECT` in its documentation):
those of an algorithm, which it chooses by the kind of the call and its size, and for messages two
ranks. Such a call waits on the host until the others have come to theirs, no longer than
TORCH_NCCL_NONBLOCKING_TIMEOUT: a rank that compiles or reads its first batch may take longer. Once
they are connected, a kernel waits, which has no limit.

To connect all ranks by all algorithms instead (NCCL_RUNTIME_CONNECT=0) takes several times the
memory, and leaves out messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

# sums: all-reduce; parts: all-gather and reduce-scatter; line, ring: messages to those next to a
# rank, in a ring also between the first and the last; pieces: all-to-all
Use = Literal["sums", "parts", "line", "ring", "pieces"]
MESSAGES: frozenset[Use] = frozenset(("line", "ring", "pieces"))  # each pair of ranks takes memory
Batch = Callable[[Any], AbstractContextManager[Any]]  # of messages that are sent together


def use_once(
    group: Any, uses: Collection[Use], device: torch.device, *, large_bytes: int, batch: Batch
) -> None:
    """Collective. `large_bytes`: of a call that is large to NCCL."""
    ways: dict[Use, Callable[[], None]] = {
        "sums": lambda: _sums(group, device, large_bytes),
        "parts": lambda: _parts(group, device, large_bytes),
        "line": lambda: _messages(group, device, batch, ring=False),
        "ring": lambda: _messages(group, device, batch, ring=True),
        "pieces": lambda: _pieces(group, device),
    }
    for use in get_args(Use):
        if use in uses:
            ways[use]()


def _numbers(n: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.float32, device=device)


def _sums(group: Any, device: torch.device, large_bytes: int) -> None:
    group.allreduce([_numbers(large_bytes // 4, device)]).wait()


def _parts(group: Any, device: torch.device, large_bytes: int) -> None:
    n = group.size()
    for n_mine in (1, max(1, large_bytes // 4 // n)):
        mine, whole = _numbers(n_mine, device), _numbers(n_mine * n, device)
        group._allgather_base(whole, mine).wait()
        group._reduce_scatter_base(mine, whole, dist.ReduceScatterOptions()).wait()


def _messages(group: Any, device: torch.device, batch: Batch, *, ring: bool) -> None:
    me, n = group.rank(), group.size()
    near = {(me - 1) % n, (me + 1) % n} if ring else {me - 1, me + 1} & {*range(n)}
    sent, came = _numbers(1, device), _numbers(n, device)
    with batch(group) as works:
        for peer in sorted(near):
            works.append(group.send([sent], peer, 0))
            works.append(group.recv([came[peer : peer + 1]], peer, 0))
    for work in works:
        work.wait()


def _pieces(group: Any, device: torch.device) -> None:
    """With sizes, which torch needs."""
    n = group.size()
    sizes = [1] * n
    group.alltoall_base(_numbers(n, device), _numbers(n, device), sizes, sizes).wait()
