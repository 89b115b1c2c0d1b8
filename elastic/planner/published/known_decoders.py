"""Published decoders by name: their dimensions, and the batch of their training. decoders.csv has
them with sources."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from elastic.errors import SpecError, alike, meant
from elastic.planner.published.decoder import Decoder

# what a decoder of one's own must say
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
MORE = ("head_dim", "experts", "active", "window", "gated", "tied")
USUAL_BATCH_TOKENS = 4_194_304  # of models whose batch nobody has published


@dataclass(frozen=True)
class KnownDecoder:
    """`params_b`: billions of parameters as its authors count them, 0 = not published;
    `batch_tokens`: of an optimizer step."""

    name: str
    decoder: Decoder
    batch_tokens: int = USUAL_BATCH_TOKENS
    params_b: float = 0.0
    source: str = ""


@cache
def known() -> Mapping[str, KnownDecoder]:
    with (files(__package__) / "decoders.csv").open(encoding="utf-8") as opened:
        rows = [_row(row) for row in csv.DictReader(opened)]
    return MappingProxyType({row.name: row for row in rows})


def _row(row: Mapping[str, str]) -> KnownDecoder:
    decoder = _decoder(
        Decoder(0, 0, 0, 0, 0, 0, 0), {key: int(row[key]) for key in (*SIZES, *MORE)}
    )
    return KnownDecoder(
        row["name"], decoder, int(row["batch_tokens"]), float(row["params_b"]), row["source"]
    )


def _decoder(before: Decoder, sizes: Mapping[str, int]) -> Decoder:
    said: dict[str, Any] = {
        key: bool(value) if key in ("gated", "tied") else value for key, value in sizes.items()
    }
    return replace(before, **said)


def find(text: str) -> KnownDecoder:
    """`llama3-70b`, `70b` (the first in the table whose name ends so), either with changes as in
    `8b,seq=16384`, or all sizes:
    `layers=80,hidden=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256,seq=8192`. Raises SpecError in
    one line."""
    name, _, rest = text.replace(" ", "").partition(",")
    if "=" in name:
        sizes = _sizes(text)
        missing = [key for key in SIZES if key not in sizes and key != "kv_heads"]
        if missing:
            raise SpecError(
                f"--model {text}: {missing[0]} is missing; a model of your own needs "
                f"{', '.join(SIZES)}"
            )
        found = _decoder(Decoder(0, 0, 0, 0, 0, 0, 0), {"kv_heads": sizes["heads"], **sizes})
        return KnownDecoder(f"{found.n_params / 1e9:.3g}B of its own", _checked(found, text))
    known = named(name)
    if not rest:
        return known
    return replace(
        known,
        name=f"{known.name} with {rest}",
        decoder=_checked(_decoder(known.decoder, _sizes(rest)), text),
    )


def named(name: str) -> KnownDecoder:
    """Raises SpecError with the nearest names."""
    table, low = known(), name.lower().replace("_", "-")
    if low in table:
        return table[low]
    ending = [known for known in table if known.endswith(f"-{low}")]
    if ending:
        return table[ending[0]]
    near = alike(low, table, 3, least=0.5) or [known for known in table if low and low in known][:3]
    right = meant(near) if near else f"there is {', '.join(table)}"
    raise SpecError(
        f"--model {name}: no such model in the table; {right}; or give its sizes: "
        f"{'=N,'.join(SIZES)}=N"
    )


def _sizes(text: str) -> dict[str, int]:
    found = {}
    for part in text.replace(" ", "").split(","):
        key, _, value = part.partition("=")
        if key not in (*SIZES, *MORE):
            near = alike(key, (*SIZES, *MORE), least=0.5)
            right = meant(near) if near else f"sizes are {', '.join((*SIZES, *MORE))}"
            raise SpecError(f"--model {text}: '{key}' is no size of a model; {right}")
        if not value.isdigit() or (key in SIZES and int(value) < 1):
            raise SpecError(
                f"--model {text}: {key} must be a whole number of at least 1, not '{value}'"
            )
        found[key] = int(value)
    return found


def _checked(decoder: Decoder, text: str) -> Decoder:
    """Sizes that go together. Raises SpecError."""
    if not decoder.head_dim and decoder.hidden % decoder.heads:
        raise SpecError(
            f"--model {text}: heads={decoder.heads} must divide hidden={decoder.hidden}, or give "
            "head_dim"
        )
    if decoder.heads % decoder.kv_heads:
        raise SpecError(
            f"--model {text}: kv_heads={decoder.kv_heads} must divide heads={decoder.heads}"
        )
    if bool(decoder.experts) != bool(decoder.active) or decoder.active > decoder.experts:
        raise SpecError(
            f"--model {text}: experts={decoder.experts} and active={decoder.active}: give both, "
            "or neither"
        )
    return decoder
