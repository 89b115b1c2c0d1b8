"""The job, as all read it that stand behind its check: made once, from the checked spec
(`JobSpec.job`) or from plain data that a journal or a message carries. Defaults of its keys stand
here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal, TypeVar

from elastic.types.nouns import AUTO, LAYOUT_OPTIONS, Layout, Pool, named_after_auto, parse_layout

T = TypeVar("T")
# between two lines of a journal at the most, while nodes are paid for: a driver that follows knows
# for how long
LINE_EVERY_S = 60.0
# workers of a run whose driver is gone save and leave by themselves for so long, behind their lease
LEAVE_MOST_S = 150.0
# of the key `batch_norm`, besides {group: N}
NormWord = Literal["auto", "step", "microbatch"]
AUTO_NORM: Final = "auto"
IN_JOB = "in job.yaml"
STEP: Final = "step"
MICROBATCH: Final = "microbatch"
Auto = Literal["auto"]
Axis = Literal["dp", "tp", "cp", "pp", "ep"]
Do = Literal["skip", "rollback", "stop"]
LrScaling = Literal["none", "linear", "sqrt"]
Precision = Literal["float32", "bfloat16", "float16"]
Purpose = Literal["auto", "fastest", "cheapest", "deadline"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["1f1b", "gpipe", "interleaved1f1b"]
# of which a source of data has one
SOURCE_KINDS = (
    "rows", "folder", "jsonl", "parquet", "huggingface", "dataset", "tokens", "mixture",
)  # fmt: skip

# Plain data without these keys is of a run that was begun before there were such, and continues as
# it did: it has read no copy back, has compared no ranks, was as fast as it could be, has evaluated
# on all samples, and each micro-batch had its own statistics in BatchNorm.
OLDER: Mapping[str, Any] = {
    "verify_copies": False,
    "check_numbers_every": 0,
    "purpose": "fastest",
    "eval_samples": 0,
    "batch_norm": MICROBATCH,
}


def orphans_paid_s(orphan_lease_s: float) -> float:
    """For how long behind the last line of a driver that is gone its nodes may be paid for: it may
    have lived until the next one was due, and its workers leave after their lease."""
    return LINE_EVERY_S + orphan_lease_s + LEAVE_MOST_S


@dataclass(frozen=True)
class GuardRule:
    """See `Guard` in config/optimization.py, and there the others."""

    do: Do = "skip"
    again: Literal["skip", "stop"] = "stop"
    rollbacks: int = 1
    in_a_row: int = 8


@dataclass(frozen=True)
class NotFiniteRule(GuardRule):
    do: Do = "rollback"


@dataclass(frozen=True)
class LossSpikeRule(GuardRule):
    z: float = 8.0
    window: int = 64
    after: int = 16


@dataclass(frozen=True)
class GradNormRule(GuardRule):
    most: float | None = None
    least: float | None = None
    z: float | None = None
    window: int = 64
    after: int = 16


@dataclass(frozen=True)
class BlockNormRule(GuardRule):
    most: float | None = None
    least: float | None = None
    every: int = 1


@dataclass(frozen=True)
class GuardRules:
    """None = not watched."""

    not_finite: NotFiniteRule = NotFiniteRule()
    loss_spike: LossSpikeRule | None = None
    grad_norm: GradNormRule | None = None
    block_norm: BlockNormRule | None = None

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> GuardRules:
        return _made(cls, data, RULES)

    def of(self, guard: str) -> GuardRule:
        """The rule of a guard that has tripped."""
        return getattr(self, guard, None) or GuardRule()

    @property
    def watched(self) -> tuple[GuardRule, ...]:
        return tuple(rule for one in fields(self) if (rule := getattr(self, one.name)) is not None)


@dataclass(frozen=True)
class LrCurve:
    """Of the key `lr_schedule`: see `LrSchedule` in config/optimization.py."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    min_factor: float = 0.0

    def decay(self, steps: int) -> tuple[int, int]:
        """Of a job of so many steps: the one from which the factor falls (counted from 0), and in
        how many."""
        warmup, length = self.warmup_steps, self.decay_steps
        if self.kind == "constant":
            return steps, 0
        if self.kind == "wsd":
            begin = max(warmup, steps - (length if length is not None else max(1, steps // 10)))
            return begin, steps - begin
        return warmup, length if length is not None else steps - warmup


@dataclass(frozen=True)
class NoiseMeasure:
    """Of the key `noise_scale`."""

    every: int = 10


@dataclass(frozen=True)
class DataKeys:
    """Of the key `data`: `train` and `validation` as plain data, which elastic/data opens."""

    train: Mapping[str, Any] | None = None
    validation: Mapping[str, Any] | None = None
    cache: str | None = None
    cache_gb: float = 20.0
    loader_workers: int = 0
    prefetch_steps: int = 2
    prefetch_mb: float = 1024.0

    def plain(self) -> dict[str, Any]:
        """What it says besides the defaults."""
        found = {one.name: (getattr(self, one.name), one.default) for one in fields(self)}
        return {name: value for name, (value, default) in found.items() if value != default}


@dataclass(frozen=True)
class TrainingPhase:
    """An entry of the key `phases`: `keys`, as plain data, take the place of the job's own from the
    step after `from_step` on. The first entry of `Job.phases` holds the job's own."""

    from_step: int
    keys: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """Keys of job.yaml as `JobSpec` explains them, and at the end what a running job gets
    besides."""

    name: str = ""
    folder: str = ""
    program: str = ""
    steps: int = 0
    global_batch: int = 0
    seed: int = 0
    eval_every: int = 0
    eval_samples: int = 64
    clip_grad_norm: float | None = None
    optimizer: Mapping[str, Any] | None = None
    lr_schedule: LrCurve | None = None
    lr_scaling: LrScaling = "none"
    base_global_batch: int | None = None
    noise_scale: NoiseMeasure | None = None
    batch_norm: NormWord | Mapping[str, int] = AUTO_NORM
    guards: GuardRules = GuardRules()
    precision: Precision = "float32"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    frozen_weights: Literal["nf4"] | None = None
    layout: str | Mapping[str, str] = AUTO
    schedule: Schedule | None = None
    virtual_stages: int | None = None
    microbatch_size: int | None = None
    microbatch_tokens: int | None = None
    activation_checkpointing: Recompute | None = None
    zero_stage: Literal[1, 2, 3] | None = None
    compile: bool = False
    float8: bool = False
    offload: bool = False
    min_workers: int = 1
    max_workers: int | None = None
    peer_every: Auto | int = "auto"
    durable_every: Auto | int = "auto"
    peer_copies: Auto | int = "auto"
    copies_across_zones: bool = False
    copy_link_share: float = 0.1
    keep_last: int = 2
    keep_every: int = 0
    keep_best: int = 0
    storage_quota_gb: float | None = None
    verify_copies: bool = True
    data: DataKeys = DataKeys()
    storage: str | None = None
    budget_usd: float | None = None
    head_usd_per_h: float = 0.0
    max_nodes: int | None = None
    deadline_h: float | None = None
    on_demand_floor: Auto | Literal["copy"] | int = "auto"
    waiting_usd_per_h: Auto | float = "auto"
    max_silence_s: float | None = None
    orphan_lease_s: float = 900.0
    purpose: Purpose = "auto"
    pools: tuple[Pool, ...] = ()
    trusted_axes: tuple[Axis, ...] = ()
    rebalance: bool = True
    across_zones: bool = False
    check_numbers_every: Auto | int = "auto"
    drill: tuple[Mapping[str, Any], ...] = ()
    trackers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metrics_port: int | str | None = None
    script: str | None = None
    args: tuple[str, ...] = ()
    phases: tuple[TrainingPhase, ...] = ()  # () = all steps are alike

    # `script` is started anew at each change of capacity, in the folder `cwd`; it keeps its own
    # copies, and no key says how many steps it has
    restarted: bool = False
    cwd: str = ""
    keys_in: str = IN_JOB  # where its keys are given, as advice names it
    fingerprint: Mapping[str, Any] | None = None  # see config/fingerprint.py; None = not taken
    # type of fewest bits that the model was seen to compute in; None = nobody looked
    computes_in: str | None = None
    n_samples: int = 0  # length of the dataset, once a worker has opened it
    phase: int = 0  # the one whose keys these are
    lengths: tuple[int, ...] = ()  # of the dataset of each phase, likewise

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Job:
        """Keys that this version does not know are ignored, for those that are missing or None see
        the defaults and OLDER."""
        given = {key: value for key, value in data.items() if value is not None}
        phase, later = given.pop("phase", 0), given.pop("phases", ())
        found: Job = _made(cls, {**OLDER, **given}, NESTED)
        if not later:
            return found
        own = {key: getattr(found, key) for key in OF_PHASE} | {"data": found.data.plain()}
        phases = (TrainingPhase(0, own), *map(_phase, later))
        return replace(found, phases=phases).in_phase(phase)

    def plain(self) -> dict[str, Any]:
        """The inverse: all keys of job.yaml, and what the running job was told."""
        first = self.in_phase(0)
        found: dict[str, Any] = {one.name: getattr(first, one.name) for one in fields(self)}
        found |= {"phase": self.phase, "lengths": list(self.lengths)}
        for name in TOLD:
            if found[name] in (getattr(type(self), name), []):
                del found[name]
        for name in ("lr_schedule", "noise_scale", "guards"):
            found[name] = asdict(found[name]) if found[name] is not None else None
        for name in ("layout", "optimizer", "batch_norm", "fingerprint"):
            if isinstance(found.get(name), Mapping):
                found[name] = dict(found[name])
        return found | {
            "data": first.data.plain(),
            "phases": [{"from_step": one.from_step} | dict(one.keys) for one in self.phases[1:]],
            "pools": [asdict(pool) for pool in self.pools],
            "trusted_axes": list(self.trusted_axes),
            "drill": [dict(entry) for entry in self.drill],
            "args": list(self.args),
        }

    def in_phase(self, number: int) -> Job:
        """With the keys of that phase, counted from 0."""
        if number == self.phase:
            return self
        keys = {key: value for key, value in self.keys_of(number).items() if key in OF_PHASE}
        found = {key: NESTED[key](value) if key in NESTED else value for key, value in keys.items()}
        if self.lengths:
            found["n_samples"] = self.lengths[number]
        return replace(self, phase=number, **found)

    def keys_of(self, number: int) -> dict[str, Any]:
        """Of that phase, as plain data: those that it says, and the job's own."""
        own, said = self.phases[0].keys, self.phases[number].keys
        return {**own, **said, "data": with_source(own["data"], said.get("data") or {})}

    def phase_at(self, step: int) -> int:
        """The phase of the step that follows when so many are done; of the last step after it."""
        at = min(step, self.steps - 1)
        return max([0, *(k for k, one in enumerate(self.phases) if one.from_step <= at)])

    @property
    def until_step(self) -> int:
        """So many steps are done when its phase is over."""
        last = self.phase + 1 >= len(self.phases)
        return self.steps if last else self.phases[self.phase + 1].from_step

    @property
    def data_phase(self) -> int:
        """The phase that began with the data that its phase has: phases that follow each other and
        do not change the data read on in one order."""
        read = [self.keys_of(k)["data"].get("train") for k in range(len(self.phases))]
        return max([0, *(k for k in range(1, self.phase + 1) if read[k] != read[k - 1])])

    def position_at(self, step: int) -> int:
        """How many samples the steps up to that one of its phase have read since `data_phase`
        began."""
        if not self.phases:
            return step * self.global_batch
        begun, position = self.data_phase, 0
        for k in range(begun, self.phase):
            length = self.phases[k + 1].from_step - self.phases[k].from_step
            position += length * int(self.keys_of(k)["global_batch"])
        return position + (step - self.phases[self.phase].from_step) * self.global_batch

    @property
    def options(self) -> dict[str, Any]:
        """What its keys say of all of its layouts."""
        return {
            name: value for name in LAYOUT_OPTIONS if (value := getattr(self, name)) is not None
        }

    @property
    def pins(self) -> dict[str, Any]:
        """Axes and options that it does not leave to the planner: options by its keys, and what its
        `layout` names after `auto`. Raises SpecError as `parse_layout`."""
        return self.options | named_after_auto(self.layout)

    def layout_of(self, text: str) -> Layout:
        """As `parse_layout`; options that the text leaves out are the job's."""
        return parse_layout(text, self.options)


# of samples with statistics of their own, by default: so many at most (Goyal et al. 2017, section
# 2.2: 32, whatever the number of workers), and so many at least
GROUP_MOST, GROUP_FEWEST = 32, 4
GROUPS, FEW = 8, 8  # of a step, at least, unless they would have fewer than FEW samples


def group_of(job: Job) -> int | None:
    """Samples whose BatchNorm statistics are taken together, in the order of the step; 0 = all of
    the step. None: each micro-batch has its own."""
    given = job.batch_norm
    if isinstance(given, Mapping):
        return int(given["group"])
    if given == STEP:
        return 0
    each = [job.in_phase(number) for number in range(len(job.phases))] or [job]
    if given == MICROBATCH or not job.global_batch or any(one.microbatch_tokens for one in each):
        return None
    return default_group(math.gcd(*(one.global_batch for one in each)))


def default_group(global_batch: int) -> int:
    """It follows from the batch alone, so that no change of capacity changes it. `global_batch`:
    what those of all phases are multiples of."""
    most = min(GROUP_MOST, max(FEW, global_batch // GROUPS))
    found = max(n for n in range(1, most + 1) if global_batch % n == 0)
    if found < GROUP_FEWEST:
        larger = range(GROUP_FEWEST, 2 * GROUP_MOST + 1)
        found = next((n for n in larger if global_batch % n == 0), global_batch)
    return found if found < global_batch else 0


def with_source(own: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """The key `data` of a phase that says `said` of it: the keys of its `train` take the place of
    the job's own; one that says where its samples are is another source."""
    before, now = own.get("train") or {}, said.get("train") or {}
    elsewhere = any(kind in now and kind not in before for kind in SOURCE_KINDS)
    train = now if elsewhere else _merged(before, now)
    return {**own, **said} | ({"train": train} if train else {})


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over`, and what it does not name of `under`, in maps in them too."""
    return {**under} | {
        key: _merged(under[key], value)
        if isinstance(value, Mapping) and isinstance(under.get(key), Mapping)
        else value
        for key, value in over.items()
    }


def _phase(data: Mapping[str, Any]) -> TrainingPhase:
    keys = {key: value for key, value in data.items() if key != "from_step"}
    return TrainingPhase(int(data["from_step"]), keys)


def _made(cls: type[T], data: Mapping[str, Any], nested: Mapping[str, Callable[[Any], Any]]) -> T:
    names = {one.name for one in fields(cls)}  # type: ignore[arg-type]
    given = {name: value for name, value in data.items() if name in names}
    return cls(
        **{
            name: nested[name](value) if name in nested and value is not None else value
            for name, value in given.items()
        }
    )


def _reader(cls: type[T]) -> Callable[[Any], T]:
    return lambda value: _made(cls, value, {})


RULES: Mapping[str, Callable[[Any], Any]] = {
    "not_finite": _reader(NotFiniteRule), "loss_spike": _reader(LossSpikeRule),
    "grad_norm": _reader(GradNormRule), "block_norm": _reader(BlockNormRule),
}  # fmt: skip
NESTED: Mapping[str, Callable[[Any], Any]] = {
    "lr_schedule": _reader(LrCurve), "noise_scale": _reader(NoiseMeasure),
    "guards": GuardRules.from_plain, "data": _reader(DataKeys),
    "pools": lambda value: tuple(map(_reader(Pool), value)), "trusted_axes": tuple, "drill": tuple,
    "args": tuple, "lengths": tuple,
}  # fmt: skip
TOLD = (  # no keys of job.yaml
    "restarted", "cwd", "fingerprint", "computes_in", "n_samples", "phase", "lengths", "keys_in",
)  # fmt: skip
# keys of job.yaml that a phase may change; it has lr_factor and lr_schedule besides
OF_PHASE = (
    "global_batch", "layout", "schedule", "virtual_stages", "microbatch_size", "microbatch_tokens",
    "activation_checkpointing", "zero_stage", "data",
)  # fmt: skip
