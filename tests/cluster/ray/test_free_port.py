"""A port for a process that listens on it later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from elastic.cluster.ray import processes


def given_out(folder: Path, text: str) -> Path:
    file = folder / "ip_local_port_range"
    file.write_text(text)
    return file


def test_no_connection_is_given_it_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GIVEN_OUT", given_out(tmp_path, "32768\t60999\n"))
    port = processes.free_port("127.0.0.1")
    assert port in processes.PORTS
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        monkeypatch.setattr(processes, "PORTS", range(port - 30, port + 1))
        assert {processes.free_port("127.0.0.1") for _ in range(40)} & {port} == set()


@pytest.mark.parametrize("text", ["1024\t65535\n", "no numbers", ""])
def test_where_all_ports_may_be_given_out_the_system_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(processes, "GIVEN_OUT", given_out(tmp_path, text))
    monkeypatch.setattr(processes.random, "sample", lambda *_: pytest.fail("chosen by ourselves"))
    port = processes.free_port("127.0.0.1")
    with socket.socket() as own:
        own.bind(("127.0.0.1", port))
