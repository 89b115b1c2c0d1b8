"""docs/job-reference.md: every key of job.yaml, from the model that checks it.

    python tests/support/docs/job_reference.py    # writes the page anew

Type, default and range are the model's; what a key says, its unit and its page stand in WORDS. A key
without words, and words without a key, fail the test of the page.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from elastic.config.data_section import DataSpec, SourceSpec
from elastic.config.drill import DrillSpec
from elastic.config.job import JobSpec, PoolSpec, embedded_pools
from elastic.config.key_names import DOCUMENTED
from elastic.config.numbers.trackers import MlflowKeys, TrackioKeys, WandbKeys
from elastic.config.optimization import (
    BlockNorm,
    GradNorm,
    Guard,
    LossSpike,
    LrSchedule,
    NoiseScaleSettings,
    NormGroup,
    OptimizerKeys,
)
from elastic.config.phase_section import PhaseSpec

PAGE = Path(__file__).resolve().parents[3] / "docs" / "job-reference.md"
INTRO = """# job.yaml: every key

You want to know what a key is called, what it may be and what it is when it is left out: it stands here. You want to know how it
works: follow the page in the last column. `elastic run JOB --set key=value` sets one for a run; `elastic.loop(key=value)` and
`ElasticTrainer(job={"key": value})` take the same names. An unknown key, a wrong type and a number out of range are one line and
exit code 2, with the key that was probably meant.

`-` as a default: the key must be given. `none`: nothing is set, the row says what happens then. Steps are optimizer steps.
"""


class Words(NamedTuple):
    """What the model does not know of a key."""

    says: str
    unit: str = ""
    page: str = ""


class Section(NamedTuple):
    title: str
    intro: str
    model: type[BaseModel]
    keys: Mapping[str, Words]


TRAINING = {
    "steps": Words("how long", "steps", "program.md"),
    "global_batch": Words("of a step, whatever the number of workers", "samples", "program.md"),
    "name": Words("begins the names of its runs"),
    "seed": Words("of the first weights and the order of the samples"),
    "program": Words("the file that defines `program`, from the job's folder", "", "program.md"),
    "script": Words("a script that enters `elastic.loop`, in place of a program", "", "loop.md"),
    "args": Words("the script's arguments", "", "loop.md"),
    "eval_every": Words("between validations; 0 = at the end alone", "steps", "program.md"),
    "eval_samples": Words(
        "of the validation set that are looked at each time", "samples", "program.md"
    ),
    "data": Words("what is read, in place of the program's datasets; see below", "", "data.md"),
    "phases": Words(
        "what is other from a step on: batch, length, layout; see below", "", "training-shapes.md"
    ),
    "drill": Words("what shall happen on the way; see below", "", "how-it-works.md"),
    "trackers": Words(
        "who is told its numbers: a name, a list of names, or see below", "", "metrics.md"
    ),
    "metrics_port": Words(
        "where Prometheus finds its numbers: PORT, HOST:PORT, 0 = any, or ray; none = nowhere",
        "",
        "metrics.md",
    ),
}
PHASE = {
    "from_step": Words("so many steps are done when it begins", "steps"),
    "global_batch": Words("of each of its steps", "samples"),
    "lr_factor": Words("on the rates that the job's schedule gives"),
    "lr_schedule": Words("in place of the job's; its steps count from the phase's first"),
    "layout": Words("as the job's key; the planner plans for the phase", "", "layouts.md"),
    "schedule": Words("of a pipeline"),
    "virtual_stages": Words("a rank's, under interleaved1f1b", "stages"),
    "microbatch_size": Words("that a rank computes at once", "samples"),
    "microbatch_tokens": Words("a budget, for samples of unequal length", "tokens"),
    "activation_checkpointing": Words("which activations are computed again"),
    "zero_stage": Words("what is cut over dp_shard"),
    "data": Words("{train: ...}: keys of the job's source, or another source", "", "data.md"),
}
OPTIMIZATION = {
    "optimizer": Words("in place of `Program.optimizer`; see below", "", "optimization.md"),
    "lr_schedule": Words("in place of `Program.lr_factor`; see below", "", "optimization.md"),
    "lr_scaling": Words(
        "how learning rates follow `global_batch` / `base_global_batch`", "", "optimization.md"
    ),
    "base_global_batch": Words(
        "that the learning rates were found with", "samples", "optimization.md"
    ),
    "clip_grad_norm": Words("most of the whole gradient; none = not clipped", "", "program.md"),
    "noise_scale": Words("measures the gradient noise scale; see below", "", "optimization.md"),
    "batch_norm": Words(
        "whose statistics BatchNorm takes: auto, step, microbatch, or see below", "", "models.md"
    ),
    "guards": Words("what happens at wrong numbers; see below", "", "optimization.md"),
}
MEMORY = {
    "precision": Words("of the passes; parameters stay as they are", "", "memory.md"),
    "reduce_dtype": Words("in which gradients are added up", "", "memory.md"),
    "frozen_weights": Words("frozen linear layers of the blocks in 4 bits", "", "models.md"),
    "layout": Words(
        "`auto`, `auto,tp=2`, `dp_shard=2,tp=2`, or a map from the number of workers to a layout",
        "",
        "layouts.md",
    ),
    "schedule": Words(
        "of a pipeline; none = the planner chooses, here and below", "", "layouts.md"
    ),
    "virtual_stages": Words("a rank's, under interleaved1f1b", "stages", "layouts.md"),
    "microbatch_size": Words("that a rank computes at once", "samples", "memory.md"),
    "microbatch_tokens": Words(
        "the same for samples of unequal length: a budget", "tokens", "data.md"
    ),
    "activation_checkpointing": Words("which activations are computed again", "", "memory.md"),
    "zero_stage": Words(
        "what is cut over dp_shard: 1 optimizer state, 2 gradients too, 3 parameters too",
        "",
        "memory.md",
    ),
    "compile": Words("torch.compile of each block", "", "memory.md"),
    "float8": Words("matrix products of the blocks in float8, through torchao", "", "memory.md"),
    "offload": Words("optimizer state in the host's memory", "", "memory.md"),
    "trusted_axes": Words(
        "taken as right whatever the check before the start finds", "", "program.md"
    ),
}
COPIES = {
    "peer_every": Words(
        "between copies into another node's memory; 0 = none", "steps", "checkpoints.md"
    ),
    "durable_every": Words("between checkpoints; 0 = at the end alone", "steps", "checkpoints.md"),
    "peer_copies": Words("kept on other nodes", "replicas", "state.md"),
    "copies_across_zones": Words("replicas lie in other zones", "", "state.md"),
    "copy_link_share": Words("of a network link that copies may use", "of 1", "state.md"),
    "keep_last": Words("the newest that stay", "checkpoints", "checkpoints.md"),
    "keep_every": Words("of which one stays for good; 0 = none does", "steps", "checkpoints.md"),
    "keep_best": Words("of least validation loss that stay", "checkpoints", "checkpoints.md"),
    "storage_quota_gb": Words("that the run's checkpoints may take", "GB", "checkpoints.md"),
    "verify_copies": Words(
        "the newest is read back before an older one is removed", "", "checkpoints.md"
    ),
    "storage": Words(
        "folder of the runs, or `s3://bucket/prefix` (also `gs://`, `az://`); none = ./elastic_runs (under `ray job submit` ~/elastic_runs)",
        "",
        "storage.md",
    ),
}
NODES = {
    "min_workers": Words("fewer do not train, they wait", "workers", "capacity.md"),
    "max_workers": Words("more are not used", "workers", "capacity.md"),
    "max_nodes": Words("of all pools together", "nodes", "capacity.md"),
    "pools": Words("the kinds of nodes; see below", "", "capacity.md"),
    "budget_usd": Words("at which the run saves and stops", "USD", "capacity.md"),
    "head_usd_per_h": Words(
        "of the head node, on the bill while a driver runs", "USD/h", "capacity.md"
    ),
    "deadline_h": Words("since the first start", "hours", "capacity.md"),
    "on_demand_floor": Words(
        "that are always on-demand; copy = as many as hold the state once", "nodes", "capacity.md"
    ),
    "waiting_usd_per_h": Words(
        "what an hour is worth in which too few nodes are there", "USD/h", "capacity.md"
    ),
    "purpose": Words(
        "auto = cheapest where deadline_h or on_demand_floor is given, else fastest",
        "",
        "capacity.md",
    ),
    "across_zones": Words("stages, shards and tp peers may lie in several zones", "", "layouts.md"),
    "rebalance": Words("shares and stages follow measured speeds", "", "heterogeneous-gpus.md"),
    "check_numbers_every": Words(
        "between comparisons of what ranks must have equal; 0 = none", "steps", "faulty-gpus.md"
    ),
    "max_silence_s": Words(
        "without a step after which a worker hangs; none = from measured steps",
        "s",
        "faulty-gpus.md",
    ),
    "orphan_lease_s": Words("that workers go on without a driver", "s", "reliability.md"),
}
POOL = {
    "name": Words("the pool's"),
    "accelerator_type": Words(
        "GPU kind, as Ray labels it; CPU = one process is a worker", "", "catalog.md"
    ),
    "gpus_per_node": Words("each is one worker", "GPUs"),
    "market_type": Words("who may take a node away, and how it is paid", "", "capacity.md"),
    "usd_per_node_h": Words("0 = free", "USD/h", "capacity.md"),
    "min_nodes": Words("always asked for", "nodes", "capacity.md"),
    "max_nodes": Words("at most", "nodes", "capacity.md"),
    "notice_s": Words("from a notice to the end of a node", "s", "notices.md"),
    "region": Words("where it is"),
    "zone": Words("where it is, for replicas and layouts", "", "layouts.md"),
    "ends_at_s": Words("when a reservation ends, since 1970", "s", "capacity.md"),
    "memory_bytes_per_gpu": Words("0 = not known, the device says it", "bytes", "planner.md"),
    "host_memory_bytes": Words("of a node; 0 = not known, the node says it", "bytes", "planner.md"),
    "instance_type": Words("for prices and hardware", "", "catalog.md"),
    "cloud": Words("for prices", "", "catalog.md"),
}
DATA = {
    "train": Words("a source (below), or a folder of indexed rows"),
    "validation": Words("the same, or several by name"),
    "cache": Words("folder on the nodes' own disks"),
    "cache_gb": Words("that it may take", "GB"),
    "loader_workers": Words("processes that read for one rank; 0 = a thread", "processes"),
    "prefetch_steps": Words("read ahead", "steps"),
    "prefetch_mb": Words("read ahead at most", "MB"),
}
SOURCE = {
    "rows": Words("folder of indexed rows, as elastic writes them"),
    "folder": Words("of text files"),
    "jsonl": Words("file, folder or URI of JSON lines"),
    "parquet": Words("file, folder or URI of Parquet"),
    "huggingface": Words("folder that `save_to_disk` has written"),
    "dataset": Words("file or folder that the library `datasets` reads"),
    "tokens": Words(".bin or .npy of token ids"),
    "mixture": Words("name -> source, with weights or by size"),
    "text": Words("field that holds the text"),
    "columns": Words("fields of numbers, instead of text"),
    "tokenizer": Words("folder or file; left out, bytes"),
    "end_token": Words("between documents"),
    "seq": Words("of a sample", "tokens"),
    "pack": Words("how documents become samples"),
    "pattern": Words("of file names"),
    "part": Words("of a folder of text"),
    "split": Words("of a dataset"),
    "format": Words("of a dataset's files; left out, by their names"),
    "dtype": Words("of a .bin file's tokens"),
    "weight": Words("of a part of a mixture"),
    "samples": Words("of a mixture", "samples"),
}
DRILL = {
    "at_step": Words("when", "step"),
    "notice": Words("nodes that are told that they leave"),
    "kill": Words("nodes that die"),
    "hang": Words("nodes whose processes are stopped"),
    "partition": Words("nodes that are cut off"),
    "slow": Words("nodes that compute more slowly"),
    "stall": Words("nodes that answer, and do not train"),
    "corrupt": Words("nodes that compute wrong numbers"),
    "device_error": Words("nodes whose device fails"),
    "add": Words("the pool that gives a node more"),
    "kill_driver": Words("the driver dies"),
    "wrong_layout": Words("layouts from here on compute something else"),
    "deadline_s": Words("of a notice", "s"),
    "factor": Words("of slow: times as long"),
    "unit_s": Words("of slow: least time of a block's pass", "s"),
    "jitter": Words("of slow: more or less by up to", "of 1"),
    "gpu": Words("only this worker of the node"),
    "for_s": Words("of a partition", "s"),
    "cut_from": Words("of a partition: from whom"),
    "place": Words("of a device_error"),
}
GUARD = {
    "do": Words("skip the update, roll back, or stop"),
    "again": Words("where a step trips again"),
    "rollbacks": Words("of a run, before `again` is done", "times"),
    "in_a_row": Words("skipped ones before the run stops", "steps"),
}
WINDOW = {
    "z": Words("robust deviations above the median"),
    "window": Words("of losses or norms looked at", "steps"),
    "after": Words("of a run before it looks", "steps"),
}


def _left_out() -> str:
    """What a job without pools has on this machine."""

    def nodes(n_gpus: int) -> str:
        pools = embedded_pools(n_gpus)
        return " and ".join(f"{pool.max_nodes} {pool.market_type}" for pool in pools)

    few = ", ".join(f"with {n}: {nodes(n)}" for n in (1, 2, 3))
    many = ", ".join(f"with {n}: {nodes(n)}" for n in (4, 8))
    return (
        f"Left out: nodes of this machine, {nodes(0)}, two processes on its CPU each; where it has "
        f"GPUs, these: of one each ({few}), from four on of two each ({many})."
    )


LIMITS = {"most": Words("largest norm"), "least": Words("smallest norm")}
SECTIONS = (
    Section("What is trained", "", JobSpec, TRAINING),
    Section("Optimization", "", JobSpec, OPTIMIZATION),
    Section("Layout, memory, speed", "", JobSpec, MEMORY),
    Section("Replicas and checkpoints", "", JobSpec, COPIES),
    Section("Nodes, time, money", "", JobSpec, NODES),
    Section("`pools:`, each entry", _left_out(), PoolSpec, POOL),
    Section(
        "`trackers.wandb:`",
        "`trackers: [wandb, mlflow]` is each with its defaults ([metrics.md](metrics.md)).",
        WandbKeys,
        {
            "project": Words("there; none = WANDB_PROJECT, or the job's name"),
            "entity": Words("user or team; none = as the library finds it"),
            "group": Words("of runs there"),
            "tags": Words("of the run there"),
        },
    ),
    Section(
        "`trackers.mlflow:`",
        "",
        MlflowKeys,
        {
            "experiment": Words("there; none = MLFLOW_EXPERIMENT_NAME, or the job's name"),
            "tracking_uri": Words("server or folder; none = MLFLOW_TRACKING_URI"),
        },
    ),
    Section(
        "`trackers.trackio:`",
        "",
        TrackioKeys,
        {
            "project": Words("there; none = the job's name"),
            "space_id": Words("a Space of Hugging Face; none = this machine, in TRACKIO_DIR"),
        },
    ),
    Section("`data:`", "[data.md](data.md) has examples.", DataSpec, DATA),
    Section(
        "`data.train`, `data.validation`: a source",
        "Exactly one of rows, folder, jsonl, parquet, huggingface, dataset, tokens, mixture.",
        SourceSpec,
        SOURCE,
    ),
    Section(
        "`drill:`, each entry",
        "Exactly one thing that happens; nodes are any, any-spot, rank0, rank:N, partner, a node id, "
        "or a list of them.",
        DrillSpec,
        DRILL,
    ),
    Section(
        "`phases:`, each entry",
        "In order of `from_step`; what an entry leaves out is the job's own.",
        PhaseSpec,
        PHASE,
    ),
    Section(
        "`optimizer:`",
        "`path` and the class's own arguments; or name -> these, with `parameters`, for several "
        "([optimization.md](optimization.md)).",
        OptimizerKeys,
        {
            "path": Words("import path of the class, such as torch.optim.AdamW"),
            "no_decay": Words("patterns of names that get no weight decay"),
        },
    ),
    Section(
        "`lr_schedule:`",
        "",
        LrSchedule,
        {
            "kind": Words("the curve"),
            "warmup_steps": Words("from 0 to the full rate", "steps"),
            "decay_steps": Words(
                "of the fall; none = to the end (wsd: a tenth of the job)", "steps"
            ),
            "min_factor": Words("of the full rate, at the end", "of 1"),
        },
    ),
    Section(
        "`noise_scale:`", "", NoiseScaleSettings, {"every": Words("between measurements", "steps")}
    ),
    Section(
        "`batch_norm:`",
        "Or a word: step = of all samples of a step; microbatch = as torch has it, no layout with several "
        "data-parallel ranks then; auto = groups of up to 32, by global_batch alone.",
        NormGroup,
        {"group": Words("of a step, in its order, with statistics of their own", "samples")},
    ),
    Section(
        "`guards.not_finite:`, and these keys of each other guard",
        "loss_spike, grad_norm and block_norm are off unless they are given.",
        Guard,
        GUARD,
    ),
    Section("`guards.loss_spike:`", "", LossSpike, WINDOW),
    Section("`guards.grad_norm:`", "", GradNorm, LIMITS | WINDOW),
    Section(
        "`guards.block_norm:`", "", BlockNorm, LIMITS | {"every": Words("between looks", "steps")}
    ),
)
OF_THE_FOLDER = {"name": "the folder's", "program": "program.py"}
NOT_A_USERS = {JobSpec: {"folder"}}  # what the reader of the file fills in


def shown_type(found: Any) -> str:
    """`Literal["a", "b"] | int | None` -> "a, b, whole number"."""
    origin, parts = typing.get_origin(found), typing.get_args(found)
    if found is type(None):
        return ""
    if origin is Literal:
        return ", ".join(
            str(part).lower() if isinstance(part, bool) else str(part) for part in parts
        )
    if origin in (typing.Union, types.UnionType):
        return ", ".join(dict.fromkeys(text for part in parts if (text := shown_type(part))))
    if origin is list:
        return f"list of {shown_type(parts[0])}"
    if origin is dict:
        return "map"
    if origin is typing.Annotated:
        return shown_type(parts[0])
    if isinstance(found, type) and issubclass(found, BaseModel):
        return "map"
    return {int: "whole number", float: "number", str: "text", bool: "true, false"}.get(
        found, "map"
    )


def shown_range(field: FieldInfo) -> str:
    """ " of at least 1", where zero or one is the least; upper bounds are in the messages alone."""
    for rule in field.metadata:
        if getattr(rule, "gt", None) is not None:
            return f" > {rule.gt:g}"
        if getattr(rule, "ge", None) is not None:
            return f" >= {rule.ge:g}"
    return ""


def shown_default(field: FieldInfo) -> str:
    if field.is_required():
        return "-"
    if field.default is PydanticUndefined:
        return "see below"
    value = field.default
    if isinstance(value, BaseModel):
        return "see below" if value.model_dump(exclude_none=True) else "none"
    if value in (None, [], {}):
        return "none"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def rows(section: Section) -> Iterator[str]:
    for key, words in section.keys.items():
        field = section.model.model_fields[key]
        name = DOCUMENTED.get(key, field.alias or key)
        page = f"[{words.page}]({words.page})" if words.page else ""
        default = (
            "-" if key in ("name", "program") and section.model is JobSpec else shown_default(field)
        )
        kind = shown_type(field.annotation) + shown_range(field)
        cells = (f"`{name}`", kind, default, words.unit, words.says, page)
        yield "| " + " | ".join(cell.replace("|", "or") for cell in cells) + " |"


def page() -> str:
    parts = [INTRO]
    for section in SECTIONS:
        head = [f"## {section.title}", *([section.intro] if section.intro else [])]
        table = [
            "| key | type | default | unit | what it says | page |",
            "|---|---|---|---|---|---|",
        ]
        parts.append("\n\n".join(head) + "\n\n" + "\n".join([*table, *rows(section)]) + "\n")
    return "\n".join(parts)


def missing() -> list[str]:
    """Keys of the models without words, and words without keys."""
    found: dict[type[BaseModel], set[str]] = {}
    for section in SECTIONS:
        found.setdefault(section.model, set()).update(section.keys)
    common = set(Guard.model_fields)
    wrong = []
    for model, keys in found.items():
        inherited = common if issubclass(model, Guard) and model is not Guard else set()
        there = set(model.model_fields) - inherited - NOT_A_USERS.get(model, set())
        wrong += [f"{model.__name__}.{key} is on no row" for key in sorted(there - keys)]
        wrong += [f"{model.__name__} has no {key}" for key in sorted(keys - there)]
    return wrong


if __name__ == "__main__":
    if wrong := missing():
        sys.exit("\n".join(wrong))
    PAGE.write_text(page())
