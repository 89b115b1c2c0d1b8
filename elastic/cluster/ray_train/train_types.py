"""ray.train's own types in and out: configurations become keys of a job, a run becomes a
`ray.train.Result`.

Public names of `ray.train` only. Each field is mapped or refused by name; a field that a later Ray
adds is refused unless it has its default.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, cast, get_args

import ray
import ray.train
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.catalog import same_gpu
from elastic.cluster.nodes.node_types import types_here
from elastic.cluster.nodes.providers import HEAD, living, pool_name
from elastic.cluster.ray import _ray_private
from elastic.cluster.ray.address import check_no_client, unreachable
from elastic.errors import SpecError
from elastic.types.nouns import ACCELERATOR_LABEL, MARKET_LABEL, POOL_LABELS, MarketType

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
ANSWER_MOST_S = 60.0  # of the head: a process may have to start there
POOL = "workers"  # where neither the job nor the cluster names one
DEPRECATED = "DEPRECATED"
MADE_UP = re.compile(r"ray_train_run-\d")  # a name that RunConfig has made by the clock
SHOWN_AT = ("DEBUG", "INFO", "NOTSET")
FAILED = ray.train.TrainingFailedError  # what `fit` raises, as that of Ray Train does


@dataclass(frozen=True)
class TrainRequest:
    """What the configurations ask for. `job`: keys of a job; `pool`: what they say of nodes;
    `show`: progress; `notes`: what a field means here that is taken, and means something else
    there."""

    job: dict[str, Any]
    pool: dict[str, Any]
    gpu: bool
    run_name: str
    show: bool = True
    notes: tuple[str, ...] = ()


def wanted(
    scaling: ray.train.ScalingConfig | None, run: ray.train.RunConfig | None
) -> TrainRequest:
    """Raises SpecError that names the field that has no meaning here."""
    scaling = scaling if scaling is not None else ray.train.ScalingConfig()
    run = run if run is not None else ray.train.RunConfig()
    _check_kind(scaling, ray.train.ScalingConfig, "scaling_config")
    _check_kind(run, ray.train.RunConfig, "run_config")
    pool, gpu = _nodes(scaling)
    kept = _kept(run.checkpoint_config or ray.train.CheckpointConfig())
    notes = _failures(run.failure_config or ray.train.FailureConfig())
    known = ("name", "storage_path", "failure_config", "checkpoint_config", "logging_config")
    _refuse_others(run, dict.fromkeys(known), _RUN_WHY)
    level = str(getattr(getattr(run, "logging_config", None), "log_level", "INFO"))
    low, high = _workers(scaling)
    job = {"min_workers": low, "max_workers": high, "storage": str(run.storage_path), **kept}
    return TrainRequest(job, pool, gpu, str(run.name), level.upper() in SHOWN_AT, notes)


def _check_kind(given: Any, kind: type, name: str) -> None:
    if not isinstance(given, kind):
        raise SpecError(f"{name}: it is a {type(given).__name__}; give a ray.train.{kind.__name__}")


def _refuse_others(config: Any, known: Mapping[str, Any], why: Mapping[str, str]) -> None:
    """Every field that is not in `known` must have its default; `why` says what would be right
    instead."""
    name = type(config).__name__
    unknown = "this version of elastic does not know what it should mean; leave it out"
    for field in fields(config):
        value, made = getattr(config, field.name), field.default_factory
        default = made() if made is not MISSING else field.default
        if field.name in known or value == default or value in (None, {}, [], DEPRECATED):
            continue
        text = repr(value)
        text = text if len(text) <= 60 else f"{text[:57]}..."
        raise SpecError(f"{name}({field.name}={text}): {why.get(field.name, unknown)}")


# ------------------------------------------------------------------------------------ ScalingConfig

_SCALING_WHY = {
    "use_tpu": "elastic trains on CPUs and NVIDIA GPUs; leave it out",
    "topology": "it is that of TPUs; leave it out",
    "trainer_resources": "the driver is this process and reserves nothing; leave it out",
    "elastic_resize_monitor_interval_s": "nodes that come or go are heard of at once, nothing is "
    "polled; leave it out",
}


def _workers(scaling: Any) -> tuple[int, int]:
    given = scaling.num_workers
    low, high = given if isinstance(given, tuple) else (given, given)
    if low < 1:
        raise SpecError(
            f"ScalingConfig(num_workers={given}): 0 is Ray Train's local mode; for one process "
            "without Ray run python -m elastic.worker JOB, else give at least 1"
        )
    return int(low), int(high)


def _nodes(scaling: Any) -> tuple[dict[str, Any], bool]:
    """What is said of the pool, and whether its workers are GPUs."""
    known = (
        "num_workers",
        "use_gpu",
        "resources_per_worker",
        "placement_strategy",
        "accelerator_type",
        "label_selector",
    )
    _refuse_others(scaling, dict.fromkeys(known), _SCALING_WHY)
    gpu = bool(scaling.use_gpu)
    _check_resources(scaling.resources_per_worker or {}, gpu)
    if scaling.placement_strategy != "PACK":
        raise SpecError(
            f"ScalingConfig(placement_strategy='{scaling.placement_strategy}'): the planner "
            "places ranks by the layout (tp and "
            "cp inside a node), and no placement group is made; leave it out"
        )
    pool: dict[str, Any] = {}
    if scaling.accelerator_type:
        if not gpu:
            raise SpecError(
                f"ScalingConfig(accelerator_type='{scaling.accelerator_type}'): it needs "
                "use_gpu=True"
            )
        pool["accelerator_type"] = scaling.accelerator_type
    return pool | _by_labels(getattr(scaling, "label_selector", None), gpu), gpu


def _check_resources(given: Mapping[str, float], gpu: bool) -> None:
    own = {"CPU": 1, "GPU": 1} if gpu else {"CPU": 1}
    for name, value in given.items():
        if own.get(name) != value:
            one = "one GPU" if gpu else "one process (use_gpu=False)"
            raise SpecError(
                f"ScalingConfig(resources_per_worker={{'{name}': {value}}}): nodes are taken "
                f"whole, a worker is {one} of them and reserves nothing else; leave it out, or "
                "describe the nodes in job['pools']"
            )


def _by_labels(selector: Any, gpu: bool) -> dict[str, Any]:
    if not selector:
        return {}
    if not isinstance(selector, Mapping):
        raise SpecError(
            "ScalingConfig(label_selector=[...]): workers are all alike; give one selector, not "
            "one for each"
        )
    found: dict[str, Any] = {}
    for label, value in selector.items():
        if label in POOL_LABELS:
            found["name"] = value
        elif label == MARKET_LABEL and value in ("spot", "on-demand"):
            found["market_type"] = value
        elif label == ACCELERATOR_LABEL and gpu:
            found["accelerator_type"] = value
        else:
            there = ", ".join(sorted({*POOL_LABELS, MARKET_LABEL, ACCELERATOR_LABEL}))
            raise SpecError(
                f"ScalingConfig(label_selector={{'{label}': '{value}'}}): nodes are told apart by "
                f"{there} (market types spot "
                "and on-demand, accelerators with use_gpu=True); use one of these"
            )
    return found


def pools(asked: TrainRequest, on_cluster: bool) -> list[dict[str, Any]]:
    """What the configurations describe: nodes of this machine, or those of the cluster that this
    process is in, where each node type that it names is a pool."""
    low, high = asked.job["min_workers"], asked.job["max_workers"]
    if on_cluster:
        named = [] if "name" in asked.pool else _named_there(asked, high)
        if named:
            return named
        kind = "GPU" if asked.gpu else "CPU"
        sizes = [int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]]
        each = max(1, min(high, max(sizes, default=1)))
        n_nodes = high  # the nodes that there are, and those that come, may be smaller
    else:
        each = 2 if high >= 4 and not (low % 2 or high % 2) else 1
        n_nodes = -(-high // each)
    kind = "GPU" if asked.gpu else "CPU"
    pool = {"name": POOL, "accelerator_type": kind, "market_type": "owned"} | asked.pool
    return [pool | {"gpus_per_node": each, "max_nodes": n_nodes}]


def _named_there(asked: TrainRequest, most: int) -> list[dict[str, Any]]:
    """Pools of the node types whose nodes the cluster labels by a name, and of those that its
    autoscaler can start. Raises SpecError where there are none and nobody tells what it can
    start."""
    types = on_head(types_here) if _ray_private.autoscaler_v2() else {}
    there = [
        (pool_name(kind.labels) or name, kind.labels, kind.resources, kind.most)
        for name, kind in (types or {}).items()
    ]
    for node in ray.nodes():
        name = pool_name(node["Labels"])
        if node["Alive"] and name and HEAD not in node["Resources"]:
            there.append((name, node["Labels"], node["Resources"], most))
    found: dict[str, dict[str, Any]] = {}
    for name, labels, resources, n_nodes in there:
        each = int(resources.get("GPU" if asked.gpu else "CPU", 0))
        market = labels.get(MARKET_LABEL)
        market = market if market in get_args(MarketType) else "owned"
        pool = {"name": name, "accelerator_type": _kind(asked, labels), "market_type": market}
        if each < 1 or n_nodes < 1 or not asked.pool.items() <= pool.items():
            continue
        found.setdefault(
            name, pool | {"gpus_per_node": min(most, each), "max_nodes": min(most, n_nodes)}
        )
    if types is None and not found:
        raise SpecError(
            "ElasticTrainer: no node that it can use is there, and which ones the cluster's "
            "autoscaler can start is not known here; give cluster=FILE (of ray up or KubeRay), or "
            "job={'pools': [...]}"
        )
    return [*found.values()]


def _kind(asked: TrainRequest, labels: Mapping[str, str]) -> str:
    """Of nodes with these labels: what was asked for, where they do not say otherwise."""
    kind = asked.pool.get("accelerator_type", "GPU") if asked.gpu else "CPU"
    label = labels.get(ACCELERATOR_LABEL, kind)
    other = asked.gpu and (kind == "GPU" or not same_gpu(kind, label))
    return str(label if other else kind)


def on_head(ask: Callable[[], Answer | None]) -> Answer | None:
    """What is known on the head of the cluster that this process is connected to; None = nobody
    answers there."""
    head = next((node.ray_id for node in living() if node.head), "")
    if head in ("", ray.get_runtime_context().get_node_id()):
        return ask()
    task: Any = ray.remote(ask)
    where = NodeAffinitySchedulingStrategy(head, soft=False)
    answer = task.options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote()
    try:
        return cast("Answer | None", ray.get(answer, timeout=ANSWER_MOST_S))
    except RayError as error:
        log.warning("the head does not say which nodes its autoscaler can start: %s", error)
        return None


def check_pools(asked: TrainRequest, kinds: Sequence[str], where: str) -> None:
    """Pools of these accelerator types, named in `where`, and what the configurations say of nodes.
    Raises SpecError."""
    if asked.pool:
        name = next(iter(asked.pool))
        raise SpecError(
            f"{where} and ScalingConfig both say what the nodes are ({name}): two ways at "
            "once; give one"
        )
    other = [kind for kind in kinds if (kind == "CPU") == asked.gpu]
    if other:
        raise SpecError(
            f"ScalingConfig(use_gpu={asked.gpu}), but a pool of {where} is of {other[0]}s; "
            "make them agree"
        )


@contextmanager
def connected(address: str | None) -> Iterator[str | None]:
    """Address of the cluster that this process is connected to, else connected to `address`
    meanwhile; None = neither. Raises SpecError where this process is on no node of it."""
    check_no_client()
    if ray.is_initialized():
        yield ray.get_runtime_context().gcs_address
        return
    if address is not None:
        try:
            ray.init(address, log_to_driver=False)
        except (OSError, RuntimeError, ValueError) as error:
            raise unreachable(address, error) from error
    try:
        yield address
    finally:
        if address is not None:
            ray.shutdown()


# ---------------------------------------------------------------------------------------- RunConfig

_RUN_WHY = {
    "storage_filesystem": "give storage_path as a folder, or an s3://, gs:// or az:// URI; "
    "credentials and endpoint come from the "
    "environment",
    "callbacks": "give ElasticTrainer(on_step=...); or read its journal (elastic "
    "status RUN, elastic.observe)",
    "worker_runtime_env": "workers import what stands beside program.py; set "
    "variables where the nodes are started",
}
_FAILURE_WHY = {
    "max_preemption_failures": "a notice or a loss never ends a run; a budget or a "
    "deadline of the job can",
    "controller_failure_limit": "the driver is this process; start it again with the same "
    "RunConfig(name) and the run "
    "continues",
    "relax_collectives_on_preemption": "no collective waits for a rank that is gone; leave it out",
    "preemption_grace_s": "survivors are not torn down at a deadline; leave it out",
    "fail_fast": "errors of the program end the run at once; leave it out",
}


def _failures(failures: Any) -> tuple[str, ...]:
    """Whatever `max_failures` is, the run does the same: what that is, where it was asked for."""
    _refuse_others(failures, {"max_failures": None}, _FAILURE_WHY)
    if not failures.max_failures:
        return ()
    return (
        f"FailureConfig(max_failures={failures.max_failures}): a node that is lost is no failure "
        "here and is not counted; an error of your code ends the run at once, since it would be "
        "raised again",
    )


def _kept(checkpoints: Any) -> dict[str, Any]:
    """Which checkpoints stay."""
    known = ("num_to_keep", "checkpoint_score_attribute", "checkpoint_score_order")
    why = {
        "checkpoint_frequency": "give job['checkpoint_every']",
        "checkpoint_at_end": "the last step is always stored",
    }
    _refuse_others(checkpoints, dict.fromkeys(known), why)
    n, score = checkpoints.num_to_keep, checkpoints.checkpoint_score_attribute
    order = checkpoints.checkpoint_score_order
    if score is None:
        return {"keep_every": 1} if n is None else {"keep_last": n}
    if score != "validation_loss" or order != "min":
        raise SpecError(
            f"CheckpointConfig(checkpoint_score_attribute='{score}', "
            f"checkpoint_score_order='{order}'): checkpoints are kept by validation_loss, lowest "
            "first; give 'validation_loss' and 'min', or neither: the newest num_to_keep stay"
        )
    return {"keep_every": 1} if n is None else {"keep_best": n, "keep_last": 1}


# ---------------------------------------------------------------------------- inside a TorchTrainer


def train_loop(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `train_loop_per_worker` for an ordinary TorchTrainer: runs a JOB at the fixed layout of its
    workers.

    train_loop_config: job (a folder that every worker sees), layout, set (keys over job.yaml),
    storage (shared; the run's own copies, of which each worker group continues), run_name. Every
    checkpoint is reported, with the metrics of its step; the summary of the run is returned. Raises
    SpecError, ProgramError; anything else that ends a rank is a RuntimeError.
    """
    from elastic.config.job import load_job
    from elastic.worker.standalone.standalone_run import StandaloneOptions, StandaloneRun

    given = dict(config)
    unknown = sorted(set(given) - {"job", "layout", "set", "storage", "run_name"})
    if unknown or "job" not in given:
        what = f"unknown key '{unknown[0]}'" if unknown else "key 'job' is missing"
        raise SpecError(f"train_loop_config: {what}; keys are job, layout, set, storage, run_name")
    overrides = [
        f"{key}={json.dumps(value)}" for key, value in dict(given.get("set") or {}).items()
    ]
    spec = load_job(given["job"], overrides)
    if not (given.get("storage") or spec.storage or os.environ.get("ELASTIC_STORAGE")):
        raise SpecError(
            "train_loop_config: key 'storage' is missing; give a folder, or an s3://, gs:// or "
            "az:// URI, that every worker reaches"
        )
    said = logging.getLogger("elastic").info
    wishes = StandaloneOptions(
        given.get("layout"), given.get("run_name"), given.get("storage"),
        hear=lambda event: said("%s", event), on_copy=_report,
    )  # fmt: skip
    ended = StandaloneRun(spec, wishes).to_the_end()
    if ended.outcome != "succeeded":
        raise RuntimeError(f"{ended.run}: {ended.reason}")
    return ended.summary()


def _report(copy: Any) -> None:
    """On every worker, in the same order; rank 0 gives the folder."""
    leads = ray.train.get_context().get_world_rank() == 0
    ray.train.report(
        dict(copy.metrics), checkpoint=ray.train.Checkpoint(copy.uri) if leads else None
    )


# ------------------------------------------------------------------------------------------- Result


@dataclass(frozen=True)
class FinishedRun:
    """A finished run as plain data. `rows`: one per step; `copies`: durable ones (uri, step),
    newest first."""

    folder: str
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    copies: list[tuple[str, int]]
    error: str = ""


def result_of(told: FinishedRun) -> ray.train.Result:
    """As `TorchTrainer.fit` gives it; the data frame has a row per step. Where `metrics` has a
    number of the last step and of the run under one name, it is the run's, as in report.json."""
    import pandas

    by_step = {row["step"]: row for row in told.rows}
    last = by_step[max(by_step)] if by_step else {}
    plain = {
        key: value
        for key, value in told.summary.items()
        if isinstance(value, str | int | float) or value is None
    }
    best = [
        (ray.train.Checkpoint(uri), by_step.get(step, {"step": step})) for uri, step in told.copies
    ]
    return ray.train.Result(
        metrics={**last, **plain},
        checkpoint=best[0][0] if best else None,
        error=FAILED(told.error) if told.error else None,
        path=told.folder,
        metrics_dataframe=pandas.DataFrame(list(by_step.values())),
        best_checkpoints=best,
    )


SCHEMES = {"s3": "s3", "gcs": "gs", "abfs": "az"}  # of pyarrow's file systems


def read_checkpoint(checkpoint: ray.train.Checkpoint, use: Callable[[str], Any]) -> Any:
    """Calls `use` with a folder, or a URI of object storage, that holds the checkpoint. Raises
    SpecError when it is no DCP folder."""
    if not isinstance(checkpoint, ray.train.Checkpoint):
        raise SpecError(
            f"resume_from_checkpoint: it is a {type(checkpoint).__name__}; give a "
            "ray.train.Checkpoint"
        )
    kind = checkpoint.filesystem.type_name if checkpoint.filesystem is not None else "local"
    if kind == "local":
        return _used(checkpoint.path, checkpoint.path, use)
    if kind in SCHEMES:
        return use(f"{SCHEMES[kind]}://{checkpoint.path}")
    with checkpoint.as_directory() as folder:
        return _used(folder, f"{kind}:{checkpoint.path}", use)


def _used(folder: str, shown: str, use: Callable[[str], Any]) -> Any:
    from pathlib import Path

    path = Path(folder)
    if not (path / ".metadata").is_file():
        found = sorted(entry.name for entry in path.iterdir())[:4] if path.is_dir() else []
        there = f"it holds {', '.join(found)}" if found else "nothing is there"
        raise SpecError(
            f"resume_from_checkpoint {shown}: no folder of torch.distributed.checkpoint ({there}, "
            "no .metadata); save it by "
            "dcp.save({'model': ..., 'optimizer': ...}), the states by get_state_dict"
        )
    return use(folder)
