"""Nodes from Ray's own autoscaler: real raylets come and go. One cluster in its own namespaces, one
scene after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster.autoscaled import Autoscaled, not_allowed

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def autoscaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Autoscaled]:
    why = not_allowed()
    if why:
        pytest.skip(why)
    made = Autoscaled(tmp_path_factory.mktemp("autoscaled"))
    yield made
    made.close()


@pytest.mark.parametrize(
    "scene",
    [
        "given_and_given_back",
        "drought_then_on_demand",
        "no_more_than_asked",
        "done_and_cleared",
        "pool_of_another_name",
        "attached_after_the_watcher_died",
        "killed_driver",
    ],
)
def test_scene(autoscaled: Autoscaled, scene: str) -> None:
    autoscaled.play(scene)
