"""A Ray address where nothing answers is one line at once."""

from __future__ import annotations

import socket

import pytest

from elastic.api.running.options import Options, ray_address
from elastic.cluster.ray.address import check_reachable
from elastic.errors import SpecError


def test_an_address_where_somebody_listens_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_reachable(address)
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert ray_address(Options()) == address


def test_one_where_nobody_listens_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        SpecError,
        match=f"the Ray cluster at {address} cannot be reached .*; set RAY_ADDRESS right, or unset "
        "it",
    ):
        ray_address(Options())
    assert ray_address(Options(local=True)) is None


@pytest.mark.parametrize("address", ["auto", "local"])
def test_other_words_are_left_to_ray(address: str) -> None:
    check_reachable(address)


@pytest.mark.parametrize("address", ["http://somewhere:8265", "ray://somewhere:10001"])
def test_a_driver_from_outside_is_told_to_be_submitted(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        SpecError, match=f"^RAY_ADDRESS={address}: the driver runs on a node.*submit"
    ):
        ray_address(Options())
