"""What a program or the command line calls: run, plan, prices, checkpoints, orders to a live run.
It picks the backend."""

from elastic.api.check_cluster import check_cluster
from elastic.api.checkpoints import Import, checkpoints, export, import_state, remove, verify
from elastic.api.control import drill, holder, stop
from elastic.api.dashboard import DashboardOptions, dashboard
from elastic.api.price_query import PriceQuery, gpus, prices
from elastic.api.profiling.live_profile import RunProfile, RunProfileRequest, profile_run
from elastic.api.profiling.profile_hardware import Profiled, profile
from elastic.api.profiling.profile_hardware import ProfileRequest as ProfileRequest
from elastic.api.profiling.scaling import ScalingRequest, ScalingStudy, scaling_study
from elastic.api.reap import Reaped, reap
from elastic.api.running.entry import run, run_script
from elastic.api.running.options import Options, ray_address
from elastic.api.running.run import Result
from elastic.api.trainer import ElasticTrainer

__all__ = [
    "DashboardOptions", "ElasticTrainer", "Import", "Options", "PriceQuery", "ProfileRequest",
    "Profiled", "Reaped", "Result", "RunProfile", "RunProfileRequest", "ScalingRequest",
    "ScalingStudy", "check_cluster", "checkpoints", "dashboard", "drill", "export", "gpus",
    "holder", "import_state", "prices", "profile", "profile_run", "ray_address", "reap", "remove",
    "run", "run_script", "scaling_study", "stop", "verify",
]  # fmt: skip
