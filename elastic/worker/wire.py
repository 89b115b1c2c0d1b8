"""Numbers and tensors from rank to rank without pickle: nothing that comes over a socket is ever run.

gloo and NCCL do not know who speaks: whoever reaches a port of a run may pose as one of its ranks. So what comes has a length
that is looked at before memory is taken for it, and is read as numbers by name or as tensors of a known type, or not at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from elastic.errors import PeerGarbled, ProgramError

WORDS_MOST = 1 << 20  # bytes from one rank: some 20,000 names with a number each
TENSORS_MOST = 1 << 30  # bytes, of all tensors that are broadcast together
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
        torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


def gather_numbers(mine: Mapping[str, float], group: dist.ProcessGroup) -> list[dict[str, float]]:
    """The numbers by name of each rank of the group, in their order; every rank calls it."""
    words = _encoded({str(name): float(value) for name, value in mine.items()})
    n = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(n)]
    dist.all_gather(lengths, torch.tensor([len(words)]), group=group)
    known = [_length(int(length), rank) for rank, length in enumerate(lengths)]
    padded = torch.zeros(max(known), dtype=torch.uint8)
    padded[: len(words)] = words
    every = [torch.empty_like(padded) for _ in range(n)]
    dist.all_gather(every, padded, group=group)
    return [numbers(_bytes(part[:length]), rank) for rank, (part, length) in enumerate(zip(every, known, strict=True))]


def broadcast_tensors(
    mine: Mapping[str, torch.Tensor] | None, source: int, group: dist.ProcessGroup
) -> dict[str, torch.Tensor]:
    """The tensors of rank `source`, on the CPU; every rank of the group calls it, the others with None."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in (mine or {}).items()}
    words = _encoded(_announced(tensors))
    length = torch.tensor([len(words)])
    dist.broadcast(length, source, group=group)
    told = words if mine is not None else torch.empty(_length(int(length), source), dtype=torch.uint8)
    dist.broadcast(told, source, group=group)
    if mine is None:
        tensors = empty_tensors(_bytes(told), source)
    for tensor in tensors.values():
        if tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), source, group=group)
    return tensors


def _announced(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str, list[int]]]:
    """Raises ProgramError for tensors that the others would not take."""
    rows = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]
    strange = [f"'{name}' is {dtype}" for name, dtype, _ in rows if dtype not in DTYPES]
    n_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if strange or n_bytes > TENSORS_MOST:
        raise ProgramError(f"this batch cannot go to other ranks: {', '.join(strange) or f'{n_bytes} bytes'}")
    return rows


def numbers(words: bytes, rank: int) -> dict[str, float]:
    """Raises PeerGarbled where the words are anything else than numbers by name."""
    found = _decoded(words, rank, parse_int=float)
    if not isinstance(found, dict) or not all(type(value) is float for value in found.values()):
        raise PeerGarbled(f"rank {rank} sent something else than numbers by name")
    return found


def empty_tensors(words: bytes, rank: int) -> dict[str, torch.Tensor]:
    """Room for what is announced. Raises PeerGarbled where that is no list of (name, type, shape), or too much."""
    found = _decoded(words, rank)
    if not isinstance(found, list) or not all(map(_is_row, found)) or len({row[0] for row in found}) < len(found):
        raise PeerGarbled(f"rank {rank} announced something else than tensors by name")
    n_bytes = sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in found)
    if n_bytes > TENSORS_MOST:
        raise PeerGarbled(f"rank {rank} announced {n_bytes} bytes of tensors; {TENSORS_MOST} at most are taken")
    return {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, dtype, shape in found}


def _is_row(row: Any) -> bool:
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str) or not isinstance(row[1], str):
        return False
    shape = row[2]
    return row[1] in DTYPES and isinstance(shape, list) and all(type(n) is int and 0 <= n <= TENSORS_MOST for n in shape)


def _encoded(said: Any) -> torch.Tensor:
    """Bytes of its JSON. Raises ProgramError where there are too many."""
    words = json.dumps(said).encode()
    if len(words) > WORDS_MOST:
        raise ProgramError(f"{len(words)} bytes of names and numbers are too many; {WORDS_MOST} at most go from rank to rank")
    return torch.frombuffer(bytearray(words), dtype=torch.uint8)


def _decoded(words: bytes, rank: int, **how: Any) -> Any:
    try:
        return json.loads(words.decode(), **how)
    except (ValueError, RecursionError) as error:
        raise PeerGarbled(f"rank {rank} sent {len(words)} bytes that are no JSON ({type(error).__name__})") from None


def _length(n_bytes: int, rank: int) -> int:
    if not 0 < n_bytes <= WORDS_MOST:
        raise PeerGarbled(f"rank {rank} announced {n_bytes} bytes; 1 to {WORDS_MOST} are taken")
    return n_bytes


def _bytes(words: torch.Tensor) -> bytes:
    return words.numpy().tobytes()
