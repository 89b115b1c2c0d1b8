"""Pretrained weights from a local folder of safetensors: each rank reads the byte ranges of its own
boxes, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from elastic.errors import SpecError
from elastic.models.nf4 import BLOCK, PACKED, pack, whole_shape
from elastic.program import Program, Weights
from elastic.types import Box, TensorSpec
from elastic.worker.program.safetensor_files import CHUNK_BYTES, SafetensorFiles

# -------------------------------------------------------------------------------------------- names


def found_names(
    program: Program, files: SafetensorFiles, specs: Iterable[TensorSpec]
) -> dict[str, str]:
    """Canonical fqn -> name in the files, of what is there; a tied tensor under any of its names.
    Files hold whole weights, also of those that the program packs.

    Raises SpecError that names the first tensor that is missing, or of another shape.
    """
    weights, names = program.weights, dict[str, str]()
    assert weights is not None
    wanted = {spec.fqn: spec for spec in specs}
    others: dict[str, list[str]] = {}
    for spec in wanted.values():
        others.setdefault(spec.tied_to or spec.fqn, []).append(spec.fqn)
    missing: list[str] = []
    for fqn, tied in others.items():
        known = (there for one in tied for there in _candidates(weights.name(one)))
        found = next((there for there in known if there in files.tensors), None)
        if found is not None:
            names[fqn] = found
        elif not wanted[fqn].buffer and weights.fresh is None and weights.rest is None:
            missing.append(fqn)
    if missing:
        n_more = len(missing) - 1
        more = f" (and {n_more} more of {len(others)} are missing)" if n_more else ""
        name = weights.name(missing[0])
        instead = quantised(name, files.tensors) or "weights of another model?"
        raise SpecError(f"{files.uri}: it has no tensor {name}{more}; {instead}")
    for fqn, name in names.items():
        shape, dtype = files.tensors[name]
        numbers = "float32" if fqn in program.packed else wanted[fqn].dtype
        shapes = (shape, stored_shape(program, wanted[fqn]))
        check_stored(f"{files.uri}: {name}", fqn, shapes, dtypes=(dtype, numbers))
    if not names:
        raise SpecError(
            f"{files.uri}: none of its {len(files.tensors)} tensors is one of the program's; "
            "another model?"
        )
    return names


QUANTISED = (
    "quantised weights are not read: give those of 16 or 32 bits, which frozen_weights: nf4 packs "
    "by itself"
)


def check_stored(
    where: str, fqn: str, shapes: Sequence[tuple[int, ...]], *, dtypes: Sequence[str]
) -> None:
    """Of a tensor that is stored and of the numbers of the program's that it becomes. Raises
    SpecError where it cannot."""
    (shape, own), (dtype, numbers) = shapes, dtypes
    if dtype in ("int8", "uint8") and "float" in numbers:
        raise SpecError(f"{where} is {dtype}, without its scales; {QUANTISED}")
    if shape != own:
        raise SpecError(f"{where} is {list(shape)}, the program's {fqn} is {list(own)}")


def quantised(name: str, there: Iterable[str]) -> str:
    """Where a weight's module has tensors of other names: what kind of file that is; '' = it has
    none."""
    module, _, leaf = name.rpartition(".")
    found = sorted(t for t in there if module and t.startswith(f"{module}.") and leaf in t)
    return f"it has {found[0]}: {QUANTISED}" if found else ""


def stored_shape(program: Program, spec: TensorSpec) -> tuple[int, ...]:
    """Of a weight's numbers, whether or not the program packs them."""
    return whole_shape(spec.shape) if spec.fqn in program.packed else spec.shape


def _candidates(name: str) -> tuple[str, ...]:
    """Also without the name of the whole (a base model that was saved alone), or below it."""
    first, _, rest = name.partition(".")
    return (
        (name, rest, f"model.{name}")
        if rest and first in ("model", "transformer")
        else (name, f"model.{name}")
    )


def check_weights(program: Program, specs: Sequence[TensorSpec]) -> None:
    """Reads the headers only. Raises SpecError where the files do not give the program what it
    needs."""
    if program.weights is None:
        return
    files = SafetensorFiles(program.weights.path)
    try:
        names = found_names(program, files, specs)
        unread = [s.fqn for s in specs if s.reread and s.tied_to is None and s.fqn not in names]
    finally:
        files.close()
    if unread:
        raise SpecError(
            f"{files.uri}: it has no tensor {unread[0]}, which is frozen: only weights that are "
            "there can be"
        )


# ------------------------------------------------------------------------------------------ filling


def fill(
    program: Program,
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, tuple[Box, Tensor]],
    *,
    seed: int,
    tick: Callable[[], object] = lambda: None,
) -> list[str]:
    """Fills `model.*` boxes from the program's weights, one chunk of memory at a time, before each
    of which `tick` is called; returns the buffers that are not there.

    Parameters that are not there get `Weights.fresh` under a seed of their own, whatever the
    layout, or what `Weights.rest` gives under the job's.
    """
    weights = program.weights
    assert weights is not None
    shapes = {spec.fqn: stored_shape(program, spec) for spec in specs}
    fresh = _Fresh(weights, seed)
    left: list[str] = []
    files = SafetensorFiles(weights.path, tick)
    try:
        names = found_names(program, files, specs)
        buffers = {spec.fqn for spec in specs if spec.buffer}
        with torch.no_grad():
            for key, (box, tensor) in tensors.items():
                fqn = key.removeprefix("model.")
                if fqn not in names and fqn in buffers:
                    left.append(fqn)
                    continue
                whole = fresh(fqn, shapes[fqn]) if fqn not in names else None
                for part, target in _parts(box, tensor, packed=fqn in program.packed):
                    values = torch.empty(part.sizes) if fqn in program.packed else target
                    if whole is None:
                        files.read_into(names[fqn], part, values)
                    else:
                        values.copy_(cut(whole, part))
                    if values is not target:
                        target.copy_(pack(values))
    finally:
        files.close()
    return left


def _parts(box: Box, tensor: Tensor, *, packed: bool) -> Iterator[tuple[Box, Tensor]]:
    """What is filled at once, of a weight's numbers and where it goes: all, or some rows of
    one whose numbers are packed."""
    if not packed:
        yield box, tensor
        return
    first, n_columns = (n // PACKED * BLOCK for n in (box.offsets[1], box.sizes[1]))
    step = max(1, CHUNK_BYTES // (4 * max(1, n_columns)))
    for at in range(0, box.sizes[0], step):
        n = min(step, box.sizes[0] - at)
        offsets = (box.offsets[0] + at, first)
        yield Box(box.fqn, offsets, (n, n_columns), "float32"), tensor.narrow(0, at, n)


def cut(whole: Tensor, box: Box) -> Tensor:
    """View of the part of a logical tensor that a box holds."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


class _Fresh:
    """Values of parameters that are not in the files."""

    def __init__(self, weights: Weights, seed: int) -> None:
        self.weights, self.seed = weights, seed
        self._rest: Mapping[str, Any] | None = None

    def __call__(self, fqn: str, shape: tuple[int, ...]) -> Tensor:
        weights, made = self.weights, None
        if weights.fresh is not None:
            name = f"{self.seed} {fqn}".encode()
            torch.manual_seed(int.from_bytes(sha256(name).digest()[:8], "little") >> 1)
            made = weights.fresh(fqn, shape)
        elif weights.rest is not None:
            if self._rest is None:
                torch.manual_seed(self.seed)
                self._rest = weights.rest()
            made = self._rest.get(fqn)
        if not isinstance(made, Tensor) or tuple(made.shape) != shape:
            found = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
            function = "fresh" if weights.fresh is not None else "rest"
            raise SpecError(
                f"Weights.{function} must give '{fqn}' as a tensor of shape {list(shape)}, not "
                f"{found}"
            )
        return made
