"""What a run refuses before it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from elastic.config.drill import NODE_WORD, NODE_WORDS, DrillSpec
from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.text import n_of
from elastic.types import DriverStarted, Pool, Stop, WorkerFailed


def paid_until_s(before: Sequence[Line], orphan_lease_s: float, embedded: bool) -> float | None:
    """Until when the nodes of a driver that is gone may have been paid for: it may have lived until
    a line was due, its workers leave after their lease. One that has ended the run has given them
    back. None = there was no driver."""
    from elastic.cluster.nodes.demand import LEAVE_MOST_S
    from elastic.driver import LINE_EVERY_S

    if not before:
        return None
    last = before[-1]
    ended = last.decision is not None and any(
        isinstance(action, Stop) for action in last.decision.actions
    )
    return last.at_s + (0.0 if embedded or ended else LINE_EVERY_S + orphan_lease_s + LEAVE_MOST_S)


def check_drill(drill: Sequence[DrillSpec], pools: Sequence[Pool], embedded: bool) -> None:
    """Raises SpecError for nodes that there can never be. `embedded`: they are called POOL-1,
    POOL-2 ..."""
    added = Counter(entry.add for entry in drill if entry.add is not None)
    most = {pool.name: pool.max_nodes + added[pool.name] for pool in pools}
    n_workers = sum(most[pool.name] * pool.gpus_per_node for pool in pools)
    listed = ", ".join(
        f"{name}-1" + (f" to {name}-{n}" if n > 1 else "") for name, n in most.items() if n
    )
    for entry in drill:
        where = "the drill" + ("" if entry.at_step is None else f", at_step {entry.at_step}")
        if entry.add is not None and entry.add not in most:
            raise SpecError(
                f"{where}: no pool '{entry.add}' to add to; pools are {', '.join(most)}"
            )
        for name in entry.nodes():
            check_market(name, pools, where)
            if name.startswith("rank:") and int(name[5:]) >= n_workers:
                raise SpecError(
                    f"{where}: '{name}', but there are at most {n_of(n_workers, 'worker')}, "
                    f"rank:0 to rank:{n_workers - 1}"
                )
            pool, _, number = name.rpartition("-")
            known = NODE_WORD.fullmatch(name) or name == "partner"
            if (
                embedded
                and not known
                and not (number.isdigit() and 1 <= int(number) <= most.get(pool, 0))
            ):
                raise SpecError(
                    f"{where}: there is never a node '{name}'; nodes here are {listed}; or give "
                    f"{NODE_WORDS}"
                )


def check_market(name: str, pools: Sequence[Pool], where: str) -> None:
    """Raises SpecError for `any-spot` where no node is ever of the spot market."""
    if name == "any-spot" and all(pool.market_type != "spot" for pool in pools):
        kinds = ", ".join(f"{pool.name} is {pool.market_type}" for pool in pools)
        raise SpecError(
            f"{where}: 'any-spot', but no pool is of the spot market ({kinds}); take any"
        )


def failed_by_itself(before: Sequence[Line]) -> str:
    """How a script that is restarted has ended its run, by the last driver's lines; '' = it has
    not."""
    why = ""
    for _, event in (entry for line in before for entry in line.events):
        if isinstance(event, DriverStarted):
            why = ""
        elif isinstance(event, WorkerFailed) and event.kind == "program":
            why = event.error
    return why
