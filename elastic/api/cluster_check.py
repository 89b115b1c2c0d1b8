"""check(): what is wrong in a cluster file, by Ray's rules and by ours, and what its pools cost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic import catalog
from elastic.config.clusters import ClusterSpec, Problem, problems_of, read_cluster
from elastic.config.job import job_data, job_of
from elastic.config.key_names import LEAST, OF_A_SCRIPT
from elastic.config.pool_checks import check_fit, unlimited
from elastic.errors import SpecError
from elastic.text import n_of

WHEELS = "docs/install.md: the wheel and constraints.txt"


@dataclass(frozen=True)
class ClusterCheck:
    """A cluster file with all that was found in it."""

    spec: ClusterSpec
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return all(problem.warning for problem in self.problems)

    def lines(self) -> list[str]:
        """Each problem in one line."""
        return [problem.line(self.spec.file, self.spec.lines) for problem in self.problems]

    def plain(self) -> dict[str, Any]:
        problems = [
            {
                "place": ".".join(map(str, problem.place)),
                "what": problem.what,
                "right": problem.right,
                "severity": "warning" if problem.warning else "error",
                "line": line,
            }
            for problem, line in zip(self.problems, self.lines(), strict=True)
        ]
        return {
            "file": self.spec.file, "cluster": self.spec.name, "provider": self.spec.provider,
            "region": self.spec.region, "zones": list(self.spec.zones), "head": _head(self.spec),
            "on_demand_floor": self.spec.on_demand_floor, "pools": [_pool(self.spec,
            n) for n in range(len(self.spec.pools))], "problems": problems, "ok": self.ok,
        }  # fmt: skip


def check_cluster(file: str | Path, job: str | Path | None = None) -> ClusterCheck:
    """Of a cluster file; with the folder of a job also whether that can run there. Asks no cloud.
    Raises SpecError where it is no cluster file at all, or no job."""
    from elastic.cluster.prices.ec2_model import node_config_problems
    from elastic.cluster.ray._ray_private import launcher_problem

    spec, problems = read_cluster(file)
    if spec.provider != "kubernetes":
        found = launcher_problem(spec.data)
        if found is not None:
            problems.insert(
                0,
                Problem(
                    found[0], f"Ray refuses it: {found[1]}", "see Ray's reference of cluster files"
                ),
            )
    if spec.head is not None:  # else Ray has said so, and what is a worker is not known
        problems += problems_of(spec)
    if spec.provider == "aws":
        problems += node_config_problems(spec)
    problems += [*_namesakes(spec, Path(file)), *_mounts(spec, Path(file))]
    if job is not None:
        problems += _of_job(spec, job)
    return ClusterCheck(spec, tuple(_in_order(spec, problems)))


def _namesakes(spec: ClusterSpec, file: Path) -> list[Problem]:
    """Other files beside it for a cluster of the same name: `ray up` of one takes the machines of
    the other for its own."""
    if spec.provider in ("kubernetes", "local") or not spec.name:
        return []
    line, there = (
        re.compile(rf"^cluster_name:\s*['\"]?{re.escape(spec.name)}['\"]?\s*(#.*)?$", re.MULTILINE),
        [],
    )
    for other in sorted({*file.parent.glob("*.yaml"), *file.parent.glob("*.yml")} - {file}):
        with suppress(OSError, UnicodeDecodeError):
            there += [other.name] if line.search(other.read_text()) else []
    what = (
        f"{', '.join(there)} beside this file {'has' if len(there) == 1 else 'have'} the same name"
    )
    right = (
        "a name for each: Ray finds its machines by it, and `ray up` of one file would change or "
        "end those of the other"
    )
    return [Problem(("cluster_name",), what, right, True)] if there else []


def _mounts(spec: ClusterSpec, file: Path) -> Iterator[Problem]:
    """What `ray up` would copy to the nodes and does not find, or the nodes would not find in it.
    Ray looks from the folder in which it is started. Of a home folder (`~`), which may be
    another's, the token alone is looked for: every user needs one."""
    mounts = spec.data.get("file_mounts")
    for there, here in mounts.items() if isinstance(mounts, Mapping) else ():
        source, place = Path(str(here)), ("file_mounts", str(there))
        if str(here).startswith("~"):
            if source.name == "auth_token" and not source.expanduser().exists():
                yield Problem(
                    place,
                    f"{here} is not there: `ray up` fails",
                    "`ray get-auth-token --generate` makes it, once",
                    True,
                )
            continue
        if not source.exists():
            if at := next((at for at in file.resolve().parents if (at / source).exists()), None):
                yield Problem(
                    place,
                    f"{here} is not in {Path.cwd()}, from where this was started",
                    f"start `ray up` in {at}",
                    True,
                )
                continue
            right = f"make it there ({WHEELS})" if source.name == "wheels" else "make it there"
            yield Problem(
                place,
                f"{here} is not there, seen from {Path.cwd()}: `ray up` fails",
                f"{right}, or start `ray up` where it is",
                True,
            )
            continue
        for key, command in _commands(spec):
            for name in re.findall(rf"{re.escape(str(there))}/([\w.*-]+\.(?:whl|txt))", command):
                if not any(source.glob(name)):
                    what = f"{there}/{name} is not in {here}: the command fails on each node"
                    yield Problem((key,), what, f"put it into {here} ({WHEELS})", True)


def _commands(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    for key in ("setup_commands", "head_setup_commands", "worker_setup_commands"):
        given = spec.data.get(key)
        yield from ((key, str(one)) for one in given) if isinstance(given, list) else ()


def _of_job(spec: ClusterSpec, folder: str | Path) -> list[Problem]:
    data, where = job_data(folder)
    file = Path(folder) / str(data.get("program", "program.py"))
    if "script" in data or not file.is_file():  # what its script says may be missing, or be more
        data = LEAST | {key: value for key, value in data.items() if key != OF_A_SCRIPT}
    job = job_of(data, file, where)
    found = []
    try:
        check_fit(job, spec.pools)
    except SpecError as error:
        found.append(
            Problem(
                ("available_node_types",), str(error), "more nodes, or a job that asks for less"
            )
        )
    what, _, right = unlimited(job.job(), spec.pools).partition("; ")
    if what:
        found.append(Problem(("available_node_types",), f"{where}: {what}", right))
    most = sum(pool.max_nodes for pool in spec.pools if pool.market_type != "spot")
    wanted = 1 if job.on_demand_floor == "copy" else job.on_demand_floor
    if isinstance(wanted, int) and wanted > most:
        what = (
            f"{where} asks for on_demand_floor: {job.on_demand_floor}, the pools that are no spot "
            f"give {n_of(most, 'node')}"
        )
        found.append(
            Problem(
                ("available_node_types",),
                what,
                "add a node type that is labeled on-demand, or lower the floor",
            )
        )
    return found


def _in_order(spec: ClusterSpec, problems: list[Problem]) -> list[Problem]:
    """Errors first, each kind in the order of the file, none twice."""
    return sorted(
        dict.fromkeys(problems),
        key=lambda problem: (problem.warning, problem.line_number(spec.lines)),
    )


def _head(spec: ClusterSpec) -> dict[str, Any] | None:
    head = spec.head
    if head is None:
        return None
    known = catalog.instance_type(head.instance_type)
    price = known.usd_per_h_or_elsewhere(spec.region)[0] if known else None
    return {
        "instance_type": head.instance_type,
        "market_type": head.market_type,
        "usd_per_h": price,
    }


def _pool(spec: ClusterSpec, n: int) -> dict[str, Any]:
    pool = spec.pools[n]
    price_from = spec.prices_of.get(pool.name, "")
    known = price_from != "not known"
    return {
        "name": pool.name, "instance_type": pool.instance_type, "market_type": pool.market_type,
        "min_nodes": pool.min_nodes, "max_nodes": pool.max_nodes,
        "gpus_per_node": pool.gpus_per_node, "accelerator_type": pool.accelerator_type,
        "usd_per_node_h": pool.usd_per_node_h if known else None,
        "usd_per_gpu_h": round(pool.usd_per_gpu_h, 6) if known else None,
        "price_from": price_from, "region": pool.region, "zone": pool.zone,
        "notice_s": pool.notice_s, "ends_at_s": pool.ends_at_s,
    }  # fmt: skip
