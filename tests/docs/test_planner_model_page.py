"""docs/planner-model.md: every part of a step is in its table, its links lead somewhere, its
constants are counted."""

from __future__ import annotations

import re

from support.places import ROOT

from elastic.planner.cost.kernels import LOGIT_BYTES, _table
from elastic.planner.explain import TOLD

PAGE = (ROOT / "docs" / "planner-model.md").read_text()


def test_links_lead_somewhere() -> None:
    found = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert found and [target for target in found if not (ROOT / "docs" / target).exists()] == []
    paths = re.findall(r"`((?:elastic|tests)/[\w/]+\.\w+)`", PAGE)
    assert len(paths) >= 5 and [path for path in paths if not (ROOT / path).exists()] == []


def test_every_part_of_a_step_has_its_formula() -> None:
    rows = " ".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `"))
    assert [name for name in TOLD if f"`{name}`" not in rows] == []


def test_every_generation_is_named_and_the_constants_are_counted() -> None:
    assert [name for name in LOGIT_BYTES if f"`{name}`" not in PAGE] == []
    assert f"{sum(map(len, _table().values()))} constants" in PAGE
