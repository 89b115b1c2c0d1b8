"""find_chip(): a GPU by any usual spelling of its name, as drivers, clouds, Ray and people write
it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from elastic.catalog.chips import Chip
from elastic.errors import SpecError, alike, meant
from elastic.text import GIB

NOISE = {
    "nvidia",
    "amd",
    "tesla",
    "geforce",
    "instinct",
    "generation",
    "oam",
    "gpu",
    "hbm2",
    "hbm3",
    "hbm3e",
    "tensor",
    "core",
}
FORMS = {"sxm", "pcie", "rtx", "ada"}  # of many chips: they alone name none


def find(name: str, chips: Mapping[str, Chip]) -> Chip:
    """The first of `matching`: where a name leaves memory or form open, that is the smallest memory
    (what is planned on it then fits the others) and the form of servers with links. Raises
    SpecError with the nearest names."""
    found = matching(name, chips)
    if found:
        return found[0]
    by_shown = {_shown(known): known for known in chips}
    for known, chip in chips.items():
        for word in sorted(_telling(chip)):
            by_shown.setdefault(word, known)
    near = list(
        dict.fromkeys(by_shown[word] for word in alike(_shown(name), by_shown, 3, least=0.5))
    )
    right = meant(near) if near else "'elastic prices --chips' lists them"
    raise SpecError(f"unknown GPU '{name}'; {right}")


def matching(name: str, chips: Mapping[str, Chip]) -> tuple[Chip, ...]:
    """All whose name holds each word of `name`, in the order of the table; a row of just this name
    is the only one."""
    if name in chips:
        return (chips[name],)
    asked = words(name) - NOISE
    return tuple(
        chip
        for chip in chips.values()
        if asked and asked <= _words_of(chip) and asked & _telling(chip)
    )


def may_be_one(name: str, other: str, chips: Mapping[str, Chip]) -> bool:
    """Can both stand for one GPU? What the table does not know is compared word by word."""
    found, others = matching(name, chips), matching(other, chips)
    if found and others:
        return any(chip in others for chip in found)
    return words(name) - NOISE == words(other) - NOISE


def words(name: str) -> set[str]:
    """`NVIDIA A100-SXM4-80GB` -> {nvidia, a100, sxm, 80gb}."""
    text = re.sub(r"rtx(?=[0-9a])", "rtx ", name.lower())
    text = re.sub(r"(\d)[\s_-]*(gb?|gib|w)(?![a-z0-9])", r"\1\2", text)
    found = {word for word in re.split(r"[^a-z0-9]+", text) if word}
    found = {re.sub(r"^(\d+)(g|gib)$", r"\1gb", word) for word in found}
    return {re.sub(r"^sxm\d$", "sxm", word) for word in found}


def _words_of(chip: Chip) -> set[str]:
    plug = set() if chip.link else {"pcie"}
    return words(chip.name) | {f"{round(chip.memory_bytes / GIB)}gb"} | plug


def _telling(chip: Chip) -> set[str]:
    """Those of its words that no mere form or size is."""
    return {word for word in words(chip.name) - FORMS if not re.fullmatch(r"\d+gb", word)}


def _shown(name: str) -> str:
    return "-".join(word for word in re.split(r"[^a-z0-9]+", name.lower()) if word not in NOISE)
