"""The other ways in, each tried once: a loop script, a plain one, `torchrun`, Ray Train; a killed
driver; object storage.

Those that need nodes run on a small Ray cluster of their own on this host. On a user's cluster the
loop script, and with it the loss of the driver and object storage, run there.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.certify.checks.fault_checks import CONTENT, LOSS, NONE_LOST
from elastic.certify.checks.main_path import SAMPLES, TRAINS, Trial, Where, replayed, wrong_samples
from elastic.certify.harness import child, cluster_place
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.layouts_tried import GLOBAL_BATCH
from elastic.certify.harness.place import Place
from elastic.certify.tasks import Task
from elastic.ledger.run_folder import RunFolder
from elastic.scenarios.check import Bound, Check, judge
from elastic.scenarios.limit import Failed, Limit
from elastic.scenarios.one_process import losses, program_file, worst_difference
from elastic.storage import Storage

if TYPE_CHECKING:
    from elastic.cluster.local.local_cluster import LocalCluster

WITHOUT_RAY = "without Ray (not installed, or --no-ray)"
LIVE, RESTARTED, TORCHRUN, RAY_TRAIN = (
    "loop script: notice",
    "plain script: kill",
    "torchrun",
    "Ray Train",
)
DRIVER, OBJECTS = "driver loss", "object storage"
STEPS = 12
SEED = 7
OWN_NODES = 2
OWN = f"{OWN_NODES} Ray nodes of its own on this host"
# should certify itself be killed, the workers leave a user's cluster after this
ORPHAN_LEASE_S = 120.0
SAVED_EVERY = 5  # steps, of programs/plain_script.py
NEEDED = ("pandas", "pyarrow", "fsspec")  # of ray[train]
NOT_STARTED = Bound(
    "workers_started_again",
    "the workers outlive their driver: the next one finds the same processes",
    most=0,
)
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


def tasks(lab: Lab) -> list[Task]:
    """Those that can be tried here."""
    place = lab.place
    found = []
    if not why_no_ray(place):
        where = place.where if place.address else f"{OWN}, as a cluster that was there"
        names = (LIVE, DRIVER, *([] if why_no_objects(lab) else [OBJECTS]))
        found.append(
            Task(names, lambda limit: _loop(lab, limit), least_s=45.0, weight=1.5, where=where)
        )
    if not why_no_torchrun():
        found.append(
            Task((TORCHRUN,), lambda limit: _torchrun(lab, limit), least_s=15.0, weight=0.7)
        )
    if not why_no_train(place):
        found.append(
            Task(
                (RAY_TRAIN,),
                lambda limit: _ray_train(lab, limit),
                least_s=25.0,
                weight=1.0,
                where=OWN,
            )
        )
    if place.ray:
        found.append(
            Task(
                (RESTARTED,),
                lambda limit: _restarted(lab, limit),
                least_s=35.0,
                weight=1.2,
                where=OWN,
            )
        )
    return found


def left_out(lab: Lab) -> dict[str, str]:
    """Name -> why it cannot be tried here."""
    place = lab.place
    whys = {
        LIVE: why_no_ray(place), DRIVER: why_no_ray(place),
        OBJECTS: why_no_ray(place) or why_no_objects(lab), TORCHRUN: why_no_torchrun(),
        RAY_TRAIN: why_no_train(place), RESTARTED: "" if place.ray else WITHOUT_RAY,
    }  # fmt: skip
    return {name: why for name, why in whys.items() if why}


def why_no_ray(place: Place) -> str:
    if not place.ray:
        return WITHOUT_RAY
    if place.address and len(place.nodes) < 2:
        return "it needs two nodes of the cluster at least; --local runs it on this host's own"
    return ""


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
        return WITHOUT_RAY
    missing = [name for name in NEEDED if util.find_spec(name) is None]
    return (
        f"Ray Train is not installed ({', '.join(missing)} missing): pip install 'ray[train]'"
        if missing
        else ""
    )


# --------------------------------------------------------------------------------- nodes of its own


@contextmanager
def _own_cluster() -> Iterator[LocalCluster]:
    """As if somebody else had started it: what uses it is given its address. CPU nodes of one
    worker, for any pool."""
    from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder

    with LocalCluster() as cluster:
        starting = [
            cluster.add(NodeOrder(f"own-{i}", 1, {"elastic-node": f"own-{i}"}))
            for i in range(OWN_NODES)
        ]
        for answer in starting:
            answer.result(90)
        yield cluster


def _pools() -> list[dict[str, Any]]:
    return [
        {
            "name": "certify", "market_type": "spot", "accelerator_type": "CPU", "gpus_per_node": 1,
            "max_nodes": OWN_NODES, "notice_s": 20,
        }
    ]  # fmt: skip


# -------------------------------------------------------------------------- a loop script, a driver


def _loop(lab: Lab, limit: Limit) -> Iterator[Check]:
    """A script that enters elastic.loop; its driver is killed, the next one attaches; then a
    notice."""
    lab.drop()
    place = lab.place
    if place.address:
        where = Where(address=place.address, world=cluster_place.world(place), connected=True)
        yield from _loop_at(lab, limit, where, pools=cluster_place.pools(place))
        return
    with _own_cluster() as cluster:
        where = Where(address=cluster.address, world=OWN_NODES, environment=cluster.environment)
        yield from _loop_at(lab, limit, where, pools=_pools())


def _loop_at(lab: Lab, limit: Limit, at: Where, *, pools: list[dict[str, Any]]) -> Iterator[Check]:
    on_objects = not why_no_objects(lab)
    with lab.room(configured=on_objects) as (name, storage):
        where = replace(at, name=name, storage=storage)
        way = {**TRAINS, "script": program_file("loop_script"), "orphan_lease_s": ORPHAN_LEASE_S}
        trial = Trial(lab.folder / "loop", pools, limit, where, way)
        try:
            away_s = trial.without_driver()
            summary = trial.notice_and_stop()
        finally:
            trial.end()
        steps = trial.curve()
        alone = losses(
            "unpaced",
            {"seed": SEED, "global_batch": GLOBAL_BATCH, "clip_grad_norm": 1.0},
            max(steps),
            limit=limit,
        )
        worst = worst_difference({step: loss for step, (loss, _) in steps.items()}, alone)
        wrong = wrong_samples({step: text for step, (_, text) in steps.items()}, SEED)
        yield _live(summary, worst)
        figures = {
            "workers_started_again": len(trial.pids - trial.first_pids), "away_s": away_s,
            "steps": max(steps), "wrong_samples": wrong, "worst_loss_difference": worst,
        }  # fmt: skip
        yield judge(DRIVER, figures, [NOT_STARTED, SAMPLES, LOSS])
        if on_objects:
            yield _objects(trial.run)


def _live(summary: Mapping[str, Any], worst: float) -> Check:
    found = [t for t in summary["transitions"] if t["cause"] == "notice"]
    if len(found) != 1 or found[0]["source"] != "live":
        raise Failed(
            "one live change by notice was expected; the run's were "
            f"{[t['cause'] for t in summary['transitions']]}"
        )
    figures = {
        "pause_s": found[0]["pause_s"], "steps_lost": found[0]["steps_lost"],
        "worst_loss_difference": worst, "content_equal": int(found[0]["digest_ok"] is True),
    }  # fmt: skip
    return judge(LIVE, figures, [NONE_LOST, CONTENT, LOSS])


def _objects(run: Storage) -> Check:
    """What the storage alone has of the run: its checkpoints, and a journal that is replayed
    without this host's folder."""
    from elastic.worker.checkpoint import checkpoint_index

    found = checkpoint_index.find(run)
    problems = [problem for item in found for problem in checkpoint_index.verify(item.uri)]
    place = RunFolder.of(run)
    shutil.rmtree(place.folder, ignore_errors=True)
    again = replayed(place.lines())
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

    last = child.last_json(text)
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
    with _own_cluster() as cluster:
        words = [sys.executable, program_file("fit"), str(folder), str(STEPS)]
        text = child.run(
            words,
            child.Setting(folder, {**cluster.environment, "RAY_ADDRESS": cluster.address}),
            limit,
            what="ElasticTrainer.fit",
        )
    found = child.last_json(text)
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
    from elastic.scenarios.programs import plain_script

    lab.drop()
    folder = lab.folder / "plain-script"
    state = folder / "state"
    state.mkdir(parents=True)
    with _own_cluster() as cluster:
        where = Where(
            "plain",
            str(folder / "runs"),
            cluster.address,
            OWN_NODES,
            environment=cluster.environment,
        )
        way = {"script": program_file("plain_script"), "args": [str(state)]}
        trial = Trial(folder, _pools(), limit, where, way)
        try:
            summary = trial.kill_and_stop()
        finally:
            trial.end()
    steps = {step: loss for step, (loss, _) in trial.curve().items()}
    found = [t for t in summary["transitions"] if t["cause"] == "loss"]
    figures = {
        "starts": len(summary["transitions"]), "pause_s": sum(t["pause_s"] or 0.0 for t in found),
        "steps_lost": sum(t["steps_lost"] for t in found), "steps": max(steps),
        "worst_loss_difference": worst_difference(steps, plain_script.losses(max(steps))),
    }  # fmt: skip
    yield judge(RESTARTED, figures, [RESTARTS, REDONE, LOSS])


# ------------------------------------------------------------------------------------------------


def _write(folder: Path, job: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
