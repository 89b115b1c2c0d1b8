"""A job whose numbers nobody can mean: always one clear line, never a traceback or a hang, and what
is accepted can be used."""

from __future__ import annotations

import json
import math
import random
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from elastic.catalog.bounded_yaml import VALUES_MOST, yaml_of
from elastic.config.data_section import SourceSpec
from elastic.config.drill import DrillSpec
from elastic.config.job import JobSpec, PoolSpec, drill_entry, job_of, load_job
from elastic.config.optimization import OWNERS
from elastic.config.pool_checks import check_budget, check_fit
from elastic.errors import SpecError

HOSTILE: list[Any] = [
    math.inf, -math.inf, math.nan, -0.0, 5e-324, 1e-300, 1e300, -1e300, 1.7976931348623157e308, 0,
    -1, 1, 2, 0.5, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, -(10**30), 10**400,
    True, False, "", "1e999", "nan", "inf", "-1", "0x10", "9" * 5000, "1_000", "auto", "\0", "a\nb",
    "../..", [], {}, [math.nan], {"a": math.inf}, None,
]  # fmt: skip
TOO_LONG = 10**5000  # Python does not print it
GOOD: dict[str, Any] = {"steps": 10, "global_batch": 8}
SAMPLES = {
    PoolSpec: {"name": "a"}, DrillSpec: {"at_step": 1, "kill": "any"}, SourceSpec: {"folder": "x"},
    OWNERS["lr_schedule"]: {"kind": "cosine"}, OWNERS["grad_norm"]: {"most": 1.0},
    OWNERS["block_norm"]: {"most": 1.0},
}  # fmt: skip


def models(kind: Any) -> Iterator[type[BaseModel]]:
    """The models that stand in an annotation."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in typing.get_args(kind):
        yield from models(part)


def numbers_of(model: type[BaseModel], place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places of all keys in which a number may stand."""
    for name, field in model.__pydantic_fields__.items():
        many = (0,) if typing.get_origin(field.annotation) is list else ()
        inner = [
            found for found in models(field.annotation) if found is not SourceSpec or not place
        ]
        for found in inner:
            yield from numbers_of(found, (*place, name, *many))
        if {int, float} & {field.annotation, *typing.get_args(field.annotation)}:
            yield (*place, name)


def job_with(place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A job with the value there, and what the models on the way need besides."""
    data: Any = value
    for i in range(len(place) - 1, -1, -1):
        data = [data] if place[i] == 0 else {place[i]: data}
        if isinstance(data, dict) and (owner := owner_of(place[:i])):
            data = {**SAMPLES.get(owner, {}), **data}
            if owner is DrillSpec and place[i] in (
                "deadline_s",
                "factor",
                "unit_s",
                "jitter",
                "gpu",
            ):
                data = {
                    "at_step": 1,
                    "notice" if place[i] == "deadline_s" else "slow": "any",
                    "factor": 2.0,
                } | data
    return GOOD | data


def owner_of(place: tuple[Any, ...]) -> type[BaseModel] | None:
    model: type[BaseModel] = JobSpec
    for name in place:
        if name != 0:
            model = next(models(model.__pydantic_fields__[name].annotation))
    return model if place else None


PLACES = sorted(set(numbers_of(JobSpec)), key=str)


def tried(data: dict[str, Any], tmp_path: Path) -> str:
    """The line that refuses it; '' = it is a job, which then can be written down and held against
    its pools."""
    try:
        job = job_of(data, tmp_path / "program.py", "job.yaml")
        json.dumps(job.plain(), allow_nan=False)
        pools = [pool.pool() for pool in job.pools]
        check_budget(job, pools)
        check_fit(job, pools)
    except SpecError as error:
        text = str(error)
        assert "\n" not in text and 10 < len(text) < 1500, text
        return text
    return ""


def test_the_places_are_found() -> None:
    assert {
        ("steps",),
        ("pools", 0, "ends_at_s"),
        ("drill", 0, "deadline_s"),
        ("data", "cache_gb"),
        ("waiting_usd_per_h",),
    } <= set(PLACES)
    assert len(PLACES) > 60
    for place in PLACES:
        assert owner_of(place[:-1]) is None or job_with(place, 1)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_hostile_numbers_are_refused_in_one_line(place: tuple[Any, ...], tmp_path: Path) -> None:
    for value in (*HOSTILE, TOO_LONG):
        said = tried(job_with(place, value), tmp_path)
        if isinstance(value, float) and not math.isfinite(value):
            assert said, f"{place} takes {value}"
        if isinstance(value, int) and value >= 10**30:
            assert said, f"{place} takes {value:.3g}" if value < 10**300 else place


def test_several_at_once_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    dice = random.Random(3)
    (tmp_path / "program.py").write_text("")
    for _ in range(150):
        data = dict(GOOD)
        for place in dice.sample([place for place in PLACES if len(place) == 1], 3):
            data[place[0]] = dice.choice(HOSTILE)
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(data))
        words = [f"{place[0]}={dice.choice(HOSTILE[:23])}" for place in dice.sample(PLACES, 2)]
        said = ""
        try:
            load_job(tmp_path, words)
        except SpecError as error:
            said = str(error)
        assert not said or ("\n" not in said and (str(tmp_path) in said or "--set" in said)), said


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e300, 10**400])
def test_an_order_from_outside(value: Any) -> None:
    with pytest.raises(SpecError, match="^drill: key 'deadline_s': "):
        drill_entry({"notice": "any", "deadline_s": value})


def test_values_behind_aliases_are_counted_each_time() -> None:
    few = "[&a [1, 2, 3], *a, *a]"
    assert yaml_of(few, "f") == [[1, 2, 3]] * 3
    with pytest.raises(SpecError, match=f"^f: it holds more than {VALUES_MOST:,} values"):
        yaml_of("&a [*a]", "f")


@pytest.mark.parametrize(
    "text",
    ["a: !!timestamp 1", "a: !!bool maybe", "a: !!int ''", "!!timestamp 1: a", "a: 2026-13-45"],
)
def test_a_value_that_is_none_of_its_kind_is_one_line(text: str) -> None:
    with pytest.raises(SpecError, match="^job.yaml: not YAML: "):
        yaml_of(text, "job.yaml")


@pytest.mark.parametrize(
    ("text", "line", "key", "first"),
    [
        ("steps: 1\nseed: 2\nsteps: 3", 3, "steps", 1),
        ("a: {b: 1, 'b': 2}", 1, "b", 1),
        ("a:\n  - b: 1\n    c: {d: 1}\n    b: 2\n", 4, "b", 2),
    ],
)
def test_a_key_that_is_there_twice_is_refused(text: str, line: int, key: str, first: int) -> None:
    with pytest.raises(
        SpecError, match=f"^f, line {line}: '{key}' is there already, in line {first}"
    ):
        yaml_of(text, "f")


def test_the_same_key_in_two_places_is_not_there_twice() -> None:
    text = "a: {b: 1}\nb: [{b: 1}, {b: 1}]\nc: &c {a: 1}\nd: {<<: *c, <<: *c}"
    found = yaml_of(text, "f")
    assert found == {"a": {"b": 1}, "b": [{"b": 1}] * 2, "c": {"a": 1}, "d": {"a": 1}}
    assert yaml_of("a: 1\n---\na: 2", "f", several=True) == [{"a": 1}, {"a": 2}]
