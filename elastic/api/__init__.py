"""What a program or the command line calls: run, plan, prices, checkpoints, orders to a live run.
It picks the backend."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.api.checkpoint_actions import (
        Import,
        checkpoints,
        export,
        import_state,
        remove,
        verify,
    )
    from elastic.api.cluster_check import check_cluster
    from elastic.api.control import drill, stop
    from elastic.api.price_query import PriceQuery, gpus, prices
    from elastic.api.profiling.live_profile import RunProfile, RunProfileRequest, profile_run
    from elastic.api.profiling.profile_hardware import Profiled, ProfileRequest, profile
    from elastic.api.profiling.scaling import ScalingRequest, ScalingStudy, scaling_study
    from elastic.api.reap_instances import Reaped, reap
    from elastic.api.running.entry import run, run_script
    from elastic.api.running.options import Options, ray_address
    from elastic.api.running.run import Result
    from elastic.api.show_dashboard import DashboardOptions, dashboard
    from elastic.api.trainer import ElasticTrainer
    from elastic.ledger.lease import holder

__all__ = [
    "DashboardOptions", "ElasticTrainer", "Import", "Options", "PriceQuery", "ProfileRequest",
    "Profiled", "Reaped", "Result", "RunProfile", "RunProfileRequest", "ScalingRequest",
    "ScalingStudy", "check_cluster", "checkpoints", "dashboard", "drill", "export", "gpus",
    "holder", "import_state", "prices", "profile", "profile_run", "ray_address", "reap", "remove",
    "run", "run_script", "scaling_study", "stop", "verify",
]  # fmt: skip

HOMES = {  # module -> what is taken from it when it is first asked for
    "elastic.api.checkpoint_actions": (
        "Import",
        "checkpoints",
        "export",
        "import_state",
        "remove",
        "verify",
    ),
    "elastic.api.cluster_check": ("check_cluster",),
    "elastic.api.control": ("drill", "stop"),
    "elastic.api.price_query": ("PriceQuery", "gpus", "prices"),
    "elastic.api.profiling.live_profile": ("RunProfile", "RunProfileRequest", "profile_run"),
    "elastic.api.profiling.profile_hardware": ("Profiled", "ProfileRequest", "profile"),
    "elastic.api.profiling.scaling": ("ScalingRequest", "ScalingStudy", "scaling_study"),
    "elastic.api.reap_instances": ("Reaped", "reap"),
    "elastic.api.running.entry": ("run", "run_script"),
    "elastic.api.running.options": ("Options", "ray_address"),
    "elastic.api.running.run": ("Result",),
    "elastic.api.show_dashboard": ("DashboardOptions", "dashboard"),
    "elastic.api.trainer": ("ElasticTrainer",),
    "elastic.ledger.lease": ("holder",),
}


def __getattr__(name: str) -> Any:
    """A command that reads a run waits for nothing that trains one."""
    for home, names in HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'elastic.api' has no attribute '{name}'")
