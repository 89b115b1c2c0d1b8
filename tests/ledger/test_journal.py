"""The journal: every noun goes through it unchanged; torn lines, merged steps, fenced drivers."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import InternalError, SpecError
from elastic.ledger.journal import CLASSES, Journal, Line, decode, encode, parse_line, read, write_line
from elastic.types import (
    Abort,
    Action,
    Decided,
    Decision,
    DriverStarted,
    EnterPlan,
    Event,
    Layout,
    ModelProfile,
    NodeLost,
    NodeReady,
    Plan,
    StepDone,
    Stop,
    WorkerFailed,
    WorkerId,
)


def sample(hint: Any) -> Any:
    """Some value of the annotated type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return args[-1]
    if origin is tuple:
        return (sample(args[0]), sample(args[0]))
    if origin is dict:
        return {"a": sample(args[1])}
    if type(None) in args:
        return sample(next(arg for arg in args if arg is not type(None)))
    if hint is Action:
        return Abort(3, (WorkerId("n", 1),))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{f.name: sample(hints[f.name]) for f in dataclasses.fields(hint)})
    return {int: 7, float: 1.5, str: "text", bool: True, Any: [1, "x", None]}[hint]


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - {"Action", "Event"}))
def test_every_noun_comes_back_as_it_was(name: str) -> None:
    value = sample(CLASSES[name])
    data = json.loads(json.dumps(encode(value), allow_nan=False))
    assert data["kind"] == name
    assert decode(data) == value
    assert type(decode(data)) is CLASSES[name]


def test_a_field_called_kind_does_not_hide_the_class() -> None:
    failed = WorkerFailed(WorkerId("n", 0), 2, "out_of_memory", "oom")
    assert encode(failed)["kind_"] == "out_of_memory" and decode(encode(failed)) == failed


def test_numbers_that_json_has_not_and_secrets() -> None:
    line = Line(1.0, 1, ((1.0, StepDone(1, 2, math.nan, 3, math.inf)),))
    found = parse_line(write_line(line)).events[0][1]
    assert isinstance(found, StepDone) and math.isnan(found.train_loss) and found.step_time_s == math.inf
    start = DriverStarted("r", 1, {"env": {"HF_TOKEN": "hf_abc", "tokenizer": "many"}}, (), ModelProfile(1, 1, ()))
    text = write_line(Line(1.0, 1, ((1.0, start),)))
    assert "hf_abc" not in text and "many" in text


def test_fields_of_a_newer_writer_are_ignored_and_unknown_kinds_are_not() -> None:
    assert decode({"kind": "NodeLost", "node_id": "a", "colour": "red"}) == NodeLost("a")
    with pytest.raises(SpecError, match="NodeMelted"):
        decode({"kind": "NodeMelted"})
    text = write_line(Line(1.0, 1)).replace('"v":1', '"v":2')
    with pytest.raises(SpecError, match="version 2 is newer"):
        parse_line(text)


def step(n: int) -> StepDone:
    return StepDone(1, n, 1.0, 10, 0.1)


def test_ticks_of_steps_are_merged_to_one_line_a_second_and_none_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, 1)
    for n in range(1, 31):
        journal.append(n / 10, [(n / 10, step(n))], Decision())
    journal.append(3.05, [(3.05, NodeLost("a"))], Decision((Abort(1),), "a is gone"))
    journal.append(3.1, [(3.1, step(31))], Decision())
    journal.close()
    lines = read(path)
    assert [event.step for line in lines for _, event in line.events if isinstance(event, StepDone)] == list(range(1, 32))
    assert len(lines) == 5 and lines[3].decision == Decision((Abort(1),), "a is gone")
    assert all(at_s == pytest.approx(e.step / 10) for line in lines for at_s, e in line.events if isinstance(e, StepDone))


def test_steps_with_an_order_are_not_held_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", 1)
    journal.append(1.0, [(1.0, step(1))], Decision((Stop("succeeded", "done"),), "done"))
    assert len(read(tmp_path / "j")) == 1 and journal.due_at_s is None
    journal.append(2.0, [(2.0, step(2))], Decision())
    assert journal.due_at_s == 3.0 and len(read(tmp_path / "j")) == 1
    journal.flush()
    assert len(read(tmp_path / "j")) == 2 and journal.due_at_s is None
    journal.close()


def written(path: Path, *nodes: str, epoch: int = 1) -> None:
    journal = Journal(path, epoch)
    for name in nodes:
        journal.append(1.0, [(1.0, NodeLost(name))], None)
    journal.close()


def names(path: Path) -> list[str]:
    return [event.node_id for line in read(path) for _, event in line.events if isinstance(event, NodeLost)]


def test_a_torn_last_line_is_left_out_and_the_next_driver_writes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, "a", "b", "c")
    whole = path.read_bytes()
    for cut in (1, 5, 40):
        path.write_bytes(whole[:-cut])
        assert names(path) == (["a", "b", "c"] if cut == 1 else ["a", "b"])
    written(path, "d", epoch=2)
    assert names(path) == ["a", "b", "d"]


def test_empty_lines_between_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, "a", "b", "c")
    path.write_text(path.read_text().replace("\n", "\n\n  \n"))
    assert names(path) == ["a", "b", "c"]


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, "a", "b", "c")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-9], lines[2]]) + "\n")
    with pytest.raises(InternalError, match="line 2"):
        read(path)


def test_lines_of_a_driver_that_lost_its_lease_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "j"
    old = Journal(path, 1)
    old.append(1.0, [(1.0, NodeLost("a"))], None)
    written(path, "b", epoch=2)
    old.append(2.0, [(2.0, NodeLost("stale"))], None)
    old.close()
    written(path, "c", epoch=2)
    assert names(path) == ["a", "b", "c"]


def test_nested_values_are_written_without_their_class() -> None:
    plan = Plan(1, Layout(dp_shard=2), (WorkerId("a", 0),), (4,), (2,))
    data = encode(Decided(Decision((EnterPlan(plan),), "go")))
    order = data["decision"]["actions"][0]
    assert order["kind"] == "EnterPlan" and "kind" not in order["plan"]["ranks"][0]
    with pytest.raises(InternalError, match="not a noun"):
        encode(Line(1.0, 1))


def test_all_events_and_actions_are_covered() -> None:
    found = {name for name, cls in CLASSES.items() if issubclass(cls, Event | Action)}
    assert {"NodeReady", "Quiesced", "DigestPart", "SetShares", "DrainNode"} <= found and NodeReady.__name__ in found
