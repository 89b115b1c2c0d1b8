"""The nouns that all rooms share: events, actions, plans, layouts, profiles. Frozen dataclasses,
standard library only.

Facts are Events (past tense), orders are Actions; both are plain data that the journal writes and
reads back. Units stand in the names: `_s` seconds, `_bytes`, `_usd`, `_usd_per_h`. All times
`*_at_s` and `deadline_s` are seconds on the backend's clock.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from elastic.types.actions import (
    Abort,
    Action,
    Decided,
    Decision,
    DrainNode,
    DropGroups,
    EnterPlan,
    FormGroups,
    Prepare,
    Quarantine,
    Quiesce,
    ReleaseNode,
    RemoveCopy,
    RequestNodes,
    RollForward,
    SetCadence,
    SetShares,
    StartProfile,
    Stop,
    StoreCopy,
)  # fmt: skip
from elastic.types.admission import APART, Admission, Mark, Terms, apart, version_differences, worst
from elastic.types.agreement import (
    COMPUTES_IN,
    Losses,
    agree,
    coarsest,
    redone_as_before,
    repeats,
    tolerance,
)
from elastic.types.events import (
    CopyDamaged,
    CopyFailed,
    CopyReadBegun,
    CopyRemoved,
    CopyStored,
    CopyVerified,
    DeviceNoted,
    DigestChecked,
    DigestPart,
    DrillAsked,
    DriverStarted,
    Evaluated,
    Event,
    GroupRan,
    GroupsFormed,
    GroupsMade,
    GuardTripped,
    InstancesSeen,
    NodeLoadSeen,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    NodesMute,
    NodeWarned,
    NoiseSeen,
    Notice,
    NoticeWithdrawn,
    NumbersChecked,
    PinningFailed,
    PlanEntered,
    PlanFailed,
    PlansFound,
    PriceSeen,
    Probed,
    ProfileAsked,
    Progress,
    Quiesced,
    RankProfiled,
    RanksTimed,
    RequestFailed,
    ScriptEnded,
    ShardStored,
    SharesSet,
    Silent,
    StepDone,
    StopAsked,
    StorageSeen,
    WorkerFailed,
    WrongNumbers,
)  # fmt: skip
from elastic.types.nouns import (
    AUTO,
    AXES,
    DTYPE_BYTES,
    LAYOUT_OPTIONS,
    NAMED_AXES,
    Box,
    Cause,
    Copy,
    FailureKind,
    Holding,
    Layout,
    MarketType,
    Move,
    Node,
    NodeStatus,
    Outcome,
    Plan,
    Pool,
    Rehearsal,
    Resume,
    Transfer,
    WorkerId,
    holdings,
    is_auto,
    named_after_auto,
    parse_layout,
    worker_ids,
)  # fmt: skip
from elastic.types.profiles import (
    Attention,
    HardwareProfile,
    Matmul,
    ModelProfile,
    OptimizerSpec,
    OwnedEntry,
    SampleProfile,
    TensorSpec,
    UnitFlow,
)  # fmt: skip
from elastic.types.typed_job import (
    BlockNormRule,
    DataKeys,
    GradNormRule,
    GuardRule,
    GuardRules,
    Job,
    LossSpikeRule,
    LrCurve,
    NotFiniteRule,
)

__all__ = [
    "APART", "AUTO", "AXES", "Abort", "Action", "Admission", "Attention", "BlockNormRule", "Box",
    "COMPUTES_IN", "Cause", "Copy", "CopyDamaged", "CopyFailed", "CopyReadBegun",
    "CopyRemoved", "CopyStored", "CopyVerified", "DTYPE_BYTES", "DataKeys", "Decided", "Decision",
    "DeviceNoted",
    "DigestChecked", "DigestPart", "DrainNode", "DrillAsked", "DriverStarted", "DropGroups",
    "EnterPlan", "Evaluated", "Event", "FailureKind", "FormGroups", "GradNormRule", "GroupRan",
    "GroupsFormed", "GroupsMade", "GuardRule", "GuardRules", "GuardTripped", "HardwareProfile",
    "Holding", "InstancesSeen", "Job", "LAYOUT_OPTIONS", "Layout", "LossSpikeRule", "Losses",
    "LrCurve", "Mark", "MarketType", "Matmul", "ModelProfile", "Move", "NAMED_AXES", "Node",
    "NodeLoadSeen", "NodeLost", "NodePrepared", "NodeReady", "NodeRefused", "NodeStatus",
    "NodeWarned", "NodesMute",
    "NoiseSeen", "NotFiniteRule", "Notice", "NoticeWithdrawn", "NumbersChecked",
    "OptimizerSpec", "Outcome", "OwnedEntry", "PinningFailed", "Plan", "PlanEntered", "PlanFailed",
    "PlansFound", "Pool", "Prepare", "PriceSeen", "Probed", "ProfileAsked", "Progress",
    "Quarantine", "Quiesce", "Quiesced", "RankProfiled", "RanksTimed", "Rehearsal", "ReleaseNode",
    "RemoveCopy", "RequestFailed", "RequestNodes", "Resume", "RollForward", "SampleProfile",
    "ScriptEnded", "SetCadence", "SetShares", "ShardStored", "SharesSet", "Silent",
    "StartProfile", "StepDone", "Stop", "StopAsked", "StorageSeen", "StoreCopy", "TensorSpec",
    "Terms", "Transfer", "UnitFlow", "WorkerFailed", "WorkerId", "WrongNumbers", "agree", "apart",
    "coarsest", "holdings", "is_auto", "is_noun", "named_after_auto", "names_of", "parse_layout",
    "redone_as_before", "repeats", "tolerance", "version_differences",
    "worker_ids", "worst",
]  # fmt: skip


def names_of(cls: type) -> tuple[str, ...]:
    """Field names of a noun, in order."""
    named: tuple[str, ...] | None = getattr(cls, "_fields", None)
    return named if named is not None else tuple(f.name for f in fields(cls))


def is_noun(cls: type) -> bool:
    """Has it named fields: a dataclass, or a NamedTuple?"""
    return is_dataclass(cls) or hasattr(cls, "_fields")
