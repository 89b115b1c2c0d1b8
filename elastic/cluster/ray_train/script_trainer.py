"""Ray Train's elastic TorchTrainer for a script: no process group of its own, since the script
makes it in its own process."""

from __future__ import annotations

from typing import Any

from ray.train.backend import Backend, BackendConfig

from elastic.cluster.ray_train.script_job import ScriptJob


class ScriptBackend(Backend):
    """Every rank of a node sees all GPUs of the group there, as under torchrun; LOCAL_RANK
    chooses."""

    share_cuda_visible_devices = True


class ScriptConfig(BackendConfig):
    backend = "gloo"  # asked for by TorchTrainer; nobody uses it

    @property
    def backend_cls(self) -> type[Backend]:
        return ScriptBackend


def trainer(job: ScriptJob, settings: dict[str, Any], resize_s: float) -> Any:
    """A TorchTrainer whose workers supervise the script. Errors are retried without end: the driver
    knows which must not be."""
    import ray.train
    from ray.train.torch import TorchTrainer

    from elastic.cluster.ray_train.script_worker import supervise

    config: Any = ScriptConfig()
    scaling: dict[str, Any] = {
        "num_workers": (job.needs.min_workers, job.needs.max_workers), "use_gpu": job.uses_gpus,
        "elastic_resize_monitor_interval_s": resize_s,
    }  # fmt: skip
    return TorchTrainer(
        supervise,
        train_loop_config=settings,
        torch_config=config,
        scaling_config=ray.train.ScalingConfig(**scaling),
        run_config=ray.train.RunConfig(
            name=settings["orders"].board, storage_path=job.ray_storage,
            failure_config=ray.train.FailureConfig(max_failures=-1)
        ),
    )  # fmt: skip
