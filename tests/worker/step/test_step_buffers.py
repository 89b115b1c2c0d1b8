"""A step that is not applied leaves the buffers as they were; frozen weights go with the generation
that read them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.places import PROGRAMS
from support.reference import collate, train
from support.worker.chain import job_of
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool

from elastic.config.optimization import Guards
from elastic.data.budget import TokenBudget
from elastic.data.order import ids_of, sample_ids
from elastic.errors import InternalError, ProgramError
from elastic.program import Program, Weights, load_program
from elastic.storage import open_storage
from elastic.types import Job, Layout, ModelProfile, Plan, ShardStored, StepDone, WorkerId
from elastic.types.orders import Rendezvous
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.model_profile import trace
from elastic.worker.session.generation import Generation
from elastic.worker.session.workplace import EnterOrder
from elastic.worker.state.buffers import StepBuffers
from elastic.worker.state.train_state import TrainState
from elastic.worker.step import batch_shares
from elastic.worker.step import optimizer_step as step_module
from elastic.worker.step.commit_vector import CommitFields
from elastic.worker.step.faulty_rank import Tripped
from elastic.worker.step.optimizer_step import Stepper

COUNTING = load_program(PROGRAMS / "tiny_counting.py")
SKIP = Guards.model_validate({"not_finite": "skip"}).model_dump()
STEPS, NAN_AT = 12, 3
ALONE = Plan(1, Layout(), (WorkerId("node0", 0),), (12,), (4,), 1)

NO_COPIES = SimpleNamespace(replicas=SimpleNamespace(unacknowledged=list))


def bad_seed() -> int:
    """Sample 77 comes in step NAN_AT, and not again in an epoch, which has more steps than the
    job."""
    return next(seed for seed in range(10_000) if 77 in sample_ids(512, 12, seed, step=NAN_AT - 1))


@pytest.fixture
def begun() -> Iterator[Any]:
    """A fresh state of one rank, and its steps."""
    groups = Groups(0, Layout(), torch.device("cpu"))

    def begin(
        guards: dict[str, Any], program: Program = COUNTING, plan: Plan = ALONE
    ) -> tuple[TrainState, Stepper, Any]:
        job = job_of("tiny_counting.py", STEPS) | {
            "seed": bad_seed(),
            "guards": guards,
            "n_samples": 512,
        }
        state = TrainState(
            program,
            trace(program),
            groups,
            layout=Layout(),
            layers=(4,),
            rank=0,
            job=Job.from_plain(job),
        )
        state.fill_fresh(7)
        dataset: Any = program.dataset and program.dataset()
        stepper = Stepper(program, Job.from_plain(job), plan, state=state, groups=groups)
        return (
            state,
            stepper,
            lambda: [collate(dataset, sample_ids(512, 12, job["seed"], step=state.step))],
        )

    yield begin
    groups.close()


def buffers_of(state: TrainState) -> dict[str, torch.Tensor]:
    return {
        name: state.tensors[f"model.head.{name}"][1].clone() for name in ("calls", "mean", "table")
    }


def replacing() -> torch.nn.Module:
    """Its forward puts other tensors in the places of its buffers."""
    model = COUNTING.model()
    head: Any = model.head

    def before(module: Any, given: Any) -> None:
        module.calls, module.mean = module.calls + 1, module.mean * 0.9 + 1.0

    head.forward = partial(torch.nn.Linear.forward, head)
    head.register_forward_pre_hook(before)
    return model


@pytest.mark.parametrize("n", [1, 3])
def test_a_step_of_several_passes_leaves_what_one_leaves(begun: Any, n: int) -> None:
    """Also where a pass puts other tensors in the places of its buffers."""
    for model in (COUNTING.model, replacing):
        plan = replace(ALONE, n_microbatches=n)
        state, stepper, batch = begun({}, replace(COUNTING, model=model), plan)
        for _ in range(2):
            stepper.run(batch(), CommitFields())
        assert int(buffers_of(state)["calls"]) == 2
    assert buffers_of(state)["mean"].tolist() == pytest.approx([1.9] * 32)
    stepper.state.model(batch()[0]["input"])  # as in a step that is aborted
    state.buffers.note()
    stepper.state.model(batch()[0]["input"])
    state.buffers.take_back()
    assert int(buffers_of(state)["calls"]) == 3


def test_a_stage_is_taken_back_by_its_own_passes_alone() -> None:
    """Of two stages of a rank, the passes of the second come after those of the first."""
    stages = [torch.nn.Module(), torch.nn.Module()]
    for stage in stages:
        stage.register_buffer("n", torch.zeros(()))
    buffers = StepBuffers([stage.n for stage in stages], stages)
    buffers.note()
    for k in (0, 0, 1, 1):
        buffers.again(k)
        stages[k].n += 1
    buffers.keep()
    assert [stage.n.item() for stage in stages] == [1.0, 1.0]


def test_a_buffer_that_changes_its_shape_is_named() -> None:
    model = torch.nn.BatchNorm1d(2)
    buffers = StepBuffers(list(model.buffers()), [model])
    model.running_mean = torch.zeros(3)
    with pytest.raises(ProgramError, match=r"running_mean of BatchNorm1d the shape \[3\]"):
        buffers.settle()


def test_gradients_that_were_read_after_an_abort_are_not_kept(
    begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU an aborted kernel ends like one that is done: the numbers look right."""
    state, stepper, batch = begun(SKIP)
    stepper.run(batch(), CommitFields())
    real = step_module.read

    def aborted_meanwhile(tensors: Any) -> Any:
        stepper.groups._aborted = True
        return real(tensors)

    monkeypatch.setattr(step_module, "read", aborted_meanwhile)
    with pytest.raises(ConnectionAbortedError, match="generation 0 was aborted"):
        stepper.run(batch(), CommitFields())
    assert stepper.pending is None, "they could be applied when the others say so"
    assert state.step == 1


def test_a_skipped_step_takes_its_buffers_back(begun: Any) -> None:
    state, stepper, batch = begun(SKIP)
    for step in range(1, NAN_AT + 2):
        before = buffers_of(state)
        stepper.run(batch(), CommitFields())
        assert (stepper.trip is not None) == (step == NAN_AT)
        same = {
            name: torch.equal(tensor, before[name]) for name, tensor in buffers_of(state).items()
        }
        assert same == {"calls": step == NAN_AT, "mean": step == NAN_AT, "table": True}
    assert int(buffers_of(state)["calls"]) == NAN_AT and state.step == NAN_AT + 1
    assert [tensor.numel() for tensor in state.buffers.watched] == [1, 32], (
        "a large one that stays as it is is not copied"
    )


def test_before_a_roll_back_too(begun: Any) -> None:
    state, stepper, batch = begun(Guards().model_dump())
    for _ in range(NAN_AT - 1):
        stepper.run(batch(), CommitFields())
    with pytest.raises(Tripped):
        stepper.run(batch(), CommitFields())
    assert int(buffers_of(state)["calls"]) == state.step == NAN_AT - 1


def broken_off(stepper: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A step whose commit has come about when a peer is gone; the commit."""
    commits: list[Any] = []
    real = stepper._commit

    def broken(*args: Any, **named: Any) -> Any:
        commits.append(real(*args, **named))
        raise ConnectionAbortedError("a peer is gone")

    monkeypatch.setattr(stepper, "_commit", broken)
    with pytest.raises(ConnectionAbortedError):
        stepper.run(batch, CommitFields())
    return commits[0].commit


def a_place() -> Any:
    """A workplace that a generation can be made in."""
    return SimpleNamespace(
        held=[], device=torch.device("cpu"), device_lost=False, job=Job(), script=None,
        me=ALONE.ranks[0], storage=None, report=list, background=list, at_phase=list,
        enter_phase=lambda number: None,
        profile=ModelProfile(4, 0, ()),
    )  # fmt: skip


def test_a_step_that_is_broken_off_may_still_be_applied(
    begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit aborts here; the state that is taken along is that of the step before; then the
    word comes to apply it."""
    state, stepper, batch = begun(SKIP)
    commit = broken_off(stepper, batch(), monkeypatch)
    after = buffers_of(state)
    place = a_place()
    left = Generation(
        place, EnterOrder(ALONE, 0, Rendezvous(ALONE.ranks, ("", 0))), lambda: (False, False)
    )  # type: ignore[arg-type]
    left.state, left.copies = state, NO_COPIES  # type: ignore[assignment]
    for _ in range(2):
        left.take_along()
        assert [(held.kind, held.step) for held in place.held] == [("live", 0)]
        assert int(buffers_of(state)["calls"]) == 0 and not buffers_of(state)["mean"].any()
    stepper.roll_forward(1, commit)
    assert (
        all(torch.equal(tensor, after[name]) for name, tensor in buffers_of(state).items())
        and int(after["calls"]) == 1
    )
    left.take_along()
    assert int(buffers_of(state)["calls"]) == 1, "of a step that is applied nothing is taken back"


def test_gradients_of_one_step_are_never_applied_as_another(
    begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, stepper, batch = begun(SKIP)
    commit = broken_off(stepper, batch(), monkeypatch)
    with pytest.raises(
        InternalError, match="told to apply step 2; the gradients here are those of step 1"
    ):
        stepper.roll_forward(2, commit)
    assert state.step == 0


def test_samples_that_the_order_does_not_give_are_an_error(
    begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank adds the digest of what it has read to the commit; the sum must be that of the
    step's samples."""
    state, stepper, batch = begun(SKIP)
    ids = stepper.shares.ids_of(0, 0)
    monkeypatch.setattr(stepper.shares, "ids_of", lambda step, dp: [ids[0], *ids[:-1]])
    with pytest.raises(InternalError, match="step 1: the ranks trained on other samples"):
        stepper.run(batch(), CommitFields())
    assert state.step == 0


def test_ids_of_a_step_are_computed_once_and_where_it_is_read(
    begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of many samples has the device wait for nothing that is known by then."""
    threads: list[str] = []

    def noted(job: Job, step: int) -> list[int]:
        threads.append(threading.current_thread().name)
        return ids_of(job, step)

    monkeypatch.setattr(batch_shares, "ids_of", noted)
    state, stepper, batch = begun(SKIP)
    stepper.shares.budget = TokenBudget(lambda sample: 4, 64)
    reader = threading.Thread(target=stepper.shares.cut, args=(0,), name="reader")
    reader.start()
    reader.join()
    stepper.run(batch(), CommitFields())
    assert state.step == 1 and stepper.shares.pad_share(0) == 0.0
    assert threads == ["reader"]


def test_a_state_in_the_middle_of_an_update_is_that_of_no_step(begun: Any) -> None:
    state, _, _ = begun(SKIP)
    place = a_place()
    left = Generation(
        place, EnterOrder(ALONE, 0, Rendezvous(ALONE.ranks, ("", 0))), lambda: (False, False)
    )  # type: ignore[arg-type]
    left.state, left.copies = state, NO_COPIES  # type: ignore[assignment]
    left.take_along()
    assert [held.kind for held in place.held] == ["live"]
    state.dirty = True  # the optimizer was interrupted
    left.take_along()
    assert place.held == []


def test_a_module_without_buffers_is_not_copied() -> None:
    none = StepBuffers([])
    none.note()
    none.keep()
    none.take_back()
    assert none.watched == [] == none._others


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_all_ranks_leave_out_the_same(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny_counting.py", STEPS) | {"seed": bad_seed(), "guards": SKIP}
    workers = pool.open(job, tmp_path, n=3)
    first = plan(1, Layout(dp_shard=2), workers, 12)
    pool.enter(first)
    pool.wait(
        lambda: any(e.step >= NAN_AT + 2 for e in pool.events(StepDone)), "steps after the bad one"
    )
    pool.enter(plan(2, Layout(dp_replicate=3), workers, 12, resume=live(first)))
    pool.quiesced(2, 3)
    pool.wait(lambda: len(pool.events(ShardStored)) == 3, "the last checkpoint")
    uri = checkpoint_writer.commit(
        open_storage(str(tmp_path)), STEPS, 2, world_size=3, epoch=1, meta={}
    )
    assert [e.step for e in pool.events(StepDone) if e.skipped] == [NAN_AT]
    checkpoint = checkpoint_index.open_checkpoint(uri)
    assert int(checkpoint.read(box_of(checkpoint, "model.head.calls"))) == STEPS - 1
    alone = train(COUNTING, job, STEPS, skipped=(NAN_AT,))
    assert [e.train_loss for e in pool.events(StepDone)] == pytest.approx(
        alone.losses, rel=1e-4, nan_ok=True
    )


def box_of(checkpoint: Any, fqn: str) -> Any:
    from elastic.types import Box

    shape, dtype = checkpoint.tensors[fqn]
    return Box(fqn, (0,) * len(shape), shape, dtype)


# ----------------------------------------------------------------------------------- frozen weights


def with_frozen_blocks(folder: Path) -> Program:
    """tiny.py on weights from a file; the blocks are frozen, as under adapters."""
    tiny = load_program(PROGRAMS / "tiny.py")

    def model() -> torch.nn.Module:
        made: torch.nn.Module = tiny.model()
        made.layers.requires_grad_(False)
        return made

    save_file(
        {name: tensor.clone() for name, tensor in tiny.model().state_dict().items()},
        folder / "model.safetensors",
    )
    return replace(tiny, model=model, weights=Weights(folder))


def test_frozen_weights_go_when_their_generation_is_left(tmp_path: Path) -> None:
    """The live boxes stay for whoever takes them over; the frozen ones are given up at once, though
    the model is still there, and the whole of it goes once nobody holds the boxes."""
    program = with_frozen_blocks(tmp_path)
    place = a_place()
    left = Generation(
        place, EnterOrder(ALONE, 0, Rendezvous(ALONE.ranks, ("", 0))), lambda: (False, False)
    )  # type: ignore[arg-type]
    state = left.state = TrainState(
        program, trace(program), left.groups, layout=Layout(), layers=(4,), rank=0, job=Job()
    )
    left.copies = SimpleNamespace(replicas=NO_COPIES.replicas, close=list)  # type: ignore[assignment]
    state.read_frozen()
    state.fill_fresh(7)
    frozen = [tensor for _, tensor in state.frozen.values()]
    assert len(frozen) >= 4 * 9 and all(tensor.untyped_storage().nbytes() for tensor in frozen)
    left.take_along()
    left.close()
    assert not any(tensor.untyped_storage().nbytes() for tensor in frozen)
    held = {fqn: tensor.clone() for fqn, (_, tensor) in place.held[0].tensors.items()}
    assert (
        set(held) & {"model.embed.weight", "optim.exp_avg.head.weight"}
        and held["model.embed.weight"].any()
    )
    model = weakref.ref(state.model)
    del left, state, frozen
    place.held.clear()
    gc.collect()
    assert model() is None
