"""What a node must be like to take part in a run, and what was found of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# how a refusal begins where the run's folder is another one on that node
APART = "storage is not shared"
PLACE = "admission"  # in the run's storage: what its nodes write to show that they share it


@dataclass(frozen=True)
class Mark:
    """A `file` that the driver has written to the run's storage, the folder `uri`, and the file
    `answer` that a worker of the node writes there once it has found it: their keys; both hold
    `text`."""

    uri: str
    file: str
    answer: str
    text: str


@dataclass(frozen=True)
class Terms:
    """`versions`: those of the run, as far as they are known. `gpu_bytes`: memory that each
    worker's GPU must have free, `host_bytes`: the node's host memory, likewise; 0 = not known.
    `mark`: None = the storage is not looked at. `on_gpu`: the node is of a pool of GPUs.
    `storage`: the run's, where that is object storage; "" = it is not looked at."""

    versions: dict[str, str] = field(default_factory=dict)
    gpu_bytes: int = 0
    host_bytes: int = 0
    mark: Mark | None = None
    on_gpu: bool = False
    storage: str = ""


@dataclass(frozen=True)
class Entry:
    """What a worker looks at when it prepares. `doors`: asks neighbors to listen, and says where
    they do (as Doors of elastic.worker.profile.link_probe); called in the background, at most
    once."""

    terms: Terms
    doors: Callable[[], Sequence[Any]] = tuple


@dataclass(frozen=True)
class Admission:
    """What was found of a node that was admitted; of its workers the worst. `seconds`: that the
    checks took, most of them beside the worker's preparation; `waited_s`: by which they made it
    longer. `flop_per_s`: of a short matmul. Free memory is what was free before the state came; 0 =
    there is none. `link_bytes_per_s`: to `neighbor`; "" = nobody was there to be asked. `mark`:
    text of the driver's file that was found in storage and answered; "" = that was not looked
    at."""

    seconds: float
    waited_s: float
    versions: dict[str, str]
    flop_per_s: float
    host_bytes: int
    gpu_bytes: int = 0
    link_bytes_per_s: float = 0.0
    neighbor: str = ""
    mark: str = ""


def apart(uri: str, what: str) -> str:
    """Why a node is refused whose storage is not the driver's."""
    right = (
        "give `storage` a folder that all nodes share and may write, or s3://bucket/prefix "
        "(likewise gs://, az://)"
    )
    return f"{APART}: {what} {uri}; {right}"


def version_differences(run: Mapping[str, str], node: Mapping[str, str]) -> str:
    """In one line; '' = none. What only one of the two knows is not compared."""
    return ", ".join(
        f"{name} {node[name]} (the run has {run[name]})"
        for name in sorted(run.keys() & node.keys())
        if run[name] != node[name]
    )


def worst(found: list[Admission]) -> Admission:
    """Of the workers of one node."""
    linked = [one for one in found if one.neighbor]
    link = min(linked, key=lambda one: one.link_bytes_per_s) if linked else found[0]
    versions: dict[str, str] = {}
    for one in found:
        versions |= one.versions
    return Admission(
        max(one.seconds for one in found), max(one.waited_s for one in found), versions,
        min(one.flop_per_s for one in found), min(one.host_bytes for one in found),
        min(one.gpu_bytes for one in found), link.link_bytes_per_s, link.neighbor,
        next((one.mark for one in found if one.mark), ""),
    )  # fmt: skip
