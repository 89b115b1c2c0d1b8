"""The interface by which the store is reached is gloo's: not what the host's name resolves to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from support.worker.ranks import meeting

from elastic.types import Layout, WorkerId
from elastic.types.orders import Rendezvous
from elastic.worker.process_groups import network_interfaces
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.network_interfaces import choose_for_gloo, interface_of, outward

INSIDE = """
ip link set lo up && ip link add lan0 type veth peer name lan1 && ip addr add 10.9.8.7/24 dev lan0 &&
ip addr add 10.9.8.9/24 dev lan0 && ip addr add 10.7.6.5/32 dev lan0 label lan0:b &&
ip addr add fd09::7/64 dev lan0 nodad && ip link set lan0 up && exec "$@"
"""
SAY = """
from elastic.worker.process_groups.network_interfaces import interface_of
print(*map(interface_of, ("10.9.8.7", "10.9.8.9", "10.7.6.5", "fd09::7")))
print(*map(interface_of, ("127.0.0.1", "::1", "10.9.8.6")))
"""


def inside(network: str, say: str) -> subprocess.CompletedProcess[str]:
    words = ["unshare", "--net", "sh", "-c", network, "sh", sys.executable, "-c", say]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        pytest.skip(f"namespaces: {error}")
    if "unshare" in done.stderr or "not permitted" in done.stderr:
        pytest.skip(f"namespaces are not allowed here: {done.stderr.strip()}")
    return done


def test_an_address_belongs_to_its_interface() -> None:
    done = inside(INSIDE, SAY)
    lan = ["lan0", "lan0", "lan0:b", "lan0"]
    assert done.stdout.split() == [*lan, "lo", "lo", "None"], done.stderr


def test_groups_meet_on_the_way_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = Groups(1, Layout(), torch.device("cpu"))
    try:
        groups.join(meeting(1, store.port), 0)
        assert os.environ["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1") == "lo"
    finally:
        groups.close()
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.mark.parametrize(
    ("address", "chosen", "n_lines"),
    [("127.0.0.1", "lo", 0), ("203.0.113.9", None, 1), ("127.9.9.9", None, 0)],
)
def test_an_address_that_no_interface_has_is_told(
    address: str,
    chosen: str | None,
    n_lines: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine0")
    choose_for_gloo(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine0" and not caplog.records
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    choose_for_gloo(address)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen
    assert len(caplog.records) == n_lines
    assert all("203.0.113.9" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("here", "store", "nodes", "found"),
    [
        ("127.0.0.1", "gpu-3", "ab", "10.9.8.7"), ("10.9.8.9", "gpu-3", "ab", "10.9.8.9"),
        ("127.0.0.1", "gpu-3", "aa", "127.0.0.1"), ("127.0.0.1", "127.0.0.1", "ab", "127.0.0.1"),
        ("127.0.0.1", "localhost", "ab", "127.0.0.1"), ("::1", "gpu-3", "ab", "10.9.8.7"),
    ],
)  # fmt: skip
def test_a_host_whose_own_name_is_loopback_is_met_by_others_elsewhere(
    here: str, store: str, nodes: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian writes it into /etc/hosts; the hosts of one machine meet on loopback."""
    own = [("lo", "127.0.0.1"), ("lan0", "10.9.8.7")]
    monkeypatch.setattr(network_interfaces, "ANYWHERE", ("255.255.255.255", 9))
    monkeypatch.setattr(
        network_interfaces, "_each_ipv4", lambda: ((name, socket.inet_aton(at)) for name, at in own)
    )
    workers = tuple(WorkerId(node, i) for i, node in enumerate(nodes))
    assert outward(here, Rendezvous(workers, (store, 1), 60.0, "")) == found


def test_the_way_out_is_that_of_the_default_route() -> None:
    words = (
        "from types import SimpleNamespace as S;"
        "from elastic.worker.process_groups.network_interfaces import outward;"
        "two = [S(node_id='a'), S(node_id='b')];"
        "print(outward('127.0.0.1', S(participants=two, store=('gpu-3', 1))))"
    )
    route = INSIDE.replace("&& exec", "&& ip route add default dev lan0 src 10.9.8.9 && exec")
    done = inside(route, words)
    assert done.stdout.split() == ["10.9.8.9"], done.stderr
