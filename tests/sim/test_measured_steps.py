"""A whole run: a plan that was measured is expected to take what it took."""

from __future__ import annotations

from elastic.driver import drive
from elastic.ledger.journal import MemoryJournal
from elastic.observe.step_times import GenerationTimes
from elastic.policy.state.fold import changes
from elastic.sim.replay import replay
from elastic.sim.scripted_faults import Delays, Fault
from elastic.sim.sim_backend import SimBackend
from elastic.types import DriverStarted, Job, ModelProfile, OptimizerSpec, Pool, TensorSpec

MODEL = ModelProfile(
    4, 1_000_000, (TensorSpec("w", (1000, 1000), "float32", 0, 1),), (OptimizerSpec(("m",)),)
)
POOLS = (Pool("p", max_nodes=4, usd_per_node_h=1.0, market_type="spot"),)
JOB = {
    "steps": 300, "global_batch": 12, "layout": "auto", "min_workers": 1, "max_workers": 4,
    "peer_every": 1, "durable_every": 100,
}  # fmt: skip
FAULTS = tuple(Fault(60.0 + 60.0 * i, "loss", i % 3) for i in range(4))


def run(expects_measured: bool) -> tuple[MemoryJournal, list[float]]:
    """The journal, and by how much each generation but the first was not as expected."""
    journal = MemoryJournal()
    start = DriverStarted("r", 1, JOB, POOLS, MODEL, expects_measured=expects_measured)
    backend = SimBackend(POOLS, Job.from_plain(JOB), FAULTS, delays=Delays(work_s=4.0))
    assert drive(backend, journal, start).phase == "succeeded"
    times = GenerationTimes()
    for change in changes(journal.lines):
        times.take(change)
    rows = [row for row in times.rows() if row["expected_s"] and row["measured_s"]]
    return journal, [abs(row["expected_s"] / row["measured_s"] - 1) for row in rows]


def test_measured_plans_are_expected_as_they_were_and_a_replay_says_the_same() -> None:
    journal, off = run(True)
    assert len(off) >= 4 and max(off) < 0.1
    again = replay(journal.lines)
    assert again.identical and len(again.state.measured) >= 4
    plain, _ = run(False)
    assert replay(plain.lines).identical, "drivers that did not know it replay as they decided"
