"""A process that knows nothing but the port of a generation's store comes as a rank, and answers
with a pickle of code."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
import torch
from support.child import child

from elastic.errors import PeerGarbled, ProgramError
from elastic.types import Abort, WorkerId
from elastic.types.orders import Rendezvous, WorkerOrder
from elastic.worker.process_groups import wire
from elastic.worker.process_groups.rendezvous import host_store, new_secret, place
from elastic.worker.session.worker_errors import kind_of

NOW = [("stage", False), ("metrics", True)]  # in `make test`
HONEST = """
import os, sys
from types import SimpleNamespace
import torch
from elastic.types import Layout, WorkerId
from elastic.types.orders import Rendezvous
from elastic.worker.step.sdc_check import SdcCheck
from elastic.worker.process_groups.groups import Groups
from elastic.worker.parallel.pipeline import Pipeline
from elastic.worker.step.logged_sums import Sums
port, me, question, secret = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], os.environ["SECRET"]
layout = Layout(pp=2) if question == "stage" else Layout(dp_shard=2)
groups = Groups(1, layout, torch.device("cpu"))
try:
    groups.join(Rendezvous((WorkerId("node", 0), WorkerId("node", 1)), ("127.0.0.1", port), 60.0, secret), me)
    if question == "metrics":
        print("heard", Sums({"right": 3.0}).over(groups.commit))
    elif question == "stage":
        pipeline = Pipeline([torch.nn.Identity()], groups.pp, layout, n=2, device=groups.device)
        total = pipeline.run(torch.ones(2, 3), {}, 2, loss=lambda output, rows: output.sum(), train=False)
        print("heard", float(total))
    else:
        stepper = SimpleNamespace(rank=me, groups=groups)
        asked = SimpleNamespace(plan=SimpleNamespace(layout=layout), stepper=stepper)
        print("heard", SdcCheck._same_sample(asked, [{"input": torch.arange(6).view(2, 3)}], 0))
except Exception as error:
    print(type(error).__name__, error)
"""
STRANGER = """
import os, pickle, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
port, me, question, mark = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
class Code:
    def __reduce__(self):
        return os.system, (f"id > {mark}",)
most = timedelta(seconds=60)
tcp = TCPStore("127.0.0.1", port, is_master=False, timeout=most, wait_for_workers=False)
while not (keys := [key for key in tcp.list_keys() if key.startswith("generation-")]):
    time.sleep(0.02)
store = PrefixStore(keys[0].partition("/")[0], tcp)
dist.init_process_group("gloo", store=store, rank=me, world_size=2, timeout=most)
plan = dist.new_group([0, 1], timeout=most, use_local_synchronization=True)
copies = dist.new_group([0, 1], timeout=most, use_local_synchronization=True)
store.set(f"addresses/{me}", "[true, [], []]")

def put(row, group):
    table = torch.zeros(2, len(row), dtype=torch.uint8)
    table[me] = row
    dist.all_reduce(table, group=group)
    return table[1 - me].clone()

def tell(words, group=None):
    theirs = int(put(torch.tensor([len(words)]).view(torch.uint8), group).view(torch.int64))
    put(torch.frombuffer(bytearray(words.ljust(theirs)), dtype=torch.uint8), group)

if keys[0].partition("/")[0].count("-") > 1:
    put(torch.zeros(32, dtype=torch.uint8), None)  # its proof
tell(b"[true, [], []]")
if question == "metrics":
    tell(pickle.dumps(Code()), plan)
elif question == "stage":
    dist.send(torch.zeros(1, dtype=torch.int32), 1, group=plan)  # 4 bytes each way: torch's vote on how shapes are found
    dist.recv(torch.zeros(1, dtype=torch.int32), 1, group=plan)  # (2.11: its greeting)
    dist.send_object_list([Code()], 1, group=plan, use_batch=True)
else:
    words = pickle.dumps(Code())
    dist.all_reduce(torch.tensor([len(words)]), group=plan)
    dist.all_reduce(torch.frombuffer(bytearray(words), dtype=torch.uint8), group=plan)
time.sleep(60)
"""


def honest(
    port: int, me: int, question: str, secret: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    words = [sys.executable, "-c", HONEST, str(port), str(me), question]
    return child(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "SECRET": secret})


def met(question: str, secret: str, mark: Path) -> str:
    """What the honest rank says. Of a broadcast it is the one that hears."""
    store = host_store("127.0.0.1", 60.0)
    me = 0 if question == "metrics" else 1
    words = [sys.executable, "-c", STRANGER, str(store.port), str(1 - me), question, str(mark)]
    with honest(store.port, me, question, secret) as rank, child(words):
        return str(rank.communicate(timeout=180)[0])


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("question", "secret"),
    [
        pytest.param(
            question,
            new_secret() if told else "",
            id=f"{'a' if told else 'no'} secret-{question}",
            marks=[] if (question, told) in NOW else [pytest.mark.whole],
        )
        for told in (False, True)
        for question in ("metrics", "sample", "stage")
    ],
)
def test_a_stranger_runs_no_code(question: str, secret: str, tmp_path: Path) -> None:
    said = met(question, secret, tmp_path / "ran")
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    other = 1 if question == "metrics" else 0
    right = (
        f"who came as rank {other} of generation 1 was not told of it"
        if secret
        else f"rank {other} sent"
    )
    assert said.startswith(f"PeerGarbled {right}"), said


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("question", "right"),
    [("metrics", "{'right': 6.0}"), ("sample", "{'input': tensor([[0, 1, 2]])}")],
)
def test_two_ranks_that_were_told_meet(question: str, right: str) -> None:
    store, secret = host_store("127.0.0.1", 60.0), new_secret()
    with ExitStack() as stack:
        ranks = [stack.enter_context(honest(store.port, me, question, secret)) for me in range(2)]
        assert [rank.communicate(timeout=180)[0] for rank in ranks] == [f"heard {right}\n"] * 2


def test_the_store_listens_at_one_address() -> None:
    store = host_store("127.0.0.1")
    rows = [
        row.split()
        for kind in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    listening = [
        where
        for _, where, _, state, *_ in rows
        if state == "0A" and where.endswith(f":{store.port:04X}")
    ]
    assert listening == [f"0100007F:{store.port:04X}"]


def test_the_secret_is_in_no_text_and_not_in_the_place() -> None:
    secret = new_secret()
    at = Rendezvous((WorkerId("a", 0),), ("h", 1), 1.0, secret)
    order = WorkerOrder(Abort(1), at)
    assert secret not in repr(order) and secret not in str(order)
    assert at.secret == secret
    where = place(3, secret)
    assert where.startswith("generation-3-") and secret not in where
    assert len({where, place(4, secret), place(3, new_secret()), place(3, "")}) == 4


def test_a_garbled_peer_is_a_fault_of_connections_and_not_of_the_program() -> None:
    assert kind_of(PeerGarbled("x")) == "collective"
    assert kind_of(ProgramError("x")) == "program"


@pytest.mark.parametrize(
    "words",
    [
        b"\x80\x04K\x01.", b"", b"\xff", b"[" * 100_000, b'{"a": [1]}', b'{"a": true}',
        b'{"a": null}', b'{"a": "1"}', b'["a", 1]', b"1", b'{"a": {"b": 1}}',
    ],
)  # fmt: skip
def test_only_numbers_by_name_are_taken(words: bytes) -> None:
    with pytest.raises(PeerGarbled, match="rank 4"):
        wire.numbers(words, 4)


def test_numbers_arrive_as_they_were() -> None:
    mine = {"a": 0.1, "b": 1e300, "c": -0.0, "d": math.inf, "é": 2**53 - 1.0}
    assert wire.numbers(json.dumps(mine).encode(), 0) == mine
    assert math.isnan(wire.numbers(b'{"a": NaN}', 0)["a"])
    # no integer that a float cannot hold
    assert wire.numbers(b'{"a": ' + b"9" * 10_000 + b"}", 0) == {"a": math.inf}


@pytest.mark.parametrize(
    "rows",
    [
        {"a": 1}, [["a", "float32"]], [["a", "object", [1]]], [["a", "float32", [-1]]], [["a",
        "float32", [1.0]]], [["a", "float32", [True]]], [["a", "float32", 3]], [[1, "float32",
        [1]]], [["a", ["float32"], [1]]], [["a", "int8", [1]], ["a", "int8", [1]]], [["a",
        "float64", [1 << 20, 1 << 20]]], [["a", "int8", [1 << 40]]], [["a", "int8", [1 << 29, 1]],
        ["b", "int16", [1 << 29]]],
    ],
)  # fmt: skip
def test_only_tensors_of_known_types_and_sizes_are_taken(rows: object) -> None:
    with pytest.raises(PeerGarbled, match="rank 2"):
        wire.empty_tensors(json.dumps(rows).encode(), 2)


@pytest.mark.parametrize("dtype", wire.DTYPES.values(), ids=wire.DTYPES)
def test_each_known_type_can_be_announced_and_sent_as_bytes(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    made = wire.empty_tensors(json.dumps(wire._announced({"x": tensor})).encode(), 0)["x"]
    assert (made.dtype, made.shape, made.view(-1).view(torch.uint8).numel()) == (
        dtype,
        tensor.shape,
        tensor.nbytes,
    )


def test_lengths_are_looked_at_before_memory_is_taken() -> None:
    for n_bytes in (0, -1, wire.WORDS_MOST + 1, 1 << 62):
        with pytest.raises(PeerGarbled, match="announced"):
            wire._length(n_bytes, 0)
    with pytest.raises(ProgramError, match="too many"):
        wire._encoded({"x" * wire.WORDS_MOST: 1.0})
    with pytest.raises(ProgramError, match="'f' is float8_e8m0fnu"):
        wire._announced({"f": torch.zeros(1, dtype=torch.uint8).view(torch.float8_e8m0fnu)})
