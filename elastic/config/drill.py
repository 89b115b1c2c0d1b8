"""What may stand in a drill: which nodes are meant, and what happens to them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from elastic.catalog.bounded_yaml import yaml_of
from elastic.config.strict_model import NODES_MOST, SECONDS_MOST, STEPS_MOST, Strict
from elastic.errors import SpecError
from elastic.text import n_of
from elastic.types import MarketType, Plan

ON_NODES = ("notice", "kill", "hang", "slow", "stall", "corrupt", "device_error", "partition")
ON_WORKERS = ("slow", "stall", "corrupt", "device_error")  # worked by the workers themselves
DRILL_KINDS = (*ON_NODES, "add", "kill_driver", "wrong_layout")
OPTIONS = {
    "deadline_s": ("notice",),
    "factor": ("slow",),
    "unit_s": ("slow",),
    "jitter": ("slow",),
    "gpu": ON_WORKERS,
    "place": ("device_error",),
    "for_s": ("partition",),
    "cut_from": ("partition",),
}
Sides = Literal["driver", "nodes", "storage"]
SIDES: tuple[Sides, ...] = ("driver", "nodes", "storage")
EACH_OTHER = "each-other"
From = Sides | Literal["each-other"] | Annotated[list[Sides], Field(min_length=1)]
PARTITION_S, PARTITION_MOST_S = 30.0, 3600.0
A_LIST = "a list such as `- {at_step: 40, notice: any-spot}`"
# what stands for an entry on the command line; the rest is said as keys
SHORT = re.compile(
    r"(?P<kind>\w+)(?:\s+(?P<name>\S+))?\s+at\s+(?:step\s+)?(?P<step>[0-9]+)"
    r"(?P<more>(?:\s+\w+=\S+)*)"
)
IN_SHORT = "'kill at 60', 'notice any-spot at 40' or 'add POOL at 80', several with commas"
NODE_WORD = re.compile(r"any|any-spot|rank0|rank:[0-9]{1,6}")
NODE_WORDS = "any, any-spot, rank0, rank:N, partner, a node id, or a list of them"


class DrillSpec(Strict):
    """One entry of a drill: exactly one of DRILL_KINDS; without `at_step` it happens at once.

    hang: the node's processes are stopped (SIGSTOP). partition: for `for_s` seconds they reach
    neither the driver nor their peers nor storage, or only those of `from` not; they work all the
    while (`from: each-other`, of two nodes or more: they reach everybody else). stall: they answer,
    and their training stalls. corrupt: what they compute is wrong. slow: they take `factor` times
    as long as they would (1 = as before); with `unit_s` each forward and backward pass of one
    sample through one block takes unit_s x factor seconds at least; `jitter`: each pass by up to
    that part more or less. device_error: their next forward pass raises a CUDA error, and so does
    everything after it; `place`: not the forward pass, but the backward pass, the optimizer, a host
    copy for the peers, or the next transfer of the state. `gpu`: of the node's workers only this
    one. wrong_layout: from now on the layouts that the run changes to compute something else than
    the one it has (of no node; for trials of the checks against that).
    """

    at_step: int | None = Field(None, ge=0, le=STEPS_MOST)
    notice: str | list[str] | None = None
    kill: str | list[str] | None = None
    hang: str | list[str] | None = None
    partition: str | list[str] | None = None
    slow: str | list[str] | None = None
    stall: str | list[str] | None = None
    corrupt: str | list[str] | None = None
    device_error: str | list[str] | None = None
    add: str | None = None
    kill_driver: Literal[True] | None = None
    wrong_layout: Literal[True] | None = None
    deadline_s: float | None = Field(None, gt=0, le=SECONDS_MOST)
    factor: float | None = Field(None, gt=0, le=SECONDS_MOST)
    unit_s: float | None = Field(None, ge=0, le=SECONDS_MOST)
    jitter: float | None = Field(None, ge=0, lt=1)
    gpu: int | None = Field(None, ge=0, le=NODES_MOST)
    for_s: float | None = Field(None, gt=0, le=PARTITION_MOST_S)
    cut_from: From | None = Field(None, alias="from")
    place: Literal["forward", "backward", "optimizer", "host_copy", "move"] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> DrillSpec:
        kinds = [kind for kind in DRILL_KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"a drill entry has exactly one of {', '.join(DRILL_KINDS)}, not "
                f"{', '.join(kinds) or 'none'}"
            )
        for option, of in OPTIONS.items():
            if getattr(self, option) is not None and kinds[0] not in of:
                option = type(self).model_fields[option].alias or option
                raise ValueError(
                    f"{option} belongs to {'a notice' if of == ('notice',) else ' or '.join(of)} "
                    "only"
                )
        if self.slow is not None and self.factor is None:
            raise ValueError("slow needs a factor, such as 2.0")
        if self.slow is not None and self.unit_s is None and (self.factor or 1) < 1:
            raise ValueError(f"factor={self.factor}: nothing can be made faster than it is")
        if self.cut_from == EACH_OTHER and len(set(self.nodes())) < 2:
            raise ValueError("from: each-other needs a list of two nodes or more")
        for name in self.nodes():
            if not name or (name.startswith(("any", "rank")) and not NODE_WORD.fullmatch(name)):
                raise ValueError(f"'{name}' names no node; it may be {NODE_WORDS}")
        return self

    def nodes(self) -> list[str]:
        """The names of what happens on nodes."""
        found = (getattr(self, kind) for kind in ON_NODES)
        value: str | list[str] = next((names for names in found if names is not None), [])
        return [value] if isinstance(value, str) else value

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, by_alias=True)


def in_short(text: str, pool: str = "") -> dict[str, dict[str, Any]]:
    """What "kill at 60, notice any-spot at 40 deadline_s=10, add at 80" says, as entries of a drill
    file, by where each stands. Without a node it is `any`, without a pool `pool`. Raises SpecError.
    """
    if Path(text).suffix in (".yaml", ".yml", ".json") or not re.search(r"\s", text.strip()):
        raise SpecError(f"{text}: no such file; a drill file is {A_LIST}; in short, {IN_SHORT}")
    found = {}
    for i, part in enumerate((one.strip() for one in text.split(",")), 1):
        said, where = SHORT.fullmatch(part), f"drill '{text}', entry {i}"
        if said is None:
            raise SpecError(f"{where}: '{part}' is not as it must be: {IN_SHORT}; or give a file")
        kind, name = said["kind"], said["name"]
        usual: Any = True if kind in ("kill_driver", "wrong_layout") else "any"
        if kind == "add":
            usual = pool
        more = (one.split("=", 1) for one in said["more"].split())
        found[where] = {
            "at_step": int(said["step"]),
            kind: name or usual,
            **{key: yaml_of(value, f"{where}: {key}") for key, value in more},
        }
    return found


@dataclass(frozen=True)
class Scene:
    """What names are resolved against: the newest plan, and each standing node's market type.
    `leaving`: a notice is out."""

    plan: Plan | None
    markets: Mapping[str, MarketType]
    leaving: frozenset[str] = frozenset()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes that stand: those of the plan in rank order, then the others."""
        planned = self.plan.nodes if self.plan else ()
        return tuple(n for n in dict.fromkeys((*planned, *self.markets)) if n in self.markets)


def resolve(names: str | Sequence[str], scene: Scene) -> tuple[str, ...]:
    """Node ids for `any`, `any-spot`, `rank0`, `rank:N`, `partner` (keeps the copies of the node
    before it), or a node id.

    `any` and `any-spot` take the last one in rank order that is not named already and has no
    notice. Raises SpecError.
    """
    found: list[str] = []
    for name in [names] if isinstance(names, str) else names:
        found.append(_node(name, found, scene))
    return tuple(dict.fromkeys(found))


def _node(name: str, before: Sequence[str], scene: Scene) -> str:
    if name in ("any", "any-spot"):
        fresh = [n for n in scene.nodes if n not in before and n not in scene.leaving]
        planned = [n for n in fresh if scene.plan and n in scene.plan.workers_per_node] or fresh
        chosen = [n for n in planned if name == "any" or scene.markets[n] == "spot"]
        if not chosen:
            raise SpecError(f"drill: no node is '{name}'; standing are {_listed(scene.nodes)}")
        return chosen[-1]
    if name == "rank0" or name.startswith("rank:"):
        rank = 0 if name == "rank0" else int(name[5:])
        ranks = scene.plan.ranks if scene.plan else ()
        if rank >= len(ranks):
            raise SpecError(
                f"drill: there is no rank {rank}; the plan has {n_of(len(ranks), 'rank')}"
            )
        return ranks[rank].node_id
    if name == "partner":
        return _partner(before, scene)
    if name not in scene.markets:
        raise SpecError(f"drill: '{name}' is no node; standing are {_listed(scene.nodes)}")
    return name


def _partner(before: Sequence[str], scene: Scene) -> str:
    ranks = scene.plan.ranks if scene.plan else ()
    mine = [rank for rank, worker in enumerate(ranks) if before and worker.node_id == before[-1]]
    kept_by = scene.plan.copies_to if scene.plan else ()
    if not mine or not kept_by or not kept_by[mine[0]]:
        raise SpecError(
            "drill: 'partner' needs a node of the plan before it and a second node; the list is "
            f"{_listed(before)}"
        )
    return ranks[kept_by[mine[0]][0]].node_id


def _listed(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) or "none"
