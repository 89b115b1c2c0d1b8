"""Each verdict is found in a journal that shows its cause, and not in one without it."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from support.observe import small_run
from support.observe.bound_runs import BATCH, GPU, MODEL, BoundRun, evidence_of

from elastic.api.diagnose import diagnosed, step_parts
from elastic.observe.accounting.model_flops import mfu
from elastic.observe.diagnosis.evidence import Evidence
from elastic.observe.diagnosis.step_verdicts import computing, loads, verdicts
from elastic.observe.diagnosis.verdicts import WORTH, RunVerdict, percent
from elastic.storage import LocalStorage
from elastic.types import (
    Copy,
    CopyFailed,
    CopyStored,
    DeviceNoted,
    Evaluated,
    HardwareProfile,
    Layout,
    RankProfiled,
    StepDone,
    WorkerId,
)

# ranks compute three times 4 blocks x 4 samples x 0.02 s of a step of 1 s: 96 %
QUIET = BoundRun()


def found(run: BoundRun) -> dict[str, RunVerdict]:
    return {one.bound: one for one in diagnosed(evidence_of(run.lines()))}


def of_data(done: StepDone) -> StepDone:
    return replace(done, data_s=0.4)


def of_copies(done: StepDone) -> StepDone:
    return replace(done, copy_s=0.3)


def of_tokens(done: StepDone) -> StepDone:
    return replace(done, imbalance=1.5)


STORED = Copy(10, "durable", 1, Layout(dp_shard=4), uri="/c", n_bytes=10**9)
PEER = Copy(10, "peer", 1, Layout(dp_shard=4))

CASES = {
    "data": (QUIET.with_(step=of_data, data_s=(0.0, 0.4, 0.0, 0.0)), "rank 1 on n1 waits 0.400 s"),
    "copies": (QUIET.with_(step=of_copies), "29 % of the run"),
    "storage": (
        QUIET.with_(
            at_step=tuple((k, (CopyStored(STORED, 10.0, stall_s=1.0),)) for k in range(2, 40, 4)),
            pause_s=1.0,
        ),
        "10 checkpoints written at 100.0 MB/s",
    ),
    "imbalance": (QUIET.with_(unit_s=(0.01, 0.01, 0.02, 0.01)), "rank 2 on n2 computes 1.60 times"),
    "pipeline bubble": (
        QUIET.with_(layout=Layout(pp=2, dp_shard=2), unit_s=(0.01,) * 4),
        "2 pipeline stages with 2 microbatches are idle 33 %",
    ),
    "network": (QUIET.with_(unit_s=(0.008,) * 4), "computes 38 % of a step"),
    "heat or power": (
        QUIET.with_(
            unit_s=(0.01, 0.01, 0.01, 0.02),
            at_step=((12, (DeviceNoted(WorkerId("n3", 0), "clocks lowered by the temperature "
            "(hardware); 90 °C or more"),)),),
        ),
        "the GPU of n3/0 says: clocks lowered by the temperature (hardware); 90 °C or more and is "
        "2.00 times slower",
    ),
    "evaluation": (
        QUIET.with_(
            job=(("eval_every", 5),), pause_s=3.0,
            at_step=tuple((k, (Evaluated(1, k, {"validation_loss": 4.0}, 3.0),))
            for k in range(5, 40, 5)),
        ),
        "every 5 steps",
    ),
    "waiting for capacity": (QUIET.with_(waits_s=20.0), "without enough nodes to train (min_workers: 1)"),
    "start-up": (QUIET.with_(prepared_s=30.0), "until machines, workers"),
    "time between steps": (QUIET.with_(late_s=0.3), "between the end of a step and the next"),
}  # fmt: skip


def test_what_a_restarted_script_reads_again_is_its_restarts() -> None:
    """Replicas are no key of its job, and storage is not what is slow."""
    run = QUIET.with_(job=(("restarted", True), ("script", "t.py")), prepared_s=30.0)
    books = run.lines()
    evidence = evidence_of(books)
    seconds = {**evidence.account.seconds, "checkpoint_restore": 20.0}
    account = replace(evidence.account, seconds=seconds)
    verdicts_of = {one.bound: one for one in diagnosed(replace(evidence, account=account))}
    assert "storage" not in verdicts_of
    one = verdicts_of["changes of capacity"]
    assert "restarts of the script took" in one.number and "elastic.loop" in one.advice
    assert "at step 0 again" not in one.number and "docs/script.md" not in one.advice
    start = account.transitions[0]
    anew = replace(start, cause="loss", steps_lost=60)
    account = replace(account, transitions=(start, anew, replace(anew, at_step=40)))
    verdicts_of = {one.bound: one for one in diagnosed(replace(evidence, account=account))}
    one = verdicts_of["changes of capacity"]
    assert one.number.endswith("; 1 of them began at step 0 again")
    assert one.advice.startswith("resume from its newest checkpoint, as docs/script.md shows; or ")


def test_a_run_without_a_fault_is_bound_by_computation_alone() -> None:
    assert list(found(QUIET)) == ["compute"]
    assert found(QUIET)["compute"].share == 0.0
    assert "96 % of a step" in found(QUIET)["compute"].number


@pytest.mark.parametrize("bound", CASES)
def test_a_cause_is_named_with_its_number_and_only_where_it_is(bound: str) -> None:
    run, number = CASES[bound]
    verdict = found(run)[bound]
    assert verdict.share >= WORTH and verdict.usd > 0
    assert number in verdict.number
    assert verdict.advice
    assert next(iter(found(run))) == bound, "what wins most comes first"
    assert bound not in found(QUIET)


def test_of_a_hot_gpu_the_imbalance_is_not_told_twice() -> None:
    assert "imbalance" not in found(CASES["heat or power"][0])


def test_a_note_that_is_not_of_heat_says_nothing_of_it() -> None:
    note = DeviceNoted(WorkerId("n3", 0), "120 PCIe replays since this worker began")
    assert "heat or power" not in found(QUIET.with_(at_step=((12, (note,)),)))


def test_samples_of_unlike_length() -> None:
    verdict = found(QUIET.with_(step=of_tokens))["imbalance"]
    assert "50 % more tokens" in verdict.number and "pack: true" in verdict.advice
    assert verdict.share == pytest.approx(found_share(QUIET) * 0.96 / 3, rel=0.01)


def found_share(run: BoundRun) -> float:
    return evidence_of(run.lines()).share("productive")


def test_replicas_that_slow_the_steps() -> None:
    stored = tuple((k, (CopyStored(PEER, slowed_s=1.0),)) for k in range(2, 40, 4))
    assert "24 % longer" in found(QUIET.with_(at_step=stored))["copies"].number


def test_checkpoints_that_were_skipped_are_told() -> None:
    run, _ = CASES["storage"]
    skipped = (1, (CopyFailed(1, 1, "still writing", skipped=True),))
    said = found(run.with_(at_step=(*run.at_step, skipped)))["storage"].number
    assert "1 skipped because" in said


def test_waiting_for_nodes_and_changes_are_read_from_the_ledger() -> None:
    verdicts_of = {one.bound: one for one in verdicts(evidence_of(small_run.lines()))}
    assert "2 steps trained again" in verdicts_of["changes of capacity"].number
    assert "15 % of the run" in verdicts_of["waiting for capacity"].number
    assert "ready nodes without a part" in verdicts_of["idle nodes"].number


def test_advice_follows_the_job() -> None:
    slow = CASES["imbalance"][0]
    assert "rebalance: true" in found(slow.with_(job=(("rebalance", False),)))["imbalance"].advice
    loading = CASES["data"][0]
    more = (("data", {"loader_workers": 2}),)
    assert found(loading)["data"].advice.startswith("data.loader_workers: 2 ")
    assert found(loading.with_(job=more))["data"].advice.startswith("data.loader_workers: 4 ")
    many = (("data", {"loader_workers": 8}),)
    assert "data.cache" in found(loading.with_(job=many))["data"].advice
    assert "bfloat16" in found(QUIET.with_(job=(("precision", "float32"),)))["compute"].advice
    assert "compile: true" in found(QUIET.with_(job=(("compile", False),)))["compute"].advice


@pytest.mark.parametrize("place", ["in elastic.loop(...)", "in ElasticTrainer(job=...)"])
def test_advice_names_the_place_in_which_the_run_was_given_its_keys(place: str) -> None:
    loading, plain = CASES["data"][0], CASES["imbalance"][0]
    mine = (("keys_in", place),)
    assert found(loading.with_(job=mine))["data"].advice == f"data.loader_workers: 2 {place}"
    assert found(loading)["data"].advice == "data.loader_workers: 2 in job.yaml"
    given = (("rebalance", False), *mine)
    assert f"rebalance: true {place}" in found(plain.with_(job=given))["imbalance"].advice
    assert not any("job.yaml" in one.advice for one in found(loading.with_(job=mine)).values())


# ------------------------------------------------------------------------- with a cost model


def known(**more: object) -> tuple[HardwareProfile, ...]:
    return (replace(GPU, **more),)  # type: ignore[arg-type]


def test_what_the_cost_model_says_of_the_network() -> None:
    slow = QUIET.with_(hardware=known(link_bytes_per_s=1e8))
    fast = QUIET.with_(hardware=known(link_bytes_per_s=1e12))
    heavy = replace(MODEL, n_params=400_000_000)
    verdict = found(slow.with_(model=heavy))["network"]
    assert "communication that computation does not hide, most of it on dp_shard" in verdict.number
    assert "zero_stage" in verdict.advice
    assert "network" not in found(fast)


def test_a_link_far_below_the_others_is_named() -> None:
    slow = CASES["network"][0].with_(links=(1e9, 1e9, 1e8, 1e9))
    verdict = found(slow)["network"]
    assert "n2 reaches its neighbor with 100.0 MB/s, others with 1.0 GB/s" in verdict.number
    assert verdict.advice.startswith("elastic doctor")
    assert "neighbor" not in found(slow.with_(links=(1e9,) * 4))["network"].number


def test_memory_bandwidth() -> None:
    sample = replace(MODEL.sample, moved_bytes=1 << 36) if MODEL.sample else None
    moved = QUIET.with_(hardware=known(), model=replace(MODEL, sample=sample))
    assert "moves bytes in memory" in found(moved)["memory bandwidth"].number
    assert "compute" not in found(moved)
    assert "compute" in found(QUIET.with_(hardware=known()))


def test_a_layout_that_computes_twice_says_so() -> None:
    layout = Layout(dp_shard=4, activation_checkpointing="full")
    verdict = found(QUIET.with_(hardware=known(), layout=layout))["compute"]
    assert "a second time" in verdict.number and verdict.share > WORTH
    assert "activation_checkpointing" in verdict.advice


def of_main(seen: Evidence) -> float | None:
    assert seen.main is not None
    return mfu(seen.state, seen.main.plan, seen.nodes, step_s=median(seen.main.steps_s))


def test_mfu_is_the_models_own_work_over_the_peak() -> None:
    seen = evidence_of(QUIET.with_(hardware=known()).lines())
    assert seen.main is not None and MODEL.sample is not None
    reached = MODEL.sample.flop * BATCH / (4 * 9.9e14)
    assert of_main(seen) == pytest.approx(reached)
    assert (
        f"{percent(reached)} of the peak" in found(QUIET.with_(hardware=known()))["compute"].number
    )
    assert step_parts(seen, seen.main.plan)["products"] > 0
    alone = evidence_of(QUIET.lines())
    assert alone.main is not None
    assert of_main(alone) is None and step_parts(alone, alone.main.plan) == {}


def test_processes_on_cpus_are_not_said_to_wait_for_the_network() -> None:
    cpus = CASES["network"][0].with_(kind="CPU")
    assert list(found(cpus)) == ["compute"]
    assert "wait for a core" in found(cpus)["compute"].number


def test_loads_count_samples_and_blocks() -> None:
    pipeline = QUIET.with_(layout=Layout(pp=2, dp_shard=2))
    facts = evidence_of(pipeline.lines()).main
    assert facts is not None
    assert loads(facts) == [pytest.approx(0.02 * 8 * 2)] * 4
    assert computing(facts) == pytest.approx(0.96)


def test_a_run_of_a_few_steps_says_nothing_of_its_steps() -> None:
    seen = evidence_of(QUIET.lines()[:5])
    assert seen.main is None and [one.bound for one in verdicts(seen)] in ([], ["start-up"])
    assert verdicts(evidence_of([])) == ()


def test_a_run_that_fails_before_its_first_step_is_bound_by_its_error() -> None:
    """What its machines took to start is no advice to somebody whose script raises."""
    spent, totals = defaultdict(float, program_startup=5.0), SimpleNamespace(wall_s=10.0)
    more = {"usd": defaultdict(float), "totals": totals, "transitions": ()}
    books: Any = SimpleNamespace(seconds=spent, **more)
    starting = replace(evidence_of(QUIET.lines()[:5]), account=books)
    assert [one.bound for one in verdicts(starting)] == ["start-up"]
    for step, said in ((0, []), (3, ["start-up"])):
        state = replace(starting.state, phase="failed", step=step)
        assert [one.bound for one in verdicts(replace(starting, state=state))] == said


def test_a_profile_of_the_run_counts_in_the_place_of_the_cost_model(tmp_path: Path) -> None:
    parts = {"compute": 0.5, "fsdp": 0.3, "data": 0.5, "idle": 0.1, "optimizer": 0.1}
    said = {
        "schema": 1, "rank": 0, "worker": "n0/0", "at": "", "steps": [20], "step_s": 1.5,
        "parts": parts, "collectives": {}, "on_device": True,
    }  # fmt: skip
    storage = LocalStorage(tmp_path)
    storage.put("profiles/p1/rank-0.json", json.dumps(said).encode())
    told = RankProfiled(1, "p1", 0, 19, 1, 100)
    run = QUIET.with_(hardware=known(), at_step=((21, (told,)),))
    seen = evidence_of(run.lines())
    verdict = {one.bound: one for one in diagnosed(seen, storage)}["network"]
    assert "30 % of a step is communication" in verdict.number
    assert "most of it on dp_shard (measured, profile p1)" in verdict.number
    assert "network" not in {one.bound for one in diagnosed(seen)}, "without its files: as before"
    cpus = evidence_of(run.with_(kind="CPU").lines())
    assert "network" not in {one.bound for one in diagnosed(cpus, storage)}, "or for a core"
    storage.put("profiles/p1/rank-1.json", b"{")
    assert "network" not in {one.bound for one in diagnosed(seen, storage)}, "damaged"
    storage.delete("profiles/p1/rank-1.json")
    failed = replace(told, error="no room")
    unread = evidence_of(run.with_(at_step=((21, (failed,)),)).lines())
    assert "network" not in {one.bound for one in diagnosed(unread, storage)}
