"""What people write for tokens, durations and GPUs."""

from __future__ import annotations

import pytest

from elastic.api.planning.quantities import GpuRequest, gpus_of, hours_of, tokens_of, usd_of
from elastic.errors import SpecError


def test_dollars() -> None:
    texts = ("500", "200k", "$1.5M", "1,200")
    assert [usd_of(text) for text in texts] == [500.0, 200e3, 1.5e6, 1200.0]
    for text in ("", "0", "-5", "200 k$", "much", "9" * 20):
        with pytest.raises(SpecError, match="--budget .*: it must be dollars in all"):
            usd_of(text)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1T", 1e12), ("300B", 3e11), ("15e12", 1.5e13), ("2.5m", 2.5e6), ("4_000k", 4e6), ("7", 7.0)],
)
def test_tokens(text: str, tokens: float) -> None:
    assert tokens_of(text) == pytest.approx(tokens)


@pytest.mark.parametrize("text", ["", "5X", "-1B", "0", "1TB", "T", "1e30"])
def test_no_tokens(text: str) -> None:
    with pytest.raises(SpecError, match=r"--tokens .*as in 300B"):
        tokens_of(text)


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("3w", 504.0),
        ("36h", 36.0),
        ("10d", 240.0),
        ("1w3d", 240.0),
        ("90m", 1.5),
        ("90 min", 1.5),
        ("2mo", 1440),
        ("1y", 8760),
    ],
)
def test_durations(text: str, hours: float) -> None:
    assert hours_of(text) == pytest.approx(hours)


@pytest.mark.parametrize("text", ["", "3", "3years", "h", "0d", "3w!"])
def test_no_durations(text: str) -> None:
    with pytest.raises(SpecError, match=r"--within .*as in 3w"):
        hours_of(text)


def test_gpus() -> None:
    found = gpus_of("H100:64, A100:16@2x8@spot,L4@x4,p5.48xlarge:8@usd=2.5")
    assert found[0] == GpuRequest("H100:64", "H100", 64)
    assert (found[1].n_gpus, found[1].per_node, found[1].market_type) == (16, 8, "spot")
    assert (found[2].n_gpus, found[2].per_node) == (0, 4)
    assert (found[3].kind, found[3].usd_per_gpu_h) == ("p5.48xlarge", 2.5)
    assert gpus_of("B200@3x8")[0].n_gpus == 24


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no GPU is named"),
        ("H100:x", "must be a GPU and how many"),
        ("H100:0", "must be a GPU and how many"),
        (":8", "must be a GPU and how many"),
        ("H100:8@cheap", "'@cheap' is unknown"),
        ("H100:16@0x8", "'@0x8' is unknown"),
        ("H100:12@1x8", "12 GPUs are not 1 node of 8"),
        ("H100:12@x8", "do not fill nodes of 8"),
    ],
)
def test_no_gpus(text: str, what: str) -> None:
    with pytest.raises(SpecError, match=what) as caught:
        gpus_of(text)
    assert "\n" not in str(caught.value)
