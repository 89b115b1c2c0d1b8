"""Readers of what people write: jobs, clusters, drills, and what they take from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from support.fuzz import mutating
from support.fuzz.target import Mutate, Target
from support.places import ROOT

from elastic.catalog.bounded_yaml import yaml_of
from elastic.config.clusters import problems_of, read_cluster
from elastic.config.hardware import SCHEMA, read_hardware
from elastic.config.job import job_of, load_drill, overridden
from elastic.errors import SpecError
from elastic.sim.markets.traces import load_trace
from elastic.types import HardwareProfile

PROGRAM = Path("/jobs/x/program.py")
DRILLS = [
    b"- {at_step: 40, notice: any-spot, deadline_s: 30}\n- {at_step: 90, kill: rank0}\n",
    b"- at_step: 7\n  slow: [a, b]\n  factor: 2.0\n- {at_step: 9, partition: n, for_s: 3, from: [driver]}\n",
]
SETS = [
    b"steps=100\0optimizer.lr=0.1\0pools=[]",
    b"layout=dp_shard=2\0global_batch=8\0data={train: {tokens: /x.bin}}\0budget_usd=3.5",
]
TRACES = [
    b'{"metadata": {"gap_seconds": 60, "start": "x"}, "data": [1, 1, 2, 0, 4]}',
    b"at_s,nodes,usd_per_node_h\n0,1,2.5\n60,2,2.5\n90,0,3\n",
    b"at_s,event,node\n0,add,a\n5,add,b\n7.5,remove,a\n",
]


def jobs() -> Target:
    seeds = [
        data
        for path in sorted((ROOT / "jobs").glob("*/job.yaml"))
        if b"\nsteps:" in b"\n" + (data := path.read_bytes())
    ]
    return Target("job", seeds, _job, (SpecError, UnicodeDecodeError), _yaml_meaning(seeds))


def _job(data: bytes) -> Any:
    """What is taken is the same job again when it comes out of a journal."""
    found = yaml_of(data.decode(), "job.yaml")
    if not isinstance(found, dict):
        return None
    spec = job_of(found, PROGRAM, "job.yaml")
    plain = spec.plain()
    stored = json.loads(json.dumps(plain, allow_nan=False))
    del stored["folder"]
    assert job_of(stored, PROGRAM).plain() == plain
    spec.job()
    return plain


def _yaml_meaning(seeds: list[bytes]) -> Mutate:
    known = {seed: yaml.safe_load(seed) for seed in seeds}
    return lambda seed, chance: mutating.as_yaml(seed, known[seed], chance)


def _in_file(path: Path, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    def put(data: bytes) -> Any:
        path.write_bytes(data)
        return read(path)

    return put


def clusters(folder: Path) -> Target:
    paths = [
        *sorted((ROOT / "cluster_configs").glob("*.yaml")),
        *sorted((ROOT / "deploy" / "kubernetes").glob("ray*.yaml")),
    ]
    seeds = [path.read_bytes() for path in paths]

    def read(path: Path) -> Any:
        spec, problems = read_cluster(path)
        return [problem.line(spec.file, spec.lines) for problem in problems + problems_of(spec)]

    return Target(
        "cluster",
        seeds,
        _in_file(folder / "cluster.yaml", read),
        (SpecError,),
        _yaml_meaning(seeds),
    )


def drills(folder: Path) -> Target:
    def read(path: Path) -> Any:
        found = load_drill(path)
        path.write_text(json.dumps([entry.plain() for entry in found]))
        assert not found or load_drill(path) == found
        return found

    return Target(
        "drill", DRILLS, _in_file(folder / "drill.yaml", read), (SpecError,), _yaml_meaning(DRILLS)
    )


def sets() -> Target:
    """What stands behind --set."""
    return Target(
        "set",
        SETS,
        lambda data: overridden(data.decode("utf-8", "surrogateescape").split("\0")),
        (SpecError,),
    )


def hardware(folder: Path) -> Target:
    profile = HardwareProfile(
        "A100", flop_per_s=(("bfloat16", 3.1e14),), measured=("units",), step_share=0.9
    )
    seed = json.dumps({"schema": SCHEMA, "at": "x", "profile": asdict(profile)}).encode()
    return Target(
        "hardware",
        [seed],
        _in_file(folder / "hardware.json", read_hardware),
        (SpecError,),
        mutating.as_json,
    )


def traces(folder: Path) -> Target:
    def read(path: Path) -> Any:
        found = load_trace(path)
        assert found.ends_s > 0 and list(found.at_s) == sorted(found.at_s) and min(found.nodes) >= 0
        return found

    return Target(
        "trace", TRACES, _in_file(folder / "trace.csv", read), (SpecError,), mutating.as_json
    )


def opened(folder: Path) -> list[Target]:
    return [jobs(), sets(), clusters(folder), drills(folder), hardware(folder), traces(folder)]
