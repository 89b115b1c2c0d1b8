"""What the one float64 all-reduce of a step carries: what one rank says goes in, what all have said
comes out of the sum.

Most slots are sums or counts over the ranks; a slot of its own has what only one rank says. How it
is written there is known here alone. At 8,192 ranks that are all data-parallel the vector has 197
kB, and 8 bytes for each parameter tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from elastic.errors import ProgramError
from elastic.types import Layout
from elastic.worker.program.commit import Commit

# of a data-parallel rank in a step, and SHARE_MOST samples: both fit into its one exact slot
TOKENS_MOST = 1 << 32
SHARE_MOST = 1 << 21


@dataclass(frozen=True)
class CommitFields:
    """What this rank wants, and how it is doing."""

    stop: bool = False
    save: bool = False
    copy_stored: bool = False  # this rank's part of the peer replica in flight
    copy_failed: bool = False  # that part never will be stored
    copy_free: bool = False  # could another one be taken at this boundary?
    # steps between peer and checkpoints from now on; only rank 0 says so
    cadence: tuple[int, int] | None = None
    data_s: float = 0.0  # for which this rank has waited for its batch
    # other numbers of samples per data-parallel rank; only rank 0 says so
    shares: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Slots:
    """How many slots there are of what not every commit has equally many of; the same on every rank
    in the same step."""

    n_ranks: int
    dp: int
    n_blocks: int = 0  # in steps in which a guard looks at each block's gradient
    n_small: int = 0  # 1 in steps that measure the gradient noise
    n_calls: int = 0  # 2 where a script's loop computes the gradients
    n_routed: int = 0  # the ranks, where tokens go to experts at other ranks
    n_reached: int = 0  # the parameters whose gradients several ranks add up

    @classmethod
    def of(
        cls, layout: Layout, n_blocks: int = 0, *, n_small: int = 0, n_calls: int = 0,
        n_reached: int = 0,
    ) -> Slots:  # fmt: skip
        n = layout.world_size
        routed = n if layout.ep > 1 else 0
        return cls(n, layout.dp, n_blocks, n_small, n_calls, routed, n_reached)

    @property
    def widths(self) -> Mapping[str, int]:
        """In their order."""
        return {
            "square_norm": 1, "loss_sum": 1, "tokens": 1, "samples": 2, "overflowed": 1, "stop": 1,
            "save": 1, "copies_stored": 1, "copies_failed": 1, "copies_free": 1, "cadence": 3,
            "block_square_norms": self.n_blocks, "unit_s": self.n_ranks, "data_s": self.n_ranks,
            "of_dp": self.dp, "small_square_norm": self.n_small, "calls": self.n_calls,
            "routed": self.n_routed, "reached": self.n_reached,
        }  # fmt: skip


@dataclass(frozen=True)
class RankPart:
    """What one rank says: its parts of the sums, its words, its times. `tokens` 0 where another
    rank counts its samples."""

    rank: int
    dp: int  # its data-parallel rank
    sums: Commit
    words: CommitFields = CommitFields()
    unit_s: float = 0.0
    small_square_norm: float = 0.0  # sum of those of its single micro-batches' gradients
    calls: int = 0  # the mark of what its script has called since the commit before
    routed: int = 0  # tokens that came to its experts since the commit before
    reached: Sequence[float] = ()  # of each parameter: 1 where a gradient has come to it here

    def pack(self, slots: Slots) -> torch.Tensor:
        """float64 [sum of the slots' widths]. Raises ProgramError where a number does not fit into
        its slot."""
        sums, words = self.sums, self.words
        found: dict[str, Sequence[float]] = {
            "square_norm": [sums.square_norm], "loss_sum": [sums.loss_sum], "tokens": [sums.tokens],
            "samples": sums.samples, "overflowed": [sums.overflowed], "stop": [words.stop],
            "save": [words.save], "copies_stored": [words.copy_stored],
            "copies_failed": [words.copy_failed], "copies_free": [words.copy_free], "cadence": (1,
            *words.cadence) if words.cadence is not None else (0, 0, 0),
            "block_square_norms": sums.block_square_norms, "unit_s": _alone(self.unit_s, self.rank,
            slots.n_ranks), "data_s": _alone(words.data_s, self.rank, slots.n_ranks),
            "of_dp": self._of_dp(slots.dp),
            "small_square_norm": [self.small_square_norm] * slots.n_small,
            "calls": (self.calls, self.calls**2)[: slots.n_calls],
            "routed": _alone(self.routed, self.rank, slots.n_ranks)[: slots.n_routed],
            "reached": self.reached,
        }  # fmt: skip
        numbers = chain.from_iterable(found[name] for name in slots.widths)
        return torch.tensor(list(numbers), dtype=torch.float64)

    def _of_dp(self, dp: int) -> list[float]:
        """Of each data-parallel rank: the tokens of its samples in this step, and how many samples
        it is to have later."""
        tokens, shares = _alone(self.sums.tokens, self.dp, dp), self.words.shares or (0,) * dp
        if not 0 <= self.sums.tokens < TOKENS_MOST or max(shares) >= SHARE_MOST:
            raise ProgramError(
                f"{self.sums.tokens:.0f} tokens and {max(shares)} samples of one data-parallel "
                "rank in a step: a commit tells "
                f"0 to {TOKENS_MOST - 1} tokens and {SHARE_MOST - 1} samples"
            )
        return [share * TOKENS_MOST + n for share, n in zip(shares, tokens, strict=True)]


@dataclass(frozen=True)
class CommitReport:
    """What all ranks know after the commit of a step. `unit_s`: of each rank, see RanksTimed;
    `data_s`: what each has waited for its batch; `tokens`: of each data-parallel rank; `shares`,
    `cadence`: what rank 0 wants."""

    commit: Commit
    unit_s: tuple[float, ...]
    data_s: tuple[float, ...]
    tokens: tuple[int, ...]
    stop: bool = False
    save: bool = False
    n_copies_stored: int = 0  # ranks whose part of the peer replica in flight is stored
    n_copies_failed: int = 0  # ranks whose part cannot be
    n_copies_free: int = 0  # ranks that could take another peer replica at this boundary
    cadence: tuple[int, int] | None = None
    shares: tuple[int, ...] | None = None
    small_square_norm: float = 0.0
    calls_differ: bool = False  # the scripts of the ranks have not all called the same
    routed: tuple[float, ...] = ()  # tokens that came to the experts of each rank

    @classmethod
    def unpack(cls, vector: torch.Tensor, slots: Slots) -> CommitReport:
        """`vector`: the sum of what all ranks have packed."""
        each = zip(slots.widths, vector.split([*slots.widths.values()]), strict=True)
        parts = {name: part.tolist() for name, part in each}

        def one(name: str) -> float:
            (value,) = parts[name]
            return float(value)

        first, second = map(int, parts["samples"])
        commit = Commit(
            one("square_norm"), one("loss_sum"), one("tokens"), (first, second),
            one("overflowed") > 0, tuple(parts["block_square_norms"]),
            tuple(number for number, n in enumerate(parts["reached"]) if not n),
        )  # fmt: skip
        said, peer_every, durable_every = map(int, parts["cadence"])
        of_dp = (divmod(int(number), TOKENS_MOST) for number in parts["of_dp"])
        shares, tokens = zip(*of_dp, strict=True)
        return cls(
            commit, tuple(parts["unit_s"]), tuple(parts["data_s"]), tokens, one("stop") > 0,
            one("save") > 0, int(one("copies_stored")), int(one("copies_failed")),
            int(one("copies_free")), (peer_every, durable_every) if said else None,
            shares if any(shares) else None, sum(parts["small_square_norm"]),
            calls_differ=_unequal(parts["calls"], slots.n_ranks), routed=tuple(parts["routed"]),
        )  # fmt: skip


def _unequal(sums: Sequence[float], n: int) -> bool:
    """Of `n` whole numbers the sum and that of the squares; () = nobody has said one."""
    return bool(sums) and n * int(sums[1]) != int(sums[0]) ** 2


def _alone(value: float, at: int, n: int) -> list[float]:
    """One of `n` slots, of which each rank fills its own."""
    found = [0.0] * n
    found[at] = value
    return found
