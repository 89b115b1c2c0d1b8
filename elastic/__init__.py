"""Elastic training on Ray: the run keeps going while nodes join and leave.

The loop of a run, and what Ctrl-C does to it, is driver.py. Importing this package imports neither
torch nor ray.
"""

from typing import TYPE_CHECKING, Any

from elastic.errors import (
    ElasticError,
    InfeasiblePlan,
    InternalError,
    NoCapacity,
    ProgramError,
    SpecError,
    StateLost,
)
from elastic.types import Layout, Plan, Pool
from elastic.version import __version__

if TYPE_CHECKING:
    from elastic.api import ElasticTrainer, Options, Result, run
    from elastic.cluster.ray_train.script_log import log
    from elastic.cluster.ray_train.train_types import train_loop
    from elastic.models.attention import attention, positions
    from elastic.program import Program, Weights
    from elastic.worker.loop.hf_trainer import prepare_trainer
    from elastic.worker.loop.loop import loop

__all__ = [
    "ElasticError", "ElasticTrainer", "InfeasiblePlan", "InternalError", "Layout", "NoCapacity",
    "Options", "Plan", "Pool", "Program", "ProgramError", "Result", "SpecError", "StateLost",
    "Weights", "__version__", "attention", "log", "loop", "positions", "prepare_trainer", "run",
    "train_loop",
]  # fmt: skip

IN_A_LOOP = {  # what others call it -> what it is of `elastic.loop`
    "get_world_size": "it is run.world_size",
    "get_rank": "it is run.rank",
    "report": "it is run.log({...})",
    "get_checkpoint": "the state is there",
}


def __getattr__(name: str) -> Any:
    """What stands in `elastic.api` is imported when it is first asked for: jobs import this package
    in every worker."""
    if name in ("ElasticTrainer", "Options", "Result", "run"):
        from elastic import api

        return getattr(api, name)
    if name in ("Program", "Weights"):
        from elastic import program

        return getattr(program, name)
    if name in ("attention", "positions"):
        from elastic.models import attention

        return getattr(attention, name)
    if name == "loop":
        from elastic.worker.loop.loop import loop

        return loop
    if name == "prepare_trainer":
        from elastic.worker.loop.hf_trainer import prepare_trainer

        return prepare_trainer
    if name == "log":
        from elastic.cluster.ray_train.script_log import log

        return log
    if name == "train_loop":
        from elastic.cluster.ray_train.train_types import train_loop

        return train_loop
    instead = f"; {IN_A_LOOP[name]} inside the loop" if name in IN_A_LOOP else ""
    raise AttributeError(f"module 'elastic' has no attribute '{name}'{instead}")
