"""Elastic training on Ray: the run keeps going while nodes come and go.

Importing this package imports neither torch nor ray.
"""

from typing import TYPE_CHECKING, Any

from elastic.errors import ElasticError, InfeasiblePlan, InternalError, NoCapacity, ProgramError, SpecError, StateLost
from elastic.program import Program
from elastic.types import Layout, Plan, Pool

if TYPE_CHECKING:
    from elastic.api import Options, Result, run

__version__ = "0.1.0"

__all__ = [
    "ElasticError", "InfeasiblePlan", "InternalError", "Layout", "NoCapacity", "Options", "Plan", "Pool", "Program",
    "ProgramError", "Result", "SpecError", "StateLost", "__version__", "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What stands in `elastic.api` is imported when it is first asked for: jobs import this package in every worker."""
    if name in ("Options", "Result", "run"):
        from elastic import api

        return getattr(api, name)
    raise AttributeError(f"module 'elastic' has no attribute '{name}'")
