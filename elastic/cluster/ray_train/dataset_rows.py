"""A `ray.data.Dataset`, or one of the library `datasets`, as the data of a run: written once as
indexed rows into its storage, so that a sample has an id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic.data.sources.parquet import INDEX, read_index, with_rows, write_rows
from elastic.errors import SpecError
from elastic.storage import Storage, open_storage

SPLITS = ("train", "validation")
NO_NUMBERS = (
    "string",
    "large_string",
    "binary",
    "large_binary",
    "struct",
    "map",
    "timestamp",
    "date",
    "<class 'obj",
)
BATCH_ROWS = 1024
FREE_SHARE = 0.9  # of the free space that a dataset may take


def materialise(datasets: Mapping[str, Any], run: Storage) -> dict[str, str]:
    """Split -> URI of its rows. What is there already is used as it is: a run keeps its data.
    Raises SpecError."""
    for split, dataset in datasets.items():
        _check(split, dataset)
    out = {}
    for split, dataset in datasets.items():
        storage = open_storage(f"{run.uri}/data/{split}")
        if not storage.exists(INDEX):
            write_rows(storage, _batches(dataset, split, storage), f"datasets['{split}']")
        read_index(storage)
        out[split] = storage.uri
    return out


def _check(split: str, dataset: Any) -> None:
    import ray.data

    if split not in SPLITS:
        raise SpecError(
            f"datasets['{split}']: a run reads 'train' and 'validation'; name it one of these, or "
            "leave it out"
        )
    if _is_map_style(dataset):
        return  # its columns are looked at when they are written
    if not isinstance(dataset, ray.data.Dataset):
        more = ""
        if (
            isinstance(dataset, ray.data.DataIterator)
            or callable(dataset)
            or hasattr(dataset, "__next__")
        ):
            more = (
                ": a stream has no sample ids, so each sample exactly once in an order that no "
                "resize changes could not be kept"
            )
        raise SpecError(
            f"datasets['{split}']: it is a {type(dataset).__name__}, not a ray.data.Dataset nor a "
            f"datasets.Dataset{more}"
        )
    schema = dataset.schema()
    for name, kind in zip(schema.names, schema.types) if schema is not None else ():
        text = str(kind)
        if text.startswith(NO_NUMBERS):
            raise SpecError(
                f"datasets['{split}']: column '{name}' holds {text}; a sample is made of numbers "
                "and tensors of one shape: map it (tokenize, say) or drop it before"
            )


def _is_map_style(dataset: Any) -> bool:
    """Is it a `datasets.Dataset`? (An IterableDataset of that library has no length.)"""
    library = type(dataset).__module__.partition(".")[0]
    return library == "datasets" and hasattr(dataset, "__len__")


def _batches(dataset: Any, split: str, storage: Storage) -> Iterator[Mapping[str, Any]]:
    """In the dataset's own order. Raises SpecError before the storage is full: an endless dataset
    never ends otherwise."""
    free, n_bytes = storage.free_bytes(), 0
    if _is_map_style(dataset):
        batches = dataset.with_format("numpy").iter(BATCH_ROWS)
    else:
        dataset.context.execution_options.preserve_order = True
        batches = dataset.iter_batches(batch_size=BATCH_ROWS, batch_format="numpy")
    for batch in with_rows(batches):
        n_bytes += sum(int(getattr(values, "nbytes", 0)) for values in batch.values())
        if free is not None and n_bytes > FREE_SHARE * free:
            raise SpecError(
                f"datasets['{split}']: {n_bytes / 1e9:.1f} GB so far and no end, {storage.uri} "
                f"had {free / 1e9:.1f} GB free; a run keeps its rows, so that samples have ids: "
                "limit it (dataset.limit(n)), or give a larger storage_path"
            )
        yield batch
