"""What a program or the command line asks for. Picks the backend, starts the observers beside the loop, writes the report."""

from elastic.api.orders import drill, holder, stop
from elastic.api.running import Options, Result, ray_address, run
from elastic.api.stored import Import, checkpoints, export, import_state, remove, verify
from elastic.api.trainer import ElasticTrainer
from elastic.api.ways import run_script

__all__ = [
    "ElasticTrainer", "Import", "Options", "Result", "checkpoints", "drill", "export", "holder", "import_state", "ray_address",
    "remove", "run", "run_script", "stop", "verify",
]  # fmt: skip
