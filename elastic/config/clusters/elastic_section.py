"""The section of a cluster file that is for this package: `metadata: {elastic: ...}`. Ray carries
it along unread."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import Field, ValidationError, field_validator

from elastic.config.clusters.cluster_file import Place, Problem
from elastic.config.strict_model import NODES_MOST, SECONDS_MOST, USD_MOST, Strict, mapping
from elastic.types import MarketType

PLACE: Place = ("metadata", "elastic")


class OwnPool(Strict):
    """What the rest of the file cannot say of a pool."""

    market_type: MarketType | None = None
    accelerator_type: str | None = None
    gpus_per_node: int | None = Field(None, gt=0, le=NODES_MOST)
    usd_per_node_h: float | None = Field(None, ge=0, le=USD_MOST)
    ends_at: str | None = None  # of a reservation; ISO 8601 with a time zone, quoted
    notice_s: float | None = Field(None, ge=0, le=SECONDS_MOST)
    zone: str | None = None

    @field_validator("ends_at", mode="before")
    @classmethod
    def _a_quoted_time(cls, value: Any) -> Any:
        if isinstance(value, datetime):
            raise ValueError(
                'must be quoted, as in "2026-12-01T11:30:00Z": Ray writes this file as JSON, '
                "which has no times"
            )
        if value is not None and (not isinstance(value, str) or _time(value) is None):
            raise ValueError(
                f'must be a time with its zone, as in "2026-12-01T11:30:00Z", not {value!r}'
            )
        return value

    @property
    def ends_at_s(self) -> float | None:
        """Epoch seconds."""
        at = _time(self.ends_at) if self.ends_at else None
        return None if at is None else at.timestamp()


class Own(Strict):
    on_demand_floor: int = Field(0, ge=0, le=NODES_MOST)
    head_usd_per_h: float | None = Field(None, ge=0, le=USD_MOST)
    pools: dict[str, OwnPool] = {}


def own_section(data: dict[str, Any]) -> tuple[Own, list[Problem]]:
    given = mapping(data.get("metadata")).get("elastic")
    if given is None:
        return Own(), []
    if not isinstance(given, dict):
        right = "it must hold keys and values: on_demand_floor, pools"
        return Own(), [Problem(PLACE, f"it is {given!r}", right)]
    try:
        return Own.model_validate(given), []
    except ValidationError as error:
        return Own(), [_problem(found) for found in error.errors()]


def _problem(error: Any) -> Problem:
    place = (*PLACE, *error["loc"])
    if error["type"] == "extra_forbidden":
        keys = OwnPool.model_fields if len(error["loc"]) > 1 else Own.model_fields
        return Problem(place, "unknown key", f"keys are {', '.join(keys)}")
    given = error.get("input")
    shown = f"it is {given!r}" if isinstance(given, str | int | float) else "wrong kind of value"
    text = str(error["msg"]).removeprefix("Value error, ")
    return Problem(place, shown, text[:1].lower() + text[1:])


def _time(text: str) -> datetime | None:
    try:
        at = datetime.fromisoformat(text)
        return at.astimezone(UTC) if at.tzinfo else None
    except (ValueError, OverflowError):
        return None
