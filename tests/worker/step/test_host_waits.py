"""A step makes the host wait for the device once, on every stage; block timing on a GPU costs few
events."""

from __future__ import annotations

from collections import Counter
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.places import PROGRAMS
from support.reference import collate
from support.worker.chain import job_of
from support.worker.host_reads import HostReads
from support.worker.ranks import meeting

from elastic.config.optimization import Guards
from elastic.data.order import sample_ids
from elastic.program import Program, load_program
from elastic.types import Job, Layout, Plan, WorkerId
from elastic.worker.loop.handoff import HandoffMessage
from elastic.worker.loop.loop import OfferedBatch, Outcome, Run
from elastic.worker.process.fault_injection import DeviceFaults
from elastic.worker.process.readback import read, square_norms, to_device
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.rendezvous import host_store, new_secret
from elastic.worker.program.calls import cut_rows, first_rows
from elastic.worker.program.commit import Commit
from elastic.worker.program.guards import MEMORY, with_memory
from elastic.worker.program.loop_program import LoopProgram
from elastic.worker.session.generation import Generation
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.block_timing import EVERY, FIRST, BlockTiming
from elastic.worker.step.commit_vector import CommitFields, CommitReport
from elastic.worker.step.device_marks import DeviceMarks
from elastic.worker.step.loss_scale import profile_of
from elastic.worker.step.optimizer_step import Stepper, seed

HERE = "127.0.0.1"
TINY = load_program(PROGRAMS / "tiny.py")
BATCH, STEPS = 16, 2
BLOCK_NORMS = Guards.model_validate(
    {"not_finite": "skip", "block_norm": {"most": 1e9, "every": 1}}
).model_dump()


def stepper_on(
    groups: Groups, rank: int, n_microbatches: int, program: Program, **job: Any
) -> Stepper:
    """Of a fresh state of the rank."""
    layout = groups.layout
    given = job_of("tiny.py", 12, BATCH) | {"n_samples": 512} | job
    program = with_memory(program, Job.from_plain(given))
    layers = (2, 2) if layout.pp == 2 else (4,)
    workers = tuple(WorkerId("node0", i) for i in range(layout.world_size))
    state = TrainState(
        program,
        profile_of(program, Job.from_plain(given)),
        groups,
        layout=layout,
        layers=layers,
        rank=rank,
        job=Job.from_plain(given),
    )
    state.fill_fresh(7)
    stepper = Stepper(
        program,
        Job.from_plain(given),
        Plan(1, layout, workers, (BATCH,), layers, n_microbatches),
        state=state,
        groups=groups,
    )
    stepper.memory = program.extra_state.get(MEMORY)
    stepper.loss_scale.begin(256)
    return stepper


def waits(stepper: Stepper) -> list[list[str]]:
    """Where the host waits in each of the steps after the first, which compares buffers and gets to
    know the shapes."""
    state, dataset, found = stepper.state, TINY.dataset(), []
    there = [
        tensor
        for _, tensor in state.tensors.values()
        if tensor.ndim and tensor.dtype is torch.float32
    ]
    reads = HostReads(
        [*there, *(x for model in state.models for x in (*model.parameters(), *model.buffers()))]
    )
    for step in range(STEPS):
        batches = [collate(dataset, sample_ids(512, BATCH, 7, step=step))]
        with reads:
            stepper.run(batches, CommitFields())
        found.append(reads.take())
    assert state.step == STEPS
    return found[1:]


@pytest.mark.parametrize(
    ("job", "n_microbatches"),
    [
        ({}, 1), ({}, 4), ({"guards": BLOCK_NORMS}, 2), ({"noise_scale": {"every": 1}}, 2),
        ({"precision": "float16"}, 2), ({"precision": "bfloat16"}, 2),
    ],
    ids=["1 microbatch", "4 microbatches", "block norms", "noise", "float16", "bfloat16"],
)  # fmt: skip
def test_the_host_waits_once_in_a_step(job: dict[str, Any], n_microbatches: int) -> None:
    groups = Groups(0, Layout(), torch.device("cpu"), fsdp="precision" in job)
    if groups.fsdp:
        groups.pretend(0)
    try:
        stepper = stepper_on(groups, 0, n_microbatches, TINY, **job)
        for seen in waits(stepper):
            assert len(seen) == 1 and seen[0].startswith(".tolist() at readback.py"), seen
        if "noise_scale" in job:
            assert stepper.noise is not None
    finally:
        groups.close()


def _stage(pipe: Any, rank: int, port: int, secret: str) -> None:
    torch.set_num_threads(1)
    groups = Groups(1, Layout(pp=2), torch.device("cpu"))
    groups.join(meeting(2, port, secret=secret), rank)
    pipe.send(waits(stepper_on(groups, rank, 8, TINY)))


@pytest.mark.e2e
def test_the_host_waits_once_in_a_step_of_a_pipeline_stage() -> None:
    """Also on the last one, whose loss is computed inside of the schedule."""
    forks, store, secret = get_context("fork"), host_store(HERE), new_secret()
    ends, processes = [], []
    for rank in range(2):
        here, there = forks.Pipe(duplex=False)
        processes.append(
            forks.Process(target=_stage, args=(there, rank, store.port, secret), daemon=True)
        )
        processes[-1].start()
        ends.append(here)
    try:
        for end in ends:
            assert end.poll(60.0), "no answer from a stage"
            for seen in end.recv():
                assert len(seen) == 1 and seen[0].startswith(".tolist() at readback.py"), seen
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_the_host_waits_once_in_a_step_of_a_loop() -> None:
    """The script hands over the loss and the count of its tokens as they are on the device, and
    gets floats back."""
    groups = Groups(0, Layout(), torch.device("cpu"))
    program = LoopProgram(**{**vars(TINY), "count": None})
    stepper = stepper_on(groups, 0, 1, program)
    run, said = Run(program, torch.optim.SGD([torch.zeros(1)])), []

    def say(word: HandoffMessage) -> Any:
        said.append(word)
        return offers.pop() if word.kind == "next" else Outcome(True, 1.0, 1.0)

    offers: list[OfferedBatch] = []
    run.handoff = SimpleNamespace(say=say)  # type: ignore[assignment]
    run.model.attach(stepper.state.model)

    def compute(batch: Any, step: int, epoch: int, **_: Any) -> Any:
        offers.append(OfferedBatch(batch, step, epoch))
        given = next(run)
        for rows in cut_rows(BATCH, 2):
            part = {key: value[rows.start : rows.stop] for key, value in given.items()}
            run.backward(TINY.loss(run.model(part["input"]), part))
        run.step()
        return said[-1].loss_sum, said[-1].tokens

    stepper.script = SimpleNamespace(compute=compute, clip_grad_norm=None, calls=run.calls)  # type: ignore[assignment]
    try:
        for seen in waits(stepper):
            assert len(seen) == 1 and seen[0].startswith(".tolist() at readback.py"), seen
        assert isinstance(run.train_loss, float) and isinstance(stepper.committed[1], float)
    finally:
        groups.close()


def test_what_the_counter_sees() -> None:
    """Reads of what was computed from the device's tensors; nothing of the host's own."""
    device = torch.device("cpu")
    weight, own = torch.ones(3), torch.ones(3)
    with HostReads([weight]) as reads:
        float(own.sum()), own.tolist(), bool((own > 0).all()), own[own > 0]
        there = own.to(device, non_blocking=True)
        assert not reads.seen
        (
            float((weight * own).sum()),
            bool((there > 0).all()),
            there.tolist(),
            there[there > 0],
            there.cpu(),
            there.to("cpu"),
        )
        (
            torch.arange(3, device=device).tolist(),
            torch.equal(there, own),
            own.copy_(there),
            own.clone().to(device),
        )
    kinds = Counter(line.partition(" at ")[0] for line in reads.seen)
    assert kinds == {
        "_local_scalar_dense": 2, ".tolist()": 2, "index": 1, ".cpu()": 1, ".to()": 1, "equal": 1,
        "copy_ to the host": 1, "a blocking .to(device)": 1,
    }  # fmt: skip


# --------------------------------------------------------------------------------- reads and copies


def test_numbers_are_read_as_the_floats_that_they_are() -> None:
    tensor = torch.tensor([[1.0, 2.0], [float("nan"), 1e-40]])
    whole, one, number, none = read([tensor, torch.tensor(3, dtype=torch.int64), 4, torch.zeros(0)])
    assert whole[:2] == [1.0, 2.0] and whole[2] != whole[2] and whole[3] == float(tensor[1, 1])
    assert (one, number, none) == ([3.0], [4.0], [])


def test_square_norms_of_low_precision_are_not_rounded_to_it() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1000), torch.randn(33, 3)]
    for dtypes in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float64)):
        given = [tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
        wanted = torch.stack([tensor.double().square().sum() for tensor in given])
        torch.testing.assert_close(square_norms(given), wanted, rtol=1e-6, atol=0)
    assert square_norms([]).sum() == 0


def test_a_batch_goes_to_a_gpu_through_pinned_memory_and_nobody_waits() -> None:
    calls: list[Any] = []

    class OnHost:
        device = torch.device("cpu")

        def pin_memory(self) -> OnHost:
            calls.append("pinned")
            return self

        def to(self, device: Any, non_blocking: bool = False) -> OnHost:
            calls.append((str(device), non_blocking))
            return self

    to_device({"input": OnHost()}, torch.device("cuda:1"))  # type: ignore[dict-item]
    assert calls == ["pinned", ("cuda:1", True)]
    batch = {"input": torch.arange(3)}
    assert to_device(batch, torch.device("cpu"))["input"] is batch["input"], (
        "nothing is pinned or copied on a CPU"
    )


def test_a_batch_that_cannot_be_pinned_goes_there_as_it_is() -> None:
    class OnHost:
        device = torch.device("cpu")

        def pin_memory(self) -> OnHost:
            raise RuntimeError("CUDA error: out of memory")

        def to(self, device: Any, non_blocking: bool = False) -> str:
            return f"on {device}"

    assert to_device({"input": OnHost()}, torch.device("cuda:1")) == {"input": "on cuda:1"}  # type: ignore[dict-item, comparison-overlap]


def test_rows_are_cut_as_torch_cuts_them() -> None:
    for n_rows in range(12):
        for n in range(1, 9):
            wanted = [part.tolist() for part in torch.arange(n_rows).tensor_split(n)]
            assert [list(rows) for rows in cut_rows(n_rows, n)] == wanted
    output = {
        "logits": torch.arange(6).view(3, 2),
        "loss": torch.tensor(1.0),
        "more": (torch.ones(3),),
    }
    cut = first_rows(output, 2)
    assert cut["logits"].shape == (2, 2) and cut["loss"].ndim == 0 and cut["more"][0].shape == (2,)


def test_a_step_is_seeded_like_torch_without_asking_absent_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = (7 * 1_000_003 + 5) * 65_537 + 3
    torch.manual_seed(number)
    wanted, asked = torch.randn(5), []
    for backend in (torch.cuda, torch.xpu, torch.mtia):
        monkeypatch.setattr(
            backend,
            "manual_seed_all",
            lambda value, name=backend.__name__: asked.append((name, value)),
        )
    seed(number, torch.device("cpu"))
    assert torch.equal(torch.randn(5), wanted) and not asked
    seed(number, torch.device("cuda"))
    assert torch.equal(torch.randn(5), wanted) and asked == [("torch.cuda", number)]


# ------------------------------------------------------------------------------------- block timing


class Event:
    """Of a stream on which everything takes a second."""

    made, now, waited = 0, 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        type(self).made += 1
        self.at_s = -1.0

    def record(self) -> None:
        type(self).now += 1.0
        self.at_s = Event.now

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        type(self).waited += 1

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at_s - self.at_s)


def test_blocks_are_timed_in_few_steps_on_a_gpu_by_events_that_are_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "made", 0)
    model = TINY.model()
    spans = BlockTiming([model], TINY, torch.device("cuda"), faults=DeviceFaults())
    spans.marks = DeviceMarks(torch.device("cpu"))  # they have events of their own
    taken = []
    for step in range(64):
        spans.next_step()
        for _ in range(3 if step % 2 else 2):
            model(torch.zeros(1, 16, dtype=torch.int64))
        assert spans.timing == (step < FIRST or step % EVERY == 0)
        taken.append(spans.taken_s())
    timed = [step for step, seconds in enumerate(taken) if seconds]
    assert timed == [step for step in range(64) if step < FIRST or step % EVERY == 0]
    assert all(taken[step] == 4 * (3 if step % 2 else 2) for step in timed), (
        "a second for each block and microbatch"
    )
    assert Event.made == 2 * 4 * 3 and Event.waited == 0
    assert len([step for step in timed if step >= 32]) == 4


def test_rank_0_takes_in_the_steps_that_were_timed_and_not_traced() -> None:
    taken: list[int] = []
    heard = CommitReport(Commit(1.0, 2.0, 3.0), (0.0, 0.0), (0.0, 0.0), (3,))
    own: Any = SimpleNamespace(
        loader=object(),
        new_shares=None,
        rank=0,
        _times=SimpleNamespace(add=lambda step, *rest, **named: taken.append(step)),
        profile=SimpleNamespace(disturbs=lambda step: step == 3),
    )
    for step, timing in enumerate((True, False, True, True, True)):
        stepper: Any = SimpleNamespace(spans=SimpleNamespace(timing=timing))
        Generation._hear(own, heard, stepper, SimpleNamespace(step=step))  # type: ignore[arg-type]
    assert taken == [0, 2, 4]
