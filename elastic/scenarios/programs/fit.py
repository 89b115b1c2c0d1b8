"""An `ElasticTrainer` where a `TorchTrainer` stood: `python fit.py STORAGE STEPS` prints its Result
as one line of JSON."""

import json
import sys
from importlib import import_module
from typing import Any

import elastic
from elastic.scenarios.programs.unpaced import program

if __name__ == "__main__":
    train: Any = import_module("ray.train")
    result = elastic.ElasticTrainer(
        program,
        job={"steps": int(sys.argv[2]), "global_batch": 48, "seed": 7, "clip_grad_norm": 1.0},
        scaling_config=train.ScalingConfig(num_workers=(1, 2)),
        run_config=train.RunConfig(
            name="fit", storage_path=sys.argv[1], logging_config=train.LoggingConfig("ERROR")
        ),
    ).fit()
    told: Any = result
    found = {"steps": told.metrics["step"], "losses": list(told.metrics_dataframe["train_loss"])}
    print(
        json.dumps({**found, "checkpoint": told.checkpoint.path, "error": str(told.error or "")}),
        flush=True,
    )
