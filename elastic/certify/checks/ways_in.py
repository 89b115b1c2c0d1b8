"""The other ways in, each tried once: a loop script (and with it a killed driver and object
storage), a plain one, `torchrun`, Ray Train.

Those that need nodes run on a small Ray cluster of their own on this host. On a user's cluster the
loop script runs there.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

from elastic.certify.checks import scenario_checks
from elastic.certify.checks.scenario_checks import NO_RAY, OWN
from elastic.certify.harness import child
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.layouts_tried import GLOBAL_BATCH
from elastic.certify.harness.place import Place
from elastic.certify.tasks import Task
from elastic.ledger.run_folder import RunFolder
from elastic.scenarios.check import LOSS, Bound, Check, judge
from elastic.scenarios.limit import Failed, Limit
from elastic.scenarios.one_process import losses, program_file, worst_difference
from elastic.scenarios.scenario import Act, Nodes, Scenario
from elastic.scenarios.stages import OWN_NODES, cluster_pools, on_cluster, own_cluster
from elastic.scenarios.stories import LOOP_SCRIPT
from elastic.scenarios.watched_run import last_json
from elastic.storage import Storage

RESTARTED, TORCHRUN, RAY_TRAIN = "plain script: kill", "torchrun", "Ray Train"
OBJECTS = "object storage"
STEPS = 12
SEED = 7
NEEDED = ("pandas", "pyarrow", "fsspec")  # of ray[train]
FINISHED = Bound("steps", "those that were asked for", least=STEPS)
DAMAGED = Bound("damaged_files", "elastic checkpoint verify: every byte against its digest", most=0)
COPIES = Bound("checkpoints", "a run that is stopped saves its state", least=1)
NEXT = Bound(
    "next_loss_difference",
    "the loss of the step after the Checkpoint, with its weights; as the other losses",
    most=5e-4,
)
REDONE = Bound(
    "steps_lost",
    "those since the script's own checkpoint: one every 5 steps, and up to 3 until the kill is "
    "carried out",
    most=8,
)
RESTARTS = Bound("starts", "one at first, one after the kill", least=2)
PLAIN_SCRIPT = Scenario(
    "plain script",
    "A script that knows nothing of elastic is started again, from its own checkpoint.",
    (Act(RESTARTED, "kill=any", "loss"),),
    Nodes(OWN_NODES, {}),
    on_cluster=True,
)


def tasks(lab: Lab) -> list[Task]:
    """Those that can be tried here."""
    place = lab.place
    found = []
    if not scenario_checks.why_not(place, LOOP_SCRIPT):
        names = (*LOOP_SCRIPT.checks, *([] if why_no_objects(lab) else [OBJECTS]))
        found.append(
            Task(
                names,
                partial(_loop, lab),
                least_s=LOOP_SCRIPT.least_s,
                weight=1.5,
                where=scenario_checks.where(place, LOOP_SCRIPT),
            )
        )
    if not why_no_torchrun():
        found.append(Task((TORCHRUN,), partial(_torchrun, lab), least_s=15.0, weight=0.7))
    if not why_no_train(place):
        found.append(
            Task((RAY_TRAIN,), partial(_ray_train, lab), least_s=25.0, weight=1.0, where=OWN)
        )
    if place.ray:
        found.append(
            Task((RESTARTED,), partial(_restarted, lab), least_s=35.0, weight=1.2, where=OWN)
        )
    return found


def left_out(lab: Lab) -> dict[str, str]:
    """Name -> why it cannot be tried here."""
    place = lab.place
    why_no_loop = scenario_checks.why_not(place, LOOP_SCRIPT)
    whys = {
        **dict.fromkeys(LOOP_SCRIPT.checks, why_no_loop),
        OBJECTS: why_no_loop or why_no_objects(lab), TORCHRUN: why_no_torchrun(),
        RAY_TRAIN: why_no_train(place), RESTARTED: "" if place.ray else NO_RAY,
    }  # fmt: skip
    return {name: why for name, why in whys.items() if why}


def why_no_objects(lab: Lab) -> str:
    return (
        ""
        if lab.storage.startswith(("s3://", "gs://", "az://"))
        else "the storage is a folder; give --storage s3://bucket/prefix (likewise gs://, az://)"
    )


def why_no_torchrun() -> str:
    return (
        ""
        if util.find_spec("pydantic") is not None
        else "pydantic is not installed, which reads a job.yaml"
    )


def why_no_train(place: Place) -> str:
    if not place.ray:
        return NO_RAY
    missing = [name for name in NEEDED if util.find_spec(name) is None]
    return (
        f"Ray Train is not installed ({', '.join(missing)} missing): pip install 'ray[train]'"
        if missing
        else ""
    )


# ------------------------------------------------------------------------------------ a loop script


def _loop(lab: Lab, limit: Limit) -> Iterator[Check]:
    """A script that enters elastic.loop; its driver is killed, the next one attaches; then a
    notice."""
    lab.drop()
    on_objects = not why_no_objects(lab)
    with scenario_checks.stage(lab, LOOP_SCRIPT, configured=on_objects) as at:
        yield from scenario_checks.checks_at(LOOP_SCRIPT, at, limit)
        if on_objects:
            yield _objects(at.run)


def _objects(run: Storage) -> Check:
    """What the storage alone has of the run: its checkpoints, and a journal that is replayed
    without this host's folder."""
    from elastic.scenarios.judge import replayed
    from elastic.worker.checkpoint import checkpoint_index

    found = checkpoint_index.find(run)
    problems = [problem for item in found for problem in checkpoint_index.verify(item.uri)]
    place = RunFolder.of(run)
    shutil.rmtree(place.folder, ignore_errors=True)
    again = replayed(list(place.lines()))
    figures = {"checkpoints": len(found), "damaged_files": len(problems), **again.figures}
    return judge(OBJECTS, figures, [COPIES, DAMAGED, *again.bounds])


# ----------------------------------------------------------------------------------------- torchrun


def _torchrun(lab: Lab, limit: Limit) -> Iterator[Check]:
    """A job at a fixed layout, without Ray and without a driver."""
    n = 2 if lab.place.address or not lab.place.gpus else min(2, len(lab.place.gpus))
    own = {"CUDA_VISIBLE_DEVICES": "" if lab.place.address else ",".join(lab.place.gpus[:n])}
    folder = lab.folder / "torchrun"
    job = {
        "name": "fixed", "program": program_file("unpaced"), "steps": STEPS,
        "global_batch": GLOBAL_BATCH, "seed": SEED, "clip_grad_norm": 1.0,
        "durable_every": STEPS // 2,
    }  # fmt: skip
    _write(folder, job)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    words = [
        *start,
        "-m",
        "elastic.worker",
        str(folder),
        "--storage",
        str(folder / "runs"),
        "--json",
    ]
    text = child.run([sys.executable, *words], child.Setting(folder, own), limit, what="torchrun")
    from elastic.worker.checkpoint import checkpoint_index

    last = last_json(text)
    alone = losses("unpaced", job, STEPS, limit=limit)
    problems = checkpoint_index.verify(last["checkpoint"])
    figures = {
        "steps": last["steps"],
        "ranks": n,
        "worst_loss_difference": abs(last["final_loss"] - alone[-1]),
        "damaged_files": len(problems),
    }
    yield judge(TORCHRUN, figures, [FINISHED, LOSS, DAMAGED])


# ---------------------------------------------------------------------------------------- Ray Train


def _ray_train(lab: Lab, limit: Limit) -> Iterator[Check]:
    """ElasticTrainer.fit; its Checkpoint is loaded by plain torch, which then has the loss of the
    next step."""
    lab.drop()
    folder = lab.folder / "ray-train"
    folder.mkdir(parents=True)
    with own_cluster() as cluster:
        words = [sys.executable, program_file("fit"), str(folder), str(STEPS)]
        text = child.run(
            words,
            child.Setting(folder, {**cluster.environment, "RAY_ADDRESS": cluster.address}),
            limit,
            what="ElasticTrainer.fit",
        )
    found = last_json(text)
    if found["error"]:
        raise Failed(f"ElasticTrainer.fit: {found['error']}")
    job = {"seed": SEED, "global_batch": GLOBAL_BATCH, "clip_grad_norm": 1.0}
    alone = losses("unpaced", job, STEPS + 1, limit=limit)
    worst = worst_difference({i + 1: float(loss) for i, loss in enumerate(found["losses"])}, alone)
    figures = {
        "steps": found["steps"], "worst_loss_difference": worst,
        "next_loss_difference": abs(next_loss(found["checkpoint"], STEPS) - alone[-1]),
    }  # fmt: skip
    yield judge(RAY_TRAIN, figures, [FINISHED, LOSS, NEXT])


def next_loss(folder: str, step: int) -> float:
    """Loss of the step after `step`, in plain torch with the weights of a DCP folder."""
    import torch
    from torch.distributed.checkpoint import load  # type: ignore[attr-defined]

    from elastic.data.order import sample_ids
    from elastic.program import load_program

    program: Any = load_program(program_file("unpaced"))
    model = program.model()
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():  # that it loads in one process is what is wanted
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    dataset = program.dataset()
    items = [dataset[i] for i in sample_ids(len(dataset), GLOBAL_BATCH, SEED, step=step)]
    batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    with torch.no_grad():
        return float(
            program.loss(model(batch["input"]), batch) / int((batch["target"] != -100).sum())
        )


# ----------------------------------------------------------------------------------- a plain script


def _restarted(lab: Lab, limit: Limit) -> Iterator[Check]:
    """A DDP script that knows nothing of elastic; a node is killed, it resumes from its own
    checkpoint."""
    from elastic.observe.accounting.accounts import account
    from elastic.scenarios.kept_steps import events
    from elastic.scenarios.play import play
    from elastic.scenarios.programs import plain_script
    from elastic.types import StepDone

    lab.drop()
    folder = lab.folder / "plain-script"
    state = folder / "state"
    state.mkdir(parents=True)
    with own_cluster() as cluster:
        keys = {"script": program_file("plain_script"), "args": [str(state)]}
        job = {**keys, "pools": cluster_pools()}
        seen = play(PLAIN_SCRIPT, replace(on_cluster(cluster, job, folder), name="plain"), limit)
    steps = {event.step: event.train_loss for event in events(seen.lines, StepDone)}
    moves = account(seen.lines).transitions
    found = [move for move in moves if move.cause == "loss"]
    figures = {
        "starts": len(moves), "pause_s": sum(move.pause_s for move in found),
        "steps_lost": sum(move.steps_lost for move in found), "steps": max(steps),
        "worst_loss_difference": worst_difference(steps, plain_script.losses(max(steps))),
    }  # fmt: skip
    yield judge(RESTARTED, figures, [RESTARTS, REDONE, LOSS])


# ------------------------------------------------------------------------------------------------


def _write(folder: Path, job: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
