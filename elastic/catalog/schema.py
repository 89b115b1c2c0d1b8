"""The rows of the tables, as CSV files and users' own YAML write them: one model for both, so that
both are checked alike.

None = the cell is empty or the key is not given. Units are those of the data sheets: TFLOPS, GB/s,
Gbit/s, MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic.catalog.validation import first_problem, in_words
from elastic.errors import SpecError, alike, meant

Positive = Field(None, gt=0)
Row = TypeVar("Row", bound=BaseModel)


class _Row(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class ChipRow(_Row):
    arch: str = ""
    bf16_tflops: float | None = Positive
    fp16_tflops: float | None = Positive
    fp8_tflops: float | None = Positive
    fp4_tflops: float | None = Positive
    tf32_tflops: float | None = Positive
    fp32_tflops: float | None = Positive
    vector_bf16_tflops: float | None = Positive
    sm: int | None = Positive
    watts: float | None = Positive
    memory_gb: float | None = Positive
    memory_gb_per_s: float | None = Positive
    link: str = ""
    nvlink_gb_per_s: float | None = Positive
    pcie_gb_per_s: float | None = Positive
    bf16_tflops_measured: float | None = Positive
    source: str = ""


class InstanceRow(_Row):
    """`link`: where its GPUs are not joined as their chip allows, 'pcie'."""

    cloud: str | None = Field(None, min_length=1)
    gpu: str = ""
    chip: str = ""
    gpus: int | None = Field(None, ge=0)
    gpu_memory_mib: int | None = Field(None, ge=0)
    vcpus: int | None = Positive
    host_memory_mib: int | None = Positive
    network_gbps: float | None = Positive
    efa_interfaces: int = Field(0, ge=0)
    link: Literal["", "pcie"] = ""
    source: str = ""


class PriceRow(_Row):
    usd_per_h: float | None = Field(None, ge=0)
    spot_usd_per_h: float | None = Field(None, ge=0)
    at: date | None = None
    source: str = ""


class OwnFile(_Row):
    """A user's file. Its entries are checked one by one, so that an error can name the entry."""

    chips: dict[str, Any] = {}
    instances: dict[str, Any] = {}
    prices: dict[str, dict[str, Any]] = {}


def checked(model: type[Row], data: Mapping[str, Any], where: str) -> Row:
    """Raises SpecError in one line: where, the key, what would be right."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        text = in_words(first_problem(error), lambda path: suggestion(path[-1], model.model_fields))
        raise SpecError(f"{where}: {text}") from None


def suggestion(name: str | int, known: Iterable[str]) -> str:
    """`; did you mean A or B?`, or what there is where nothing is near and the list is short."""
    names = list(known)
    near = alike(str(name), names, 3)
    if near:
        return f"; {meant(near)}"
    return f"; there is {', '.join(names)}" if len(names) <= 24 else ""
