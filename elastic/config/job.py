"""JobSpec: what stands in job.yaml, checked. Every error is one line: the file, the key, what is
wrong, what would be right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from elastic.catalog.bounded_yaml import SHOWN_MOST, read_yaml, yaml_of
from elastic.catalog.validation import KeyPath, first_problem, in_words, shown_of
from elastic.config.data_section import DataSpec, SourceSpec
from elastic.config.drill import A_LIST, DrillSpec, in_short
from elastic.config.key_names import STORED, KeysFrom, place_of, shown_key, stored_keys
from elastic.config.numbers.trackers import OWNERS as TRACKERS
from elastic.config.numbers.trackers import PortKey, TrackersKey, TrackersSpec
from elastic.config.optimization import (
    OWNERS,
    Guards,
    LrSchedule,
    NoiseScaleSettings,
    NormKey,
    OptimizerKey,
    norm_problem,
    problem,
)
from elastic.config.phase_section import PhaseSpec, check_phases, in_phase
from elastic.config.strict_model import (
    BYTES_MOST,
    GB_MOST,
    HOURS_MOST,
    NAME,
    NAME_MOST,
    NODES_MOST,
    NORM_MOST,
    SAMPLES_MOST,
    SECONDS_MOST,
    SEED_MOST,
    STEPS_MOST,
    TIME_MOST_S,
    USD_MOST,
    Strict,
)
from elastic.errors import SpecError, nearest, unknown_keyword
from elastic.types import (
    AUTO,
    Job,
    Layout,
    MarketType,
    Pool,
    is_auto,
    named_after_auto,
    parse_layout,
)
from elastic.types.typed_job import (
    AUTO_NORM,
    Auto,
    Axis,
    LrScaling,
    Precision,
    Purpose,
    Recompute,
    Schedule,
)

Model = TypeVar("Model", bound=BaseModel)
# what a key may be that takes a word too, and its largest number
EVERY = "'auto' or a number of steps (0 = off)", STEPS_MOST
WORD_OR_NUMBER = {
    "peer_copies": ("'auto' or a number of copies on other nodes (0 = none)", NODES_MOST),
    "on_demand_floor": ("a word or a number of at least 0", USD_MOST),
    "waiting_usd_per_h": ("a word or a number of at least 0", USD_MOST),
}
SILENCE_LEAST_S = 0.1
BY_START = {  # keys of a job that its script cannot give itself, and why
    "folder": "it is the folder of the script",
    "program": "the script is the program",
    "script": "it is this script",
    "args": "they stand behind -- where the script is started, or in job.yaml",
}
LEASE_LEAST_S, LEASE_MOST_S = 1.0, 30 * 86400.0  # workers without a driver must leave some day


class PoolSpec(Strict):
    """One pool of nodes; the fields of `elastic.types.Pool`."""

    name: str = Field(min_length=1, max_length=NAME_MOST, pattern=NAME)
    accelerator_type: str = "CPU"
    gpus_per_node: int = Field(1, gt=0, le=NODES_MOST)
    market_type: MarketType = "owned"
    usd_per_node_h: float = Field(0.0, ge=0, le=USD_MOST)
    min_nodes: int = Field(0, ge=0)
    max_nodes: int = Field(1, gt=0, le=NODES_MOST)
    notice_s: float = Field(120.0, ge=0, le=SECONDS_MOST)
    region: str = ""
    zone: str = ""
    ends_at_s: float | None = Field(None, ge=0, le=TIME_MOST_S)
    memory_bytes_per_gpu: int = Field(0, ge=0, le=BYTES_MOST)
    host_memory_bytes: int = Field(0, ge=0, le=BYTES_MOST)
    instance_type: str = ""
    cloud: str = ""

    @model_validator(mode="after")
    def _min_below_max(self) -> PoolSpec:
        if self.min_nodes > self.max_nodes:
            raise ValueError(
                f"pool '{self.name}': min_nodes={self.min_nodes} is more than "
                f"max_nodes={self.max_nodes}"
            )
        return self

    def pool(self) -> Pool:
        return Pool(**self.model_dump())


def embedded_pools(n_gpus: int = 0) -> list[PoolSpec]:
    """What the embedded cluster gives a job without pools: spot and on-demand nodes of two
    processes each, or this machine's GPUs, two to a node where there are four or more."""
    if not n_gpus:
        spot, on_demand = {"gpus_per_node": 2, "max_nodes": 2}, {"gpus_per_node": 2, "max_nodes": 1}
        kind = "CPU"
    else:
        each = 2 if n_gpus >= 4 else 1
        spot, on_demand = (
            {"gpus_per_node": each, "max_nodes": n_gpus // each - 1},
            {"gpus_per_node": each, "max_nodes": 1},
        )
        kind = "GPU"
    found = (
        [PoolSpec(name="spot", accelerator_type=kind, market_type="spot", **spot)]
        if spot["max_nodes"]
        else []
    )
    return [
        *found,
        PoolSpec(name="on-demand", accelerator_type=kind, market_type="on-demand", **on_demand),
    ]


class JobSpec(Strict):
    """A job. `folder` and `program` are absolute paths; `layout` as a map is keyed by the number of
    workers, as text."""

    name: str = Field(min_length=1, max_length=NAME_MOST, pattern=NAME)
    folder: str
    program: str
    steps: int = Field(gt=0, le=STEPS_MOST)
    global_batch: int = Field(gt=0, le=SAMPLES_MOST)
    seed: int = Field(Job.seed, ge=0, le=SEED_MOST)
    eval_every: int = Field(Job.eval_every, ge=0, le=STEPS_MOST)
    eval_samples: int = Field(Job.eval_samples, gt=0, le=SAMPLES_MOST)
    clip_grad_norm: float | None = Field(None, gt=0, le=NORM_MOST)
    optimizer: OptimizerKey | None = None  # instead of Program.optimizer
    lr_schedule: LrSchedule | None = None  # instead of Program.lr_factor
    lr_scaling: LrScaling = Job.lr_scaling
    # that the learning rates were found with
    base_global_batch: int | None = Field(None, gt=0, le=SAMPLES_MOST)
    noise_scale: NoiseScaleSettings | None = None  # None = not measured
    batch_norm: NormKey = AUTO_NORM  # of which samples its statistics are
    guards: Guards = Guards()
    # of forward and backward pass; parameters stay as they are
    precision: Precision = Job.precision
    # in which gradients are added up
    reduce_dtype: Literal["float32", "bfloat16"] = Job.reduce_dtype
    frozen_weights: Literal["nf4"] | None = None  # linear layers of the blocks in 4 bits
    layout: str | dict[str, str] = AUTO
    schedule: Schedule | None = None  # None, here and below: 'auto' chooses
    # pipeline stages per rank under interleaved1f1b
    virtual_stages: int | None = Field(None, gt=1, le=NODES_MOST)
    # of a data-parallel rank, computed at once
    microbatch_size: int | None = Field(None, gt=0, le=SAMPLES_MOST)
    # likewise, for samples of unequal length
    microbatch_tokens: int | None = Field(None, gt=0, le=SAMPLES_MOST)
    activation_checkpointing: Recompute | None = None
    zero_stage: Literal[1, 2, 3] | None = None
    compile: bool = Job.compile
    float8: bool = Job.float8  # matrix products of the blocks, through torchao
    offload: bool = Job.offload
    min_workers: int = Field(Job.min_workers, gt=0, le=NODES_MOST)
    max_workers: int | None = Field(None, gt=0, le=NODES_MOST)
    peer_every: Auto | int = Job.peer_every
    durable_every: Auto | int = Job.durable_every
    peer_copies: Auto | int = Job.peer_copies
    copies_across_zones: bool = Job.copies_across_zones
    copy_link_share: float = Field(Job.copy_link_share, gt=0, le=1)
    keep_last: int = Field(Job.keep_last, ge=1, le=STEPS_MOST)
    keep_every: int = Field(Job.keep_every, ge=0, le=STEPS_MOST)
    keep_best: int = Field(Job.keep_best, ge=0, le=STEPS_MOST)
    storage_quota_gb: float | None = Field(None, gt=0, le=GB_MOST)
    # the newest is read back before an older one is removed
    verify_copies: bool = Job.verify_copies
    data: DataSpec = DataSpec()  # instead of the program's own datasets
    storage: str | None = None
    budget_usd: float | None = Field(None, gt=0, le=USD_MOST)
    # on the bill while a driver runs
    head_usd_per_h: float = Field(Job.head_usd_per_h, ge=0, le=USD_MOST)
    max_nodes: int | None = Field(None, gt=0, le=NODES_MOST)
    deadline_h: float | None = Field(None, gt=0, le=HOURS_MOST)  # since the run's first start
    # nodes; copy = as many as hold the state once
    on_demand_floor: Auto | Literal["copy"] | int = Job.on_demand_floor
    # what an hour is worth in which too few nodes are there
    waiting_usd_per_h: Auto | float = Job.waiting_usd_per_h
    max_silence_s: float | None = Field(None, ge=SILENCE_LEAST_S, le=SECONDS_MOST)
    orphan_lease_s: float = Field(Job.orphan_lease_s, ge=LEASE_LEAST_S, le=LEASE_MOST_S)
    purpose: Purpose = Job.purpose  # auto = cheapest with deadline_h or on_demand_floor
    pools: list[PoolSpec] = Field(default_factory=embedded_pools, min_length=1)
    trusted_axes: list[Axis] = []  # taken as right, whatever the checks before the start find
    # shares and stages follow measured speeds; nodes that cost more than they give are left
    rebalance: bool = Job.rebalance
    # stages, shards and tp peers may stand in different zones, not only replicas
    across_zones: bool = Job.across_zones
    # steps between comparisons of what must be equal; 0 = none
    check_numbers_every: Auto | int = Job.check_numbers_every
    drill: list[DrillSpec] = []
    trackers: TrackersKey = TrackersSpec()
    metrics_port: PortKey = None  # None = nobody is served
    # the file of `program` is a script that enters elastic.loop, called with `args`
    script: str | None = None
    args: list[str] = []
    phases: list[PhaseSpec] = []
    _where: str = PrivateAttr("job")

    @property
    def where(self) -> str:
        """Where it was read from, as errors name it."""
        return self._where

    @field_validator("layout", mode="before")
    @classmethod
    def _layout_parses(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            value = {str(workers): str(text) for workers, text in value.items()}
            for workers, text in value.items():
                n = parse_layout(text).world_size
                if workers != str(n):
                    raise ValueError(
                        f"the entry for {workers} workers is '{text}', a layout of {n}"
                    )
            if not value:
                raise ValueError("the map is empty")
        elif is_auto(value):
            named_after_auto(value)
        else:
            parse_layout(str(value))
        return value

    @field_validator("drill", mode="before")
    @classmethod
    def _in_short(cls, value: Any) -> Any:
        return [*in_short(value).values()] if isinstance(value, str) else value

    @field_validator("args", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        return [str(item) for item in value] if isinstance(value, list | tuple) else value

    @field_validator(
        "peer_copies", "on_demand_floor", "waiting_usd_per_h", "peer_every", "durable_every",
        "check_numbers_every",
    )  # fmt: skip
    @classmethod
    def _from_0_on(cls, value: str | float, info: ValidationInfo) -> str | float:
        what, most = WORD_OR_NUMBER.get(str(info.field_name), EVERY)
        if not isinstance(value, str) and not 0 <= value <= most:
            raise ValueError(f"must be {what}, not {shown_of(value)}; at most {most:g}")
        return value

    @model_validator(mode="after")
    def _agree(self) -> JobSpec:
        if self.purpose == "deadline" and self.deadline_h is None:
            raise ValueError("purpose: deadline: until when? give deadline_h, in hours")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(
                f"max_workers={self.max_workers} is less than min_workers={self.min_workers}"
            )
        for text in self.layouts() or [str(self.layout)]:
            layout = Layout(**named_after_auto(text)) if is_auto(text) else parse_layout(text)
            for axis in ("cp", "ep"):
                if self.compile and (n := getattr(layout, axis)) > 1:
                    raise ValueError(
                        f"layout '{text}' has {axis}={n}, compile: true does not go with that; "
                        "take one of them"
                    )
            if layout.tp > 1 and self.compile and self.microbatch_tokens:
                raise ValueError(
                    f"layout '{text}' has tp={layout.tp}; compile: true goes with it or with "
                    "microbatch_tokens, not with both"
                )
            if layout.tp > 1 and self.float8:
                raise ValueError(
                    f"layout '{text}' has tp={layout.tp}, float8: true does not go with that; "
                    "take one of them"
                )
            if layout.dp > self.global_batch:
                raise ValueError(
                    f"layout '{text}' has {layout.dp} data-parallel ranks, "
                    f"global_batch={self.global_batch} has fewer samples"
                )
            if self.microbatch_tokens and (layout.pp > 1 or layout.microbatch_size):
                raise ValueError(f"layout '{text}': {_no_budget(layout)}")
        if self.microbatch_tokens and self.microbatch_size:
            raise ValueError(
                "microbatch_tokens and microbatch_size both say what is computed at once; take "
                "one of them"
            )
        wrong = problem(
            self.steps, self.lr_schedule, self.lr_scaling, base_global_batch=self.base_global_batch
        )
        wrong = wrong or self.data.problem(self.microbatch_tokens)
        wrong = wrong or norm_problem(
            self.batch_norm, self.global_batch, bool(self.microbatch_tokens)
        )
        if wrong:
            raise ValueError(wrong)
        if self.args and self.script is None:
            raise ValueError("'args' are those of a 'script', which is not given")
        if self.float8 and self.precision != "bfloat16":
            raise ValueError(
                "float8: true needs precision: bfloat16 for all that is no matrix product, not "
                f"{self.precision}"
            )
        if self.precision == "float16" and self.script is not None:
            raise ValueError(
                "precision: float16 needs a loss scale, which a script's own loss does not get; "
                "take bfloat16"
            )
        for key in ("microbatch_size", "microbatch_tokens"):
            if getattr(self, key) and self.script is not None:
                raise ValueError(
                    f"a script gets its whole share of a step at once; leave {key} out"
                )
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError(f"two pools have the same name ({', '.join(names)})")
        if any(entry.at_step is None for entry in self.drill):
            raise ValueError("an entry of the drill has no at_step")
        check_phases(self.phases, self.plain(), lambda data: _checked(JobSpec, data, "it"))
        return self

    def layouts(self) -> list[str]:
        """The layouts that the job names whole; none for 'auto'."""
        if isinstance(self.layout, dict):
            return list(self.layout.values())
        return [] if is_auto(self.layout) else [self.layout]

    def least_layouts(self) -> list[Layout]:
        """Those, with the keys' options; for 'auto' what the job pins of it, with one rank on each
        other axis."""
        job = self.job()
        return [job.layout_of(text) for text in self.layouts()] or [Layout(**job.pins)]

    def plain(self) -> dict[str, Any]:
        """As plain data: what DriverStarted.job holds."""
        return self.model_dump() | {
            "drill": [entry.plain() for entry in self.drill],
            "data": self.data.plain(),
            "phases": [phase.plain() for phase in self.phases],
        }

    def job(self) -> Job:
        return Job.from_plain(self.plain())

    def at(self, layout: Layout) -> JobSpec:
        """The same at one layout in all phases, and without a drill. Raises SpecError."""
        phases = [phase.model_copy(update={"layout": None}).plain() for phase in self.phases]
        return self._also({**self.plain(), "layout": str(layout), "drill": [], "phases": phases})

    def each_phase(self) -> list[JobSpec]:
        """One job for each of its phases, of as many steps; itself where it has none."""
        each = range(len(self.phases) + 1) if self.phases else ()
        return [self._also(in_phase(self.plain(), number)) for number in each] or [self]

    def _also(self, data: dict[str, Any]) -> JobSpec:
        found = _checked(JobSpec, data, self._where)
        found._where = self._where
        return found


def _no_budget(layout: Layout) -> str:
    """Why it does not go with microbatch_tokens."""
    if layout.pp > 1:
        return (
            f"pp={layout.pp} needs micro-batches of one shape, microbatch_tokens makes unequal "
            "ones; take pp=1"
        )
    return "microbatch_tokens says already what is computed at once; leave microbatch_size out"


def load_job(folder: str | Path, overrides: Iterable[str] = ()) -> JobSpec:
    """The job of a folder (job.yaml and program.py). `overrides` are 'key=value'. Raises SpecError.

    Does not look at pools: see `check_fit`.
    """
    return folder_job(folder, *job_data(folder, overrides))


def folder_job(folder: str | Path, data: Mapping[str, Any], shown: str) -> JobSpec:
    """The same of what `job_data` has read."""
    if "script" in data:
        raise SpecError(
            f"{shown}: its 'script' is started by `elastic run {folder}` alone; a 'program' can "
            "be given here too"
        )
    program = Path(folder).resolve() / str(data.get("program", "program.py"))
    job = job_of(data, program, shown)
    if not program.is_file():
        raise SpecError(
            f"{Path(folder) / program.name}: no such file; a job folder needs a program.py that "
            "defines `program`"
        )
    return job


def job_data(folder: str | Path, overrides: Iterable[str] = ()) -> tuple[dict[str, Any], str]:
    """What stands in a folder's job.yaml, with `overrides` and unchecked, and the file as errors
    name it. Raises SpecError."""
    root = Path(folder).resolve()
    file = root / "job.yaml"
    shown = Path(folder) / "job.yaml"
    if not root.is_dir():
        what = "no such folder"
        if root.is_file():
            what = (
                f"a file; elastic run --script starts it, `script: {root.name}` in a job.yaml too"
            )
        if root.is_file() and root.name in ("job.yaml", "program.py"):
            what = f"a file; its folder is meant, {root.parent.name}"
        raise SpecError(f"{folder}: {what}; a job is a folder with job.yaml and program.py")
    if not file.is_file():
        raise SpecError(
            f"{shown}: no such file; a job folder needs a job.yaml (steps, global_batch ...)"
        )
    data = read_yaml(file, str(shown))
    if not isinstance(data, dict):
        raise SpecError(f"{shown}: it must hold keys and values, not {_kind(data)}")
    over = overridden(overrides)
    return stored_keys(data, str(shown)) | over, KeysFrom.of(str(shown), over)


def overridden(overrides: Iterable[str]) -> dict[str, Any]:
    """'key=value' texts as keys and values. Raises SpecError."""
    found: dict[str, Any] = {}
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise SpecError(f"--set {text}: it must be key=value, as in --set steps=100")
        found[key.strip()] = yaml_of(value, f"--set {text[:SHOWN_MOST]}")
    return stored_keys(found, "--set")


def job_of(data: Mapping[str, Any], program: Path, where: str = "job") -> JobSpec:
    """The job that `data` describes, with the Program in the file `program`. Raises SpecError that
    begins with `where`."""
    if "folder" in data:
        raise SpecError(f"{where}: unknown key 'folder'; it is the folder of the program")
    root = program.resolve().parent
    job = _checked(
        JobSpec,
        {"name": root.name}
        | stored_keys(data, where)
        | {"folder": str(root), "program": str(program)},
        where,
    )
    job._where = where
    return job


def loop_keys(data: Mapping[str, Any], others: Iterable[str]) -> dict[str, Any]:
    """Keys of a job that a script gives to elastic.loop, under their stored names; their values are
    checked with those of its job.yaml. `others`: keywords of elastic.loop that are no such key.
    Raises SpecError."""
    keys = [key for key in (*JobSpec.__pydantic_fields__, *STORED) if key not in BY_START]
    for name in data:
        if name in BY_START:
            raise SpecError(f"elastic.loop({name}=...): {BY_START[name]}; leave it out")
        if name not in keys:
            raise SpecError(unknown_keyword("elastic.loop", name, [*others, *keys]))
    given = {name: value for name, value in data.items() if value is not None}
    return stored_keys(given, "elastic.loop(...)")


def load_drill(drill: str | Path, pool: str = "") -> list[DrillSpec]:
    """The entries of a drill file, or of its short form ("kill at 60"), in order of their step;
    `pool`: what "add at 80" adds to. Raises SpecError."""
    if Path(drill).is_file():
        data = read_yaml(Path(drill), str(drill))
        if not isinstance(data, list):
            raise SpecError(f"{drill}: it must be {A_LIST}, not {_kind(data)}")
        found = {f"{drill}, entry {i}": entry for i, entry in enumerate(data, 1)}
    else:
        found = in_short(str(drill), pool)
    entries = {where: drill_entry(data, where) for where, data in found.items()}
    for where, entry in entries.items():
        if entry.at_step is None:
            raise SpecError(f"{where}: at_step is missing")
    return sorted(entries.values(), key=lambda entry: entry.at_step or 0)


def drill_entry(data: Any, where: str = "drill") -> DrillSpec:
    """One drill entry as plain data -> DrillSpec. Raises SpecError that begins with `where`."""
    if not isinstance(data, dict):
        raise SpecError(
            f"{where}: it must be keys and values such as {{kill: any}}, not {_kind(data)}"
        )
    return _checked(DrillSpec, data, where)


def pool_of(data: Mapping[str, Any], where: str) -> PoolSpec:
    """A pool as plain data, checked. Raises SpecError that begins with `where`."""
    return _checked(PoolSpec, dict(data), where)


def _checked(model: type[Model], data: dict[str, Any], where: str) -> Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problem = first_problem(error)
        text = in_words(problem, partial(_nearest, model), shown_key)
        raise SpecError(f"{place_of(where, problem['loc'])}: {text}") from None
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def _nearest(model: type[BaseModel], path: KeyPath) -> str:
    owners: dict[str, type[BaseModel]] = {
        "pools": PoolSpec,
        "drill": DrillSpec,
        "data": DataSpec,
        "phases": PhaseSpec,
        **OWNERS,
        **TRACKERS,
    }
    owner = next((owners[str(part)] for part in reversed(path[:-1]) if part in owners), model)
    owner = SourceSpec if owner is DataSpec and len(path) > 2 else owner
    names = [name for name in owner.__pydantic_fields__ if name != "folder"]
    names += [*STORED] if owner is JobSpec else []
    return nearest(str(path[-1]), names, "keys")


def _kind(data: Any) -> str:
    return {dict: "keys and values", list: "a list", str: "text", type(None): "nothing"}.get(
        type(data), f"{data!r}"
    )
