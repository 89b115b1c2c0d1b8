"""What a program or the command line asks for. Picks the backend, starts the observers beside the loop, writes the report."""

from elastic.api.clusters import check_cluster
from elastic.api.orders import drill, holder, stop
from elastic.api.pricing import Wanted, gpus, prices
from elastic.api.profiling import Profiled, profile
from elastic.api.profiling import Wishes as ProfileWishes
from elastic.api.reaping import Reaped, reap
from elastic.api.running import Options, Result, ray_address, run
from elastic.api.stored import Import, checkpoints, export, import_state, remove, verify
from elastic.api.trainer import ElasticTrainer
from elastic.api.ways import run_script

__all__ = [
    "ElasticTrainer", "Import", "Options", "ProfileWishes", "Profiled", "Reaped", "Result", "Wanted", "check_cluster",
    "checkpoints", "drill", "export", "gpus", "holder", "import_state", "prices", "profile", "ray_address", "reap", "remove",
    "run", "run_script", "stop", "verify",
]  # fmt: skip
