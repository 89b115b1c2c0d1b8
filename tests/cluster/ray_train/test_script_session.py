"""The session of a worker whose script is restarted: real processes of a small script, no Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.child import child
from support.cluster.stage import wait_gone
from support.waiting import until

from elastic.cluster.ray_train import rank_process
from elastic.cluster.ray_train.rank_process import here, listens, n_guests
from elastic.cluster.ray_train.script_checkpoints import copies_of
from elastic.cluster.ray_train.script_child import PARENT, asker
from elastic.cluster.ray_train.script_session import ScriptSession
from elastic.types import (
    Abort,
    EnterPlan,
    Event,
    GroupRan,
    Layout,
    NodeLoadSeen,
    NodePrepared,
    Plan,
    PlanEntered,
    Prepare,
    Progress,
    Quiesce,
    Quiesced,
    Resume,
    ScriptEnded,
    StepDone,
    StoreCopy,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import WorkerOrder
from elastic.worker.profile import node_load
from elastic.worker.profile.node_load import LoadReports

E_ = TypeVar("E_", bound=Event)
# meets as init_process_group does, by connections of all ranks to rank 0
MEETS = """
import json, os, signal, socket, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    listener = socket.create_server(where)
for _ in range(1000):
    try:
        line = socket.create_connection(where)
        break
    except OSError:
        time.sleep(0.01)
names = [name for name in os.environ if name.startswith("TORCH_NCCL")]
print("environment", json.dumps({k: os.environ.get(k) for k in (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR TORCHELASTIC_RUN_ID "
    "CUDA_VISIBLE_DEVICES ACCELERATE_USE_CPU").split()}), flush=True)
"""
STEPS = """
first = int(sys.argv[1])
for step in range(first, first + 3):
    print(f"step {step}: loss {1 / step}", flush=True)
"""
STAYS = "time.sleep(600)\n"
LISTENS = "signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))\nprint('listens', flush=True)\n"


class Group:
    """Sessions of workers, by name of their nodes, and a store for each generation."""

    def __init__(
        self,
        folder: Path,
        *workers: WorkerId,
        script: str,
        args: tuple[str, ...] = (),
        uri: str = "",
    ):
        file = folder / "train.py"
        file.write_text(script)
        job = {"script": str(file), "args": args, "cwd": str(folder), "restarted": True}
        self.workers, self.stores = workers, dict[int, Any]()
        self.sessions = {w: ScriptSession(w, job, uri or f"{folder}/runs/r") for w in workers}
        self.heard: dict[WorkerId, list[Event]] = {w: [] for w in workers}
        self._seen = dict.fromkeys(workers, 0)

    def enter(self, generation: int = 1, step: int = 0, resume: str = "fresh") -> Plan:
        from elastic.worker.session.workplace import host_rendezvous

        source: Any = resume
        plan = Plan(
            generation, Layout(dp_replicate=len(self.workers)), self.workers, (), (),
            resume=Resume(source, step),
        )  # fmt: skip
        rendezvous, self.stores[generation] = host_rendezvous(plan, "127.0.0.1", 300.0)
        for session in self.sessions.values():
            session.order(WorkerOrder(EnterPlan(plan), rendezvous))
        return plan

    def order(self, action: Any) -> None:
        for session in self.sessions.values():
            session.order(WorkerOrder(action))

    def hear(self) -> None:
        for worker, session in self.sessions.items():
            for number, event in session.poll(self._seen[worker], 0.0).messages:
                self._seen[worker] = number
                self.heard[worker].append(event)

    def all(self, kind: type[E_], n: int, *of: WorkerId) -> list[E_]:
        """Waits for so many such words of these workers (default: of all)."""

        def found() -> list[E_]:
            self.hear()
            words = [e for w in of or self.workers for e in self.heard[w] if isinstance(e, kind)]
            return words if len(words) >= n else []

        return until(found, lambda: f"{n} {kind.__name__}: {self.heard}", 60.0)

    def close(self) -> None:
        for session in self.sessions.values():
            session.close(20.0)


A, B, C = WorkerId("a", 0), WorkerId("a", 1), WorkerId("b", 0)
Made = Callable[..., Group]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    groups: list[Group] = []

    def make(*workers: WorkerId, **given: Any) -> Group:
        groups.append(Group(tmp_path, *workers, **given))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def environments(text: str) -> list[dict[str, Any]]:
    marked = (line for line in text.splitlines() if line.startswith("environment "))
    found = [json.loads(line.removeprefix("environment ")) for line in marked]
    return sorted(found, key=lambda one: int(one["RANK"]))


@pytest.mark.e2e
def test_a_group_meets_prints_steps_and_ends_well(
    made: Made, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    group = made(A, B, C, script=MEETS + STEPS, args=("1",))
    group.order(Prepare("a"))
    assert [e.pids for e in group.all(NodePrepared, 3)] == [(os.getpid(),)] * 3
    group.enter()
    group.all(ScriptEnded, 3)
    told = [e for e in group.heard[A] if not isinstance(e, NodePrepared | Progress | NodeLoadSeen)]
    assert [type(e) for e in told] == [PlanEntered, *[StepDone] * 3, GroupRan, ScriptEnded]
    assert [(e.step, e.train_loss) for e in told if isinstance(e, StepDone)] == [
        (1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)),
    ]  # fmt: skip
    for other in (B, C):
        assert not [e for e in group.heard[other] if isinstance(e, StepDone | PlanEntered)]
    printed = environments(capfd.readouterr().out)
    assert [
        (e["RANK"], e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"], e["GROUP_RANK"]) for e in printed
    ] == [("0", "0", "2", "0"), ("1", "1", "2", "0"), ("2", "0", "1", "1")]
    assert {e["WORLD_SIZE"] for e in printed} == {"3"}
    assert {e["TORCHELASTIC_RUN_ID"] for e in printed} == {"r"}
    # LOCAL_RANK chooses among the GPUs of all ranks of its node
    assert [e["CUDA_VISIBLE_DEVICES"] for e in printed] == ["3,3", "3,3", "3"]
    assert {e["ACCELERATE_USE_CPU"] for e in printed} == {None}


def test_one_worker_of_a_node_tells_its_load_and_what_the_script_holds(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LoadReports.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(LoadReports.__init__.__kwdefaults__, "every_s", 0.05)
    monkeypatch.setattr(node_load, "NODE_S", 0.01)
    before = "kept = b'1' * 100_000_000 * (rank == 0)\nprint('step 1: loss 1')\n"
    group = made(A, B, C, script=MEETS + before + STAYS)
    group.all(NodeLoadSeen, 1, A)
    group.enter()
    group.all(StepDone, 1)
    group.hear()
    group.heard = {w: [] for w in group.workers}
    (seen, *_), (other, *_) = (group.all(NodeLoadSeen, 1, w) for w in (A, C))
    assert (seen.node_id, other.node_id) == ("a", "b")
    assert seen.worker_bytes > 100e6 and 0 <= seen.cpu_share <= 1
    assert not [e for e in group.heard[B] if isinstance(e, NodeLoadSeen)]
    group.order(Abort(1))
    group.all(Quiesced, 3)
    group.heard = {w: [] for w in group.workers}
    assert group.all(NodeLoadSeen, 2, A)[-1].worker_bytes == 0, "and the next ones are still told"
    group.close()
    assert [s._load._end.is_set() for s in group.sessions.values() if s._load] == [True, True]


def test_ranks_without_gpus_are_one_group_for_accelerate_too(
    made: Made, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each rank of a Trainer of transformers trains all of it, alone."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    group = made(A, script=MEETS + STEPS, args=("1",))
    group.enter()
    group.all(ScriptEnded, 1)
    (printed,) = environments(capfd.readouterr().out)
    assert printed["ACCELERATE_USE_CPU"] == "true"


def test_where_it_continues_is_what_its_first_line_says(made: Made) -> None:
    group = made(A, script=MEETS + STEPS, args=("8",))
    group.enter(step=10, resume="durable")
    group.all(ScriptEnded, 1)
    (entered,) = group.all(PlanEntered, 1)
    assert entered.step == 7
    assert [e.step for e in group.all(StepDone, 3)] == [8, 9, 10]


def test_steps_that_are_counted_within_an_epoch_are_told(
    made: Made, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the next group too, which resumes in its second epoch."""
    epochs = f"for _ in range(2):\n    exec({STEPS!r})\n"
    group = made(A, script=MEETS + epochs, args=("1",))
    group.enter()
    group.all(ScriptEnded, 1)
    assert [e.step for e in group.all(StepDone, 6)] == [1, 2, 3, 4, 5, 6]
    note = "begin again at each epoch: step 1 after step 3 counts as step 4 of the run"
    assert capfd.readouterr().out.count(note) == 1
    group.enter(2, step=3, resume="durable")
    group.all(ScriptEnded, 2)
    assert [e.step for e in group.all(PlanEntered, 2)] == [0, 3]
    assert note not in capfd.readouterr().out


def test_a_script_without_steps_is_said_to_run(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "RAN_EVERY_S", 0.2)
    monkeypatch.setattr(rank_process, "FIRST_STEP_S", 0.5)
    group = made(A, C, script=MEETS + STAYS)
    group.enter(step=10, resume="durable")
    assert group.all(PlanEntered, 1)[0].step == 10, "whatever it does, it has begun"
    group.all(GroupRan, 2)
    group.order(Quiesce(1, grace_s=30.0, cause="growth"))
    assert {e.worker for e in group.all(Quiesced, 2)} == {A, C}
    assert not any(isinstance(e, WorkerFailed) for told in group.heard.values() for e in told)


def test_its_own_error_is_told_with_the_last_line_of_its_traceback(made: Made) -> None:
    group = made(A, C, script=MEETS + "if rank: raise IndexError('no such column')\n" + STAYS)
    group.enter()
    (failed,) = group.all(WorkerFailed, 1)
    assert (failed.worker, failed.kind) == (C, "program")
    assert failed.error == "rank 1 (exit code 1): IndexError: no such column"
    group.order(Abort(1))
    assert {e.worker for e in group.all(Quiesced, 2)} == {A, C}


def test_its_own_error_is_told_without_the_secrets_of_its_node(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "0123456789abcdef" * 3)
    group = made(A, script=MEETS + "raise ValueError('401: ' + os.environ['MY_API_KEY'])\n")
    group.enter()
    (failed,) = group.all(WorkerFailed, 1)
    assert failed.error == "rank 0 (exit code 1): ValueError: 401: ***"


IN_A_MODULE = """
import elastic, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
elastic.loop(model=model, optimizer=optimizer, dataset=torch.ones(16, 4)).start()
"""


@pytest.mark.e2e
def test_a_loop_that_a_module_of_the_script_enters_is_said_to_belong_into_its_file(
    made: Made, tmp_path: Path
) -> None:
    (tmp_path / "trainer.py").write_text(IN_A_MODULE)
    group = made(A, script="import trainer\n")
    group.enter()
    (failed,) = group.all(WorkerFailed, 1)
    assert failed.kind == "program"
    assert "(or elastic.prepare_trainer) must stand in train.py" in failed.error


def test_a_process_that_is_killed_from_outside_is_no_error_of_the_script(made: Made) -> None:
    group = made(A, script=MEETS + "os.kill(os.getpid(), 9)\n")
    group.enter()
    (failed,) = group.all(WorkerFailed, 1)
    assert failed.kind == "infrastructure"
    assert failed.error == "the process of rank 0 was killed from outside (signal 9)"


@pytest.mark.parametrize(
    ("error", "kind"), [("StorageFailed", "infrastructure"), ("StorageFull", "program")]
)
def test_storage_that_does_not_answer_is_no_error_of_the_script(
    made: Made, error: str, kind: str
) -> None:
    group = made(A, script=f"import ray.train, elastic.errors as e\nraise e.{error}('no answer')\n")
    group.enter()
    (failed,) = group.all(WorkerFailed, 1)
    assert (failed.kind, failed.error.rpartition(": ")[2]) == (kind, "no answer")


def test_a_notice_ends_who_listens_and_leaves_the_other_alone(made: Made) -> None:
    group = made(A, C, script=MEETS + f"if rank == 0:\n    exec({LISTENS!r})\n" + STAYS)
    group.enter()
    group.all(PlanEntered, 1)
    child = until(lambda: group.sessions[A]._process and group.sessions[A]._process._child, "it")
    until(lambda: listens(child.pid, signal.SIGTERM), "its handler")
    group.order(Quiesce(1, grace_s=20.0, cause="notice", leaving=("b",)))
    assert [e.worker for e in group.all(Quiesced, 1)] == [A]
    time.sleep(0.3)  # sleeps: nothing comes of the other
    group.hear()
    assert not any(isinstance(e, Quiesced) for e in group.heard[C])
    group.order(Quiesce(1, grace_s=20.0))
    assert [e.worker for e in group.all(Quiesced, 1, C)] == [C]


def test_a_notice_that_comes_before_the_handler_is_heard_when_there_is_one(
    made: Made, tmp_path: Path
) -> None:
    """As while a script imports what takes long."""
    waits = f"while not os.path.exists({str(tmp_path / 'go')!r}):\n    time.sleep(0.01)\n"
    group = made(A, script=MEETS + waits + LISTENS + STAYS)
    group.enter()
    group.all(PlanEntered, 1)
    began_s = time.monotonic()
    group.order(Quiesce(1, grace_s=60.0, cause="notice", leaving=("b",)))
    (tmp_path / "go").touch()
    group.all(Quiesced, 1)
    assert time.monotonic() - began_s < 50, "by SIGTERM, not by the deadline"


def test_who_does_not_end_after_sigterm_is_killed(made: Made) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    group = made(A, script=deaf + MEETS + STEPS + STAYS, args=("1",))
    group.enter()
    group.all(StepDone, 1)
    began_s = time.monotonic()
    group.order(Quiesce(1, grace_s=0.5))
    group.all(Quiesced, 1)
    assert time.monotonic() - began_s > 0.4


def test_the_next_group_runs_on_the_same_workers(made: Made) -> None:
    group = made(A, C, script=MEETS + STEPS + STAYS, args=("1",))
    group.enter()
    group.all(StepDone, 3)
    group.order(Quiesce(1, grace_s=30.0, cause="growth"))
    group.all(Quiesced, 2)
    group.order(StoreCopy(1))  # means nothing to it
    group.enter(2, step=3, resume="durable")
    group.all(StepDone, 6)
    assert [e.generation for e in group.all(PlanEntered, 2)] == [1, 2]
    assert group.sessions[A].poll(0, 0.0).phase == "supervising"


def test_a_group_is_ended_while_its_ranks_wait_for_each_other(made: Made) -> None:
    group = made(A, C, script=MEETS + STAYS)
    group.sessions.pop(A)  # it never comes
    group.enter()
    time.sleep(0.2)  # sleeps: it waits
    group.order(Abort(1))
    assert group.all(Quiesced, 1, C)[0].generation == 1


def test_without_a_process_every_order_to_end_is_answered(made: Made) -> None:
    group = made(A, script=STAYS)
    group.order(Abort(3))
    assert group.all(Quiesced, 1)[0].generation == 3
    group.enter(2)  # is aborted already
    group.all(Quiesced, 2)
    assert group.sessions[A].poll(0, 0.0).phase == "idle"


ASKS = """
import ray.train
for n in range(1000):
    info = ray.train.get_preemption_info()
    if info is not None:
        print("told", n, info.preempted_ranks, flush=True)
        break
    time.sleep(0.02 * (rank + 1))
"""


@pytest.mark.e2e
def test_ray_trains_own_question_has_one_answer_on_all_ranks(
    made: Made, capfd: pytest.CaptureFixture[str]
) -> None:
    group = made(A, C, script=MEETS + ASKS + STAYS)
    group.enter()
    group.all(PlanEntered, 1)
    time.sleep(1.0)  # sleeps: they ask meanwhile
    group.order(Quiesce(1, grace_s=20.0, cause="notice", leaving=("b",)))
    told: list[str] = []

    def both() -> bool:
        text = capfd.readouterr().out
        told.extend(line for line in text.splitlines() if line.startswith("told"))
        return len(told) == 2

    until(both, lambda: f"an answer: {told}", 60.0)
    assert len(set(told)) == 1 and told[0].endswith("[1]"), told


REPORTS = """
import tempfile, ray.train
checkpoint, first = ray.train.get_checkpoint(), 1
if checkpoint:
    with checkpoint.as_directory() as folder:
        print("found", *sorted(os.listdir(folder)), flush=True)
        first = int(open(f"{folder}/part-{rank}").read()) + 1
for step in range(first, first + 3):
    if (rank, first, step) == (1, 1, 3):
        while not os.path.exists("whole"): time.sleep(0.01)
        os.kill(os.getpid(), 9)
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/part-{rank}", "w") as file: file.write(str(step))
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"loss": 1 / step, "rate": rank + 0.5}, checkpoint=checkpoint)
    (rank, step) == (0, 2) and open("whole", "w").close()  # it has said that all parts are there
"""


@pytest.mark.e2e
@pytest.mark.parametrize("place", ["folder", pytest.param("s3", marks=pytest.mark.whole)])
def test_the_next_group_resumes_from_the_last_reported_checkpoint(
    made: Made, place: str, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = "" if place == "folder" else request.getfixturevalue("s3").uri + "/r"
    group = made(A, C, script=MEETS + REPORTS, uri=uri)
    group.enter()
    (failed,) = group.all(WorkerFailed, 1)
    assert (failed.worker, failed.kind) == (C, "infrastructure")
    group.order(Abort(1))
    group.all(Quiesced, 2)
    group.enter(2, step=2, resume="durable")
    group.all(ScriptEnded, 2)
    steps = group.all(StepDone, 5)
    assert [(e.step, e.train_loss) for e in steps] == [(n, 1 / n) for n in range(1, 6)]
    assert {e.logged["rate"] for e in steps} == {0.5}, "rank 0's count"
    assert [e.step for e in group.all(PlanEntered, 2)] == [0, 2]
    found = [line for line in capfd.readouterr().out.splitlines() if line.startswith("found")]
    assert found == ["found part-0 part-1"] * 2
    assert not copies_of(uri, "a").exists() and not copies_of(uri, "b").exists()


ALONE = """
import ray.train
while not os.path.exists("go"):
    time.sleep(0.01)
ray.train.report({"step": 7, "loss": 1.0})
info = ray.train.get_preemption_info()
print("told", info and info.preempted_ranks, flush=True)
"""


@pytest.mark.e2e
def test_ranks_answer_each_other_without_the_driver_that_started_them(
    made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And are told of a notice by the next one."""
    group = made(A, C, script=MEETS + ALONE)
    group.enter()
    group.all(PlanEntered, 1)
    group.stores.clear()
    group.order(Quiesce(1, grace_s=60.0, cause="notice", leaving=("b",)))
    (tmp_path / "go").touch()
    assert [e.step for e in group.all(StepDone, 1)] == [7]
    group.all(Quiesced, 2)
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("told")]
    assert told == ["told [1]"] * 2


@pytest.mark.e2e
def test_a_rank_that_reports_once_more_than_another_fails(made: Made) -> None:
    more = "import ray.train\nfor _ in range(2 - rank):\n    ray.train.report({})\n"
    group = made(A, C, script=MEETS + more)
    group.enter()
    (failed,) = group.all(WorkerFailed, 1)
    assert (failed.worker, failed.kind) == (A, "program") and "rank 1 has ended" in failed.error


@pytest.mark.e2e
def test_who_was_told_of_a_notice_may_leave_with_any_code(made: Made) -> None:
    """It is not the end of the script: the next group resumes from what it has saved."""
    group = made(A, C, script=MEETS + ASKS + "sys.exit(rank)\n")
    group.enter()
    group.all(PlanEntered, 1)
    group.order(Quiesce(1, grace_s=60.0, cause="notice", leaving=("b",)))
    assert {e.worker for e in group.all(Quiesced, 2)} == {A, C}
    ended = [e for told in group.heard.values() for e in told]
    assert not [e for e in ended if isinstance(e, ScriptEnded | WorkerFailed)]


def test_output_that_cannot_be_written_does_not_stop_the_script(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pipe is read to the end: else the script would wait for ever."""
    written: list[bytes] = []

    def write(file: int, data: bytes) -> int:
        written.append(data)
        raise OSError(28, "No space left on device")

    group = made(A, script=MEETS + STEPS + "print('x' * 200_000)\n", args=("1",))
    with monkeypatch.context() as patched:
        patched.setattr(rank_process.os, "write", write)
        group.enter()
        group.all(ScriptEnded, 1)
    assert len(group.all(StepDone, 3)) == 3 and len(written) >= 5


# ------------------------------------------------------------------------------------ its own eyes


def test_guests_at_a_port_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert n_guests(port) == 0
        with (
            socket.create_connection(("127.0.0.1", port)),
            socket.create_connection(("127.0.0.1", port)),
        ):
            assert n_guests(port) == 2


@pytest.mark.parametrize("handler", [True, False])
def test_who_listens_to_sigterm_is_seen(handler: bool) -> None:
    line = "signal.signal(signal.SIGTERM, lambda *a: None);" if handler else ""
    text = f"import signal,time;{line}print('up', flush=True);time.sleep(600)"
    with child([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None and script.stdout.readline() == "up\n"
        assert listens(script.pid, signal.SIGTERM) is handler


def test_the_script_is_itself_and_ends_with_its_supervisor(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys,time\nprint(__name__, sys.argv[1:], flush=True)\ntime.sleep(600)\n"
    )
    text = (
        "import "
        f"os,subprocess,sys,time\nos.environ['{PARENT}']=str(os.getpid())\nc=subprocess.Popen([sys.executable,'-m','elastic.cluster.ray_train.script_child',{str(script)!r},'--a','b'])\nprint(c.pid, "
        "flush=True)\ntime.sleep(600)\n"
    )
    with child([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert supervisor.stdout.readline() == "__main__ ['--a', 'b']\n"
        supervisor.kill()
        supervisor.wait()
        wait_gone([pid])


def test_a_script_is_found_where_the_driver_has_it_or_in_the_submitted_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copy" / "sub").mkdir(parents=True)
    (tmp_path / "copy" / "sub" / "train.py").touch()
    monkeypatch.chdir(tmp_path / "copy")
    there = str(tmp_path / "copy" / "sub" / "train.py")
    assert here(there, str(tmp_path)) == (there, str(tmp_path))
    assert here("/gone/job/sub/train.py", "/gone/job") == (there, str(tmp_path / "copy"))


def test_a_question_goes_to_the_supervisor_and_back() -> None:
    mine, theirs = socket.socketpair()
    ask = asker(theirs)
    mine.sendall(b'{"deadline_ms": 5, "ranks": {"a": [1]}}\n')
    assert ask(ask="report", given=True) == {"deadline_ms": 5, "ranks": {"a": [1]}}
    assert mine.recv(100) == b'{"ask": "report", "given": true}\n'
    mine.close()
    assert ask(ask="report") is None, "nobody answers any more"
    theirs.close()
