"""Opens what a job trains on: the sources that `data:` in job.yaml names, else the program's own
datasets. What each phase of a job begins with is opened before the first one begins: what is wrong
with it is said at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic.config.data_section import DataSpec, SourceSpec
from elastic.data.budget import check_lengths
from elastic.data.mixture import Mixture
from elastic.data.packing import Documents, MaskedWindows, Padded, Whole, Windows
from elastic.data.sources.arrow_datasets import ArrowRows, ArrowTokens
from elastic.data.sources.arrow_tables import HuggingFace, Parquet
from elastic.data.sources.block_cache import BlockCache
from elastic.data.sources.corpus import Corpus, FileBytes, TokenFiles, Tokenized
from elastic.data.sources.files import Files, files_at
from elastic.data.sources.parquet import Rows
from elastic.data.sources.records import Columns, Jsonl, Records
from elastic.data.sources.text_folder import split_files
from elastic.data.sources.tokenizers import tokenizer_of
from elastic.data.streams import Stream, check_shuffles, has_items, is_stream, refuse_loader
from elastic.errors import SpecError
from elastic.program import Program, drawing
from elastic.storage import open_storage
from elastic.types import Job

TEXT = "text"  # the field, where none is named
VALIDATION_SHARE = 0.05  # of a folder's files


class Sets(dict[str, Any]):
    """Several validation sets by name."""


def dataset_of(program: Program, job: Job) -> Any:
    """The job's training data: what its key `data.train` names, else the program's own. Raises
    SpecError without either."""
    return _train(program, job)[0]


def _train(program: Program, job: Job) -> tuple[Any, str]:
    """The dataset, and what a person should know of it; '' = nothing."""
    note = ""
    data = DataSpec.model_validate(job.data.plain())
    if data.train is not None:
        what = "data.train"
        place = _Place.of(job, data)
        dataset = _named(what, data.train, place)
        note = place.note(what)
    elif program.dataset is None:
        raise SpecError(
            f"there is no data: {program.of}dataset is None, and the job names no data.train"
        )
    else:
        what = f"{program.of}dataset"
        with drawing(job.seed):  # an order, a split: each rank and each loader process opens it
            dataset = program.dataset()
        refuse_loader(dataset, what)
        streams = is_stream(dataset) and not _is_map(dataset)
        if streams:
            check_shuffles(dataset, what)
            dataset = Stream(dataset, job.global_batch or 1)
        else:
            checked(dataset, what)
    check_lengths(job, dataset, what)
    return dataset, note


def validation_of(program: Program, job: Job) -> Any:
    """As `dataset_of`; `Sets` where the job names several; None = there is none."""
    data = DataSpec.model_validate(job.data.plain())
    if data.validation is not None:
        place = _Place.of(job, data)
        found = Sets()
        for name, one in data.validation.items():
            what = "data.validation" + (f".{name}" if name else "")
            found[name] = _named(what, one, place)
            check_lengths(job, found[name], what)
        return found[""] if [*found] == [""] else found
    if program.validation is None:
        return None
    what = f"{program.of}validation"
    with drawing(job.seed):
        dataset = checked(program.validation(), what)
    check_lengths(job, dataset, what)
    return dataset


@dataclass(frozen=True)
class PhaseData:
    """`job`: with the lengths of the datasets; `datasets`: by the phase that begins with them;
    `notes`: what a person should know of them."""

    job: Job
    datasets: Mapping[int, Any]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, job: Job) -> PhaseData:
        """Raises SpecError that names the phase where its data cannot be opened."""
        first, note = _train(program, job)
        notes = [note]
        job, found = replace(job, n_samples=len(first)), {0: first}
        for number in range(1, len(job.phases)):
            of_phase = job.in_phase(number)
            same_batch = of_phase.global_batch == job.global_batch
            if isinstance(first, Stream) and not (same_batch and of_phase.data_phase == 0):
                raise SpecError(
                    f"phases, entry {number}: Program.dataset is a stream, which is read from the "
                    "front in batches of one size; leave global_batch and data out of it"
                )
            if of_phase.data_phase == number:
                try:
                    found[number], note = _train(program, of_phase)
                except SpecError as error:
                    raise SpecError(f"phases, entry {number}: {error}") from error
                notes.append(note and f"phases, entry {number}: {note}")
        each = (job.in_phase(number).data_phase for number in range(len(job.phases)))
        lengths = tuple(len(found[begun]) for begun in each)
        return cls(replace(job, lengths=lengths), found, tuple(filter(None, notes)))


def _is_map(dataset: Any) -> bool:
    try:
        return len(dataset) >= 0 and has_items(dataset)
    except (TypeError, NotImplementedError):
        return False


def checked(dataset: Any, what: str) -> Any:
    """The dataset, when it is map-style and not empty. Raises SpecError that begins with `what`."""
    refuse_loader(dataset, what)
    kind = type(dataset).__name__
    if not has_items(dataset):
        raise SpecError(
            f"{what}: a {kind} has no [sample id]; a dataset is map-style: len() and [sample id] "
            "-> dict of tensors; or, to train on, a stream: state_dict() and load_state_dict()"
        )
    try:
        n_samples = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise SpecError(
            f"{what}: a {kind} has no len() (nor state_dict() and load_state_dict(), as a stream "
            "needs)"
        ) from error
    if not n_samples:
        raise SpecError(f"{what}: it has no samples")
    return dataset


# --------------------------------------------------------------------------------------- of the job


@dataclass(frozen=True)
class _Place:
    """Where relative paths begin, and the node's cache, once it is asked for."""

    folder: Path
    data: DataSpec
    seed: int
    made: list[BlockCache] = field(default_factory=list)

    @classmethod
    def of(cls, job: Job, data: DataSpec) -> _Place:
        return cls(Path(job.folder).absolute(), data, job.seed)

    def cache(self) -> BlockCache:
        if not self.made:
            self.made.append(BlockCache(self.data.cache, int(self.data.cache_gb * 1e9)))
        return self.made[0]

    def reads(self, files: Files) -> None:
        """Samples are read from these files."""
        if files.cache is not None:
            files.cache.expect(sum(files.sizes))

    def note(self, what: str) -> str:
        """'' where what samples are read from fits into the cache."""
        for cache in self.made:
            if not cache.fits:
                wanted, limit = (n / 1e9 for n in (cache.wanted_bytes, cache.limit_bytes))
                return (
                    f"{what}: {wanted:.4g} GB in object storage do not fit into a node's cache "
                    f"(data.cache_gb: {limit:.4g}): a sample that is not in it is fetched each "
                    "time; raise data.cache_gb where the nodes' disks have room"
                )
        return ""

    def path(self, text: str) -> str:
        return text if "://" in text else str(self.folder / Path(text).expanduser())


def _named(where: str, source: SourceSpec, place: _Place) -> Any:
    try:
        found = checked(_opened(source, place), where)
        found[0]  # what no sample can be made of is seen here
        return found
    except SpecError as error:
        text = str(error)
        raise SpecError(text if text.startswith(where) else f"{where}: {text}") from error


def _opened(source: SourceSpec, place: _Place) -> Any:
    if source.mixture is not None:
        return _mixture(source, place)
    where = place.path(str(getattr(source, source.kind)))
    if source.kind == "rows":
        return Rows(open_storage(where))
    if source.kind == "tokens":
        files = files_at(
            where, source.pattern or "**/*.{bin,npy}", place.cache() if "://" in where else None
        )
        if isinstance(source.end_token, str):
            raise SpecError(
                f"end_token '{source.end_token}': a token file has ids only; give the id"
            )
        place.reads(files)
        return _samples(
            TokenFiles(files, source.dtype, source.end_token, cache=place.cache()), source, place
        )
    if source.kind == "folder":
        return _samples(_folder(where, source, place), source, place)
    records = _records(where, source, place.cache())
    of_text = (source.text, source.tokenizer, source.end_token, source.seq, source.pack)
    if all(key is None for key in of_text):
        place.reads(records.files)
        return Columns(records, source.columns)
    return _samples(_tokenized(records, source.text or TEXT, source, place=place), source, place)


def _mixture(source: SourceSpec, place: _Place) -> Mixture:
    parts = source.parts()
    sets = {
        name: _named(f"part '{name}' of the mixture", part, place) for name, part in parts.items()
    }
    first, *others = sets
    shapes = {name: _shapes(one[0], parts[name].unequal) for name, one in sets.items()}
    for name in others:
        if shapes[name] != shapes[first]:
            raise SpecError(
                f"part '{name}' of the mixture gives {shapes[name]}, part '{first}' {shapes[first]}"
            )
    weights = {name: part.weight for name, part in parts.items() if part.weight is not None}
    return Mixture(sets, weights or None, source.samples, seed=place.seed)


def _shapes(item: Mapping[str, Any], unequal: bool) -> str:
    """`unequal`: the first dimension differs from sample to sample."""
    shapes = {
        key: ["...", *value.shape[1:]] if unequal and value.ndim else list(value.shape)
        for key, value in item.items()
    }
    return ", ".join(f"{key} {value.dtype} {shapes[key]}" for key, value in sorted(item.items()))


def _records(where: str, source: SourceSpec, cache: BlockCache) -> Records:
    if source.kind == "huggingface":
        return HuggingFace(where, source.split, cache)
    if source.kind == "dataset":
        return ArrowRows(
            where, source.format, split=source.split, pattern=source.pattern, cache=cache
        )
    kind = Jsonl if source.kind == "jsonl" else Parquet
    return kind(where, cache, source.pattern) if source.pattern else kind(where, cache)


def _folder(where: str, source: SourceSpec, place: _Place) -> Corpus:
    files = files_at(where, source.pattern or "**", place.cache() if "://" in where else None)
    files = split_files(files, source.part or "all", VALIDATION_SHARE)
    if source.tokenizer in (None, "bytes") and source.end_token is None:
        place.reads(files)
        return FileBytes(files)
    return _tokenized(_FileTexts(files), "", source, place=place)


def _tokenized(texts: Any, name: str, source: SourceSpec, *, place: _Place) -> Corpus:
    if source.tokenizer is None:
        raise SpecError(
            "key 'tokenizer' is missing: bytes, the path of a tokenizer.json, or none where the "
            "field holds ids"
        )
    path = (
        source.tokenizer if source.tokenizer in ("bytes", "none") else place.path(source.tokenizer)
    )
    end = None if source.end_token is None else str(source.end_token)
    kind = ArrowTokens if isinstance(texts, ArrowRows) else Tokenized
    return kind(texts, name, tokenizer_of(path, end), cache=place.cache())


def _samples(corpus: Corpus, source: SourceSpec, place: _Place) -> Any:
    if source.seq is None:
        raise SpecError("key 'seq' is missing: the tokens of a sample")
    if source.pack == "whole":
        return Whole(corpus, source.seq, place.cache())
    kinds: dict[str | None, type[Windows | Documents]] = {
        "cut": MaskedWindows,
        "pad": Padded,
        "document": Documents,
    }
    found = kinds.get(source.pack, Windows)(corpus, source.seq)
    if not len(found):
        raise SpecError(
            f"it holds {corpus.n_tokens} tokens; one sample of seq={source.seq} needs "
            f"{source.seq + 1}"
        )
    return found


class _FileTexts:
    """Each file is a text, as UTF-8."""

    def __init__(self, files: Files) -> None:
        self.files, self.digest = files, files.digest

    def texts(self, name: str) -> Iterator[str]:
        for n in range(len(self.files)):
            yield b"".join(self.files.chunks(n)).decode("utf-8", "replace")

    def where(self, index: int) -> str:
        return self.files.uri(index)
