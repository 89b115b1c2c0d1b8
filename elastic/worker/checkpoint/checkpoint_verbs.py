"""What `elastic checkpoint` does: lists, exports weights, imports a state from elsewhere,
removes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from elastic.data.streams import STATE
from elastic.errors import SpecError
from elastic.models.lora import ADAPTER_FILE, ADAPTER_NAMES, peft_config
from elastic.models.nf4 import pack, unpack, whole_shape
from elastic.models.weight_types import CONFIG, TypedWeights, in_bfloat16, in_type, with_config
from elastic.program import Program
from elastic.reshard.rank_boxes import EXTRA, LOSS_SCALE, RNG, first_values, state_specs
from elastic.storage import Storage, open_storage
from elastic.text import n_of
from elastic.types import Box, Layout, ModelProfile, TensorSpec
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.checkpoint.adapter_export import AdapterExport
from elastic.worker.checkpoint.checkpoint_format import (
    FOLDER,
    FOLDER_NAME,
    MARKER,
    METADATA,
    REMOVED,
)
from elastic.worker.checkpoint.checkpoint_index import newest_epoch
from elastic.worker.checkpoint.checkpoint_reader import Checkpoint
from elastic.worker.checkpoint.foreign_dcp import open_plain
from elastic.worker.program.model_profile import trace
from elastic.worker.program.safetensor_files import (
    FILE_BYTES,
    Parts,
    SafetensorFiles,
    Shapes,
    write_files,
)
from elastic.worker.program.weights import check_stored, cut, quantised

PART_BYTES = 64 << 20  # so much of a tensor is in memory at a time
SHARD_BYTES = 32 << 30  # of an import: object storage bounds the size of a file
MODEL = "model."
OPTIM = "optim."
BY_POSITION = re.compile(r"(^|\.)state\.\d+\.\w+$")


@dataclass(frozen=True)
class ListedCheckpoint:
    """A copy in a run's storage. An uncommitted one is being written, or was left by an interrupted
    save."""

    step: int
    generation: int
    committed: bool
    uri: str
    n_bytes: int
    layout: str = ""
    world_size: int = 0
    saved_at_s: float | None = None


def listed(run: Storage, problems: list[str] | None = None) -> list[ListedCheckpoint]:
    """Newest first; what is wrong with markers goes into `problems`."""
    out = []
    for f in checkpoint_index.find(run, problems):
        at_s, size = f.meta.get("saved_at_s"), (_layout(f.meta), f.world_size)
        at_s = float(at_s) if isinstance(at_s, int | float) else None
        out.append(ListedCheckpoint(f.step, f.generation, True, f.uri, f.n_bytes, *size, at_s))
    known = {item.uri for item in out}
    sizes: dict[str, int] = {}
    for key, (n_bytes, _) in run.sizes(f"{FOLDER}/").items():
        uri = run.uri_of("/".join(key.split("/")[:2]))
        if uri not in known:
            sizes[uri] = sizes.get(uri, 0) + n_bytes
    for uri, n_bytes in sizes.items():
        match = FOLDER_NAME.fullmatch(uri.rpartition("/")[2])
        if match:
            out.append(ListedCheckpoint(int(match[1]), int(match[2]), False, uri, n_bytes))
    return sorted(out, key=lambda item: (item.step, item.generation), reverse=True)


def chosen(run: Storage, step: int | None) -> checkpoint_index.CheckpointInfo:
    """The newest committed copy, or the newest of that step. Raises SpecError that names the steps
    there are."""
    found = checkpoint_index.find(run)
    for item in found:
        if step is None or item.step == step:
            return item
    steps = ", ".join(str(item.step) for item in found) or "none"
    raise SpecError(
        f"{run.uri}: no committed checkpoint{'' if step is None else f' of step {step}'}; steps "
        f"there: {steps}"
    )


# ------------------------------------------------------------------------------------------- export


def tied_names(specs: Iterable[TensorSpec]) -> dict[str, str]:
    """Name of a tensor that shares another one's memory -> the name of that."""
    return {spec.fqn: spec.tied_to for spec in specs if spec.tied_to is not None}


def _written_too(tied: Mapping[str, str], beside: Container[str]) -> Mapping[str, str]:
    """The tied names that stand in the files, too: none where the library that reads them ties by
    its config.json."""
    return {} if CONFIG in beside else tied


def export(
    run: Storage,
    step: int | None,
    to: Storage,
    *,
    tied: Mapping[str, str] | None = None,
    beside: Mapping[str, bytes] | None = None,
    bfloat16: Container[str] = (),
    state: str = "",
    file_bytes: int | None = None,
) -> dict[str, Any]:
    """Writes the weights and buffers of a copy as safetensors, under the program's own names. Every
    byte read is checked. `tied`: as `tied_names`; they are written too, so that `load_state_dict`
    finds every name, but where config.json is among `beside`, the files that are written beside the
    weights: its library ties them. With ADAPTER_NAMES among these the weights are those of an
    adapter alone, as peft names them. `bfloat16`: names of those that are written in it. `state`:
    what the optimizer keeps under that name is written in place of the weights that it is of, as
    an average of them."""
    item = chosen(run, step)
    beside = dict(beside or {})
    checkpoint = checkpoint_index.open_checkpoint(item.uri)
    shapes, parts = _weights(checkpoint, _written_too(tied or {}, beside), state=state)
    most = FILE_BYTES if file_bytes is None else file_bytes
    if ADAPTER_NAMES in beside:
        names: dict[str, str] = json.loads(beside.pop(ADAPTER_NAMES))
        if missing := next((name for name in names.values() if name not in shapes), ""):
            raise SpecError(f"{item.uri}: it has no tensor {missing}, which peft's adapter is of")
        own = {name: shapes[of] for name, of in names.items()}
        written = write_files(
            to, own, lambda name: parts(names[name]), file_bytes=sys.maxsize, single=ADAPTER_FILE
        )
        return _done(item, to, n_tensors=len(own), files=[*written, *_put(to, beside)])
    typed = in_bfloat16(bfloat16, shapes, parts)
    files = write_files(to, typed.shapes, typed.parts, file_bytes=most)
    return _done(item, to, n_tensors=len(shapes), files=[*files, *_put(to, beside)])


def _put(to: Storage, files: Mapping[str, bytes]) -> Iterable[str]:
    for name, data in files.items():
        to.put(name, data)
    return files


def _done(
    item: checkpoint_index.CheckpointInfo, to: Storage, *, n_tensors: int, files: list[str]
) -> dict[str, Any]:
    where = {"step": item.step, "from": item.uri, "to": to.uri}
    return where | {"files": files, "tensors": n_tensors}


def _weights(
    checkpoint: Checkpoint,
    tied: Mapping[str, str],
    *,
    part: str = "",
    packed: Container[str] = (),
    state: str = "",
) -> tuple[Shapes, Parts]:
    """`part`: the module whose weights these are, '' = the model. `packed`: names of those that
    hold bytes of 4-bit weights, in the model. `state`: as in `export`."""
    begin = f"{MODEL}{part}." if part else MODEL
    stored = {
        fqn.removeprefix(begin): about
        for fqn, about in sorted(checkpoint.tensors.items())
        if fqn.startswith(begin)
    }
    kept = _kept_as(checkpoint, state)
    stored |= {n: kept[begin + n][1:] for n in stored if begin + n in kept}
    of = {name: owner for name, owner in tied.items() if owner in stored}
    stored |= {name: stored[owner] for name, owner in of.items()}
    bytes_of = {n for n in stored if (begin + n).removeprefix(MODEL) in packed}
    shapes = {
        n: (whole_shape(shape), "float32") if n in bytes_of else (shape, dtype)
        for n, (shape, dtype) in stored.items()
    }

    def parts(name: str) -> Iterator[Tensor]:
        fqn = begin + of.get(name, name)
        whole = Box.whole(kept[fqn][0] if fqn in kept else fqn, *stored[name])
        each = (checkpoint.read(box) for box in whole.in_rows(PART_BYTES))
        return (unpack(one, torch.float32) for one in each) if name in bytes_of else each

    return shapes, parts


def _kept_as(checkpoint: Checkpoint, state: str) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """A weight's name in the checkpoint -> name, shape and type there of what the optimizer keeps
    of it under `state`. Raises SpecError where it does not keep that of all, or in another
    shape."""
    if not state:
        return {}
    kept: dict[str, set[str]] = {}
    for fqn in checkpoint.tensors:
        if fqn.startswith(OPTIM):
            _, name, weight = fqn.split(".", 2)
            kept.setdefault(MODEL + weight, set()).add(name)
    found = {}
    for weight, names in kept.items():
        fqn, (shape, _) = f"{OPTIM}{state}.{weight.removeprefix(MODEL)}", checkpoint.tensors[weight]
        if checkpoint.tensors.get(fqn, (None, ""))[0] != shape:
            raise SpecError(
                f"--state {state}: of {weight.removeprefix(MODEL)} the optimizer keeps "
                f"{', '.join(sorted(names))}, not this in its shape"
            )
        found[weight] = (fqn, *checkpoint.tensors[fqn])
    if not found:
        raise SpecError(f"--state {state}: the optimizer keeps nothing of the weights")
    return found


def export_for(
    run: Storage,
    step: int | None,
    to: Storage,
    *,
    program: Program,
    merged: bool = False,
    weights: str = "",
    state: str = "",
    file_bytes: int = FILE_BYTES,
) -> dict[str, Any]:
    """The same with what the program puts beside the weights: a folder that its library loads. Of a
    program with adapters: these alone, as peft has them, or (`merged`) the whole model with them
    added to its weights. `weights`: the type that they are written in, one of WEIGHT_TYPES; '' =
    as they are."""
    alone = program.adapter is not None and not merged
    if merged and program.adapter is None:
        raise SpecError("--merged: this job's program has no adapters")
    if state and program.adapter is not None:
        raise SpecError(f"--state {state}: of a job with adapters the weights are written alone")
    if alone and weights:
        raise SpecError(f"--weights {weights}: of a job with adapters it needs --merged")
    beside = dict(program.files()) if program.files is not None and not alone else {}
    if weights:
        beside = with_config(weights, beside)
    item = chosen(run, step)
    checkpoint = checkpoint_index.open_checkpoint(item.uri)
    trained = AdapterExport(checkpoint, program) if program.adapter is not None else None
    try:
        if trained is None:
            tied = _written_too(tied_names(trace(program).specs), beside)
            part, begin = program.exports, f"{program.exports}." if program.exports else ""
            tied = {n.removeprefix(begin): of.removeprefix(begin) for n, of in tied.items()}
            shapes, parts = _weights(
                checkpoint, tied, part=part, packed=program.packed, state=state
            )
        else:
            shapes, parts = trained.alone() if alone else trained.merged()
        if alone:
            files = write_files(to, shapes, parts, single=ADAPTER_FILE)
            assert program.adapter is not None
            config = peft_config(program.adapter, program.weights)
            beside = {"adapter_config.json": json.dumps(config, indent=1).encode()}
        else:
            typed = TypedWeights(shapes, parts)
            if weights:
                typed = in_type(weights, program, shapes, parts=parts)
            files = write_files(
                to, typed.shapes, typed.parts, file_bytes=file_bytes, metadata=typed.metadata
            )
    finally:
        if trained is not None:
            trained.close()
    return _done(item, to, n_tensors=len(shapes), files=[*files, *_put(to, beside)])


# ------------------------------------------------------------------------------------------- import


class Tensors(Protocol):
    uri: str
    tensors: dict[str, tuple[tuple[int, ...], str]]

    def read(self, box: Box) -> Tensor: ...


@dataclass(frozen=True)
class ImportRequest:
    """How to make a copy of a program's state from tensors under other names. `at_step`: where the
    run continues; None = as many steps as the optimizer there counts, 0 where it counts none.

    `buffers`: gives the values of buffers, by fqn; asked only where one is missing there. `steps`:
    of the job, None = any. `packed`: see Program.
    """

    profile: ModelProfile
    seed: int
    at_step: int | None = 0
    ignore_extra: bool = False
    buffers: Callable[[], dict[str, Tensor]] = dict
    steps: int | None = None
    packed: frozenset[str] = frozenset()


@dataclass
class TensorMatch:
    """Which tensor there becomes which here: fqn of the state -> name there; the others are
    made."""

    names: dict[str, str]
    converted: list[str]
    extra: list[str]


def import_state(source: str, run: Storage, wanted: ImportRequest) -> dict[str, Any]:
    """Makes a committed copy in an empty run from safetensors (a file or folder) or from a
    checkpoint of plain DCP.

    Moments are taken over where they are there, else they begin at 0. Raises SpecError naming the
    tensor that is missing or of another shape.
    """
    if checkpoint_index.find(run):
        raise SpecError(f"{run.uri}: this run has checkpoints already; import into a new run")
    tensors, close = _open_source(source)
    try:
        matched = match(tensors, wanted)
        step = _step(tensors, wanted, matched)
        items = _items(tensors, replace(wanted, at_step=step), matched)
        sizes = _write_shards(run, step, items)
    finally:
        close()
    meta = {"layout": asdict(Layout()), "layers": [], "imported_from": source}
    epoch, n = newest_epoch(run), len(sizes)
    uri = checkpoint_writer.commit(run, step, 0, world_size=n, epoch=epoch, meta=meta)
    moments = sum(fqn.startswith("optim.") for fqn in matched.names)
    return {
        "uri": uri, "step": step, "n_bytes": sum(sizes), "weights": len(matched.names) - moments,
        "moments": moments, "converted": matched.converted, "ignored": matched.extra,
    }  # fmt: skip


def _write_shards(run: Storage, step: int, items: Iterable[tuple[Box, Tensor]]) -> list[int]:
    """As if several ranks had saved it, each about SHARD_BYTES; the bytes of each."""

    def numbered() -> Iterator[tuple[int, tuple[Box, Tensor]]]:
        written = 0
        for box, tensor in items:
            written += box.n_bytes
            yield written // SHARD_BYTES, (box, tensor)

    return [
        checkpoint_writer.write_shard(run, step, 0, rank=rank, items=(item for _, item in part))
        for rank, (_, part) in enumerate(groupby(numbered(), key=lambda one: one[0]))
    ]


def _step(tensors: Tensors, wanted: ImportRequest, matched: TensorMatch) -> int:
    """Where the run continues. Raises SpecError where that is not before the end of the job."""
    step = wanted.at_step
    if step is None:
        names = [name for fqn, name in matched.names.items() if fqn.startswith("optim.step.")]
        counters = (Box(name, (), (), tensors.tensors[name][1]) for name in names)
        step = max((int(tensors.read(box)) for box in counters), default=0)
    if wanted.steps is not None and step >= wanted.steps:
        raise SpecError(
            f"{tensors.uri}: it has done {n_of(step, 'step')}, the job ends at step "
            f"{wanted.steps}; give more steps"
        )
    return step


def _open_source(source: str) -> tuple[Tensors, Any]:
    path, remote = Path(source), "://" in source
    if open_storage(source).exists(MARKER) if remote else (path / MARKER).is_file():
        return checkpoint_index.open_checkpoint(source), lambda: None  # our own
    if remote or (path / METADATA).is_file():
        return open_plain(source), lambda: None
    if not path.exists():
        raise SpecError(f"{source}: no such file or folder")
    files = SafetensorFiles(path)
    return files, files.close


def match(tensors: Tensors, wanted: ImportRequest) -> TensorMatch:
    """Names there, found by a common prefix of all weights (`model.`, `module.` ...) and one
    pattern of all moments."""
    specs = {
        spec.fqn: spec
        for spec in state_specs(wanted.profile)
        if 0 not in spec.shape and spec.fqn != RNG
    }
    tied = tied_names(wanted.profile.specs)
    weights = {
        fqn: [name, *(one for one, owner in tied.items() if owner == name)]
        for fqn in specs
        if (name := fqn.removeprefix(MODEL)) != fqn
    }
    needed = [group for fqn, group in weights.items() if not specs[fqn].buffer]
    prefix = _prefix(list(tensors.tensors), needed, tensors.uri)
    names = {
        fqn: there
        for fqn, group in weights.items()
        if (there := next((prefix + n for n in group if prefix + n in tensors.tensors), ""))
    }
    found = TensorMatch(names | _all_moments(set(tensors.tensors), wanted.profile, specs), [], [])
    for fqn, name in found.names.items():
        (shape, dtype), own, numbers = tensors.tensors[name], specs[fqn].shape, specs[fqn].dtype
        if _packs(wanted, fqn, dtype):
            own, numbers = whole_shape(own), "float32"
        check_stored(f"{tensors.uri}: {name}", fqn, (shape, own), dtypes=(dtype, numbers))
        if dtype != specs[fqn].dtype:
            found.converted.append(f"{name}: {dtype} -> {specs[fqn].dtype}")
    used = {*found.names.values(), *(prefix + name for name in tied), RNG, LOSS_SCALE}
    found.extra = sorted(name for name in tensors.tensors if name not in used)
    # a single number counts steps or epochs; the place in a stream is that of another run
    several = [name for name in found.extra if prod(tensors.tensors[name][0]) != 1]
    odd = [name for name in several if name != EXTRA + STATE]
    if odd and not wanted.ignore_extra:
        raise SpecError(_what_is_odd(tensors.uri, odd))
    return found


def _packs(wanted: ImportRequest, fqn: str, dtype: str) -> bool:
    """Is it packed on the way? A checkpoint of such a job has its bytes."""
    return fqn.removeprefix(MODEL) in wanted.packed and "float" in dtype


def _what_is_odd(uri: str, odd: list[str]) -> str:
    by_position = next((name for name in odd if BY_POSITION.search(name)), None)
    if by_position is not None:
        return (
            f"{uri}: {by_position} names its parameter by a number, as optimizer.state_dict() "
            "does, and not which one that is; save by names (get_optimizer_state_dict), or take "
            "the weights only: elastic checkpoint import --ignore-extra"
        )
    return (
        f"{uri}: the program has no tensor for {odd[0]} (and {len(odd) - 1} more); another model? "
        "elastic checkpoint import --ignore-extra leaves them out"
    )


def _prefix(names: list[str], weights: Sequence[Sequence[str]], uri: str) -> str:
    """What stands before every weight's name there; the shortest that fits. `weights`: the names of
    each, more than one of a tied one."""
    if not weights:
        return ""
    ends = {name.removesuffix(one) for one in weights[0] for name in names if name.endswith(one)}
    fitting = sorted((p for p in ends if p == "" or p.endswith(".")), key=lambda p: (len(p), p))
    have = set(names)

    def lacking(prefix: str) -> list[str]:
        return [group[0] for group in weights if have.isdisjoint(prefix + one for one in group)]

    for prefix in fitting:
        if not lacking(prefix):
            return prefix
    prefix = fitting[0] if fitting else ""
    missing = lacking(prefix)
    instead = quantised(prefix + missing[0], names)
    raise SpecError(
        f"{uri}: it has no tensor {prefix}{missing[0]} (and {len(missing) - 1} more of "
        f"{len(weights)} are missing)" + (f"; {instead}" if instead else "")
    )


def _all_moments(names: set[str], profile: ModelProfile, specs: Container[str]) -> dict[str, str]:
    """The state of all optimizers, each of which may have been saved under a prefix of its own; or
    nothing of it."""
    found: dict[str, str] = {}
    for i in range(len(profile.optimizers)):
        own = [s for s in profile.specs if s.optimizer == i and s.tied_to is None]
        kept_of = {spec.fqn: profile.kept_of(spec) for spec in own}
        wanted = [
            name
            for fqn, kept in kept_of.items()
            for entry in (*kept.entries, *kept.scalars, *(one.name for one in kept.owned))
            if (name := f"optim.{entry}.{fqn}") in specs
        ]
        moments = _moments(names, wanted)
        if wanted and not moments:
            return {}
        found |= moments
    return found


def _moments(names: set[str], wanted: list[str]) -> dict[str, str]:
    """All of an optimizer's state, as `<prefix>.state.<fqn>.<entry>` (get_state_dict) or as our own
    `optim.<entry>.<fqn>`; or nothing of it."""
    entries = {fqn: fqn.removeprefix("optim.").split(".", 1) for fqn in wanted}
    if not entries:
        return {}
    first_entry, first = next(iter(entries.values()))
    tail = f"{first}.{first_entry}"
    prefixes = sorted(
        {name.removesuffix(tail) for name in names if name.endswith("." + tail)}, key=len
    )
    for prefix in prefixes:
        found = {fqn: f"{prefix}{name}.{entry}" for fqn, (entry, name) in entries.items()}
        if names.issuperset(found.values()):
            return found
    return {fqn: fqn for fqn in wanted} if names.issuperset(wanted) else {}


def _items(
    tensors: Tensors, wanted: ImportRequest, matched: TensorMatch
) -> Iterator[tuple[Box, Tensor]]:
    """The state in parts, each read when it is written."""
    made: dict[str, Tensor] = {}
    first = first_values(wanted.profile)
    for spec in state_specs(wanted.profile):
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if spec.fqn == RNG:
            begin = torch.tensor([wanted.seed, wanted.at_step], dtype=dtype)
            yield Box.whole(RNG, (2,), spec.dtype), begin
            continue
        name = matched.names.get(spec.fqn)
        for box in Box.whole(spec.fqn, spec.shape, spec.dtype).in_rows(PART_BYTES):
            if name is not None:
                stored = tensors.tensors[name][1]
                packs = _packs(wanted, spec.fqn, stored)
                sizes = whole_shape(box.sizes) if packs else box.sizes
                values = tensors.read(Box(name, box.offsets, sizes, stored))
                yield box, pack(values) if packs else values.to(dtype)
            elif spec.buffer:
                made = made or wanted.buffers()
                yield box, cut(made[spec.fqn.removeprefix(MODEL)], box).to(dtype)
            else:
                yield box, torch.full(box.sizes, first.get(spec.fqn, 0.0), dtype=dtype)


# ------------------------------------------------------------------------------------------- remove


def remove(run: Storage, step: int, force: bool = False) -> list[str]:
    """Removes all copies of a step, uncommitted ones too; returns their URIs. Raises SpecError for
    the only good one."""
    items = [item for item in listed(run) if item.step == step]
    if not items:
        steps = ", ".join(str(item.step) for item in listed(run)) or "none"
        raise SpecError(f"{run.uri}: no checkpoint of step {step}; steps there: {steps}")
    if not force and any(item.committed for item in items):
        others = [item for item in checkpoint_index.find(run) if item.step != step]
        if not any(not checkpoint_index.verify(item.uri, deep=False) for item in others):
            raise SpecError(
                f"{run.uri}: step {step} is the only good checkpoint of this run; --force removes "
                "it all the same"
            )
    for item in items:
        # so that the next driver does not miss it
        run.put(f"{REMOVED}/{item.uri.rpartition('/')[2]}", b"")
        checkpoint_index.remove(item.uri)
    return [item.uri for item in items]


def _layout(meta: dict[str, Any]) -> str:
    if not isinstance(found := meta.get("layout"), dict):
        return ""
    names = set(asdict(Layout()))
    return str(Layout(**{key: value for key, value in found.items() if key in names}))


def open_target(uri: str) -> Storage:
    """A folder to export to. Raises SpecError when weights are there already."""
    storage = open_storage(uri)
    there = [key for key in storage.list() if key.endswith(".safetensors")]
    if there:
        raise SpecError(f"{uri}: {there[0]} is there already; export to an empty folder")
    return storage
