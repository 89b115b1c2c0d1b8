"""What `elastic prices` prints: instance types with their prices, the pools of a cluster file, GPUs
with their peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.observe.run_tables import columns, dollars
from elastic.text import GIB

INSTANCES = (
    "TYPE", "CLOUD", "GPUS", "MEMORY", "LINK", "NETWORK", "REGION", "ON DEMAND", "SPOT USD/H",
    "USD/GPU-H", "SPOT", "AVAILABLE", "AS OF",
)  # fmt: skip
POOLS = (
    "POOL",
    "TYPE",
    "MARKET",
    "GPUS",
    "LINK",
    "NETWORK",
    "WHERE",
    "USD/NODE-H",
    "USD/GPU-H",
    "FROM",
    "ZONES",
    "SCORES",
)
CHIPS = (
    "GPU",
    "ARCH",
    "BF16",
    "FP16",
    "FP8",
    "FP4",
    "TF32",
    "FP32",
    "SMS",
    "WATTS",
    "GIB",
    "GB/S",
    "LINK",
    "GB/S",
    "PCIE GB/S",
)
PEAKS = ("bf16", "fp16", "fp8", "fp4", "tf32", "fp32")


def prices(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of pools, or of instance types with the sources of their prices below."""
    if not rows:
        return ["nothing in the catalog is that"]
    if "pool" in rows[0]:
        return columns([POOLS, *map(_pool, rows)], right=(7, 8))
    return [
        *columns([INSTANCES, *map(_instance, rows)], right=(3, 5, 7, 8, 9, 10)),
        "",
        *(f"source: {source}" for source in sorted({row["source"] for row in rows} - {""})),
    ]


def chips(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dense TFLOPS, with the source of each row below."""
    table = columns([CHIPS, *map(_chip, rows)], right=(2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14))
    return [
        *table,
        "",
        "dense TFLOPS; - = not known, or no such units",
        "",
        *(f"{row['name']}: {row['source'] or '-'}" for row in rows),
    ]


def _instance(row: Mapping[str, Any]) -> tuple[str, ...]:
    usd = [
        dollars(row[key])
        for key in ("usd_per_h", "spot_usd_per_h", "usd_per_gpu_h", "spot_usd_per_gpu_h")
    ]
    memory = f"{row['gpu_memory_bytes'] / GIB:.0f} GiB" if row["gpu_memory_bytes"] else "-"
    place = (row["link"] or "-", _network(row), row["region"] or "-")
    kind = (row["instance_type"], row["cloud"], row["gpus"], memory)
    return (*kind, *place, *usd, row["available"] or "-", row["at"] or "-")


def _pool(row: Mapping[str, Any]) -> tuple[str, ...]:
    zones = ", ".join(f"{zone} {usd:.4f}" for zone, usd in row["zones"].items()) or "-"
    scores = ", ".join(f"{zone} {score}/10" for zone, score in row["scores"].items()) or "-"
    where, usd = row["zone"] or row["region"] or "-", dollars(row["usd_per_node_h"])
    kind = (row["pool"], row["instance_type"] or "-", row["market_type"], row["gpus"])
    prices = (usd, dollars(row["usd_per_gpu_h"]), row["source"])
    return (*kind, row["link"] or "-", _network(row), where, *prices, zones, scores)


def _chip(row: Mapping[str, Any]) -> tuple[str, ...]:
    peaks = [_number(row[f"{kind}_flop_per_s"] / 1e12) for kind in PEAKS]
    memory = (_number(row["memory_bytes"] / GIB), _number(row["memory_bytes_per_s"] / 1e9))
    links = (_number(row[f"{kind}_bytes_per_s"] / 1e9) for kind in ("nvlink", "pcie"))
    size = (_number(row["sm"]), _number(row["watts"]))
    return (row["name"], row["arch"] or "-", *peaks, *size, *memory, row["link"] or "-", *links)


def _network(row: Mapping[str, Any]) -> str:
    return f"{row['network_gbps']:g} Gb/s" if row["network_gbps"] else "-"


def _number(value: float) -> str:
    return f"{value:g}" if value else "-"
