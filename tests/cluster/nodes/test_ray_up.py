"""`ray up` of a shipped cluster file, end to end, on hosts that are namespaces (aws_hosts.py): one
cluster, one run, one scene after the other. `-s` shows what each scene measured."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.cluster.autoscaled import Inside
from support.cluster.aws_hosts import SETUP, missing
from support.places import TESTS

pytestmark = [pytest.mark.whole, pytest.mark.timeout(3600)]
LONG = [pytest.param(scene, marks=pytest.mark.whole) for scene in ("killed", "cut")]  # minutes each


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    why = missing()
    if why:
        pytest.skip(why)
    made = Inside(
        str(TESTS / "support" / "cluster" / "aws_hosts.py"),
        tmp_path_factory.mktemp("aws"),
        os.environ,
        SETUP,
    )
    yield made
    made.close()


@pytest.mark.parametrize("scene", ["launched", "reaches_steps", "notice", *LONG, "ended"])
def test_scene(inside: Inside, scene: str) -> None:
    if inside.failed:
        pytest.fail(f"not played after {inside.failed}")
    print(f"{scene}: {inside.play(scene)}")
