"""All that a report and a diagnosis read of a journal, in one pass over it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.observe.accounting.accounts import Account, Books
from elastic.observe.accounting.sampled_curve import SampledCurve
from elastic.observe.diagnosis.evidence import Evidence, EvidenceReader
from elastic.observe.reporting.capacity_history import CapacityHistory
from elastic.observe.reporting.story import Incidents
from elastic.observe.run_view import View
from elastic.policy.state.fold import changes


@dataclass(frozen=True)
class RunStanding:
    """What a status is drawn of. `trend`: of its steps."""

    view: View
    account: Account
    evidence: Evidence
    trend: SampledCurve


@dataclass(frozen=True)
class RunSeen(RunStanding):
    history: CapacityHistory
    incidents: Incidents


def seen_of_run(run: RunFolder) -> RunSeen:
    """Raises SpecError where the journal says nothing."""
    with find_runs.uncollected():
        return seen_of(find_runs.lines_of(run))


def seen_of(lines: Iterable[Line]) -> RunSeen:
    view, books, history = View(), Books(), CapacityHistory()
    evidence, trend, incidents = EvidenceReader(), SampledCurve(), Incidents()
    for change in changes(lines):
        for reader in (view, books, history, evidence, trend, incidents):
            reader.take(change)
    account = books.closed()
    return RunSeen(view, account, evidence.found(account), trend, history, incidents)
