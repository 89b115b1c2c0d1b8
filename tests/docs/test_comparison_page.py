"""What docs/comparison.md says of elastic and of others: figures of docs/benchmarks.md, and of GPUs
what the other pages say."""

from __future__ import annotations

import re

from support.places import ROOT


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_what_is_compared_was_measured() -> None:
    (row,) = re.findall(r"^\| until the next step.*$", page("comparison.md"), re.M)
    (course,) = re.findall(r"^\| without a step.*$", page("comparison.md"), re.M)
    rest = r"^\| a notice of the cloud .*$|^\| a node comes .*$"
    lines = [row, course, *re.findall(rest, page("comparison.md"), re.M)]
    known = set(re.findall(r"[0-9]+\.[0-9]+", page("benchmarks.md")))
    found = re.findall(r"([0-9.]+)(?: and ([0-9.]+))? s\b", " ".join(lines))
    assert len(found) == 7 and {number for pair in found for number in pair if number} <= known


def test_gpus_that_were_shown_are_those_of_the_readme() -> None:
    (row,) = re.findall(r"^\| GPUs shown \| ([^|]*) \|", page("comparison.md"), re.M)
    readme = " ".join((ROOT / "README.md").read_text().split())
    status = readme.split("**Status.**", 1)[1].split("Not shown yet", 1)[0]
    for said in ("one H200", "up to four NCCL ranks", "gpu.md#what-one-h200-showed"):
        assert said in status and said in row
