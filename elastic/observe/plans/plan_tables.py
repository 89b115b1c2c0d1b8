"""What `elastic plan` prints: offers with their memory as bars, choices side by side, curves,
needs. Reads the plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from elastic.observe.run_tables import columns
from elastic.text import count, hours, memory_size, n_of, seconds, usd, usd_number

TABLE = re.compile(r"\btable of (\d{4}-\d\d-\d\d)")
WIDTH = 100
Data = Mapping[str, Any]


def plan(data: Data) -> list[str]:
    """The best offer in words, then the table, what was left out, and warnings."""
    best = data["offers"][0]
    lines = [
        *subject(data),
        *_indent(map(_pool, data["pools"])),
        "",
        *_answer(data, best),
        "",
        *_offers(data),
    ]
    lines += _rejected(data)
    lines += [f"warning: {number}{text}" for number, text in _warnings(data["offers"])]
    return lines + _notes(data)


def subject(data: Data) -> list[str]:
    model = data["model"]
    sample, batch = "", f"{n_of(model['global_batch'], 'sample')}"
    if model["sample_tokens"]:
        sample = f", sequences of {model['sample_tokens']}"
        batch = f"{model['global_batch']} sequences = {count(model['step_tokens'])} tokens"
    return [
        f"{model['name']}: {count(model['n_params'])} parameters{sample}, {batch} a step, "
        f"{model['precision']}"
    ]


def _pool(pool: Data) -> str:
    each = (
        f"{pool['n_nodes']} x {pool['gpus_per_node']}"
        if pool["n_nodes"] > 1
        else f"1 node of {pool['gpus_per_node']}"
    )
    where = f", {pool['instance_type']}" if pool["instance_type"] else ""
    price = (
        f", {usd(pool['usd_per_gpu_h'])} per GPU-hour ({pool['price_from']})"
        if pool["usd_per_gpu_h"]
        else ""
    )
    net = (
        f", {pool['network_bytes_per_s_per_gpu'] * 8e-9:.3g} Gb/s per GPU between nodes"
        if pool["n_nodes"] > 1
        else ""
    )
    kind = "process" if pool["gpu"] == "CPU" else pool["gpu"]
    known = pool["hardware_from"]
    measured = "guessed" if known == "guessed" else f"measured: {known}"
    numbers = "" if known == "catalog" else f", numbers {measured}"
    return f"{pool['n_gpus']} x {kind}, {pool['market_type']} ({each}{where}{net}{price}{numbers})"


def _answer(data: Data, best: Data) -> list[str]:
    """What layout, how long, how many dollars: at one glance."""
    unit = data["model"]["unit"]
    cost = (
        f", {usd(best['usd_per_h'])}/h, {usd(best['usd_per_mtoken'])} per million {unit}"
        if best["usd_per_h"]
        else ""
    )
    aim = {"fastest": "best", "cheapest": "cheapest", "deadline": "cheapest in time"}[
        data["purpose"]
    ]
    head = "asked for: " if data["asked_for"] else f"{aim}: "
    lines = [
        f"{head}{best['layout']}",
        f"      {seconds(best['step_s'])} a step, {best['tokens_per_s']:,.0f} {unit}/s{cost}",
    ]
    if best["hours"]:
        rate = max((pool["lost_per_node_h"] for pool in data["pools"]), default=0.0)
        taken = (
            f", {1 - best['goodput']:.1%} of it lost to preempted nodes (up to {rate:g} a node "
            "and hour assumed)"
        )
        lost = taken if best["goodput"] < 0.999 else ""
        total = f" and {usd(best['usd'])}" if best["usd"] else ""
        lines.append(f"      {count(data['tokens'])} {unit}: {hours(best['hours'])}{total}{lost}")
    if data["budget_usd"] and best["usd_per_h"] and not data["tokens"]:
        lines.append(
            f"      {usd(data['budget_usd'])} buys {bought(data['budget_usd'], best, data)}"
        )
    copy = (
        f"a checkpoint stops the steps for {seconds(best['copy_stall_s'])} and is written in "
        f"{seconds(best['copy_write_s'])}"
    )
    lines.append(f"      {copy}; a lost node costs about {seconds(best['lost_node_s'])}")
    return lines


def _offers(data: Data) -> list[str]:
    """A head, then of each offer its layout as --layout takes it, its numbers below the head, and
    why."""
    table = columns(
        [_head(data), *(_offer(offer, data) for offer in data["offers"])],
        right=(0, 1, 2, 4, 5, 6, 7, 8),
    )
    lines = [f"   {table[0]}"]
    for line, offer in zip(table[1:], data["offers"], strict=True):
        lines += [f"{offer['n']}  {offer['layout']}", f"   {line}"]
        lines += wrap(
            _only(offer) + offer["why"], WIDTH, initial_indent="   ", subsequent_indent="   "
        )
    return lines


def _only(offer: Data) -> str:
    """Where an offer does without some of the GPUs."""
    used = " + ".join(f"{part['n_gpus']} of {part['pool']}" for part in offer["parts"])
    return f"on {used} alone: " if offer["n_idle_gpus"] else ""


def _head(data: Data) -> Sequence[str]:
    unit = data["model"]["unit"].upper()
    head = [
        "STEP",
        f"{unit}/S",
        "MFU",
        "MEMORY OF A GPU",
        "EFFICIENCY",
        "USD/H",
        f"USD/M{unit[:-1]}",
    ]
    return [*head, "TIME", "USD"] if data["tokens"] else head


def _offer(offer: Data, data: Data) -> Sequence[str]:
    row = [
        seconds(offer["step_s"]), f"{offer['tokens_per_s']:,.0f}", f"{offer['mfu']:.0%}",
        memory_bar(offer["memory_bytes"], offer["room_bytes"]), f"{offer['efficiency']:.0%}",
        usd_number(offer["usd_per_h"]), usd_number(offer["usd_per_mtoken"]),
    ]  # fmt: skip
    return [*row, hours(offer["hours"]), usd_number(offer["usd"])] if data["tokens"] else row


def _warnings(offers: Sequence[Data]) -> list[tuple[str, str]]:
    """Each once, with the numbers of the offers that it is of, where not of all."""
    found: dict[str, list[int]] = {}
    for offer in offers:
        for text in offer["warnings"]:
            found.setdefault(text, []).append(offer["n"])
    return [
        ("" if len(of) == len(offers) else f"offer {', '.join(map(str, of))}: ", text)
        for text, of in found.items()
    ]


def _rejected(data: Data) -> list[str]:
    if not data["rejected"]:
        return []
    rows = [(family, why) for family, why in data["rejected"].items()]
    return [
        "",
        f"left out (the cost of {data['n_looked_at']:,} layouts was computed):",
        *_indent(columns(rows)),
        "",
    ]


def _notes(data: Data) -> list[str]:
    notes = [f"note: {text}" for text in data["notes"]]
    tabled = [pool for pool in data["pools"] if pool["usd_per_gpu_h"] and _day(pool)]
    days = sorted({_day(pool) for pool in tabled})
    clouds = sorted({pool["cloud"] for pool in data["pools"] if pool["cloud"]})
    sources = "`elastic prices` has their sources"
    if len(days) == 1:
        notes.append(f"note: prices are those of the dated table of {days[0]}; {sources}")
    elif days:
        notes.append(f"note: prices are of different days, {' and '.join(days)}; {sources}")
    if len(clouds) > 1:
        notes.append(f"note: nodes of several clouds are compared, {' and '.join(clouds)}")
    return notes


def _day(pool: Data) -> str:
    """Of the table that its price is of; '' = it is of none."""
    found = TABLE.search(pool["price_from"])
    return found[1] if found else ""


# ------------------------------------------------------------------------------------- side by side


def what_if(data: Data) -> list[str]:
    rows: list[Sequence[str]] = [("CHOICE", *_short_head(data), "", "LAYOUT")]
    unlike = len({row["own"] for row in data["choices"] if row["layout"]}) > 1
    for row in data["choices"]:
        marks = [mark for mark in ("fastest", "cheapest") if row.get(mark)]
        marks += _over(row, data)
        whose = ("  (the job's)" if row["own"] else "  (a free choice)") if unlike else ""
        layout = f"{row['layout']}{whose}" if row["layout"] else _why_not(row)
        rows.append((row["choice"], *_short(row, data), ", ".join(marks), layout))
    return _compared(data, _asked(data), rows, right=range(1, len(rows[0]) - 2))


def _compared(
    data: Data,
    asked: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int],
    said: Sequence[str] = (),
) -> list[str]:
    """The table with what is above and below it; `said`: of its rows."""
    table, prices = columns(rows, right=right), dict.fromkeys(map(_price, data["pools"]))
    return [*subject(data), *asked, "", *table, "", *said, *prices, *_notes(data)]


def _asked(data: Data) -> list[str]:
    """What is to be trained, by when and for how much."""
    if not data["tokens"]:
        return []
    return [f"{_amount(data)}:"]


def _amount(data: Data) -> str:
    within = f" within {hours(data['deadline_h'])}" if data["deadline_h"] else ""
    budget = f" for {usd(data['budget_usd'])}" if data["budget_usd"] else ""
    return f"{count(data['tokens'])} {data['model']['unit']}{within}{budget}"


def _over(row: Data, data: Data) -> list[str]:
    """What it does not keep to."""
    limits = {"in_time": "not in time", "in_budget": "over the budget"}
    return [said for key, said in limits.items() if data["tokens"] and row[key] is False]


def _short_head(data: Data) -> list[str]:
    unit = data["model"]["unit"].upper()
    head = [f"{unit}/S", "MFU", "EFFICIENCY", "USD/H", f"USD/M{unit[:-1]}"]
    return [*head, "TIME", "USD"] if data["tokens"] else head


def _short(row: Data, data: Data) -> list[str]:
    if row["layout"] is None:
        return ["-"] * len(_short_head(data))
    made = [
        f"{row['tokens_per_s']:,.0f}", f"{row['mfu']:.0%}", f"{int(100 * row['efficiency'])}%",
        usd_number(row["usd_per_h"]), usd_number(row["usd_per_mtoken"]),
    ]  # fmt: skip
    return [*made, hours(row["hours"]), usd_number(row["usd"])] if data["tokens"] else made


def _why_not(row: Data) -> str:
    return f"does not fit: {row['why_not']}" if row["layout"] is None else ""


def _price(pool: Data) -> str:
    where = pool["instance_type"] or "no cloud's"
    price = (
        f"{usd(pool['usd_per_gpu_h'])} per GPU-hour ({pool['price_from']})"
        if pool["usd_per_gpu_h"]
        else "no price"
    )
    return (
        f"{pool['gpu']} {pool['market_type']}: {where}, nodes of {pool['gpus_per_node']}, "
        f"{pool['network_bytes_per_s_per_gpu'] * 8e-9:.3g} Gb/s per GPU, {price}"
    )


def scaling(data: Data) -> list[str]:
    least = data["efficiency"]
    rows: list[Sequence[str]] = [("GPUS", *_short_head(data), "", "LAYOUT")]
    for row in data["curve"]:
        share = row["efficiency"] or 0.0
        rows.append(
            (
                f"{row['n_gpus']:,}",
                *_short(row, data),
                ", ".join([bar(share, 20), *_over(row, data)]),
                row["layout"] or _why_not(row),
            )
        )
    useful = f"{data['useful_gpus']:,} GPUs" if data["useful_gpus"] else "no number of them"
    told = (
        f"efficiency stays at {least:.0%} or more up to {useful}, at "
        f"{data['model']['global_batch']} samples a step"
    )
    if data["useful_gpus"] != data["curve"][-1]["n_gpus"]:
        told += "; a larger --batch reaches further"
    return _compared(data, _asked(data), rows, right=range(len(rows[0]) - 2), said=[told])


def capacity(data: Data) -> list[str]:
    rows: list[Sequence[str]] = [
        ("KIND", "GPUS", "NODES", "TIME", "USD", "USD/H", "USD/MTOKEN", "EFFICIENCY", "", "LAYOUT")
    ]
    for row in data["kinds"]:
        cells = ["-"] * 5
        if row["layout"] is not None:
            cells = [
                hours(row["hours"]),
                *(usd_number(row[key]) for key in ("usd", "usd_per_h", "usd_per_mtoken")),
            ]
            cells.append(f"{row['efficiency']:.0%}")
        mark = ", ".join(["<- cheapest"] * row["cheapest"] + _over(row, data))
        rows.append(
            (
                row["kind"],
                f"{row['n_gpus']:,}",
                f"{row['n_nodes']:,}",
                *cells,
                mark,
                row["layout"] or _why_not(row),
            )
        )
    aim = f"{_amount(data)}: the fewest nodes of each kind that make it"
    return _compared(data, [aim, *_answered(data)], rows, right=range(1, 8))


def _answered(data: Data) -> list[str]:
    """What to take, in words."""
    best = next((row for row in data["kinds"] if row["cheapest"]), None)
    if best is None:
        return []
    nodes = (
        f"{best['n_nodes']:,} x {best['instance_type']}"
        if best["instance_type"]
        else f"{best['n_nodes']:,} nodes"
    )
    over = f"not for {usd(data['budget_usd'])}; " if "over the budget" in _over(best, data) else ""
    return [
        f"{over}cheapest: {best['n_gpus']:,} x {best['kind']} ({nodes}): {hours(best['hours'])} "
        f"and {usd(best['usd'])}"
    ]


# ---------------------------------------------------------------------------- predictions, measured


SCORED = ("ROW", "MODEL", "GPUS", "LAYOUT", "MEASURED", "PREDICTED", "ERROR")


def scored(data: Data, rows: Sequence[Sequence[str]]) -> list[str]:
    """Tokens per second and GPU, row by row, then how well that is on the whole."""
    fits, choices = data["fits_table"], data["choices"]
    lines = [*columns([SCORED, *rows], right=(4, 5, 6)), ""]
    error, most = data["median_abs_err"], data["p90_abs_err"]
    lines.append(
        f"tokens/s: {data['rows_timed']} rows, median error {error:.1%}, 9 of 10 within {most:.1%} "
        f"(one MFU for each GPU kind: {data['constant_mfu_median_abs_err']:.1%})"
    )
    if data["mem_rows"]:
        lines.append(
            f"memory: {data['mem_rows']} rows, median error {data['mem_median_abs_err']:.1%}"
        )
    right = fits["fits_said_fits"] + fits["not_said_not"]
    lines.append(
        f"fits or not: {right} of {sum(fits.values())} right ({data['fits_accuracy']:.1%})"
    )
    if choices:
        lines.append(
            f"choice of a layout: {data['best_choice_within_5pct']:.0%} of {choices} within 5% of "
            f"the best measured one, median regret {data['regret_median']:.1%}"
        )
    return lines


# --------------------------------------------------------------------------------- numbers as words


def memory_bar(n_bytes: float, room_bytes: float) -> str:
    """`#######... 61.2 of 80.0 GiB`."""
    if not room_bytes:
        return memory_size(n_bytes)
    number, unit = memory_size(n_bytes).split()
    room, room_unit = memory_size(room_bytes).split()
    return (
        f"{bar(n_bytes / room_bytes, 10)} {number}{'' if unit == room_unit else f' {unit}'} of "
        f"{room} {room_unit}"
    )


def bar(share: float, width: int) -> str:
    full = min(width, max(0, round(share * width)))
    return "#" * full + "." * (width - full)


def bought(budget_usd: float, offer: Data, data: Data) -> str:
    """What a budget is enough for on an offer."""
    tokens = budget_usd / offer["usd_per_mtoken"] * 1e6
    hours_ = budget_usd / offer["usd_per_h"]
    return f"{count(tokens)} {data['model']['unit']} in {hours(hours_)}"


def _indent(lines: Any) -> list[str]:
    return [f"  {line}" for line in lines]
