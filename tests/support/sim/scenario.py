"""Random jobs, pools and faults for the virtual clock."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from elastic.sim.scripted_faults import Delays, Fault, FaultKind, Moment
from elastic.types import ModelProfile, OptimizerSpec, Pool, TensorSpec

MODEL = ModelProfile(
    4,
    1_000_000,
    (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",)),),
    tp_limit=2,
)


# seeds below draw what they drew before there was any
WEATHER_FROM = 50_000
APART_FROM = 150_000


KINDS: list[FaultKind] = [
    "notice", "notice", "notice", "withdraw", "loss", "loss", "loss", "hang", "process", "error",
    "drought", "add",
]  # fmt: skip


MOMENTS: list[Moment] = ["inside", "waiting", "torn"]


def scenario(seed: int) -> tuple[dict[str, Any], tuple[Pool, ...], list[Fault], Delays]:
    """A job, its pools, and faults that end at some time."""
    chance = random.Random(seed)
    pools = [Pool("spot", "CPU", chance.choice([1, 1, 2, 4]), "spot", 0.9, 0, chance.randint(1, 5))]
    if chance.random() < 0.4:
        pools.append(Pool("steady", "CPU", 1, "on-demand", 3.0, 0, chance.randint(1, 2)))
    job = {
        "name": "random", "steps": chance.randint(20, 60), "global_batch": chance.choice([8, 12,
        32]), "seed": 0, "layout": "auto", "min_workers": 1, "max_workers": chance.choice([None,
        6]), "peer_every": chance.choice(["auto", 1, 3]), "durable_every": chance.choice(["auto", 5,
        0]), "budget_usd": None, "max_nodes": None,
    }  # fmt: skip
    faults = []
    for _ in range(chance.randint(0, 12)):
        at_s, kind = chance.uniform(5, 90), chance.choice(KINDS)
        lasts_s = chance.uniform(1, chance.choice([10, 40, 120]))
        fault = Fault(
            at_s,
            kind,
            chance.randrange(8),
            lasts_s,
            chance.choice(pools).name,
            chance.choice(MOMENTS),
        )
        faults.append(fault)
        # another one while the first is being dealt with
        if kind == "loss" and chance.random() < 0.4:
            faults.append(
                Fault(
                    at_s + chance.uniform(0, 4),
                    chance.choice(["loss", "notice"]),
                    chance.randrange(8),
                    3.0,
                )
            )
    for once in ("corrupt", "not_finite"):  # one roll-back each is what a run bears
        if chance.random() < 0.2:
            faults.append(Fault(chance.uniform(20, 60), once))
    if chance.random() < 0.3:
        lasts_s = chance.uniform(10, 60)
        faults.append(
            Fault(chance.uniform(0, 60), "refuse", lasts_s=lasts_s, pool=chance.choice(pools).name)
        )
    layouts, wrong = wrong_layouts(seed)
    names = [pool.name for pool in pools]
    faults += (
        unequal(seed) + devices(seed) + wrong + liars(seed) + storage(seed, names) + drivers(seed)
    )
    faults += partitions(seed)
    # which is found out by what a checkpoint holds, where nothing else is left
    if seed >= WEATHER_FROM and not wrong:
        faults += weather(seed)
    if seed >= APART_FROM:
        faults += apart(seed)
    return job | layouts, tuple(pools), faults, Delays(work_s=chance.choice([1.0, 4.0]))


def unequal(seed: int) -> list[Fault]:
    """In every second run: GPUs that are slow for some time or from some time on, jitter, numbers
    that are wrong."""
    chance = random.Random(seed + 1000)
    if chance.random() < 0.5:
        return []
    faults = [Fault(0.0, "jitter", seed, lasting=True, amount=chance.choice([0.0, 0.1]))]
    for _ in range(chance.randint(0, 5)):
        at_s, lasts_s, times = (
            chance.uniform(5, 90),
            chance.uniform(2, 60),
            chance.choice([1.5, 2.0, 4.0, 10.0]),
        )
        gpu = chance.choice([-1, -1, 0])
        faults.append(
            Fault(
                at_s,
                "throttle",
                chance.randrange(8),
                lasts_s,
                lasting=chance.random() < 0.3,
                amount=times,
                gpu=gpu,
            )
        )
    if chance.random() < 0.3:
        at_s, n_steps = chance.uniform(15, 80), chance.randint(1, 8)
        faults.append(
            Fault(
                at_s,
                "wrong_numbers",
                chance.randrange(8),
                lasting=chance.random() < 0.3,
                amount=n_steps,
            )
        )
    if chance.random() < 0.3:
        faults.append(Fault(chance.uniform(15, 80), "stall", chance.randrange(8)))
    return faults


def devices(seed: int) -> list[Fault]:
    """In every third run: devices that fail, at all moments, two of them perhaps at once."""
    chance = random.Random(seed + 3000)
    if chance.random() > 1 / 3:
        return []
    faults = [
        Fault(chance.uniform(5, 80), "device", chance.randrange(8), moment=chance.choice(MOMENTS))
    ]
    if chance.random() < 0.5:
        at_s = faults[0].at_s + chance.choice([0.0, 0.1, 1.0, 20.0])
        faults.append(
            Fault(
                at_s,
                chance.choice(["device", "loss", "notice"]),
                chance.randrange(8),
                5.0,
                moment=chance.choice(MOMENTS),
            )
        )
    return faults


def wrong_layouts(seed: int) -> tuple[dict[str, Any], list[Fault]]:
    """In every third run: a layout of any kind for each number of workers, and from some time on
    all axes that the running one has not are wrong."""
    chance = random.Random(seed + 2000)
    if chance.random() > 1 / 3:
        return {}, []
    layouts = {"1": "dp_shard=1"}
    for n in range(2, 9):
        kinds = [f"dp_shard={n}", *([f"pp={n}"] if n <= 4 else [])]
        kinds += [f"pp=2,dp_shard={n // 2}", f"tp=2,dp_shard={n // 2}"] if n % 2 == 0 else []
        layouts[str(n)] = chance.choice(kinds)
    return {"layout": layouts}, [Fault(chance.uniform(10, 80), "wrong_layout")]


def liars(seed: int) -> list[Fault]:
    """In every third run: notices that come too late, whose nodes are taken before or after their
    deadline or never; and nodes that come back under their name."""
    chance = random.Random(seed + 4000)
    if chance.random() > 1 / 3:
        return []
    faults = []
    for _ in range(chance.randint(1, 4)):
        at_s, which, lasts_s = (
            chance.uniform(5, 90),
            chance.randrange(8),
            chance.choice([0.0, 0.5, 8.0, 30.0]),
        )
        late_s = chance.choice([0.0, -20.0, -4.0, 5.0, 60.0])
        if chance.random() < 0.4:
            moment = chance.choice(MOMENTS)
            faults.append(Fault(at_s, "return", which, chance.uniform(0, 20), moment=moment))
        else:
            faults.append(
                Fault(at_s, "notice", which, lasts_s, amount=late_s, lasting=chance.random() < 0.2)
            )
    return faults


def storage(seed: int, pools: list[str]) -> list[Fault]:
    """In every third run: storage that answers nothing, is full, or has lost what was written;
    pools that give nodes which end at once, late, or at another price."""
    chance = random.Random(seed + 5000)
    if chance.random() > 1 / 3:
        return []
    faults = []
    for _ in range(chance.randint(1, 3)):
        kind: FaultKind = chance.choice(["storage", "full", "damage", "crash", "slow", "price"])
        lasts_s = chance.uniform(0.5, chance.choice([5, 20, 80]))
        if kind == "damage" and any(fault.kind == kind for fault in faults):
            continue  # of two copies that are kept one is left
        lasting, amount = chance.random() < 0.5, chance.uniform(0.2, 20.0)
        faults.append(
            Fault(
                chance.uniform(5, 90),
                kind,
                0,
                lasts_s,
                chance.choice(pools),
                lasting=lasting,
                amount=amount,
            )
        )
    return faults


def drivers(seed: int) -> list[Fault]:
    """In every third run: drivers that are killed or stall, for up to an hour; the next one's clock
    may be off."""
    chance = random.Random(seed + 6000)
    if chance.random() > 1 / 3:
        return []
    faults = []
    for _ in range(chance.randint(1, 3)):
        kind: FaultKind = chance.choice(["driver", "driver", "freeze"])
        at_s, lasts_s = chance.uniform(2, 90), chance.choice([0.1, 1.0, 5.0, 40.0, 3600.0])
        off_s = chance.choice([0.0, 0.0, 3600.0, -3600.0])
        faults.append(
            Fault(
                at_s,
                kind,
                chance.randrange(8),
                lasts_s,
                lasting=chance.random() < 0.3,
                amount=off_s,
            )
        )
    return faults


def partitions(seed: int) -> list[Fault]:
    """In every third run: nodes that are cut off, for less and for more than what makes them
    silent, perhaps two at once."""
    chance = random.Random(seed + 7000)
    if chance.random() > 1 / 3:
        return []
    faults = []
    for _ in range(chance.randint(1, 3)):
        at_s, lasts_s = chance.uniform(5, 90), chance.choice([0.3, 3.0, 5.9, 8.0, 30.0, 120.0])
        faults.append(
            Fault(at_s, "partition", chance.randrange(8), lasts_s, moment=chance.choice(MOMENTS))
        )
        if chance.random() < 0.3:  # a part of the cluster
            faults.append(
                replace(
                    faults[-1], at_s=at_s + chance.choice([0.0, 0.5]), which=chance.randrange(8)
                )
            )
    return faults


def apart(seed: int) -> list[Fault]:
    """In every second run: two nodes that do not reach each other, perhaps of one of them a third,
    for less and for more than what two attempts take."""
    chance = random.Random(seed + 9000)
    if chance.random() > 1 / 2:
        return []
    faults = []
    for _ in range(chance.randint(1, 2)):
        at_s, which = chance.uniform(5, 90), chance.randrange(8)
        lasts_s = chance.choice([2.0, 8.0, 15.0, 40.0, 200.0, 2000.0])
        moment = chance.choice(MOMENTS)
        faults.append(Fault(at_s, "apart", which, lasts_s, moment=moment))
        if chance.random() < 0.4:
            faults.append(replace(faults[-1], which=which + 1, at_s=at_s + chance.choice([0, 7.0])))
    return faults


def weather(seed: int) -> list[Fault]:
    """In two of three runs: storage that is away, slow, throttled, read-only, full, or answers with
    the past, for seconds or minutes; in most of these spells something else happens, too, perhaps
    the next driver comes on another machine."""
    chance = random.Random(seed + 8000)
    if chance.random() > 2 / 3:
        return []
    faults = []
    for _ in range(chance.randint(1, 3)):
        kind: FaultKind = chance.choice(
            ["storage", "slow_storage", "throttled", "read_only", "past", "full"]
        )
        at_s, lasts_s = chance.uniform(0, 90), chance.choice([3.0, 12.0, 40.0, 150.0, 1200.0])
        faults.append(Fault(at_s, kind, 0, lasts_s, amount=chance.choice([0.5, 4.0, 20.0])))
        if chance.random() < 0.7:
            also: FaultKind = chance.choice(
                ["loss", "loss", "process", "notice", "error", "driver", "driver"]
            )
            later_s, moment = (
                chance.uniform(0, min(lasts_s, 40.0)),
                "torn" if also == "driver" else chance.choice(MOMENTS),
            )
            which, back_s = chance.randrange(8), chance.choice([0.1, 5.0, 40.0])
            faults.append(
                Fault(
                    at_s + later_s,
                    also,
                    which,
                    back_s,
                    moment=moment,
                    lasting=chance.random() < 0.3,
                )
            )
    return faults
