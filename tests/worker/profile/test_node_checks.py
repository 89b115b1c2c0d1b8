"""What a worker looks at before its node may take part: each check finds its fault, and none finds
one where there is none."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.places import ROOT
from support.waiting import until

from elastic.config.fingerprint import KEY
from elastic.errors import StorageFailed, StorageRefused
from elastic.storage.local import LocalStorage
from elastic.types import (
    APART,
    Admission,
    Mark,
    NodePrepared,
    NodeRefused,
    Prepare,
    Terms,
    WorkerId,
    version_differences,
    worst,
)
from elastic.types.admission import Entry
from elastic.types.orders import WorkerOrder
from elastic.worker.process import free_memory
from elastic.worker.process.free_memory import free_host_bytes
from elastic.worker.profile import link_probe, node_checks
from elastic.worker.profile.link_probe import Door, listen, measure
from elastic.worker.profile.node_checks import (
    FREE_MOST_S,
    Checks,
    NodeRejected,
    answer,
    awaited,
    multiply,
    too_little,
    try_links,
    versions,
)
from elastic.worker.session.session import Session

CPU = torch.device("cpu")
JOB: dict[str, Any] = {
    "name": "admission", "folder": str(ROOT),
    "program": str(ROOT / "tests" / "programs" / "tiny.py"), "steps": 4, "global_batch": 12,
    "seed": 1,
}  # fmt: skip


@pytest.fixture
def background() -> Iterator[Callable[..., Any]]:
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


# ------------------------------------------------------------------------------ versions and memory


def test_a_version_that_only_one_side_knows_is_no_difference() -> None:
    mine = versions()
    assert set(mine) >= {"elastic", "torch", "Python"} and "+" not in mine["torch"]
    assert version_differences(mine, {**mine, "NCCL": "2.27.5"}) == ""
    assert version_differences({**mine, "NCCL": "2.27.5"}, mine) == ""
    assert version_differences(
        {"NCCL": "2.27.5", "torch": "2.13.0"}, {"NCCL": "2.26.2", "torch": "2.13.0"}
    ) == ("NCCL 2.26.2 (the run has 2.27.5)")


@pytest.mark.parametrize(
    ("nccl", "linked", "says"),
    [
        ("2.26.2", True, True),
        ("2.26.2", False, False),
        ("2.27.5", True, False),
        ("2.2.6", True, False),
    ],
)
def test_a_version_of_nccl_that_was_seen_to_hang_is_said_once_for_each_node(
    nccl: str,
    linked: bool,
    says: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(node_checks, "versions", lambda: {"NCCL": nccl})
    monkeypatch.setattr(node_checks, "free_gpu_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    Checks(Entry(Terms({"NCCL": nccl})), torch.device("cuda", 0), linked).begin(lambda *_: Future())
    assert [f"NCCL {nccl} was reported to hang" in record.message for record in caplog.records] == [
        True
    ] * says


@pytest.mark.parametrize("name", ["elastic", "torch", "Python"])
def test_another_version_is_refused_before_anything_else_is_done(
    name: str, background: Callable[..., Any]
) -> None:
    mine = versions()
    checks = Checks(Entry(Terms({**mine, name: "0.0"})), CPU, linked=False)
    with pytest.raises(NodeRejected, match=f"^{name} {mine[name]} \\(the run has 0.0\\)$"):
        checks.begin(lambda *_: pytest.fail("something was begun"))


@pytest.mark.parametrize(
    ("value", "linked", "n_visible", "refused"),
    [
        ("1", False, 8, True),
        ("true", False, 2, True),
        ("1", True, 8, False),
        ("1", False, 1, False),
        ("0", False, 8, False),
    ],
)
def test_workers_that_would_share_the_first_gpu(
    value: str, linked: bool, n_visible: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray can be told to show every worker all GPUs: the second worker of a node says so before
    anything else is done."""
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_visible)
    monkeypatch.setattr(node_checks, "free_gpu_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(node_checks, "FREE_MOST_S", 0.0)
    checks = Checks(Entry(Terms(gpu_bytes=2 << 30)), torch.device("cuda", 0), linked)
    why = (
        f"^RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.* all {n_visible} GPUs"
        if refused
        else "GPU's memory are free"
    )
    with pytest.raises(NodeRejected, match=why):
        checks.begin(lambda *_: pytest.fail("something was begun"))


def test_a_node_of_a_pool_of_gpus_where_torch_finds_none_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its worker would train on the CPU."""

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 11040)")

    checks = Checks(Entry(Terms(on_gpu=True, gpu_bytes=2 << 30)), CPU, linked=True)
    monkeypatch.setattr(torch.cuda, "init", init)
    for build, says in (("12.6", "CUDA 12.6"), (None, "CPUs")):
        monkeypatch.setattr(torch.version, "cuda", build)
        with pytest.raises(NodeRejected) as refused:
            checks.begin(lambda *_: Future())
        assert str(refused.value) == (
            f"its pool is of GPUs, and torch {torch.__version__}, built for {says}, finds none "
            "here: The NVIDIA driver on your system is too old"
        )
        assert not refused.value.may_pass


def test_memory_that_is_not_there(background: Callable[..., Any]) -> None:
    free = free_host_bytes()
    assert 0 < free < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with pytest.raises(
        NodeRejected, match=r"GiB of host memory are free, the job needs 1048576\.00 GiB there"
    ):
        Checks(Entry(Terms(host_bytes=1 << 50)), CPU, linked=False).begin(background)
    assert "of a GPU's memory are free, the job needs 2.00 GiB" in too_little(
        Terms(gpu_bytes=2 << 30), 1 << 40, 1 << 30
    )
    assert too_little(Terms(gpu_bytes=1 << 30, host_bytes=1 << 30), 1 << 30, 1 << 30) == ""


def test_memory_of_a_process_that_was_killed_is_waited_for() -> None:
    """It is free after 5 s, or never."""
    now_s, ticks = [100.0], []

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    def free() -> int:
        return int(min(1.0, (now_s[0] - 100.0) / 5.0) * (70 << 30))

    def tick() -> None:
        ticks.append(now_s[0])

    found = awaited(60 << 30, free, clock=lambda: now_s[0], sleep=sleep, tick=tick)
    assert found >= 60 << 30 and 104.0 <= now_s[0] <= 105.0 and len(ticks) >= 4, (
        "its worker makes progress meanwhile"
    )
    now_s[0] = 200.0
    assert awaited(80 << 30, free, clock=lambda: now_s[0], sleep=sleep) == 70 << 30
    assert now_s[0] == 200.0 + FREE_MOST_S


def test_a_refusal_for_memory_of_the_gpu_names_who_holds_it_and_may_pass(
    monkeypatch: pytest.MonkeyPatch, background: Callable[..., Any]
) -> None:
    monkeypatch.setattr(node_checks, "FREE_MOST_S", 0.0)
    monkeypatch.setattr(node_checks, "memory_holders", lambda device: ((8, 72 << 30), (7, 0)))
    with pytest.raises(
        NodeRejected,
        match=r"the job needs 2\.00 GiB there \(still, after 0 s; memory is held by process 8",
    ) as told:
        Checks(Entry(Terms(gpu_bytes=2 << 30)), CPU, linked=False).begin(background)
    assert told.value.may_pass and str(told.value).endswith("process 8 (72.00 GiB), process 7)")
    with pytest.raises(NodeRejected, match="of host memory") as told:
        Checks(Entry(Terms(gpu_bytes=2 << 30, host_bytes=1 << 50)), CPU, linked=False).begin(
            background
        )
    assert not told.value.may_pass


def test_memory_that_becomes_free_lets_the_worker_in(
    monkeypatch: pytest.MonkeyPatch, background: Callable[..., Any]
) -> None:
    free = iter([0, 0, 1 << 30, 3 << 30])
    monkeypatch.setattr(node_checks, "free_gpu_bytes", lambda device: next(free))
    monkeypatch.setattr(node_checks, "FREE_EVERY_S", 0.0)
    checks = Checks(Entry(Terms(gpu_bytes=2 << 30)), CPU, linked=False)
    checks.begin(background)
    assert checks.end().gpu_bytes == 3 << 30


def test_a_control_group_bounds_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it keeps of files it lets go of."""
    monkeypatch.setattr(free_memory, "CONTROL_GROUP", tmp_path)
    for name, text in (
        ("memory.max", "1000"),
        ("memory.current", "900"),
        ("memory.stat", "anon 300\ninactive_file 600\n"),
    ):
        (tmp_path / name).write_text(text)
    assert free_host_bytes() == 700
    (tmp_path / "memory.max").write_text("max")
    assert free_host_bytes() > 1 << 20


# --------------------------------------------------------------------------------------- the matmul


def test_the_product_is_as_known_and_its_speed_is_measured() -> None:
    assert multiply(CPU) > 1e6


def one_wrong(value: float) -> Callable[..., torch.Tensor]:
    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = a @ b
        c[-1, -1] = c[-1, -1] + 1 if value == 1 else value
        return c

    return matmul


@pytest.mark.parametrize(("value", "more"), [(1.0, ""), (float("nan"), ", some are no numbers")])
def test_one_wrong_element_is_found(value: float, more: str) -> None:
    n = node_checks.CPU_SIZE**2
    with pytest.raises(
        NodeRejected, match=f"^it computes wrongly: 1 of {n} elements of a product on cpu{more}$"
    ):
        multiply(CPU, one_wrong(value))


def test_an_error_of_the_device_is_a_reason(
    background: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with ...")

    with pytest.raises(
        NodeRejected,
        match="^it cannot compute on cpu: CUDA error: uncorrectable ECC error encountered$",
    ):
        multiply(CPU, broken)
    monkeypatch.setattr(node_checks, "multiply", lambda device: multiply(device, broken))
    checks = Checks(Entry(Terms()), CPU, linked=False)
    checks.begin(background)
    assert "ECC" in str(checks.refusal()), "also where the program failed first because of it"


def test_bfloat16_holds_every_element_of_the_large_product() -> None:
    largest = node_checks._known(node_checks.GPU_SIZE // node_checks.PERIOD)
    assert torch.equal(largest.to(torch.bfloat16).to(torch.float32), largest)
    assert largest.unique(dim=0).shape == largest.unique(dim=1).shape == (7, 7), (
        "it tells one row and column from another"
    )


# ----------------------------------------------------------------------------------------- the link


def closed_door() -> Door:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Door(
            "gone", "127.0.0.1", int(server.getsockname()[1]), b"t" * link_probe.TOKEN_BYTES
        )


def test_a_link_is_measured() -> None:
    found = measure(listen("b", "127.0.0.1"))
    assert found.problem == "" and found.name == "b" and found.bytes_per_s > 0


def test_a_door_is_for_one_visitor_who_knows_the_token() -> None:
    door = listen("b", "127.0.0.1")
    assert (
        "b cannot be reached" in measure(replace(door, token=b"?" * link_probe.TOKEN_BYTES)).problem
    )
    assert measure(door).problem == "", "the wrong one was only sent away"
    until(lambda: "cannot be reached" in measure(door).problem, "the end of the door")


def test_visitors_that_say_nothing_keep_nobody_waiting() -> None:
    door = listen("b", "127.0.0.1")
    with ExitStack() as silent:
        for _ in range(8):
            silent.enter_context(socket.create_connection((door.host, door.port), 5.0))
        began_s = time.monotonic()
        assert measure(door).problem == ""
        assert time.monotonic() - began_s < link_probe.TOKEN_MOST_S, "none of them was waited for"


def test_a_neighbour_that_cannot_be_reached() -> None:
    assert measure(closed_door()).problem.startswith("gone cannot be reached at 127.0.0.1:")


def test_what_arrives_altered_is_found() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def altering() -> None:
        with server, server.accept()[0] as visitor:
            link_probe._read(visitor, link_probe.TOKEN_BYTES)
            text = bytearray(link_probe._read(visitor, link_probe.PAYLOAD_BYTES))
            text[1000] ^= 1
            visitor.sendall(struct.pack("<QI", len(text), zlib.crc32(text)))

    threading.Thread(target=altering, daemon=True).start()
    door = Door("b", "127.0.0.1", int(server.getsockname()[1]), b"t" * link_probe.TOKEN_BYTES)
    assert measure(door).problem == "what it sends to b arrives altered"


def test_a_node_that_reaches_one_of_two_neighbours_is_not_at_fault() -> None:
    found = try_links(lambda: [closed_door(), listen("b", "127.0.0.1")])
    assert found is not None and (found.name, found.problem) == ("b", "")
    failed = try_links(lambda: [closed_door(), closed_door()])
    assert failed is not None and failed.problem and failed.failed == ("gone", "gone")
    assert try_links(list) is None, "nobody is there yet"


def test_all_checks_of_a_good_node(background: Callable[..., Any]) -> None:
    checks = Checks(
        Entry(Terms(versions(), host_bytes=1 << 20), lambda: [listen("b", "127.0.0.1")]),
        CPU,
        linked=True,
    )
    checks.begin(background)
    checks.program({"program": "p", "n_samples": None}, {"program": "p", "n_samples": 5})
    found = checks.end()
    assert (
        found.neighbor == "b"
        and min(found.flop_per_s, found.link_bytes_per_s, found.host_bytes, found.seconds) > 0
    )
    assert found.versions == versions() and found.gpu_bytes == 0
    with pytest.raises(
        NodeRejected, match=r"its program is another one: the code of its program\.py"
    ):
        checks.program({"program": "p"}, {"program": "q"})


# ------------------------------------------------------------------------------------------ storage


def mark(uri: Path, text: str = "a1b2") -> Mark:
    return Mark(str(uri), f"admission/{text}", f"admission/{text}.a", text)


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[Path, Path]:
    """The run's folder on the driver's host, with its mark, and on another one that has a disk of
    its own."""
    for name in ("driver", "other"):
        (tmp_path / name).mkdir()
    LocalStorage(tmp_path / "driver").put("admission/a1b2", b"a1b2")
    return tmp_path / "driver", tmp_path / "other"


def test_the_drivers_file_is_found_and_answered(
    hosts: tuple[Path, Path], background: Callable[..., Any]
) -> None:
    checks = Checks(Entry(Terms(versions(), mark=mark(hosts[0]))), CPU, linked=True)
    checks.begin(background)
    assert checks.end().mark == "a1b2"
    assert (hosts[0] / "admission" / "a1b2.a").read_text() == "a1b2"
    checks = Checks(Entry(Terms(versions(), mark=mark(hosts[1]))), CPU, linked=False)
    checks.begin(background)
    assert checks.end().mark == "", "one worker of a node looks"


def test_storage_that_is_the_hosts_own_is_refused(hosts: tuple[Path, Path]) -> None:
    (hosts[1] / "admission").mkdir()
    for uri, says in (
        (hosts[1], "a file that the driver has written is not there on this node, in "),
        (
            hosts[1] / "no" / "such",
            "a file that the driver has written is not there on this node, in ",
        ),
        (hosts[0] / "admission" / "a1b2", "this node cannot read and write (Not a directory) "),
    ):
        with pytest.raises(NodeRejected) as refused:
            answer(mark(uri))
        right = (
            "give `storage` a folder that all nodes share and may write, or s3://bucket/prefix "
            "(likewise gs://, az://)"
        )
        assert str(refused.value) == f"{APART}: {says}{uri}; {right}"
    (hosts[1] / "admission" / "a1b2").write_text("another run's")
    with pytest.raises(NodeRejected, match="another file than the driver's is on this node"):
        answer(mark(hosts[1]))


def test_storage_that_does_not_answer_is_refused(
    hosts: tuple[Path, Path], background: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_checks, "END_MOST_S", 0.2)
    hangs = threading.Event()
    monkeypatch.setattr(node_checks, "answer", lambda mark: hangs.wait(60.0))
    monkeypatch.setattr(node_checks, "multiply", lambda device: 1.0)
    checks = Checks(Entry(Terms(versions(), mark=mark(hosts[0]))), CPU, linked=True)
    checks.begin(background)
    try:
        with pytest.raises(
            NodeRejected,
            match=f"{APART}: no answer within 0 s on this node from {hosts[0]}; give `storage`",
        ):
            checks.end()
    finally:
        hangs.set()


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (StorageRefused("s3://b/r: ListObjectsV2 was refused (AccessDenied): no"), True),
        (StorageFailed("s3://b/r: ListObjectsV2 failed (503; asked 3 times): down"), False),
        (None, False),
    ],
)
def test_object_storage_that_says_no_to_the_node_is_told_in_its_words(
    error: Exception | None,
    refused: bool,
    background: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Credentials that only the driver has. What is away may be so for all."""
    asked = []

    class Far:
        def hasty(self, most_s: float) -> Far:
            return self

        def list(self, prefix: str) -> list[str]:
            asked.append(prefix)
            if error is not None:
                raise error
            return []

    monkeypatch.setattr(node_checks, "open_storage", lambda uri: Far())
    checks = Checks(Entry(Terms(versions(), storage="s3://b/r")), CPU, linked=True)
    checks.begin(background)
    with pytest.raises(NodeRejected) if refused else nullcontext() as found:
        checks.end()
    assert asked == ["admission/"]
    if refused:
        assert str(found.value) == f"the run's storage refuses it: {error}"
    checks = Checks(Entry(Terms(versions(), storage="s3://b/r")), CPU, linked=False)
    checks.begin(background)
    checks.end()
    assert asked == ["admission/"], "one worker of a node asks"


def test_of_several_workers_the_worst_counts() -> None:
    a = Admission(0.2, 0.1, {"torch": "2"}, 5e9, 100, 7, 3e8, "b", "a1b2")
    b = Admission(0.3, 0.0, {"torch": "2"}, 4e9, 90, 8)
    assert (
        worst([a, b])
        == worst([b, a])
        == Admission(0.3, 0.1, {"torch": "2"}, 4e9, 90, 7, 3e8, "b", "a1b2")
    )


# ------------------------------------------------------------------------------------- in a session


def refused(job: dict[str, Any], entry: Entry, tmp_path: Path) -> NodeRefused:
    session = Session(WorkerId("a", 0), job, str(tmp_path))
    try:
        session.order(WorkerOrder(Prepare("a"), entry=entry))
        ((_, event),) = session.poll(0, 120.0).messages
    finally:
        session.close()
    assert isinstance(event, NodeRefused), event
    return event


def test_a_session_refuses_instead_of_preparing(tmp_path: Path) -> None:
    told = refused(JOB, Entry(Terms({"torch": "0.0"})), tmp_path)
    assert told.node_id == "a" and told.reason == f"torch {versions()['torch']} (the run has 0.0)"
    told = refused({**JOB, KEY: {"program": "0", "n_samples": None}}, Entry(Terms()), tmp_path)
    assert told.reason == "its program is another one: the code of its program.py"
    told = refused(JOB, Entry(Terms(), lambda: [closed_door()]), tmp_path)
    assert told.reason.startswith("gone cannot be reached") and told.neighbors == ("gone",)
    assert refused(JOB, Entry(Terms(mark=mark(tmp_path))), tmp_path).reason.startswith(f"{APART}: ")


def test_a_refused_node_may_be_looked_at_again(tmp_path: Path) -> None:
    session = Session(WorkerId("a", 0), JOB, str(tmp_path))
    try:
        session.order(WorkerOrder(Prepare("a"), entry=Entry(Terms(), lambda: [closed_door()])))
        ((number, event),) = session.poll(0, 120.0).messages
        assert isinstance(event, NodeRefused)
        session.order(
            WorkerOrder(Prepare("a"), entry=Entry(Terms(), lambda: [listen("b", "127.0.0.1")]))
        )
        ((_, event),) = session.poll(number, 120.0).messages
    finally:
        session.close()
    assert (
        isinstance(event, NodePrepared)
        and event.admission is not None
        and event.admission.neighbor == "b"
    )


def test_a_bad_node_is_not_the_programs_fault(tmp_path: Path) -> None:
    """The program could not be opened there either, which would end the run."""
    broken = {**JOB, "program": str(tmp_path / "not_there.py")}
    assert refused(broken, Entry(Terms(), lambda: [closed_door()]), tmp_path).reason.startswith(
        "gone cannot be reached"
    )
