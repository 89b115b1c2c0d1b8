"""What a session reports of an error in its generation, and what it does about its device."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.cluster.backend.ray_backend import RayBackend
from elastic.ledger.journal import Journal
from elastic.types import Decision, Job, NodeRefused, Prepare, Stop, WorkerFailed, WorkerId
from elastic.types.orders import WorkerOrder
from elastic.worker.process.fault_injection import DeviceFaults
from elastic.worker.profile import node_checks
from elastic.worker.profile.node_checks import NodeRejected
from elastic.worker.session.preparation import Preparation
from elastic.worker.session.session import Session

ME = WorkerId("a", 1)


class Generation:
    number, next_step, plan = 3, 7, None

    def __init__(self) -> None:
        self.device_lost, self.done = False, list[str]()

    def lose_device(self) -> None:
        self.device_lost = True

    def break_off(self) -> None:
        self.done.append("lost" if self.device_lost else "well")


def session() -> tuple[Session, list[Any]]:
    made, said = Session.__new__(Session), list[Any]()
    made.me, made._aborted, made._phase, made._progress, made._told_s = ME, 0, "", 0, 0.0
    made._put = said.append  # type: ignore[method-assign]
    return made, said


def preparation() -> tuple[Preparation, list[Any]]:
    said = list[Any]()
    return Preparation(ME, Job(), "", said.append, lambda *_: None, print), said  # type: ignore[arg-type]


def prepare(made: Preparation) -> None:
    made.run((), None, lambda: False, device=torch.device("cpu"), faults=DeviceFaults())


@pytest.mark.parametrize(
    ("said", "kind", "do", "lost", "step"),
    [
        ("uncorrectable ECC error encountered", "device", "", True, 7),
        ("device-side assert triggered", "program", "retry", True, 7),
        ("invalid configuration argument", "program", "", False, 0),
    ],
)
def test_a_cuda_error_in_a_generation(said: str, kind: str, do: str, lost: bool, step: int) -> None:
    made, events = session()
    generation = Generation()
    made._failed(generation, torch.AcceleratorError(f"CUDA error: {said}\nadvice"))  # type: ignore[arg-type]
    (event,) = events
    assert isinstance(event, WorkerFailed) and event.generation == 3 and said in event.error
    assert (event.kind, event.do, event.step, generation.device_lost) == (kind, do, step, lost)
    assert generation.done == ["lost" if lost else "well"], (
        "the others are freed, and the device is known to be lost by then"
    )


@pytest.mark.parametrize(
    ("peak_gb", "free_gb", "told_gb"), [(60, 1, 79), (79, 30, 79)], ids=["NCCL's", "torch's"]
)
def test_memory_that_gave_out_is_measured_before_any_is_freed(
    peak_gb: int, free_gb: int, told_gb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's buffers are none of torch's, and go with the groups."""
    made, events = session()
    generation = Generation()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak_gb << 30)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda: ((80 if generation.done else free_gb) << 30, 80 << 30)
    )
    error = torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'")
    made._failed(generation, error)  # type: ignore[arg-type]
    (event,) = events
    assert (event.kind, event.measured_bytes) == ("out_of_memory", told_gb << 30)
    assert generation.done == ["well"]


@pytest.mark.parametrize("torch_knows", [True, False])
def test_a_gpu_that_others_have_filled_measures_nothing_and_frees_the_peers(
    torch_knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a context there, what is free cannot be asked either."""
    made, events = session()
    generation = Generation()

    def raises() -> tuple[int, int]:
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", raises)
    peak: Any = (lambda: 60 << 30) if torch_knows else raises
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    made._failed(generation, torch.OutOfMemoryError("CUDA out of memory"))  # type: ignore[arg-type]
    (event,) = events
    told = (60 << 30) if torch_knows else 0
    assert (event.kind, event.measured_bytes) == ("out_of_memory", told)
    assert generation.done == ["well"]


def test_a_cuda_error_while_it_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, kind, do in (
        ("unspecified launch failure", "device", ""),
        ("device-side assert triggered", "program", "retry"),
    ):
        made, events = preparation()

        def settled(*_: object, said: str = said) -> None:
            raise torch.AcceleratorError(f"CUDA error: {said}")

        monkeypatch.setattr(made, "_settled", settled)
        prepare(made)
        (event,) = events
        assert (event.generation, event.kind, event.do) == (0, kind, do)


PROGRAM = """
import os
raise PermissionError("401 for the key " + os.environ["MY_API_KEY"])
"""


def test_a_secret_that_only_the_worker_knows_is_not_in_the_journal_of_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "0123456789abcdef" * 2 + "01234567"
    monkeypatch.setenv("MY_API_KEY", secret)
    (tmp_path / "program.py").write_text(PROGRAM)
    job = {
        "name": "j", "folder": str(tmp_path), "program": str(tmp_path / "program.py"), "steps": 4,
        "global_batch": 12, "seed": 1,
    }  # fmt: skip
    made = Session(ME, job, str(tmp_path / "run"))
    try:
        made.order(WorkerOrder(Prepare("a")))
        ((_, failed),) = made.poll(0, 120.0).messages
    finally:
        made.close()
    assert isinstance(failed, WorkerFailed) and "401 for the key ***" in failed.error
    monkeypatch.delenv("MY_API_KEY")
    journal = Journal(tmp_path / "journal.jsonl", 1)
    journal.append(1.0, [(1.0, failed)], Decision((Stop("failed", failed.error),), failed.error))
    journal.close()
    written = (tmp_path / "journal.jsonl").read_text()
    assert "401 for the key ***" in written and secret not in written
    assert secret not in capfd.readouterr().err


def test_a_refusal_says_whether_it_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made, events = preparation()

    def settled(*_: object) -> None:
        raise NodeRejected("too little memory", may_pass=True)

    monkeypatch.setattr(made, "_settled", settled)
    prepare(made)
    assert events == [NodeRefused("a", "too little memory", "", True)]


def test_a_rehearsal_does_not_hide_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = preparation()
    rehearsal: Any = SimpleNamespace(layout="dp_shard=2")
    for said, raises in (("unspecified launch failure", True), ("out of memory", False)):

        def fails(place: object, rehearsal: object, said: str = said) -> None:
            raise torch.AcceleratorError(f"CUDA error: {said}")

        monkeypatch.setattr("elastic.worker.session.preparation.rehearse_plan", fails)
        if raises:
            with pytest.raises(torch.AcceleratorError):
                made._rehearse(None, rehearsal)  # type: ignore[arg-type]
        else:
            made._rehearse(None, rehearsal)  # type: ignore[arg-type]


def test_the_process_of_a_device_side_assert_is_ended_and_that_of_a_lost_device_serves_on() -> None:
    backend, ended = RayBackend.__new__(RayBackend), list[WorkerId]()
    backend._plan = None
    backend._end = ended.extend  # type: ignore[method-assign,assignment]
    assert backend._follow(WorkerFailed(ME, 3, "device", "CUDA error: ECC", 0, 7)) == [] == ended
    assert (
        backend._follow(WorkerFailed(ME, 3, "program", "CUDA error: assert", 0, 7, do="retry"))
        == []
    )
    assert ended == [ME]


def test_a_script_without_memory_before_its_loop_is_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported when others have had time to free theirs."""
    monkeypatch.setattr(node_checks, "FREE_MOST_S", 2.0)
    (tmp_path / "train.py").write_text("big = [0]\nraise MemoryError('400 GiB')\n")
    made, events = preparation()
    made.job = Job(script=str(tmp_path / "train.py"))
    began_s, phases = time.monotonic(), list[str]()
    made.at_phase = lambda phase, step: phases.append(phase)
    prepare(made)
    assert time.monotonic() >= began_s + 2.0 and len(phases) >= 3
    why = f"{tmp_path}/train.py, line 2: MemoryError: 400 GiB"
    assert events == [NodeRefused("a", why, may_pass=True)]
