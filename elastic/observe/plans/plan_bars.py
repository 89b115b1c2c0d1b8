"""Where the time and the memory of an offer go, as stacked bars: in the terminal (letters tell
parts apart, color only helps) and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from elastic.observe.reporting.pictures import OTHER, Parts, blank, letters, saved, stacked
from elastic.text import GIB, hours, memory_size, seconds, usd

# part -> letter, color, what it is
TIME = {
    "products": ("P", "#1f618d", "matrix products, forward and backward"),
    "attention": ("A", "#2e86c1", "attention"),
    "moved": ("M", "#85c1e9", "norms, activations, sums: bytes moved in memory"),
    "recomputed": ("R", "#d4ac0d", "computed a second time (activation checkpointing)"),
    "tp": ("t", "#af7ac5", "waiting for tensor-parallel sums"),
    "cp": ("c", "#7d3c98", "waiting for keys and values of other ranks (cp)"),
    "ep": ("e", "#5b2c6f", "waiting for tokens on their way to experts"),
    "pp": ("p", "#e59866", "sending between pipeline stages"),
    "bubble": ("b", "#cb4335", "idle while the pipeline fills and drains"),
    "uneven": ("u", "#f1948a", "waiting for the slowest stage or rank"),
    "fsdp": ("f", "#229954", "gathering and scattering shards that computation does not hide"),
    "replicas": ("r", "#52be80", "summing gradients over replicas, not hidden"),
    "optimizer": ("O", "#808b96", "optimizer update"),
    "jitter": ("j", "#abb2b9", "nodes that wait for each other"),
    "accumulate": ("+", "#5d6d7e", "adding gradients of microbatches up"),
    "commit": ("k", "#34495e", "the step's last all-reduce: does it count"),
    "offload": ("o", "#6e2c00", "copies from and to host memory"),
}
MEMORY = {
    "parameters": ("W", "#1f618d", "parameters, this GPU's shard"),
    "gradients": ("G", "#2e86c1", "gradients"),
    "optimizer": ("O", "#808b96", "optimizer state"),
    "gathered": ("g", "#229954", "parameters gathered during a step"),
    "activations": ("A", "#d4ac0d", "activations kept for the backward pass"),
    "again": ("R", "#e59866", "one block's activations, computed again"),
    "logits": ("L", "#cb4335", "logits and what the loss keeps"),
}


def explain(data: Mapping[str, Any], n: int, width: int = 80) -> list[Text]:
    """Of offer `n`: a bar of a step's time and one of a GPU's memory, and a line for each part, the
    largest first."""
    offer = next(offer for offer in data["offers"] if offer["n"] == n)
    unit = data["model"]["unit"]
    mfu = f", MFU {offer['mfu']:.1%}"
    head = f"offer {n}: {offer['layout']}"
    step = f"a step: {seconds(offer['step_s'])}, {offer['tokens_per_s']:,.0f} {unit}/s{mfu}"
    lines = [
        Text(head, style="bold"),
        Text(step),
        *_bar(offer["seconds"], TIME, offer["step_s"], width=width),
    ]
    lines += _parts(offer["seconds"], TIME, seconds, width=width)
    room, used = offer["room_bytes"], sum(offer["memory"].values())
    total = f"memory of the GPU that needs most: {memory_size(used)}" + (
        f" of {memory_size(room)}" if room else ""
    )
    lines += [Text(), Text(total), *_bar(offer["memory"], MEMORY, max(room, used), width=width)]
    lines += _parts(offer["memory"], MEMORY, memory_size, width=width)
    lines += [Text(), *_shares(offer), *_money(offer, data)]
    return lines


def _bar(parts: Mapping[str, float], known: Parts, whole: float, *, width: int) -> list[Text]:
    """`[PPPPAAMMtt....]`, dots = what is left of `whole`."""
    text = Text("[")
    for drawn, color in letters(parts, known, whole, room=width - 2):
        text.append(drawn, style=color)
    return [text.append("." * (width - 1 - len(text)) + "]")]


def _parts(parts: Mapping[str, float], known: Parts, shown: Any, *, width: int) -> list[Text]:
    """A line for each: letter, share, size, meaning."""
    total, lines = sum(parts.values()), []
    for name in sorted(parts, key=lambda name: -parts[name]):
        letter, color, about = known.get(name, OTHER)
        share = parts[name] / total if total else 0.0
        line = Text(f" {letter} ", style=color)
        line.append(f"{share:6.1%} {shown(parts[name]):>9}  {name:<11} {about or name}")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines


def _shares(offer: Mapping[str, Any]) -> list[Text]:
    """What each pool does, where there are several or stages are unequal."""
    lines = []
    for part in offer["parts"] if len(offer["parts"]) > 1 else ():
        layers = f", layers {'+'.join(map(str, part['layers']))}" if len(part["layers"]) > 1 else ""
        text = (
            f"pool {part['pool']}: {part['n_gpus']} GPUs, {part['samples']} samples of a step to "
            "each data-parallel rank"
        )
        lines.append(Text(f"{text}{layers}, busy {part['busy']:.0%} of it"))
    return lines


def _money(offer: Mapping[str, Any], data: Mapping[str, Any]) -> list[Text]:
    if not offer["usd_per_h"]:
        return []
    unit = data["model"]["unit"]
    lost = (
        f"; {1 - offer['goodput']:.1%} of the time goes to preempted nodes"
        if offer["goodput"] < 0.999
        else ""
    )
    total = f"; {hours(offer['hours'])} and {usd(offer['usd'])} in all" if offer["hours"] else ""
    return [
        Text(
            f"{usd(offer['usd_per_h'])}/h, {usd(offer['usd_per_mtoken'])} per million "
            f"{unit}{lost}{total}"
        )
    ]


def save(data: Mapping[str, Any], path: str | Path) -> Path:
    """All offers side by side: seconds of a step and memory of a GPU by part. Returns the file."""
    offers = data["offers"]
    figure, (left, right) = blank(13, 1.8 + 0.75 * len(offers), columns=2, sharey=True)
    for axes, key, known, unit in ((left, "seconds", TIME, 1.0), (right, "memory", MEMORY, GIB)):
        rows = [{name: n / unit for name, n in offer[key].items()} for offer in offers]
        stacked(axes.barh, rows, known, start="left", at=range(len(offers)), height=0.6)
    room = max(offer["room_bytes"] for offer in offers) / GIB
    if room:
        right.axvline(room, color="#c0392b", linestyle="--", linewidth=1, label="there is")
    left.set_yticks(
        range(len(offers)),
        [f"{offer['n']}  {_lines(offer['layout'])}" for offer in offers],
        fontsize=8,
    )
    left.invert_yaxis()
    left.set_xlabel("seconds of an optimizer step")
    right.set_xlabel("GiB of the GPU that needs most")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.25)
        axes.legend(
            fontsize=7,
            frameon=False,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.12 - 0.3 / len(offers)),
            ncols=4,
        )
    pools = " + ".join(f"{pool['n_gpus']} x {pool['gpu']}" for pool in data["pools"])
    figure.suptitle(f"{data['model']['name']} on {pools}", fontsize=11)
    return saved(figure, path)


def _lines(layout: str) -> str:
    """Its options below its axes."""
    return layout.replace(",microbatch", "\nmicrobatch").replace(
        "activation_checkpointing", "checkpointing"
    )
