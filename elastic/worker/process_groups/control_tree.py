"""What all ranks of a generation say to each other: a few numbers at a time, without a connection
from each rank to each other.

Sums over all ranks go up a tree of small groups (elastic.types.grid.control_tree) and their result
down again. Up to MESH_MOST ranks that is one all-reduce in one group, whose order of sums stays
what it is. In a larger tree a rank has O(log N) connections, and a sum takes O(log N) hops: each
row adds up at its first rank, the highest row gives every rank in it the result, and each row takes
it from its first rank. All ranks have the same bits, since each gets a copy of one sum; and nobody
has a result that some rank has not added to. Whoever waits here is freed as in any group, by the
end of its own connections.

Messages between two ranks go over a group of which two ranks connect when they first need it
(`Pairs`).
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from elastic.errors import PeerGarbled
from elastic.worker.process.doing import doing
from elastic.worker.process_groups.axis_ranges import axis_range
from elastic.worker.process_groups.rendezvous import PROOF_BYTES, proof

HELLO_TAG = 1 << 20  # no message of the ranks has it
# of sums while a generation is entered: one rank may read its state for as long as bytes come, and
# the driver finds out who hangs
ENTERING_TIMEOUT = timedelta(days=1)


class Control:
    """Collectives of a generation's ranks, or of all its participants. Every rank calls each of
    them in the same order."""

    def __init__(
        self, rank: int, size: int, rows: Sequence[dist.ProcessGroup], *, highest: bool = True
    ) -> None:
        """`rows`: those that this rank is in, the lowest first; in all of them but the last it is
        the first rank. `highest`: is the last one the tree's highest?"""
        self.rank, self.size, self.rows = rank, size, tuple(rows)
        self._below = self.rows[:-1] if highest else self.rows
        self._highest = self.rows[-1] if highest and self.rows else None
        self.n_begun = 0  # sums that this rank has added to
        self.timeout: timedelta | None = None  # of a sum; None: that of the groups

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """In place; of a tensor in host memory."""
        self.n_begun += 1
        with doing("others"), axis_range("commit"):
            return self._reduced(tensor, op)

    def _reduced(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        up, down = dist.ReduceOptions(), dist.BroadcastOptions()
        up.reduceOp, up.rootRank, down.rootRank = dist.ReduceOp(op), 0, 0
        together = dist.AllreduceOptions()
        together.reduceOp = dist.ReduceOp(op)
        if self.timeout is not None:
            up.timeout = down.timeout = together.timeout = self.timeout
        for row in self._below:
            row.reduce([tensor], up).wait()
        if self._highest is not None:
            self._highest.allreduce([tensor], together).wait()
        for row in reversed(self._below):
            row.broadcast([tensor], down).wait()
        return tensor

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Each rank's tensor, all of one shape, with the ranks as its first dimension: to the last
        bit, whatever the type."""
        flat = mine.contiguous().view(-1).view(torch.uint8)
        table = torch.zeros(self.size, flat.numel(), dtype=torch.uint8)
        table[self.rank] = flat
        return self.all_reduce(table).view(-1).view(mine.dtype).view(self.size, *mine.shape)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Fills the tensor of whole numbers with that of rank `source`."""
        return self.all_reduce(tensor if self.rank == source else tensor.zero_())

    def prove(self, secret: str, generation: int) -> None:
        """Each rank shows all others that it was told of this generation. Raises PeerGarbled where
        one cannot."""
        rows = self.gather(_shown(secret, f"rank {self.rank} of generation {generation}"))
        for rank, row in enumerate(rows):
            if not hmac.compare_digest(
                row.numpy().tobytes(), proof(secret, f"rank {rank} of generation {generation}")
            ):
                raise PeerGarbled(
                    f"who came as rank {rank} of generation {generation} was not told of it: a "
                    "stranger on this network"
                )

    def again(self) -> Control:
        """The same ranks by the same groups, counted by itself."""
        return Control(self.rank, self.size, self.rows, highest=self._highest is not None)

    def barrier(self) -> None:
        """Nobody is past it before all are there."""
        self.all_reduce(torch.zeros(1, dtype=torch.float64))


class Pairs:
    """A gloo group in which two ranks connect when one of them first has something for the other.

    gloo reads where its peers listen from the store that it is made with. That one is this
    process's own: it is filled by what each rank says through the control group, so nothing is
    asked of the generation's store, which may be gone by then.
    """

    def __init__(self) -> None:
        self.store: Any = HashStore()

    def words(self, rank: int) -> str:
        """Where this rank listens, as its gloo has put it into the store."""
        return base64.b64encode(self.store.get(_key(rank))).decode()

    def know(self, rank: int, words: str) -> None:
        try:
            self.store.set(_key(rank), base64.b64decode(words, validate=True))
        except ValueError:
            raise PeerGarbled(
                f"rank {rank} said something else than where its pairs connect"
            ) from None


def _key(rank: int) -> str:
    return f"0/{rank}"  # of gloo's first network device


def connect(
    group: dist.ProcessGroup, peers: Collection[int], secret: str, *, generation: int
) -> None:
    """Connects this rank of a group of Pairs with each of the peers, which call it too. gloo waits
    in the first message until the other rank has one for it as well: so all ranks go through their
    peers in one order, that of the ranks. Raises PeerGarbled where one of them was not told of the
    generation."""
    me = group.rank()
    for peer in sorted(peers):
        theirs = torch.zeros(PROOF_BYTES, dtype=torch.uint8)
        mine = _shown(secret, f"from {me} to {peer} in generation {generation}")
        with doing("others"):
            for work in (
                group.send([mine], peer, HELLO_TAG),
                group.recv([theirs], peer, HELLO_TAG),
            ):
                work.wait()
        if not hmac.compare_digest(
            theirs.numpy().tobytes(),
            proof(secret, f"from {peer} to {me} in generation {generation}"),
        ):
            raise PeerGarbled(
                f"who came as rank {peer} of generation {generation} was not told of it: a stranger"
            )


def _shown(secret: str, what: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(proof(secret, what)), dtype=torch.uint8)
