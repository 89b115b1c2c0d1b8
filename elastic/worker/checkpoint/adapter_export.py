"""Trained adapters as files: alone, under peft's names, or added to the weights that they were
trained on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from elastic.errors import SpecError
from elastic.models.lora import BASE, DOWN, UP, base_name, peft_name
from elastic.models.nf4 import unpack, whole_shape
from elastic.program import Program
from elastic.types import Box, TensorSpec
from elastic.worker.checkpoint.checkpoint_reader import Checkpoint
from elastic.worker.program.model_profile import trace
from elastic.worker.program.safetensor_files import Parts, SafetensorFiles, Shapes
from elastic.worker.program.weights import found_names

MODEL = "model."
ROWS_BYTES = 16 << 20


class AdapterExport:
    """One checkpoint of a program with adapters. Close it."""

    def __init__(self, checkpoint: Checkpoint, program: Program) -> None:
        assert program.adapter is not None
        self.checkpoint, self.program, self.adapter = checkpoint, program, program.adapter
        self._files: SafetensorFiles | None = None

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    def alone(self) -> tuple[Shapes, Parts]:
        """The adapters, whole."""
        names = {
            peft_name(fqn.removeprefix(MODEL)): fqn
            for fqn in sorted(self.checkpoint.tensors)
            if fqn.startswith(MODEL) and (f".{DOWN}." in fqn or f".{UP}." in fqn)
        }
        shapes = {name: self.checkpoint.tensors[fqn] for name, fqn in names.items()}
        return shapes, lambda name: iter([self.checkpoint.read_whole(names[name])])

    def merged(self) -> tuple[Shapes, Parts]:
        """Every weight of the model, `base_layer` with the scaled lora_B lora_A added, in rows."""
        specs = [
            s
            for s in trace(self.program).specs
            if s.tied_to is None and f".{DOWN}." not in s.fqn and f".{UP}." not in s.fqn
        ]
        weights, stored = self.program.weights, {}
        if weights is not None:
            self._files = SafetensorFiles(weights.path)
            stored = found_names(self.program, self._files, specs)
        by_name = {base_name(spec.fqn): spec for spec in specs}
        shapes = {name: self._whole_of(spec) for name, spec in by_name.items()}
        return shapes, lambda name: self._rows(by_name[name], stored)

    def _whole_of(self, spec: TensorSpec) -> tuple[tuple[int, ...], str]:
        """Shape and type of a weight's numbers: those of 4 bits get the adapters' type."""
        if spec.fqn not in self.program.packed:
            return spec.shape, spec.dtype
        dtype = self.checkpoint.tensors[f"{MODEL}{self.adapter.modules[0]}.{DOWN}.weight"][1]
        return whole_shape(spec.shape), dtype

    def _rows(self, spec: TensorSpec, stored: dict[str, str]) -> Iterator[Tensor]:
        layer, _, leaf = spec.fqn.rpartition(f".{BASE}.")
        low = layer in self.adapter.modules and leaf == "weight"
        read = self.checkpoint.read_whole
        down = read(f"{MODEL}{layer}.{DOWN}.weight") if low else None
        up = read(f"{MODEL}{layer}.{UP}.weight") if low else None
        for box in Box.whole(MODEL + spec.fqn, spec.shape, spec.dtype).in_rows(ROWS_BYTES):
            part = self._base(spec, box, stored)
            if spec.fqn in self.program.packed:
                part = unpack(part, getattr(torch, self._whole_of(spec)[1]))
            if down is not None and up is not None:
                rows = up.narrow(0, box.offsets[0], box.sizes[0])
                part = part + self.adapter.scale * (rows @ down)
            yield part

    def _base(self, spec: TensorSpec, box: Box, stored: dict[str, str]) -> Tensor:
        if box.fqn in self.checkpoint.tensors:
            return self.checkpoint.read(box)
        if self._files is None or spec.fqn not in stored:
            raise SpecError(f"{spec.fqn} is neither in the checkpoint nor in the program's weights")
        part = torch.empty(box.sizes, dtype=getattr(torch, spec.dtype))
        self._files.read_into(stored[spec.fqn], box, part)
        return part
