"""Every number that a run tells to Prometheus, defined once: the endpoint, Ray's metrics, the alert
rules, the dashboard and docs/metrics.md follow this table.

Names are Prometheus's: base units, `_total` for what only grows. What an account says of a category
is a gauge: a step that is undone moves from one category to another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True)
class Metric:
    """`labels`: besides `run`, which all have; each has few values."""

    name: str
    kind: Kind
    about: str
    labels: tuple[str, ...] = ()


METRICS = (
    Metric("elastic_run_phase", "gauge",
           "1 for the phase the run is in, 0 for the others: waiting, entering, running, "
           "succeeded, failed, stopped", ("phase",)),
    Metric("elastic_step", "gauge", "optimizer steps finished; falls where steps are undone"),
    Metric("elastic_steps_wanted", "gauge", "steps that the job asks for"),
    Metric("elastic_steps_total", "counter",
           "steps trained, those that are trained again included"),
    Metric("elastic_tokens_total", "counter",
           "tokens trained (samples, where the loss counts those), again included"),
    Metric("elastic_last_step_timestamp_seconds", "gauge",
           "when the newest step was heard of, since 1970"),
    Metric("elastic_train_loss", "gauge", "of the newest step, per token"),
    Metric("elastic_grad_norm", "gauge", "of the newest step, before clipping"),
    Metric("elastic_validation_loss", "gauge", "of the newest validation"),
    Metric("elastic_step_seconds", "gauge", "of the newest step alone"),
    Metric("elastic_tokens_per_second", "gauge", "of the newest step alone"),
    Metric("elastic_mfu_ratio", "gauge",
           "model FLOP utilization of the newest step: FLOPs of the model over the peak of "
           "the GPUs in the plan; there where both are known"),
    Metric("elastic_goodput_ratio", "gauge",
           "productive GPU-seconds over paid GPU-seconds, of the whole run"),
    Metric("elastic_account_gpu_seconds", "gauge",
           "paid GPU-seconds by category of the ledger", ("category",)),
    Metric("elastic_account_usd", "gauge", "dollars by category of the ledger", ("category",)),
    Metric("elastic_gpu_seconds_total", "counter", "paid GPU-seconds of the whole run"),
    Metric("elastic_spend_usd_total", "counter", "dollars of the whole run"),
    Metric("elastic_spend_usd_per_hour", "gauge", "dollars an hour of what is paid for now"),
    Metric("elastic_budget_usd", "gauge", "the job's budget, where it has one"),
    Metric("elastic_nodes", "gauge",
           "nodes that are paid for, by pool and status: pending, ready, prepared, "
           "draining, quarantined", ("pool", "status")),
    Metric("elastic_nodes_requested", "gauge",
           "nodes that were asked for and have not come", ("pool",)),
    Metric("elastic_node_usd_per_hour", "gauge", "price of a node now", ("pool",)),
    Metric("elastic_workers", "gauge", "workers of the running plan"),
    Metric("elastic_generation", "gauge", "number of the running generation"),
    Metric("elastic_faulty_nodes", "gauge",
           "nodes on which a device has failed, or that are quarantined", ("pool",)),
    Metric("elastic_notices_total", "counter", "notices of preemption", ("pool",)),
    Metric("elastic_nodes_lost_total", "counter",
           "nodes that were gone before they were released", ("pool",)),
    Metric("elastic_requests_failed_total", "counter",
           "requests for nodes that a pool refused, and each time that fewer nodes of one are "
           "still starting", ("pool",)),
    Metric("elastic_transitions_total", "counter", "generations entered, by cause", ("cause",)),
    Metric("elastic_transition_pause_seconds_total", "counter",
           "for which no step was made in transitions", ("cause",)),
    Metric("elastic_transition_phase_seconds_total", "counter",
           "seconds of the phases of transitions: detect, quiesce, groups, build, "
           "transfer, probe, first_step", ("cause", "phase")),
    Metric("elastic_transition_lost_steps_total", "counter",
           "steps that had to be done again", ("cause",)),
    Metric("elastic_copies_total", "counter",
           "copies by kind (peer, durable) and result: stored, failed, skipped, damaged",
           ("kind", "result")),
    Metric("elastic_copy_seconds_total", "counter",
           "from a copy's boundary until it was stored", ("kind",)),
    Metric("elastic_copy_bytes_total", "counter", "bytes of copies that were stored", ("kind",)),
    Metric("elastic_checkpoint_step", "gauge", "step of the newest checkpoint"),
    Metric("elastic_checkpoint_timestamp_seconds", "gauge",
           "when the newest checkpoint was stored, since 1970"),
    Metric("elastic_guard_trips_total", "counter",
           "guards that have tripped, and what was done: skip, rollback, stop", ("guard", "do")),
    Metric("elastic_wrong_numbers_total", "counter",
           "comparisons of ranks that found silent data corruption"),
    Metric("elastic_node_cpu_ratio", "gauge",
           "of the time of all cores of the node's machine, what was used", ("node",)),
    Metric("elastic_node_memory_available_bytes", "gauge",
           "host memory that processes of the node can still take", ("node",)),
    Metric("elastic_node_memory_size_bytes", "gauge", "host memory of the node", ("node",)),
    Metric("elastic_worker_resident_memory_bytes", "gauge",
           "host memory that the node's first worker holds", ("node",)),
    Metric("elastic_node_gpu_utilization_ratio", "gauge",
           "of the time of the node's GPUs, that in which they computed: their mean", ("node",)),
    Metric("elastic_node_gpu_memory_bytes", "gauge",
           "memory of the node's GPUs that is taken", ("node",)),
    Metric("elastic_node_gpu_memory_size_bytes", "gauge", "memory of the node's GPUs", ("node",)),
    Metric("elastic_node_gpu_power_watts", "gauge", "power of the node's GPUs", ("node",)),
    Metric("elastic_node_gpu_temperature_celsius", "gauge",
           "of the hottest of the node's GPUs", ("node",)),
    Metric("elastic_storage_away", "gauge", "1 while the run's storage does not answer"),
    Metric("elastic_journal_timestamp_seconds", "gauge",
           "of the newest journal line that is in these numbers, since 1970"),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in METRICS}


def row_of(metric: Metric) -> str:
    """Of the table in docs/metrics.md."""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.about} |"
