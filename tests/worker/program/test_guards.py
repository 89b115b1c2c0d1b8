"""Guards: what trips them, what is done about it, and that all ranks and layouts do the same."""

from __future__ import annotations

import math
import pickle
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.places import PROGRAMS
from support.reference import train
from support.worker.chain import job_of
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool

from elastic.config.job import load_job
from elastic.config.optimization import Guards
from elastic.data.order import ids_of, sample_ids
from elastic.data.streams import N_POSITIONS
from elastic.errors import SpecError
from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import (
    Box,
    GuardRule,
    GuardRules,
    GuardTripped,
    Holding,
    Job,
    Layout,
    Plan,
    Quiesced,
    Resume,
    ShardStored,
    StepDone,
    WorkerFailed,
    WorkerId,
)
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.process_groups.control_tree import Control
from elastic.worker.program.commit import Commit, StepReports, step_done
from elastic.worker.program.extra_state import ExtraState
from elastic.worker.program.guards import (
    MEMORY,
    GuardMemory,
    Trip,
    deviations,
    judge,
    needs_memory,
    trip_of,
)
from elastic.worker.program.job_program import with_job
from elastic.worker.session.generation import Generation
from elastic.worker.step import batch_shares
from elastic.worker.step.batch_shares import BatchShares
from elastic.worker.step.faulty_rank import UNNAMED, FaultyRank, Tripped
from elastic.worker.step.optimizer_step import Pending, Stepper


def rules(**guards: Any) -> GuardRules:
    return GuardRules.from_plain(Guards.model_validate(guards).model_dump())


def commit(
    loss: float, norm: float = 1.0, tokens: int = 10, blocks: tuple[float, ...] = ()
) -> Commit:
    squares = [(value * tokens) ** 2 for value in (norm, *blocks)]
    return Commit(squares[0], loss * tokens, tokens, block_square_norms=tuple(squares[1:]))


def filled(given: GuardRules, losses: list[float], norm: float = 1.0) -> GuardMemory:
    memory = GuardMemory(given)
    for loss in losses:
        memory.applied(commit(loss, norm))
    return memory


# ----------------------------------------------------------------------------------------- judgment

LEVEL = [2.0, 2.1, 1.9, 2.05, 1.95, 2.0, 2.02, 1.98]


def test_deviations_are_those_of_the_median() -> None:
    z, middle = deviations([0.0, 1.0, 2.0, 3.0, 100.0], 2.0 + 3 * 1.4826)
    assert (z, middle) == (pytest.approx(3.0), 2.0), (
        "one wild value moves neither median nor spread"
    )
    assert deviations([5.0] * 9, 5.05)[0] == pytest.approx(5.0), (
        "a constant loss has a spread of a hundredth"
    )


def test_a_spike_trips_upwards_only_and_not_before_there_are_enough_steps() -> None:
    given = rules(loss_spike={"z": 8, "after": 8, "window": 16})
    memory = filled(given, LEVEL)
    found = judge(given, memory, commit(6.0), blocks={})
    assert found and found[0] == "loss_spike"
    assert found[1].startswith(
        "train_loss 6 is 42.7 robust deviations above the median 2 of the last 8 steps (at most 8)"
    )
    assert (
        judge(given, memory, commit(2.2), blocks={}) is None
        and judge(given, memory, commit(0.1), blocks={}) is None
    )
    assert judge(given, filled(given, LEVEL[:7]), commit(6.0), blocks={}) is None, (
        "seven steps are too few"
    )
    assert judge(rules(), memory, commit(6.0), blocks={}) is None, "nobody asked"


def test_a_loss_that_falls_for_long_is_no_spike_and_one_that_is_not_positive_is_not_judged() -> (
    None
):
    given = rules(loss_spike={"z": 6, "after": 8, "window": 16})
    memory = GuardMemory(given)
    for step in range(200):
        now = commit(10.0 * 0.97**step + 0.1 * math.sin(step))
        assert judge(given, memory, now, blocks={}) is None
        memory.applied(now)
    assert judge(given, memory, commit(-3.0), blocks={}) is None
    assert len(memory.losses.values) == 16


def test_norms_explode_and_vanish_over_all_and_by_block() -> None:
    given = rules(
        grad_norm={"most": 5.0, "least": 1e-3}, block_norm={"most": 3.0, "least": 1e-4, "every": 2}
    )
    assert judge(given, None, commit(1.0, 4.0), blocks={"block 0": 2.0}) is None
    assert judge(given, None, commit(1.0, 6.0), blocks={}) == (
        "grad_norm",
        "gradient norm 6 explodes (at most 5)",
    )
    assert judge(given, None, commit(1.0, 1e-4), blocks={}) == (
        "grad_norm",
        "gradient norm 0.0001 vanishes (at least 0.001)",
    )
    found = judge(given, None, commit(1.0), blocks={"block 0": 2.0, "block 1": 1e-5})
    assert found == ("block_norm", "gradient norm of block 1 1e-05 vanishes (at least 0.0001)")
    assert (
        commit(1.0, 4.0, 10, (2.0, 3.0)).block_norms == [2.0, 3.0] and commit(1.0).block_norms == []
    )
    spiky = rules(grad_norm={"z": 8, "after": 8})
    found = judge(spiky, filled(spiky, LEVEL, 1.0), commit(1.0, 50.0), blocks={})
    assert found and found[0] == "grad_norm" and "robust deviations" in found[1]


def test_numbers_that_are_none_come_first() -> None:
    given = rules(loss_spike={"z": 8, "after": 8})
    found = judge(given, filled(given, LEVEL), commit(math.nan, math.nan), blocks={})
    assert found == ("not_finite", "train_loss nan, gradient norm nan")
    assert step_done(1, 5, commit(math.nan)).skipped and not step_done(1, 5, commit(1.0)).skipped


# ------------------------------------------------------------------------------------- what is done


@pytest.mark.parametrize(
    ("rule", "before", "in_a_row", "do", "more"),
    [
        ({"do": "rollback"}, (), 0, "rollback", ""), ({"do": "rollback"}, (("other", 9),), 0,
        "rollback", ""), ({"do": "rollback"}, (("g", 9),), 0, "stop",
        "again, after one roll-back: look at these"), ({"do": "rollback", "again": "skip"}, (("g",
        9),), 0, "skip", "again, after one roll-back: the step is skipped"), ({"do": "rollback",
        "rollbacks": 3}, (("g", 4), ("g", 5)), 0, "rollback", ""), ({"do": "rollback",
        "rollbacks": 3}, (("g", 4), ("g", 9)), 0, "stop", "again, after 2 roll-backs"),
        ({"do": "skip"}, (), 7, "skip", ""), ({"do": "skip"}, (), 8, "stop",
        "8 steps in a row were skipped before it"), ({"do": "rollback", "again": "skip",
        "in_a_row": 2}, (("g", 9),), 2, "stop", "2 steps in a row"), ({"do": "stop"}, (), 0, "stop",
        ""),
    ],
)  # fmt: skip
def test_no_guard_goes_on_for_ever(
    rule: dict[str, Any], before: Any, in_a_row: int, do: str, more: str
) -> None:
    trip = trip_of(("g", "it is bad"), GuardRule(**rule), 9, before=before, in_a_row=in_a_row)
    assert (trip.guard, trip.step, trip.do, trip.reason) == ("g", 9, do, "step 9: it is bad")
    assert trip.more.startswith(more) and bool(trip.more) == bool(more)


def test_a_trip_is_one_line_that_names_at_most_sixteen_samples() -> None:
    trip = Trip("loss_spike", 9, "skip", "step 9: it is bad", "again")
    error = Tripped(
        trip,
        FaultyRank(
            2, WorkerId("b", 0), "rank 2 on b/0 has the largest train_loss (9)", tuple(range(20))
        ),
    )
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.trip == trip
    named = ", ".join(map(str, range(16)))
    assert str(error).endswith(
        f"has the largest train_loss (9); its samples: {named} and 4 more; again"
    )


@pytest.mark.parametrize(
    ("n_samples", "named"), [(N_POSITIONS, "stream: no ids"), (4, "0, 1, 2, 3")]
)
def test_samples_of_a_stream_have_no_ids_to_name(
    n_samples: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(1, Layout(), (WorkerId("a", 0),), (4,), (1,), 1)
    job = Job(n_samples=n_samples, global_batch=4)
    monkeypatch.setattr(batch_shares, "ids_of", lambda job, step: sorted(ids_of(job, step)))
    shares = BatchShares(job, plan)
    told = Pending(9, {}, math.nan, 1.0)
    stepper: Any = SimpleNamespace(
        job=job,
        plan=plan,
        groups=SimpleNamespace(commit=Control(0, 1, ())),
        _told=told,
        shares=shares,
    )
    faulty_rank = Stepper.faulty_rank(
        stepper, Trip("not_finite", 9, "skip", "step 9: train_loss nan", "")
    )
    assert (faulty_rank.rank, faulty_rank.worker) == (0, WorkerId("a", 0))
    said = faulty_rank.sentence(Trip("not_finite", 9, "skip", "step 9: train_loss nan", ""))
    assert (
        said
        == f"step 9: train_loss nan: the loss of rank 0 on a/0 is not finite; its samples: {named}"
    )


# ------------------------------------------------------------------------------------------ memory


def test_the_memory_is_part_of_the_training_state() -> None:
    given = rules(loss_spike={"window": 8, "after": 4})
    program = with_job(load_program(PROGRAMS / "tiny.py"), Job(guards=given))
    assert with_job(program, Job(guards=given)) is program
    extra = ExtraState(program.extra_state)
    boxes = {spec.fqn: (None, torch.zeros(spec.shape, dtype=torch.uint8)) for spec in extra.specs()}
    memory = program.extra_state[MEMORY]
    for loss in range(1, 12):
        memory.applied(commit(float(loss)))
    memory.skipped()
    extra.note(boxes)
    other = ExtraState({MEMORY: GuardMemory(given)})
    other.load(boxes)
    assert (
        other.objects[MEMORY].losses.values
        == memory.losses.values
        == [math.log(n) for n in range(4, 12)]
    )
    assert other.objects[MEMORY].in_a_row == 1
    with pytest.raises(SpecError, match=r"extra_state\['guards'\]: the name is taken"):
        with_job(replace(program, extra_state={MEMORY: object()}), Job(guards=given))


def test_a_job_that_says_nothing_keeps_no_memory() -> None:
    assert not needs_memory(rules()) and not needs_memory(
        rules(grad_norm={"most": 1.0, "do": "stop"})
    )
    assert needs_memory(rules(not_finite="skip")) and needs_memory(
        rules(not_finite={"again": "skip"})
    )
    assert needs_memory(rules(grad_norm={"z": 4, "do": "stop"}))


# ----------------------------------------------------------------------------------------- job.yaml


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("guards: {loss_spice: {}}", "unknown key 'guards.loss_spice'; did you mean 'loss_spike'?"),
        ("guards: {loss_spike: {zz: 3}}", "unknown key 'guards.loss_spike.zz'; did you mean 'z'?"),
        ("guards: {not_finite: ignore}",
        "key 'guards.not_finite.do': input should be 'skip', 'rollback' or 'stop'"),
        ("guards: {grad_norm: skip}",
        "key 'guards.grad_norm': give most, least or z: the guard has no bound"),
        ("guards: {loss_spike: {z: -1}}",
        "key 'guards.loss_spike.z': input should be greater than 0 (it is -1)"),
    ],
)  # fmt: skip
def test_what_job_yaml_refuses(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "program.py").write_text("")
    (tmp_path / "job.yaml").write_text(f"steps: 4\nglobal_batch: 2\n{text}\n")
    with pytest.raises(SpecError) as error:
        load_job(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_word_is_enough(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    (tmp_path / "job.yaml").write_text(
        "steps: 4\nglobal_batch: 2\nguards: {not_finite: skip, loss_spike: rollback}\n"
    )
    found = load_job(tmp_path).plain()["guards"]
    assert found["not_finite"]["do"] == "skip" and found["loss_spike"] == {
        "do": "rollback", "again": "stop", "rollbacks": 1, "in_a_row": 8, "z": 8.0, "window": 64,
        "after": 16,
    }  # fmt: skip
    assert found["grad_norm"] is None and found["block_norm"] is None


# --------------------------------------------------------------------------- all ranks, all layouts

STEPS, NAN_AT, SPIKE_AT = 22, 4, 17


def bad_seed() -> int:
    """Sample 77 comes in step NAN_AT, sample 78 in SPIKE_AT."""
    return next(
        seed for seed in range(100_000)
        if 77 in sample_ids(512, 12, seed, step=NAN_AT - 1) and 78 in sample_ids(512, 12, seed,
        step=SPIKE_AT - 1)
    )  # fmt: skip


@pytest.mark.e2e
def test_bad_steps_are_skipped_alike_in_every_layout(pool: Pool, tmp_path: Path) -> None:
    """One step without a number, one spike against a window that was begun in another layout: both
    are left out, the order of samples stays, and the state at the end is that of one process that
    leaves them out."""
    given = rules(
        not_finite="skip",
        loss_spike={"after": 8, "window": 32},
        block_norm={"most": 1e9, "every": 3},
    )
    job = job_of("tiny_spike.py", STEPS) | {"seed": bad_seed(), "guards": asdict(given)}
    workers = pool.open(job, tmp_path)
    layouts = [Layout(dp_shard=3), Layout(pp=2, dp_shard=2), Layout(dp_shard=2, tp=2)]
    plans = [plan(1, layouts[0], workers, 12)]
    pool.enter(plans[0])
    for number, layout in enumerate(layouts[1:], 2):
        target = 6 * (number - 1)
        pool.wait(lambda: any(e.step >= target for e in pool.events(StepDone)), f"step {target}")  # noqa: B023
        plans.append(plan(number, layout, workers, 12, resume=live(plans[-1])))
        pool.enter(plans[-1])
        pool.entered(number)
    pool.quiesced(3, 4)
    pool.wait(lambda: len(pool.events(ShardStored)) == 4, "the last checkpoint")
    checkpoint_writer.commit(open_storage(str(tmp_path)), STEPS, 3, world_size=4, epoch=1, meta={})
    done = pool.events(StepDone)
    assert [e.step for e in done] == list(range(1, STEPS + 1))
    assert [e.step for e in done if e.skipped] == [NAN_AT, SPIKE_AT]
    alone = train(load_program(job["program"]), job, STEPS, skipped=(NAN_AT, SPIKE_AT))
    assert [e.train_loss for e in done] == pytest.approx(alone.losses, rel=1e-4, nan_ok=True)
    check_state(alone, tmp_path)
    check_trips(
        {e.guard: e for e in pool.events(GuardTripped)}, {p.generation: p for p in plans}, job
    )
    assert not pool.events(WorkerFailed)


def check_state(alone: Any, run: Path) -> None:
    checkpoint = checkpoint_index.open_checkpoint(
        checkpoint_index.find(open_storage(str(run)))[0].uri
    )
    for name, parameter in alone.model.named_parameters():
        moments = alone.state_of(parameter)
        wanted = {f"optim.{entry}.{name}": moments[entry] for entry in ("step", "exp_avg")} | {
            f"model.{name}": parameter
        }
        for fqn, tensor in wanted.items():
            shape = tuple(tensor.shape)
            got = checkpoint.read(Box(fqn, (0,) * len(shape), shape, "float32"))
            torch.testing.assert_close(
                got, tensor.detach(), atol=2e-4, rtol=1e-3, msg=lambda m, fqn=fqn: f"{fqn}: {m}"
            )


def check_trips(
    tripped: dict[str, GuardTripped], plans: dict[int, Any], job: dict[str, Any]
) -> None:
    """Each names the step, the rank that had the bad sample, and its samples."""
    assert set(tripped) == {"not_finite", "loss_spike"}
    for guard, step, bad in (("not_finite", NAN_AT, 77), ("loss_spike", SPIKE_AT, 78)):
        event = tripped[guard]
        ids = sample_ids(512, 12, job["seed"], step=step - 1)
        samples = plans[event.generation].samples
        d = next(
            d for d in range(len(samples)) if bad in ids[sum(samples[:d]) : sum(samples[: d + 1])]
        )
        assert (event.step, event.do) == (step, "skip")
        assert (
            event.samples == tuple(ids[sum(samples[:d]) : sum(samples[: d + 1])])
            and bad in event.samples
        )
        assert (
            event.worker == plans[event.generation].ranks[event.rank] and str(bad) in event.reason
        )
    assert "robust deviations above the median" in tripped["loss_spike"].reason


def test_what_every_rank_says_of_a_guard_is_told_once() -> None:
    told = StepReports()
    event = GuardTripped(3, 9, "loss_spike", "skip", "step 9: it is bad")
    assert told.add(event) == [event] and told.add(event) == []
    assert told.add(replace(event, step=10)) and told.add(replace(event, generation=4))


def test_a_step_that_was_left_out_is_told_as_such_by_what_a_worker_has_left_with() -> None:
    told, worker = StepReports({3: 8}), WorkerId("a", 0)
    told.add(GuardTripped(3, 9, "loss_spike", "skip", "step 9: it is bad"))
    left = Quiesced(worker, 3, 9, (Holding(worker, 3, 0, 9, "live"),), commit(9.0).numbers)
    done, said = told.add(left)
    assert isinstance(done, StepDone) and (done.step, done.skipped, said) == (9, True, left)
    assert told.add(done) == [] and told.add(left) == [left], "each step is told of once"


def test_all_steps_that_rank_0_had_no_time_to_report_are_told() -> None:
    """It was lost with two reports that nobody had fetched."""
    told, workers = StepReports({3: 7}), [WorkerId(name, 0) for name in "ab"]
    earlier = tuple((step, commit(float(step)).told(skipped=step == 8)) for step in (6, 7, 8))
    holdings = tuple(Holding(workers[0], 3, 0, 9, kind) for kind in ("live", "peer"))
    left = Quiesced(workers[0], 3, 9, holdings, commit(9.0).numbers, earlier=earlier)
    *done, said = told.add(left)
    assert [(e.step, e.train_loss, e.skipped) for e in done if isinstance(e, StepDone)] == [
        (8, 8.0, True),
        (9, 9.0, False),
    ]
    assert said == replace(left, earlier=()), "no line of the journal needs them"
    assert told.add(replace(left, worker=workers[1])) == [
        replace(left, worker=workers[1], earlier=())
    ]
    gap = Quiesced(workers[0], 4, 9, (Holding(workers[0], 4, 0, 9, "live"),), commit(9.0).numbers)
    assert StepReports({4: 6}).add(replace(gap, earlier=earlier[:1])) == [gap]


@pytest.mark.parametrize("breaks", ["script", "offender", "forward"])
def test_a_skip_is_told_also_where_the_generation_breaks_off(breaks: str) -> None:
    """Once, without the name of a rank, and what the program remembers is noted."""
    noted, reported = list[str](), list[GuardTripped]()
    trip = Trip("loss_spike", 9, "skip", "step 9: it is bad", "")

    def fail(*_: Any) -> None:
        raise ConnectionError("gone")

    def faulty_rank(trip: Trip, together: bool = True) -> FaultyRank:
        return fail() if together else FaultyRank(-1, None, UNNAMED, (5,))  # type: ignore[func-returns-value, return-value]

    stepper = SimpleNamespace(
        state=SimpleNamespace(step=9, tensors={}), trip=trip, faulty_rank=faulty_rank
    )
    script = SimpleNamespace(applied=fail if breaks == "script" else lambda *_: None)
    place = SimpleNamespace(
        script=script, extra=SimpleNamespace(note=noted.append), report=reported.append
    )
    generation: Any = Generation.__new__(Generation)
    generation.place, generation.stepper, generation.plan = (
        place,
        stepper,
        SimpleNamespace(generation=3),
    )
    if breaks == "forward":
        generation._stepped(commit(1.0), live=False)
    else:
        with pytest.raises(ConnectionError):
            generation._stepped(commit(1.0))
    (said,) = reported
    assert (said.generation, said.step, said.do, said.rank, said.samples) == (
        3,
        9,
        "skip",
        -1,
        (5,),
    ) and UNNAMED in said.reason
    assert noted == [{}]


@pytest.mark.slow
def test_guards_and_a_loss_scale_may_be_given_to_a_run_that_goes_on_and_taken_from_it(
    pool: Pool, tmp_path: Path
) -> None:
    """Each process resumes from the checkpoint of the one before, with other guards, or in another
    precision."""
    resume = Resume()
    some, more = rules(loss_spike={"window": 16}), rules(loss_spike={"window": 512})
    jobs = [(rules(), "float32"), (some, "float16"), (more, "float16"), (rules(), "float32")]
    for number, (given, precision) in enumerate(jobs, 1):
        job = job_of("tiny.py", 2 * number) | {"guards": asdict(given), "precision": precision}
        workers = pool.open(job, tmp_path, n=1)
        pool.enter(plan(number, Layout(), workers, 12, resume=resume))
        pool.quiesced(number, 1)
        pool.wait(lambda: pool.events(ShardStored), "the last checkpoint")
        digest = int(pool.events(ShardStored)[-1].digest)
        uri = checkpoint_writer.commit(
            open_storage(str(tmp_path)),
            2 * number,
            number,
            world_size=1,
            epoch=1,
            meta={"digest": digest},
        )
        resume = Resume("durable", 2 * number, number, uri=uri)
        assert [e.step for e in pool.events(StepDone)] == [2 * number - 1, 2 * number]
        parts = pool.digests(number) if number > 1 else []
        assert all(e.before is None for e in parts), "another state than the one that was stored"
