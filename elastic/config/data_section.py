"""What stands under `data:` in job.yaml. Plain data: the sources themselves are opened by
elastic/data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from elastic.config.strict_model import GB_MOST, NODES_MOST, SAMPLES_MOST, STEPS_MOST, Strict
from elastic.types.typed_job import SOURCE_KINDS as KINDS
from elastic.types.typed_job import DataKeys

RECORDS = ("jsonl", "parquet", "huggingface", "dataset")
CORPORA = ("folder", *RECORDS, "tokens")
ONLY_FOR = {
    "pattern": ("folder", "jsonl", "parquet", "dataset", "tokens"),
    "part": ("folder",),
    "text": RECORDS,
    "columns": RECORDS,
    "tokenizer": ("folder", *RECORDS),
    "end_token": CORPORA,
    "seq": CORPORA,
    "pack": CORPORA,
    "split": ("huggingface", "dataset"),
    "format": ("dataset",),
    "dtype": ("tokens",),
    "samples": ("mixture",),
}
HANDED_ON = ("text", "tokenizer", "end_token", "seq", "pack")  # by a mixture to its parts


class SourceSpec(Strict):
    """Exactly one of KINDS says where the samples are; the others say how they are read."""

    rows: str | None = None  # a folder of indexed rows, as elastic writes them
    folder: str | None = None  # of text files
    jsonl: str | None = None
    parquet: str | None = None
    huggingface: str | None = None  # a folder that save_to_disk has written
    dataset: str | None = None  # what the library `datasets` reads
    tokens: str | None = None  # .bin or .npy
    mixture: dict[str, SourceSpec] | None = None
    text: str | None = None  # the field that holds the text
    columns: list[str] | None = None  # fields of numbers, instead of text
    tokenizer: str | None = None
    end_token: str | int | None = None
    seq: int | None = Field(None, gt=0, le=SAMPLES_MOST)
    pack: Literal["stream", "cut", "whole", "pad", "document"] | None = None
    pattern: str | None = None
    part: Literal["train", "validation", "all"] | None = None
    split: str | None = None
    format: Literal["arrow", "json", "parquet", "csv", "text"] | None = None
    dtype: str | None = None
    weight: float | None = Field(None, gt=0)
    samples: int | None = Field(None, gt=0, le=STEPS_MOST)

    @field_validator("pack", mode="before")
    @classmethod
    def _yes_or_no(cls, value: Any) -> Any:
        return {True: "cut", False: "stream"}[value] if isinstance(value, bool) else value

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @model_validator(mode="after")
    def _agree(self) -> SourceSpec:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"a source has exactly one of {', '.join(KINDS)}, not {', '.join(kinds) or 'none'}"
            )
        for key, of in ONLY_FOR.items():
            if getattr(self, key) is not None and kinds[0] not in (
                *of,
                "mixture" if key in HANDED_ON else "",
            ):
                raise ValueError(f"'{key}' belongs to {' or '.join(of)}, not to {kinds[0]}")
        if kinds[0] == "mixture":
            self._check_parts(self.mixture or {})
        if self.columns is not None and (self.text or self.tokenizer or self.pack or self.seq):
            raise ValueError(
                "'columns' are fields of numbers: leave text, tokenizer, seq and pack out, or "
                "columns"
            )
        return self

    def _check_parts(self, parts: Mapping[str, SourceSpec]) -> None:
        if not parts:
            raise ValueError(
                "a mixture needs parts, as in mixture: {code: {folder: ..., weight: 2}, prose: "
                "{jsonl: ...}}"
            )
        with_weight = [name for name, part in parts.items() if part.weight is not None]
        if with_weight and len(with_weight) < len(parts):
            missing = next(name for name in parts if name not in with_weight)
            raise ValueError(
                f"part '{missing}' of the mixture has no weight, '{with_weight[0]}' has one; give "
                "all or none"
            )
        for name, part in parts.items():
            if part.mixture is not None:
                raise ValueError(
                    f"part '{name}' of the mixture is a mixture; put its parts beside the others"
                )

    def parts(self) -> dict[str, SourceSpec]:
        """Of a mixture, with what it hands on."""
        handed = {key: getattr(self, key) for key in HANDED_ON if getattr(self, key) is not None}
        return {
            name: SourceSpec(**_fitting(handed, part) | part.plain())
            for name, part in (self.mixture or {}).items()
        }

    @property
    def unequal(self) -> bool:
        """Do samples differ in length?"""
        return self.pack == "document" or any(part.unequal for part in self.parts().values())

    def longest(self) -> int:
        """The most tokens of a sample, as far as the keys say it."""
        return max([self.seq or 0, *(part.longest() for part in self.parts().values())])

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


def _fitting(handed: Mapping[str, Any], part: SourceSpec) -> dict[str, Any]:
    if part.columns is not None:
        return {}
    return {key: value for key, value in handed.items() if part.kind in ONLY_FOR[key]}


class DataSpec(Strict):
    """`train` and `validation`: a source, or the folder of indexed rows; validation also as name ->
    source."""

    train: SourceSpec | None = None
    validation: dict[str, SourceSpec] | None = None  # under its name; a single one is called ""
    cache: str | None = None  # folder on the nodes' own disks
    cache_gb: float = Field(DataKeys.cache_gb, gt=0, le=GB_MOST)
    loader_workers: int = Field(DataKeys.loader_workers, ge=0, le=NODES_MOST)
    prefetch_steps: int = Field(DataKeys.prefetch_steps, gt=0, le=NODES_MOST)
    prefetch_mb: float = Field(DataKeys.prefetch_mb, gt=0, le=GB_MOST)

    @field_validator("train", mode="before")
    @classmethod
    def _path_or_source(cls, value: Any) -> Any:
        return {"rows": value} if isinstance(value, str) else value

    @field_validator("validation", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"": {"rows": value}}
        if isinstance(value, Mapping) and _is_source(value):
            return {"": value}
        if isinstance(value, Mapping):
            return {
                name: {"rows": source} if isinstance(source, str) else source
                for name, source in value.items()
            }
        return value

    def problem(self, microbatch_tokens: int | None) -> str:
        """What is wrong with samples of unequal length and the micro-batches that are made of them;
        '' = nothing."""
        found = {"data.train": self.train} if self.train is not None else {}
        found |= {
            f"data.validation{'.' * bool(name)}{name}": one
            for name, one in (self.validation or {}).items()
        }
        for where, source in found.items():
            if microbatch_tokens is None and source.unequal:
                return (
                    f"{where}: 'pack: document' gives samples of unequal length; give "
                    "microbatch_tokens, or take pack: pad"
                )
            if microbatch_tokens is not None and source.longest() > microbatch_tokens:
                return (
                    f"{where}: a sample of seq={source.longest()} does not fit into "
                    f"microbatch_tokens={microbatch_tokens}"
                )
        return ""

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude_defaults=True)


def _is_source(value: Mapping[str, Any]) -> bool:
    """One source, and not several by name (one of which may be called 'text')."""
    return bool(set(value) & set(KINDS)) and not any(
        isinstance(v, Mapping) for k, v in value.items() if k != "mixture"
    )
