"""What a layout says besides its axes: in its own text, or by keys of the job for all layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.config.job import job_of
from elastic.config.pool_checks import check_fit
from elastic.errors import InfeasiblePlan, SpecError
from elastic.planner.layout_choice import named_for, plan_layout
from elastic.types import Layout, ModelProfile, Node, Pool, parse_layout
from elastic.worker.hosting.resume_checks import check_layouts
from elastic.worker.standalone.layout_started import layout_of

MODEL = ModelProfile(n_blocks=4, n_params=10, specs=(), tp_limit=2)
NODES = [Node("a", "p", 4)]


def job(**keys: Any) -> Any:
    return job_of({"steps": 4, "global_batch": 16, **keys}, Path("program.py"))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp_shard=2, tp=2, activation_checkpointing="full"),
        Layout(pp=2, schedule="interleaved1f1b", virtual_stages=3),
        Layout(
            pp=2,
            microbatch_size=3,
            zero_stage=1,
            activation_checkpointing="selective",
            offload=True,
        ),
    ],
)
def test_a_layout_and_its_text(layout: Layout) -> None:
    assert parse_layout(str(layout)) == layout


def test_the_text_of_a_layout_goes_before_the_keys_of_the_job() -> None:
    keys = {"activation_checkpointing": "full", "microbatch_size": 4}
    assert parse_layout("tp=2", keys) == Layout(
        tp=2, activation_checkpointing="full", microbatch_size=4
    )
    assert parse_layout("tp=2,activation_checkpointing=none", keys) == Layout(
        tp=2, microbatch_size=4
    )


def test_keys_hold_for_every_layout_that_is_chosen() -> None:
    spec = job(activation_checkpointing="full", microbatch_size=2)
    want = Layout(dp_shard=4, activation_checkpointing="full", microbatch_size=2)
    found = plan_layout(MODEL, spec.job(), NODES)
    assert (found.layout, found.n_microbatches) == (want, 2)
    assert layout_of(spec, 4) == want
    named = job(activation_checkpointing="full", layout="tp=2,activation_checkpointing=selective")
    want = Layout(tp=2, activation_checkpointing="selective")
    assert (
        plan_layout(MODEL, named.job(), NODES).layout
        == layout_of(named, 2)
        == named.job().layout_of(named_for(named.job(), 4))
        == want
    )
    by_size = job(activation_checkpointing="full", layout={"2": "tp=2"})
    assert plan_layout(MODEL, by_size.job(), NODES).layout == by_size.job().layout_of("tp=2")


def test_a_schedule_of_the_job_counts_for_the_blocks_that_stages_need() -> None:
    check_layouts(job(layout="pp=4"), MODEL)
    with pytest.raises(
        SpecError, match="8 pipeline stages, but the program's `blocks` matches only 4 "
    ):
        check_layouts(job(layout="pp=4", schedule="interleaved1f1b"), MODEL)


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (
            ("CPU",),
            "float8: true needs GPUs that compute in float8 (H100, H200, B200, L4, L40S); there "
            "are none",
        ),
        (("H100", "A100"), "float8: true needs GPUs of one kind, the pools have H100 and A100"),
        (("H100", "CPU"), "float8: true needs GPUs of one kind, the pools have H100 and CPU"),
    ],
)
def test_float8_is_refused_where_not_all_have_it(kinds: tuple[str, ...], said: str) -> None:
    spec = job(float8=True, precision="bfloat16")
    with pytest.raises(SpecError) as error:
        check_fit(spec, [Pool(kind, kind) for kind in kinds])
    assert said in str(error.value)
    check_fit(spec, [Pool("a", "H100"), Pool("b", "H100")])
    assert plan_layout(MODEL, spec.job(), NODES).layout.tp == 1
    with pytest.raises(InfeasiblePlan, match="tp=2 does not go with float8"):
        plan_layout(MODEL, replace(spec.job(), layout="tp=2"), NODES)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"layout": "tp=2,activation_checkpointing=some"},
            "activation_checkpointing must be none or selective or full, not 'so",
        ),
        (
            {"layout": "tp=2,zero_stage=4"},
            "layout 'tp=2,zero_stage=4': zero_stage must be 1 or 2 or 3, not '4'",
        ),
        (
            {"layout": "tp=2,offload=1"},
            "layout 'tp=2,offload=1': offload must be false or true, not '1'",
        ),
        (
            {"layout": "pp=2,schedule=zb"},
            "layout 'pp=2,schedule=zb': schedule must be 1f1b or gpipe or interleaved1f1b, not "
            "'zb'",
        ),
        (
            {"schedule": "zb"},
            "key 'schedule': input should be '1f1b', 'gpipe' or 'interleaved1f1b' (it is 'zb')",
        ),
        (
            {"layout": "tp=2,microbatch_size=0"},
            "microbatch_size must be a whole number of at least 1, not '0'",
        ),
        (
            {"activation_checkpointing": "all"},
            "'activation_checkpointing': input should be 'none', 'selective' or 'full' (it is",
        ),
        ({"zero_stage": 0}, "key 'zero_stage': input should be 1, 2 or 3 (it is 0)"),
        (
            {"reduce_dtype": "float16"},
            "key 'reduce_dtype': input should be 'float32' or 'bfloat16' (it is 'float16')",
        ),
        (
            {"precision": "float16", "script": "t.py"},
            "float16 needs a loss scale, which a script's own loss does not get; take bf",
        ),
        (
            {"float8": True},
            "float8: true needs precision: bfloat16 for all that is no matrix product, not float32",
        ),
        (
            {"float8": True, "precision": "bfloat16", "layout": "tp=2"},
            "has tp=2, float8: true does not go with that",
        ),
        (
            {"compile": True, "microbatch_tokens": 64, "layout": "tp=2"},
            "layout 'tp=2' has tp=2; compile: true goes with it or with microbatch_tokens, not "
            "with both",
        ),
        (
            {"compile": True, "layout": "cp=2"},
            "layout 'cp=2' has cp=2, compile: true does not go with that; take one of them",
        ),
        ({"offload": "some"}, "key 'offload': input should be a valid boolean"),
        ({"microbatch_size": 0}, "key 'microbatch_size': input should be greater than 0 (it is 0)"),
        (
            {"microbatch_size": 2, "script": "t.py"},
            "a script gets its whole share of a step at once; leave microbatch_size out",
        ),
        (
            {"microbatch_tokens": 9, "script": "t.py"},
            "whole share of a step at once; leave microbatch_tokens out",
        ),
        (
            {"microbatch_tokens": 9, "microbatch_size": 2},
            "both say what is computed at once; take one of them",
        ),
        (
            {"microbatch_tokens": 9, "layout": "pp=2"},
            "layout 'pp=2': pp=2 needs micro-batches of one shape, microbatch_tokens",
        ),
        (
            {"microbatch_tokens": 9, "layout": "tp=2,microbatch_size=2"},
            "microbatch_tokens says already what is computed at once",
        ),
        (
            {"microbatch_tokens": 0},
            "key 'microbatch_tokens': input should be greater than 0 (it is 0)",
        ),
        (
            {
                "microbatch_tokens": 9,
                "data": {
                    "train": {"jsonl": "a", "tokenizer": "bytes", "seq": 10, "pack": "document"}
                },
            },
            "data.train: a sample of seq=10 does not fit into microbatch_tokens=9",
        ),
        (
            {
                "data": {
                    "validation": {"v": {"mixture": {"a": {"folder": "b", "pack": "document"}}}}
                }
            },
            "data.validation.v: 'pack: document' gives samples of unequal length; give "
            "microbatch_tokens, or take pack: pad",
        ),
    ],
)
def test_bad_input_is_one_line(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        job(**keys)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
