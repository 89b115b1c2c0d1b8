"""Numbers and tensors from rank to rank without pickle: nothing that comes over a socket is ever
run.

gloo and NCCL do not know who speaks: whoever reaches a port of a run may pose as one of its ranks.
So what comes has a length that is looked at before memory is taken for it, and is read as numbers
by name, as tensors of a known type or as their shapes, or not at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from elastic.errors import PeerGarbled, ProgramError
from elastic.worker.process.doing import doing
from elastic.worker.process_groups.control_tree import Control

WORDS_MOST = 1 << 20  # bytes from one rank: some 20,000 names with a number each
TENSORS_MOST = 1 << 30  # bytes, of all tensors that are broadcast together
STAGE_MOST = 1 << 36  # bytes, of what one pipeline stage hands to the next for a microbatch
DIMS_MOST = 64
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
    )
}  # fmt: skip


class TensorMeta(NamedTuple):
    """What a pipeline stage must know of a tensor before the first one comes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def n_bytes(self) -> int:
        """Of its numbers or of the memory that they span, whichever is more: strides may overlap,
        or leave gaps."""
        n, each = math.prod(self.shape), zip(self.shape, self.stride, strict=True)
        spanned = 1 + sum((size - 1) * step for size, step in each) if n else 0
        return max(n, spanned) * self.dtype.itemsize


def gather_numbers(mine: Mapping[str, float], control: Control) -> list[dict[str, float]]:
    """The numbers by name of each rank, in their order; every rank calls it."""
    every = gather_words({str(name): float(value) for name, value in mine.items()}, control)
    return [numbers(words, rank) for rank, words in enumerate(every)]


def gather_words(said: Any, control: Control) -> list[bytes]:
    """The JSON of what each rank says; every rank calls it."""
    words = _encoded(said)
    lengths = [
        _length(int(n), rank) for rank, n in enumerate(control.gather(torch.tensor(len(words))))
    ]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(words)] = words
    return [_bytes(row[:n]) for row, n in zip(control.gather(padded), lengths, strict=True)]


def broadcast_tensors(
    mine: Mapping[str, torch.Tensor] | None, source: int, control: Control
) -> dict[str, torch.Tensor]:
    """The tensors of rank `source`, on the CPU; every rank calls it, the others with None."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in (mine or {}).items()}
    words = _encoded(_announced(tensors))
    length = control.broadcast(torch.tensor([len(words)]), source)
    room = (
        words if mine is not None else torch.empty(_length(int(length), source), dtype=torch.uint8)
    )
    told = control.broadcast(room, source)
    if mine is None:
        tensors = empty_tensors(_bytes(told), source)
    for tensor in tensors.values():
        if tensor.numel():
            control.broadcast(tensor.view(-1).view(torch.uint8), source)
    return tensors


def send_metas(
    metas: Sequence[TensorMeta | None], to: int, group: dist.ProcessGroup, *, device: torch.device
) -> None:
    """To the rank `to`, which calls `receive_metas`. Raises ProgramError for what it would not
    take."""
    words = _encoded(rows_of(metas))
    _pass(dist.isend, torch.tensor([len(words)], device=device), to, group=group)
    _pass(dist.isend, words.to(device), to, group=group)


def receive_metas(
    source: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[TensorMeta | None, ...]:
    length = _pass(
        dist.irecv, torch.zeros(1, dtype=torch.int64, device=device), source, group=group
    )
    words = torch.empty(_length(int(length), source), dtype=torch.uint8, device=device)
    return tensor_metas(_bytes(_pass(dist.irecv, words, source, group=group).cpu()), source)


def _pass(
    how: Callable[..., Any], tensor: torch.Tensor, peer: int, *, group: dist.ProcessGroup
) -> torch.Tensor:
    """As a batch, which goes by the connections of the whole group: NCCL would make a pair of ranks
    connections of its own. The other stage may not come."""
    with doing("others"):
        for work in dist.batch_isend_irecv([dist.P2POp(how, tensor, peer, group)]):
            work.wait()
    return tensor


def rows_of(
    metas: Sequence[TensorMeta | None],
) -> list[tuple[tuple[int, ...], tuple[int, ...], str, bool] | None]:
    """Raises ProgramError for tensors that the other stage would not take."""
    known = [meta for meta in metas if meta is not None]
    strange = {
        f"{meta.dtype} of {len(meta.shape)} dimensions"
        for meta in known
        if meta.dtype not in DTYPES.values() or len(meta.shape) > DIMS_MOST
    }
    n_bytes = sum(meta.n_bytes for meta in known)
    if strange or n_bytes > STAGE_MOST:
        why = ", ".join(sorted(strange)[:9]) or f"{len(known)} tensors of {n_bytes} bytes"
        raise ProgramError(f"this cannot go from one pipeline stage to another: {why}")
    names = {dtype: name for name, dtype in DTYPES.items()}
    return [
        meta and (tuple(meta.shape), tuple(meta.stride), names[meta.dtype], meta.requires_grad)
        for meta in metas
    ]


def _announced(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str, list[int]]]:
    """Raises ProgramError for tensors that the others would not take."""
    rows = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in tensors.items()
    ]
    strange = [f"'{name}' is {dtype}" for name, dtype, _ in rows if dtype not in DTYPES]
    n_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if strange or n_bytes > TENSORS_MOST:
        raise ProgramError(
            f"this batch cannot go to other ranks: {', '.join(strange) or f'{n_bytes} bytes'}"
        )
    return rows


def numbers(words: bytes, rank: int) -> dict[str, float]:
    """Raises PeerGarbled where the words are anything else than numbers by name."""
    found = _decoded(words, rank, parse_int=float)
    if not isinstance(found, dict) or not all(type(value) is float for value in found.values()):
        raise PeerGarbled(f"rank {rank} sent something else than numbers by name")
    return found


def empty_tensors(words: bytes, rank: int) -> dict[str, torch.Tensor]:
    """Room for what is announced. Raises PeerGarbled where that is no list of (name, type, shape),
    or too much."""
    found = _decoded(words, rank)
    if (
        not isinstance(found, list)
        or not all(map(_is_row, found))
        or len({row[0] for row in found}) < len(found)
    ):
        raise PeerGarbled(f"rank {rank} announced something else than tensors by name")
    n_bytes = sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in found)
    if n_bytes > TENSORS_MOST:
        raise PeerGarbled(
            f"rank {rank} announced {n_bytes} bytes of tensors; {TENSORS_MOST} at most are taken"
        )
    return {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, dtype, shape in found}


def tensor_metas(words: bytes, rank: int) -> tuple[TensorMeta | None, ...]:
    """Raises PeerGarbled where that is no list of (shape, stride, type, requires_grad) or null, or
    too much."""
    found = _decoded(words, rank)
    if not isinstance(found, list) or not all(row is None or _is_meta(row) for row in found):
        raise PeerGarbled(f"rank {rank} sent something else than the shapes of tensors")
    metas = tuple(
        row and TensorMeta(tuple(row[0]), tuple(row[1]), DTYPES[row[2]], row[3]) for row in found
    )
    n_bytes = sum(meta.n_bytes for meta in metas if meta is not None)
    if n_bytes > STAGE_MOST:
        raise PeerGarbled(
            f"rank {rank} announced {n_bytes} bytes of tensors; {STAGE_MOST} at most are taken"
        )
    return metas


def addresses(words: bytes, rank: int) -> tuple[bool, list[tuple[str, int]], list[str]]:
    """Does that rank's device work, where does it listen, and where do its pairs connect? Raises
    PeerGarbled where that is anything else."""
    found = _decoded(words, rank)
    if not isinstance(found, list) or [type(part) for part in found] != [bool, list, list]:
        raise PeerGarbled(f"rank {rank} said something else than where it listens")
    if not all(map(_is_address, found[1])) or not all(isinstance(where, str) for where in found[2]):
        raise PeerGarbled(f"rank {rank} listens at something else than hosts and ports")
    return found[0], [(host, port) for host, port in found[1]], found[2]


def _is_address(found: Any) -> bool:
    match found:
        case [str(), port]:
            return type(port) is int
    return False


def _is_meta(row: Any) -> bool:
    match row:
        case [list(shape), list(stride), str(dtype), bool()]:
            return (
                dtype in DTYPES
                and len(shape) == len(stride) <= DIMS_MOST
                and all(type(n) is int and 0 <= n <= STAGE_MOST for n in (*shape, *stride))
            )
    return False


def _is_row(row: Any) -> bool:
    match row:
        case [str(), str(dtype), list(shape)]:
            known = dtype in DTYPES
            return known and all(type(n) is int and 0 <= n <= TENSORS_MOST for n in shape)
    return False


def _encoded(said: Any) -> torch.Tensor:
    """Bytes of its JSON. Raises ProgramError where there are too many."""
    words = json.dumps(said).encode()
    if len(words) > WORDS_MOST:
        raise ProgramError(
            f"{len(words)} bytes of names and numbers are too many; {WORDS_MOST} at most go from "
            "rank to rank"
        )
    return torch.frombuffer(bytearray(words), dtype=torch.uint8)


def _decoded(words: bytes, rank: int, **how: Any) -> Any:
    try:
        return json.loads(words.decode(), **how)
    except (ValueError, RecursionError) as error:
        raise PeerGarbled(
            f"rank {rank} sent {len(words)} bytes that are no JSON ({type(error).__name__})"
        ) from None


def _length(n_bytes: int, rank: int) -> int:
    if not 0 < n_bytes <= WORDS_MOST:
        raise PeerGarbled(f"rank {rank} announced {n_bytes} bytes; 1 to {WORDS_MOST} are taken")
    return n_bytes


def _bytes(words: torch.Tensor) -> bytes:
    return words.numpy().tobytes()
