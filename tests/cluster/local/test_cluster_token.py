"""Who has not the token of an embedded cluster gets nothing from it, at no port; and no port is
open to other machines."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from elastic.cluster.local import cluster_token
from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder

pytestmark = pytest.mark.e2e
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
TOKEN = "RAY_AUTH_TOKEN_PATH"
OVERWRITE = """
import sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
keys = client.internal_kv_keys(b"ActorClass:", b"fun", 5)
for key in keys:
    client.internal_kv_put(key, b"a stranger's", True, b"fun", 5)
print("overwritten", len(keys))
"""
CALL = """
import json, sys
import grpc
from ray.core.generated import core_worker_pb2, gcs_service_pb2, node_manager_pb2
methods = [
    f"/{service.full_name}/{method.name}"
    for file in (core_worker_pb2, gcs_service_pb2, node_manager_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
] + ["/ray.rpc.ObjectManagerService/Push", "/ray.rpc.ObjectManagerService/Pull"]
metadata = [("authorization", "Bearer " + open(sys.argv[2]).read())] if len(sys.argv) > 2 else []
asked = ("/GetNodeStats", "/GetCoreWorkerStats", "/InternalKVKeys", "/Pull")
found = {}
for port in json.loads(sys.argv[1]):
    channel, said = grpc.insecure_channel(f"127.0.0.1:{port}"), found.setdefault(port, {})
    for method in methods if not metadata else [m for m in methods if m.endswith(asked)]:
        try:
            channel.unary_unary(method)(b"", timeout=5 if metadata else 60, metadata=metadata)
            status = "OK"
        except grpc.RpcError as error:
            status = error.code().name
        said.setdefault(status, []).append(method)
print(json.dumps(found))
"""


@ray.remote(num_cpus=1)
class Victim:
    def word(self) -> str:
        return "mine"


@pytest.fixture(scope="module")
def stranger() -> dict[str, str]:
    """An environment that says nothing."""
    return {"PATH": os.environ["PATH"]}


@pytest.fixture(scope="module")
def own() -> Iterator[LocalCluster]:
    """A cluster with a node and an actor on it."""
    with LocalCluster() as cluster:
        cluster.add(NodeOrder("a", 1)).result(180)
        cluster.connect("tokens")
        victim: Any = Victim.remote()
        assert ray.get(victim.word.remote(), timeout=180) == "mine"
        yield cluster


def python(text: str, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-c", text, *words)
    return subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=600, check=False
    )


def listening(cluster: LocalCluster) -> list[tuple[str, str, int]]:
    """Name of the process, address and port of every TCP socket of the cluster and of this
    driver."""
    found = []
    for pid in (os.getpid(), *cluster.pids()):
        try:
            process = psutil.Process(pid)
            name, sockets = process.name(), process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        found += [
            (name, s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN
        ]
    return found


def of_ray() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


def outer_address() -> str | None:
    """Of this machine, where it has one."""
    every = (
        a.address
        for entries in psutil.net_if_addrs().values()
        for a in entries
        if a.family.name == "AF_INET"
    )
    return next((address for address in every if not address.startswith("127.")), None)


# each token is new, and gone afterwards: test_token_file.py
@pytest.mark.whole
def test_clusters_one_after_the_other_have_tokens_of_their_own_and_leave_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of this file: it drives clusters of its own."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    before, seen = of_ray(), set()
    for _ in range(2):
        with LocalCluster() as cluster:
            cluster.connect("twice")
            seen.add(Path(cluster.environment[TOKEN]).read_text())
            assert os.environ[TOKEN] == cluster.environment[TOKEN]
            assert len(ray.nodes()) == 1
            cluster.disconnect()
            assert of_ray() == before
    assert len(seen) == 2


def test_all_ports_are_on_loopback(own: LocalCluster) -> None:
    found = listening(own)
    assert {"gcs_server", "raylet"} <= {name for name, _, _ in found}
    assert any(name.startswith("ray::") for name, _, _ in found)
    assert [one for one in found if one[1] not in LOOPBACK] == []
    outer = outer_address()
    for _, _, port in found if outer else ():
        with socket.socket() as there:
            there.settimeout(5)
            assert there.connect_ex((outer, port)) == errno.ECONNREFUSED


def test_a_stranger_cannot_put_code_in_the_place_of_an_actor(
    own: LocalCluster, stranger: dict[str, str]
) -> None:
    done = python(OVERWRITE, own.address, env=stranger)
    assert done.returncode != 0, done.stdout
    assert "overwritten" not in done.stdout
    assert "nauthenticated" in done.stderr, done.stderr


def test_each_port_refuses_who_has_no_token(own: LocalCluster, stranger: dict[str, str]) -> None:
    ports = sorted(
        {
            port
            for name, _, port in listening(own)
            if name in ("gcs_server", "raylet") or name.startswith("ray::")
        }
    )
    assert len(ports) >= 6, "of a head, two raylets and a worker"
    token = own.environment[TOKEN]
    refused = json.loads(python(CALL, json.dumps(ports), env=stranger).stdout)
    let_in = json.loads(python(CALL, json.dumps(ports), token, env=stranger).stdout)
    assert len(refused) == len(let_in) == len(ports)
    for port, without in refused.items():
        assert without.keys() <= {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE"}, (
            port,
            without,
        )
        assert "UNAUTHENTICATED" in without, (port, without)
        assert "UNAUTHENTICATED" not in let_in[port], (port, let_in[port])


def test_who_has_the_token_is_let_in(own: LocalCluster, stranger: dict[str, str]) -> None:
    """Last: it does what the stranger could not."""
    done = python(OVERWRITE, own.address, env={**stranger, **own.environment})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 1


def test_the_token_is_a_file_of_its_user_and_in_no_command_line(own: LocalCluster) -> None:
    file = Path(own.environment[TOKEN])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    token = file.read_text()
    assert len(token) == 2 * cluster_token.TOKEN_BYTES
    for pid in own.pids():
        told = Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/environ").read_text()
        assert token not in told, f"process {pid}"
    logs = [log for log in file.parent.rglob("*") if log.is_file() and log != file]
    assert not [log for log in logs if token.encode() in log.read_bytes()]
