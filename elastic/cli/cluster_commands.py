"""Commands about machines, no run needed: prices, cluster check, cluster reap."""

from __future__ import annotations

import argparse
from typing import Any

from elastic import api
from elastic.cli.parser import option, show, verb, verb_group
from elastic.observe import run_tables
from elastic.observe.plans import price_list
from elastic.text import n_of


def add(verbs: Any) -> None:
    _add_prices(verbs)
    _add_cluster(verbs)


def _add_prices(verbs: Any) -> None:
    made = verb(
        verbs,
        "prices",
        _prices,
        about="what instances cost: a cluster file's pools now, or the table that comes with this",
    )
    instead = made.add_mutually_exclusive_group()
    option(instead, "--cluster FILE", "a cluster file; AWS is asked for the prices of its pools")
    option(instead, "--chips", "the GPUs instead: peaks, memory, links, sources")
    option(
        made, "--gpu NAME", "only with this GPU, in any spelling, as h100 or A100-80GB", default=""
    )
    option(
        made, "--cloud NAME", "only of this cloud: aws, gcp, azure or one of your own", default=""
    )
    option(made, "--region NAME", "only in this region", default="")
    option(
        made, "--catalog FILE", "own entries (also: $ELASTIC_CATALOG)", action="append", default=[]
    )


def _add_cluster(verbs: Any) -> None:
    actions = verb_group(verbs, "cluster", "cluster files: what `ray up` launches")
    made = verb(
        actions,
        "check",
        _cluster_check,
        about="check a cluster file, and print its pools with their prices",
    )
    option(made, "FILE", "a file of Ray's cluster launcher, or a RayCluster or RayJob of KubeRay")
    option(made, "--job JOB", "folder of a job: also whether it can run there")
    made = verb(
        actions,
        "reap",
        _cluster_reap,
        about="list the EC2 instances that a dead cluster has leaked, and terminate them; of other "
        "clouds: say how",
    )
    option(made, "FILE", "the file that `ray up` launched it from")
    option(made, "--yes", "end them")
    option(made, "--alive", "also where the cluster's head runs")


def _prices(given: argparse.Namespace) -> int:
    wanted = api.PriceQuery(given.gpu, given.cloud, given.region, tuple(given.catalog))
    if given.chips:
        rows = api.gpus(wanted)
        show(given, {"chips": rows}, price_list.chips(rows))
        return 0
    found = api.prices(given.cluster, wanted)
    show(
        given,
        found.plain(),
        [*price_list.prices(found.rows), *found.problems, f"table of {found.plain()['table_at']}"],
    )
    return 0


def _cluster_check(given: argparse.Namespace) -> int:
    found = api.check_cluster(given.file, given.job)
    rows: list[tuple[str, ...]] = [run_tables.POOLS]
    rows += [
        run_tables.pool(pool, found.spec.prices_of.get(pool.name, "")) for pool in found.spec.pools
    ]
    n_errors = sum(not problem.warning for problem in found.problems)
    n_warnings = len(found.problems) - n_errors
    verdict = f"{given.file}: {n_of(n_errors, 'error')}, {n_of(n_warnings, 'warning')}"
    show(
        given,
        found.plain(),
        [*found.lines(), *run_tables.columns(rows, right=(3, 4, 5, 6)), verdict],
    )
    return 0 if found.ok else 2


def _cluster_reap(given: argparse.Namespace) -> int:
    found = api.reap(given.file, given.yes, given.alive)
    rows: list[tuple[str, ...]] = [
        run_tables.MACHINES,
        *(tuple(i.plain().values()) for i in found.instances),
    ]
    show(
        given,
        found.plain(),
        [*(run_tables.columns(rows) if found.instances else []), found.verdict()],
    )
    return 1 if found.left else 0
