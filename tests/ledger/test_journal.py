"""The journal: every noun goes through it unchanged; torn lines, merged steps, fenced drivers."""

from __future__ import annotations

import json
import math
import random
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.observe.small_run import lines as small_run

from elastic.config.job import JobSpec
from elastic.errors import InternalError, SpecError
from elastic.ledger import journal as journal_of
from elastic.ledger.journal import (
    CLASSES,
    Journal,
    Line,
    decode,
    encode,
    parse_line,
    read,
    sift,
    write_line,
)
from elastic.types import (
    Abort,
    Action,
    Copy,
    CopyDamaged,
    CopyStored,
    Decided,
    Decision,
    DriverStarted,
    EnterPlan,
    Event,
    Holding,
    Layout,
    ModelProfile,
    NodeLoadSeen,
    NodeLost,
    NodeReady,
    Plan,
    Resume,
    StepDone,
    Stop,
    WorkerFailed,
    WorkerId,
    is_noun,
    names_of,
)


def sample(hint: Any) -> Any:
    """Some value of the annotated type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return args[-1]
    if origin is tuple:
        return (
            tuple(sample(arg) for arg in args)
            if ... not in args
            else (sample(args[0]), sample(args[0]))
        )
    if origin in (dict, Mapping):
        return {"a": sample(args[1])}
    if origin in (typing.Union, types.UnionType):
        return sample(next(arg for arg in args if arg is not type(None)))
    if hint is Action:
        return Abort(3, (WorkerId("n", 1),))
    if isinstance(hint, type) and is_noun(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{name: sample(hints[name]) for name in names_of(hint)})
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


def test_the_workers_that_many_plans_name_are_kept_once() -> None:
    ranks = tuple(WorkerId(f"node-{k}", k) for k in range(3))
    held = tuple(Holding(worker, 1, rank, 8, "peer") for rank, worker in enumerate(ranks))
    plan = Plan(
        2, Layout(dp_shard=3), ranks, (1, 1, 1), (), resume=Resume("peer", 8, holdings=held)
    )
    first, second = (decode(json.loads(json.dumps(encode(plan)))) for _ in range(2))
    assert first == second == plan
    for mine, other, holding in zip(first.ranks, second.ranks, second.resume.holdings, strict=True):
        assert mine is other is holding.worker and type(mine) is WorkerId
        assert holding.kind is first.resume.holdings[0].kind


def test_numbers_that_json_has_not_and_secrets() -> None:
    line = Line(1.0, 1, ((1.0, StepDone(1, 2, math.nan, 3, math.inf)),))
    found = parse_line(write_line(line)).events[0][1]
    assert (
        isinstance(found, StepDone)
        and math.isnan(found.train_loss)
        and found.step_time_s == math.inf
    )
    start = DriverStarted(
        "r", 1, {"env": {"HF_TOKEN": "hf_abc", "tokenizer": "many"}}, (), ModelProfile(1, 1, ())
    )
    text = write_line(Line(1.0, 1, ((1.0, start),)))
    assert "hf_abc" not in text and "many" in text


WHOLE_JOBS: tuple[dict[str, Any], ...] = (
    {
        "name": "a", "folder": "/f", "program": "/f/key/program.py", "steps": 9, "global_batch": 8,
        "seed": 3, "eval_every": 2, "eval_samples": 3, "clip_grad_norm": 1.0,
        "optimizer": {"token": {"path": "torch.optim.SGD", "lr": 0.1, "key": "text"}},
        "lr_schedule": {"kind": "linear", "warmup_steps": 2}, "lr_scaling": "sqrt",
        "base_global_batch": 4, "noise_scale": {"every": 3}, "guards": {"loss_spike": {}},
        "precision": "bfloat16", "reduce_dtype": "bfloat16", "layout": {"2": "dp_shard=2"},
        "schedule": "gpipe", "virtual_stages": 2, "microbatch_tokens": 64,
        "activation_checkpointing": "full", "zero_stage": 2, "compile": True, "float8": True,
        "offload": True, "min_workers": 2, "max_workers": 4, "peer_every": 3, "durable_every": 4,
        "peer_copies": 1, "copies_across_zones": True, "copy_link_share": 0.2, "keep_last": 3,
        "keep_every": 2, "keep_best": 1, "storage_quota_gb": 2.5, "verify_copies": False, "data": {
            "train": {"mixture": {"secret": {"tokens": "/d/x.bin", "end_token": "<end>",
            "weight": 2}}, "end_token": "<e>"}, "validation": {"token": {"jsonl": "/d/y",
            "text": "key", "seq": 32}}, "cache": "/tmp/key", "cache_gb": 3, "loader_workers": 1,
            "prefetch_steps": 3, "prefetch_mb": 2,
        }, "storage": "s3://bucket/token", "budget_usd": 3.5, "head_usd_per_h": 0.3, "max_nodes": 4,
        "deadline_h": 2.0, "on_demand_floor": "copy", "waiting_usd_per_h": 2.5,
        "max_silence_s": 60.0, "orphan_lease_s": 100.0, "purpose": "cheapest",
        "pools": [{"name": "key", "region": "token", "max_nodes": 4}], "trusted_axes": ["pp"],
        "rebalance": False, "across_zones": True, "check_numbers_every": 50,
        "drill": [{"at_step": 3, "kill": ["rank0", "any"]}],
        "trackers": {"wandb": {"project": "token"}}, "metrics_port": "127.0.0.1:0",
    }, {"script": "/f/train_token.py", "args": ["--end-token", "<end>", "--tokens", "x.bin"],
    "microbatch_size": None}, {"microbatch_size": 2, "data": {"train": {"tokens": "/d/x.bin",
    "end_token": "<end>"}}, "batch_norm": {"group": 4}, "frozen_weights": "nf4", "phases": [{"from_step": 4,
    "global_batch": 12, "data": {"train": {"end_token": "<e>"}}}]},
)  # fmt: skip


def test_every_key_of_a_job_comes_back_as_it_was() -> None:
    least = {
        key: WHOLE_JOBS[0][key] for key in ("name", "folder", "program", "steps", "global_batch")
    }
    assert {
        key for job in WHOLE_JOBS for key, value in job.items() if value is not None
    } == JobSpec.model_fields.keys()
    for given in WHOLE_JOBS:
        job = JobSpec(**{**least, **given}).plain()
        start = DriverStarted("r", 1, job, (), ModelProfile(1, 1, ()))
        assert decode(json.loads(json.dumps(encode(start)))) == start


def test_no_secret_reaches_the_file(tmp_path: Path) -> None:
    secret = "zq7-planted"
    job = {
        "args": ["--hf-token", secret, f"--wandb_api_key={secret}"],
        "storage": f"s3://me:{secret}@host/x", "env": {"api_keys": [secret], "apikey": secret,
        "credentials": {"user": secret}, "passwd": secret},
    }  # fmt: skip
    said = f"train.py: error: unrecognized arguments: --hf-token {secret}"
    events = (
        DriverStarted("r", 1, job, (), ModelProfile(1, 1, ())),
        WorkerFailed(WorkerId("n", 0), 1, "program", said),
        CopyDamaged(
            f"s3://me:{secret}@host/x/checkpoints/step-1",
            f"https://host/x?token={secret} is damaged",
        ),
    )
    journal = Journal(tmp_path / "j", 1)
    journal.append(1.0, [(1.0, event) for event in events], Decision((Stop("failed", said),), said))
    journal.close()
    text = (tmp_path / "j").read_text()
    assert secret not in text and text.count("***") >= 10


def test_fields_of_another_writer_are_ignored_and_unknown_kinds_are_not() -> None:
    assert decode({"kind": "NodeLost", "node_id": "a", "color": "red"}) == NodeLost("a")
    copy = {
        "step": 3,
        "kind": "peer",
        "generation": 1,
        "layout": {},
        "holdings": [{"worker": {"node_id": "a"}, "rank": 0}],
    }
    assert decode({"kind": "CopyStored", "copy": copy}) == CopyStored(Copy(3, "peer", 1, Layout()))
    with pytest.raises(SpecError, match="NodeMelted"):
        decode({"kind": "NodeMelted"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_of, "VERSION", 3)
        text = write_line(Line(1.0, 1))
    with pytest.raises(SpecError, match="version 3 is newer"):
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
    assert [
        event.step for line in lines for _, event in line.events if isinstance(event, StepDone)
    ] == list(range(1, 32))
    assert len(lines) == 5 and lines[3].decision == Decision((Abort(1),), "a is gone")
    assert all(
        at_s == pytest.approx(e.step / 10)
        for line in lines
        for at_s, e in line.events
        if isinstance(e, StepDone)
    )


def test_the_load_of_a_node_makes_no_line_of_its_own(tmp_path: Path) -> None:
    load = NodeLoadSeen("a", 0.5, 1, 2, 3)
    journal = Journal(tmp_path / "j", 1)
    for n, event in enumerate((step(1), load, step(2))):
        journal.append(n / 10, [(n / 10, event)], Decision())
    journal.close()
    (line,) = read(tmp_path / "j")
    assert [event for _, event in line.events] == [step(1), load, step(2)]


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
    return [
        event.node_id
        for line in read(path)
        for _, event in line.events
        if isinstance(event, NodeLost)
    ]


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


def three_drivers(path: Path) -> list[Line]:
    """A small run whose journal three drivers wrote; the first was killed in the middle of a line.
    Returns what counts."""
    lines = small_run()
    cuts = (0, len(lines) // 3, 2 * len(lines) // 3, len(lines))
    for epoch in (1, 2, 3):
        journal = Journal(path, epoch)
        for line in lines[cuts[epoch - 1] : cuts[epoch]]:
            journal.append(line.at_s, line.events, line.decision)
        journal.close()
        if epoch == 1:
            with path.open("ab") as file:
                file.write(b'{"v":1,"at_s":3.5,"epoch":1,"events":[[3.5,{"kind":"Node')
    return read(path)


def flipped(text: bytes, bit: int) -> bytes:
    return text[: bit // 8] + bytes([text[bit // 8] ^ (1 << bit % 8)]) + text[bit // 8 + 1 :]


@pytest.mark.slow
def test_no_flipped_bit_becomes_another_run(tmp_path: Path) -> None:
    """Either the run is what it was, or the damage is told, or the last line is left out as a torn
    one is."""
    right = three_drivers(tmp_path / "j")
    text = (tmp_path / "j").read_bytes()
    last = text[:-1].rfind(b"\n") + 1
    bits = random.Random(7).sample(range(8 * len(text)), 3000)
    ends = [8 * at + k for at, byte in enumerate(text) if byte == 10 for k in range(8)]
    told = same = 0
    for bit in {*bits, *ends, *range(8 * last, 8 * last + 400)}:
        lines, damage = sift(flipped(text, bit))
        left_out = bit // 8 >= last and lines == right[:-1]
        assert damage is not None or lines == right or left_out, f"bit {bit}"
        if damage is not None:
            assert lines == right[: len(lines)] and damage.offset <= bit // 8
        told, same = told + (damage is not None), same + (damage is None and lines == right)
    assert told > 1000 and same < 100


def test_what_was_recorded_without_checksums_is_read(tmp_path: Path) -> None:
    right = three_drivers(tmp_path / "j")
    text = re.sub(r',"crc":"\w+"|,"after":"\w+"', "", (tmp_path / "j").read_text())
    assert "crc" not in text and "after" not in text
    (tmp_path / "j").write_text(text)
    assert read(tmp_path / "j") == right
    with (tmp_path / "j").open("a") as file:
        file.write('{"v":1,"at_s":99')
    written(tmp_path / "j", "z", epoch=4)
    assert read(tmp_path / "j")[:-1] == right and names(tmp_path / "j")[-1] == "z"
    lines = (tmp_path / "j").read_text().splitlines()
    (tmp_path / "j").write_text("\n".join([*lines[:-3], lines[-3][:-9], lines[-1]]) + "\n")
    # the new driver had read it
    with pytest.raises(InternalError, match=rf"line {len(lines) - 2}: it was altered"):
        read(tmp_path / "j")


def test_a_line_without_its_checksum_among_others_is_damaged(tmp_path: Path) -> None:
    written(tmp_path / "j", "a", "b", "c")
    lines = (tmp_path / "j").read_text().splitlines()
    (tmp_path / "j").write_text(
        "\n".join([lines[0], re.sub(r',"crc":"\w+"', "", lines[1]).replace('"b"', '"x"'), lines[2]])
        + "\n"
    )
    with pytest.raises(InternalError, match="line 2"):
        read(tmp_path / "j")


def test_a_driver_finds_the_last_whole_line_however_long_it_is(tmp_path: Path) -> None:
    for n in (1, 1 << 16, 1 << 20):
        path = tmp_path / f"j{n}"
        written(path, "a", "b" * n)
        whole = path.read_bytes()
        path.write_bytes(whole + b'{"v":1')
        written(path, "c", epoch=2)
        assert names(path) == ["a", "b" * n, "c"]
        path.write_bytes(
            whole[:-20] + path.read_bytes()[len(whole) - 20 :].replace(b"crc", b"crd", 1)
        )
        with pytest.raises(InternalError, match="line 2"):
            read(path)


def test_a_line_that_is_nested_too_deep_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, "a", "b", "c")
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join([lines[0], '{"v":1,"events":' + "[" * 100_000 + "]" * 100_000 + "}", *lines[1:]])
        + "\n"
    )
    with pytest.raises(
        InternalError, match="line 2: it was altered after it was written; .*--from-checkpoint"
    ) as raised:
        read(path)
    assert "\n" not in str(raised.value) and raised.value.exit_code == 2
    path.write_text(lines[0] + "\n" + "[" * 100_000)
    assert names(path) == ["a"]


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
    assert {
        "NodeReady",
        "Quiesced",
        "DigestPart",
        "SetShares",
        "DrainNode",
    } <= found and NodeReady.__name__ in found
