"""Which nodes a plan is for, and what is known of their hardware and prices: the catalog, or what
was measured on them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from elastic import catalog
from elastic.api.planning.quantities import GpuRequest
from elastic.catalog.schema import suggestion
from elastic.config.hardware import known_hardware, path_of
from elastic.errors import SpecError
from elastic.planner.cost import catalog_hardware, default_hardware
from elastic.planner.offers import NodeGroup
from elastic.policy.plans import zone_of
from elastic.policy.pools.hazard import RECLAIMS_PER_NODE_H
from elastic.types import HardwareProfile, Pool

log = logging.getLogger(__name__)

GIVEN = "as given"
USUAL_PER_NODE = 8  # at most, where nobody says how many GPUs a node has


@dataclass(frozen=True)
class MachineGroup:
    """A group of nodes, and where its numbers come from, in words. `instance_type`: '' = not of a
    cloud; `notes`: what a reader should know of these numbers; `standby`: of the nodes, those that
    a run takes only while too few others are there (run_nodes.py)."""

    group: NodeGroup
    instance_type: str = ""
    price_from: str = ""
    hardware_from: str = "catalog"
    notes: tuple[str, ...] = ()
    standby: int = 0

    @property
    def cloud(self) -> str:
        known = catalog.instance_type(self.instance_type)
        return known.cloud if known else ""

    def with_nodes(self, n: int) -> MachineGroup:
        return replace(self, group=replace(self.group, n_nodes=n))

    def plain(self) -> dict[str, Any]:
        group, gpu = self.group, self.group.hardware
        return {
            "pool": group.pool, "gpu": gpu.accelerator_type, "n_gpus": group.n_gpus,
            "n_nodes": group.n_nodes, "gpus_per_node": group.gpus_per_node,
            "market_type": group.market_type, "instance_type": self.instance_type,
            "usd_per_node_h": group.usd_per_node_h,
            "usd_per_gpu_h": round(group.usd_per_node_h / group.gpus_per_node, 6),
            "price_from": self.price_from, "cloud": self.cloud, "hardware_from": self.hardware_from,
            "memory_bytes_per_gpu": gpu.memory_bytes, "peak_flop_per_s": gpu.peak_flop_per_s,
            "network_bytes_per_s_per_gpu": gpu.link_bytes_per_s,
            "lost_per_node_h": group.lost_per_node_h, "notes": list(self.notes),
        }  # fmt: skip


def of_pool(pool: Pool, n_nodes: int, price_from: str = "") -> MachineGroup:
    """What a pool of a cluster file or of a job is made of. Raises SpecError for a GPU that nobody
    knows."""
    known = catalog.instance_type(pool.instance_type) if pool.instance_type else None
    gpu, source, note = _hardware(pool, known)
    if pool.memory_bytes_per_gpu or pool.accelerator_type == "CPU":  # as a run goes by
        gpu = replace(gpu, memory_bytes=pool.memory_bytes_per_gpu)
    group = NodeGroup(
        pool.name, gpu, n_nodes, pool.gpus_per_node, pool.usd_per_node_h, pool.market_type,
        RECLAIMS_PER_NODE_H[pool.market_type], zone_of(pool),
        pool.host_memory_bytes or (known.host_memory_bytes if known else 0),
    )  # fmt: skip
    free = (
        pool.accelerator_type != "CPU"
        and not pool.usd_per_node_h
        and pool.market_type != "owned"
        and price_from != GIVEN
    )
    unpriced = (
        f"no {pool.market_type} price of pool {pool.name} is known: its dollars are left out"
        if free
        else ""
    )
    return MachineGroup(
        group, pool.instance_type, price_from, source, tuple(filter(None, (note, unpriced)))
    )


def _hardware(pool: Pool, known: catalog.InstanceType | None) -> tuple[HardwareProfile, str, str]:
    """Of a GPU of the pool, where it comes from, and what to say about that."""
    measured = next(iter(known_hardware([pool.accelerator_type])), None)
    where = str(path_of(pool.accelerator_type))
    if pool.accelerator_type in ("CPU", "GPU"):
        if measured is not None:
            return measured, where, ""
        if pool.accelerator_type == "GPU":
            raise SpecError(
                f"pool '{pool.name}': GPU is no kind of GPU; name it, as in H100, or measure it: "
                "elastic profile JOB"
            )
        note = (
            "nobody has measured this CPU: times are a guess (30 GFLOP/s per process); run "
            "`elastic profile JOB` first"
        )
        return default_hardware.GUESSED_CPU, "guessed", note
    chip = _chip(pool, known)
    network = known.network_bytes_per_s_per_gpu * 8e-9 if known and known.network_gbps else 0.0
    gpu = catalog_hardware.profile(chip, network)
    if measured is not None:
        return _over(gpu, measured), where, ""
    note = (
        ""
        if network
        else (
            f"the network of pool {pool.name} is not known: {gpu.link_bytes_per_s * 8e-9:g} Gb/s "
            "per GPU assumed"
        )
    )
    return gpu, "catalog", note


def _chip(pool: Pool, known: catalog.InstanceType | None) -> catalog.Chip:
    if known and known.chip:
        return catalog.find_chip(known.chip)
    try:
        found = catalog.find_chips(pool.accelerator_type)
    except SpecError as error:
        raise SpecError(f"pool '{pool.name}': {error}") from None
    size = pool.memory_bytes_per_gpu
    return min(found, key=lambda chip: abs(chip.memory_bytes - size)) if size else found[0]


def _over(gpu: HardwareProfile, measured: HardwareProfile) -> HardwareProfile:
    """What was measured of the kind wins; the rest stays as its maker says."""
    plain = HardwareProfile()
    said = [f.name for f in fields(measured) if getattr(measured, f.name) != getattr(plain, f.name)]
    keep = ("accelerator_type", "arch", "link_bytes_per_s")
    taken = {name: getattr(measured, name) for name in said if name not in keep}
    if "link_bytes_per_s" in measured.measured:
        taken["link_bytes_per_s"] = measured.link_bytes_per_s
    return replace(gpu, **taken)


def with_counts(pools: Sequence[Pool], counts: Mapping[str, int]) -> dict[str, int]:
    """Nodes of each pool: its most, or what --nodes says. Raises SpecError."""
    names = [pool.name for pool in pools]
    for name in counts:
        if name not in names:
            raise SpecError(
                f"--nodes {name}={counts[name]}: there is no such pool{suggestion(name, names)}"
            )
    found = {pool.name: counts.get(pool.name, pool.max_nodes) for pool in pools}
    for pool in pools:
        if found[pool.name] > pool.max_nodes:
            raise SpecError(
                f"--nodes {pool.name}={found[pool.name]}: the pool gives at most {pool.max_nodes} "
                "(its max_nodes)"
            )
    if not any(found.values()):
        raise SpecError("--nodes leaves no node: give at least one pool a node")
    return found


def nodes_of(texts: Sequence[str]) -> dict[str, int]:
    """`--nodes POOL=N`. Raises SpecError."""
    found = {}
    for text in texts:
        name, _, count = text.partition("=")
        if not name or not count.isdigit():
            raise SpecError(f"--nodes {text}: it must be POOL=N, as in --nodes spot=4")
        found[name] = int(count)
    return found


# ------------------------------------------------------------------------------------- GPUs by kind


def of_asked(asked: GpuRequest, cloud: str = "") -> MachineGroup:
    """Nodes with that GPU, as the cheapest instance type per GPU-hour has them. Raises SpecError in
    one line."""
    named = catalog.instance_type(asked.kind)
    types = [named] if named else _types(asked, cloud)
    if named and not named.gpus:
        raise SpecError(
            f"{asked.text}: {asked.kind} has no GPU; 'elastic prices' lists instance types with "
            "GPUs"
        )
    found = _cheapest(asked, types)
    known = named or found
    chip = catalog.find_chip(known.chip if known else asked.kind)
    per_node = asked.per_node or (
        found.gpus if found else min(asked.n_gpus or USUAL_PER_NODE, USUAL_PER_NODE)
    )
    if asked.n_gpus % per_node:
        raise SpecError(
            f"{asked.text}: {asked.n_gpus} GPUs do not fill nodes of {per_node}; say the nodes, "
            f"as in {asked.kind}@2x4"
        )
    usd, price_from = _price(asked, found)
    pool = Pool(
        asked.text, chip.name, per_node, asked.market_type, (usd or 0.0) * per_node, 0, max(1,
        asked.n_gpus // per_node), memory_bytes_per_gpu=found.gpu_memory_bytes if found else 0,
        instance_type=found.name if found else "",
        host_memory_bytes=found.host_memory_bytes if found else 0,
    )  # fmt: skip
    return of_pool(pool, pool.max_nodes, price_from)


def _types(asked: GpuRequest, cloud: str) -> list[catalog.InstanceType]:
    """Those that have the GPU. Raises SpecError for a GPU that nobody knows, with the nearest
    names."""
    chips = {chip.name for chip in catalog.find_chips(asked.kind)}
    exact = catalog.find_chip(asked.kind).name
    every = [each for each in catalog.instance_types().values() if each.chip in chips and each.gpus]
    if re.search(r"\d+ ?gi?b?\b|pcie|sxm|nvl", asked.kind.lower()):
        every = [each for each in every if each.chip == exact]
    if cloud and not any(each.cloud == cloud for each in every):
        has = sorted({each.cloud for each in every})
        raise SpecError(
            f"--cloud {cloud}: it has no {asked.kind}; {', '.join(has) or 'none in the catalog'} "
            "has it"
        )
    return [each for each in every if cloud in ("", each.cloud)]


def _cheapest(
    asked: GpuRequest, types: Sequence[catalog.InstanceType]
) -> catalog.InstanceType | None:
    """Of the largest nodes (eight GPUs at most) that the GPUs fill; those with a price first."""
    if len(types) == 1:
        return types[0]
    if asked.per_node:
        fitting = [each for each in types if each.gpus == asked.per_node]
    else:
        sizes = {
            each.gpus
            for each in types
            if each.gpus <= USUAL_PER_NODE and asked.n_gpus % each.gpus == 0
        }
        priced = {
            each.gpus for each in types if each.gpus in sizes and _usd(each, asked) is not None
        }
        fitting = [each for each in types if each.gpus == max(priced or sizes, default=0)]
    return min(
        fitting,
        key=lambda each: (_usd(each, asked) is None, (_usd(each, asked) or 0.0) / each.gpus),
        default=None,
    )


def _usd(found: catalog.InstanceType, asked: GpuRequest) -> float | None:
    """Dollars per hour of a node, in the cheapest region that the table has a price of."""
    spot = asked.market_type == "spot"
    return min(
        (usd for quote in found.prices.values() if (usd := quote.usd(spot)) is not None),
        default=None,
    )


def _price(asked: GpuRequest, found: catalog.InstanceType | None) -> tuple[float | None, str]:
    """Per GPU-hour and where that comes from."""
    if asked.usd_per_gpu_h is not None:
        return asked.usd_per_gpu_h, GIVEN
    if asked.market_type == "owned":
        return 0.0, "owned: no price"
    usd = _usd(found, asked) if found else None
    if found is None or usd is None:
        return None, "not known"
    spot = asked.market_type == "spot"
    region, quote = next(
        (region, quote) for region, quote in sorted(found.prices.items()) if quote.usd(spot) == usd
    )
    instead = " (of on-demand nodes)" if asked.market_type == "reserved" else ""
    return (
        usd / found.gpus,
        f"{found.cloud} {region}, table of {quote.at or catalog.PRICES_AT}{instead}",
    )


def known_of(pools: Iterable[Pool]) -> tuple[HardwareProfile, ...]:
    """For a run: a profile of each kind of accelerator that was measured or stands in the catalog,
    under the pools' own name of it, with the slowest links and the least memory of its pools; none
    of the others, whose layouts are then compared on default hardware. Raises SpecError for a bad
    file of what was measured."""
    found: dict[str, HardwareProfile] = {}
    for _, gpu in _each_known(pools):
        first = found.setdefault(gpu.accelerator_type, gpu)
        found[gpu.accelerator_type] = replace(
            first,
            link_bytes_per_s=min(first.link_bytes_per_s, gpu.link_bytes_per_s),
            memory_bytes=min(first.memory_bytes, gpu.memory_bytes),
        )
    return tuple(found.values())


def own_of(pools: Sequence[Pool]) -> tuple[tuple[str, HardwareProfile], ...]:
    """For a run too: pools, by name, whose nodes are not as `known_of` has their kind."""
    merged = known_of(pools)
    return tuple((name, gpu) for name, gpu in _each_known(pools) if gpu not in merged)


def _each_known(pools: Iterable[Pool]) -> Iterator[tuple[str, HardwareProfile]]:
    for pool in pools:
        kind = pool.accelerator_type
        if not known_hardware([kind]) and kind == "CPU":
            continue
        try:
            gpu = of_pool(pool, 1).group.hardware
        except SpecError as error:
            log.info("of pool %s no hardware is known: %s", pool.name, error)
            continue
        yield pool.name, replace(gpu, accelerator_type=kind)
