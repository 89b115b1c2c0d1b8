"""Elastic training on Ray: the run keeps going while nodes come and go.

Importing this package imports neither torch nor ray.
"""

from elastic.errors import ElasticError, InfeasiblePlan, InternalError, NoCapacity, ProgramError, SpecError, StateLost
from elastic.program import Program
from elastic.types import Layout, Plan, Pool

__version__ = "0.1.0"

__all__ = [
    "ElasticError", "InfeasiblePlan", "InternalError", "Layout", "NoCapacity", "Plan", "Pool", "Program", "ProgramError",
    "SpecError", "StateLost", "__version__",
]  # fmt: skip
