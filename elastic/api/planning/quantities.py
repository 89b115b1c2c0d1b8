"""What people write for tokens, durations and GPUs: `300B`, `3w`, `H100:64@spot`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from elastic.config.strict_model import HOURS_MOST, USD_MOST
from elastic.errors import SpecError
from elastic.text import n_of
from elastic.types import MarketType

TOKENS = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)([kmbt]?)")
TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
DURATION = re.compile(r"(?:[0-9]*\.?[0-9]+(?:min|mo|y|w|d|h|m))+")
ONE_DURATION = re.compile(r"([0-9]*\.?[0-9]+)(min|mo|y|w|d|h|m)")
HOURS = {
    "y": 365 * 24.0,
    "mo": 30 * 24.0,
    "w": 168.0,
    "d": 24.0,
    "h": 1.0,
    "m": 1 / 60,
    "min": 1 / 60,
}
COUNT, NODES = re.compile(r"0*[1-9][0-9]{0,6}"), re.compile(r"([0-9]{0,7})x([0-9]{1,7})")
PRICE = re.compile(r"usd=([0-9]{0,9}\.?[0-9]{1,9})")
MARKETS: tuple[str, ...] = get_args(MarketType)
GPUS_LIKE = "as in H100:64, H100:8@spot, A100:16@2x8 or p5.48xlarge:64@usd=2.50"


@dataclass(frozen=True)
class GpuRequest:
    """GPUs that somebody asks for. `kind`: of the GPU, or an instance type; `n_gpus`: 0 = not said;
    `usd_per_gpu_h`: None = that of the catalog."""

    text: str
    kind: str
    n_gpus: int = 0
    per_node: int = 0
    market_type: MarketType = "on-demand"
    usd_per_gpu_h: float | None = None


def tokens_of(text: str) -> float:
    """`300B` -> 3e11. Raises SpecError."""
    found = TOKENS.fullmatch(text.strip().lower().replace(",", "").replace("_", ""))
    number = float(found[1]) * TIMES[found[2]] if found else 0.0
    if not 0 < number < 1e18:
        raise SpecError(
            f"--tokens {text}: it must be a number of tokens, as in 300B, 1.5T or 15e12"
        )
    return number


def usd_of(text: str) -> float:
    """`200k` -> 200000. Raises SpecError."""
    plain = text.strip().lower().removeprefix("$").replace(",", "").replace("_", "")
    found = TOKENS.fullmatch(plain)
    usd = float(found[1]) * TIMES[found[2]] if found else 0.0
    if not 0 < usd <= USD_MOST:
        raise SpecError(f"--budget {text}: it must be dollars in all, as in 500, 200k or 1.5M")
    return usd


def hours_of(text: str, flag: str = "--within") -> float:
    """`3w` -> 504. Raises SpecError."""
    low = text.strip().lower().replace(" ", "")
    hours = (
        sum(float(n) * HOURS[unit] for n, unit in ONE_DURATION.findall(low))
        if DURATION.fullmatch(low)
        else 0.0
    )
    if not 0 < hours <= HOURS_MOST:
        raise SpecError(
            f"{flag} {text}: it must be a duration of at most {HOURS_MOST:g} hours, as in 3w, "
            "10d, 36h or 1w3d"
        )
    return hours


def gpus_of(text: str, flag: str = "--gpus") -> tuple[GpuRequest, ...]:
    """`H100:8@1x8,A100:16@spot` -> what is asked for, pool by pool. Raises SpecError."""
    found = tuple(_asked(part.strip(), flag) for part in text.split(",") if part.strip())
    if not found:
        raise SpecError(f"{flag} '{text}': no GPU is named; give kinds and counts, {GPUS_LIKE}")
    return found


def _asked(text: str, flag: str) -> GpuRequest:
    head, *marks = text.split("@")
    kind, colon, count = head.partition(":")
    if not kind or (colon and not COUNT.fullmatch(count)):
        raise SpecError(f"{flag} {text}: '{head}' must be a GPU and how many of it, {GPUS_LIKE}")
    n_gpus, per_node, market, usd = int(count or 0), 0, "on-demand", None
    for mark in marks:
        nodes, price = NODES.fullmatch(mark.lower()), PRICE.fullmatch(mark.lower())
        if nodes and int(nodes[1] or 1) and int(nodes[2]):
            n_gpus, per_node = _nodes(text, flag, nodes, n_gpus=n_gpus)
        elif price:
            usd = float(price[1])
        elif mark.lower() in MARKETS:
            market = mark.lower()
        else:
            right = (
                f"nodes as 1x8, or one of {', '.join(MARKETS)}, or a price per GPU-hour as usd=2.50"
            )
            raise SpecError(f"{flag} {text}: '@{mark}' is unknown; it may be {right}")
    return GpuRequest(text, kind, n_gpus, per_node, market, usd)  # type: ignore[arg-type]


def _nodes(text: str, flag: str, found: re.Match[str], *, n_gpus: int) -> tuple[int, int]:
    """GPUs in all and of a node, by `@2x8` (two nodes of eight) or `@x8`."""
    each, every = int(found[2]), int(found[1] or 0) * int(found[2])
    if every and n_gpus and every != n_gpus:
        raise SpecError(
            f"{flag} {text}: {n_gpus} GPUs are not {n_of(int(found[1]), 'node')} of {each} "
            f"({every} GPUs); leave one of them out"
        )
    if (every or n_gpus) % each:
        raise SpecError(
            f"{flag} {text}: {n_gpus} GPUs do not fill nodes of {each}; ask for a multiple of "
            f"{each}"
        )
    return every or n_gpus, each
