"""ElasticTrainer: a job in the words of Ray Train. `elastic.cluster.ray_train.train_types`
translates its types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.api.checkpoint_actions import Import, import_into
from elastic.api.running.entry import not_interrupted, run_train_function
from elastic.api.running.options import RUN_NAME, Options, ray_address
from elastic.api.running.program_file import file_of
from elastic.api.running.run import Result, run_job
from elastic.api.running.start_checks import check_keys, check_storage
from elastic.config.clusters import load_cluster
from elastic.config.data_section import DataSpec
from elastic.config.job import JobSpec, PoolSpec, job_data, job_of
from elastic.config.script import enters_loop
from elastic.errors import OF_ITS_USER, SpecError, known_keywords
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.observe.metrics.metrics_files import OnStep
from elastic.observe.metrics.step_rows import rows_of
from elastic.observe.run_view import view_of
from elastic.program import Program
from elastic.storage import Storage, open_storage
from elastic.user_frames import outwards, plainly

if TYPE_CHECKING:
    import ray.train

IMPORTED = "elastic_program_"  # how modules begin that workers make of a program's file
WHERE = "ElasticTrainer(job=...)"


# arguments of a TorchTrainer
SAME = {"train_loop_per_worker": "program"}
INSTEAD = {
    "torch_config": "processes meet by gloo, on GPUs by NCCL, and their timeouts follow the "
    "measured steps (job['max_silence_s'] bounds them); leave it out",
    "dataset_config": "each worker reads its share of each step out of the whole dataset; leave "
    "it out",
    "validation_config": "give elastic.loop(validation=, evaluate=), or Program.validation, and "
    "job['eval_every']",
    "metadata": "a checkpoint holds the training state; what else a train function must remember "
    "is elastic.loop(extra_state=...)",
}
OF_A_FUNCTION = {  # what is for a Program
    "datasets": "give elastic.loop(dataset=...) a map-style one (len() and [sample id], as of "
    "torch or of the library datasets); a ray.data.Dataset is taken here with a Program",
    "resume_from_checkpoint": "load it into the model before elastic.loop(model=...); a run of "
    "the same RunConfig(name=...) resumes by itself",
}


@known_keywords("elastic.ElasticTrainer", SAME, instead=INSTEAD)
@dataclass(eq=False)
class ElasticTrainer:
    """Stands where a `TorchTrainer` stood: the same configurations, the same Result, but survivors
    of a loss never restart.

    program:                a Program that stands in a file as `program`; a job folder; or a train
                            function that enters `elastic.loop`, called with `train_loop_config`
                            (`train_loop_per_worker=` is another name for it).
    job:                    keys of job.yaml, over those of the folder: steps, global_batch ...
    scaling_config:         num_workers=(least, most); without it `job` says what the nodes are.
    cluster:                a cluster file: its pools, with their markets and prices, on the cluster
                            that was launched from it. Without it, job["pools"] or a label_selector
                            each node type that the cluster names is a pool, without a price.
    run_config:             name (a known one is resumed), storage_path, which checkpoints stay.
    datasets:               "train" and "validation" as ray.data.Dataset, or as datasets.Dataset:
                            written once as indexed rows into the run's storage.
    resume_from_checkpoint: of another trainer, saved by torch.distributed.checkpoint; where the run
                            has none of its own.
    no_budget:              paid pools may be used although the job has neither budget_usd nor
                            max_nodes.
    allow_changed:          a run of the same name is resumed although the file, the data or the
                            mathematics have changed.
    on_step:                called with the numbers of each step, a mapping, in a thread of this
                            process.
    Raises SpecError that names a field which has no meaning here.
    """

    program: Program | str | Path | Callable[..., None]
    _: KW_ONLY
    job: Mapping[str, Any] | None = None
    train_loop_config: Mapping[str, Any] | None = None
    scaling_config: ray.train.ScalingConfig | None = None
    run_config: ray.train.RunConfig | None = None
    cluster: str | Path | None = None
    datasets: Mapping[str, Any] | None = None
    resume_from_checkpoint: ray.train.Checkpoint | None = None
    no_budget: bool = False
    allow_changed: bool = False
    on_step: OnStep | None = None

    def __post_init__(self) -> None:
        _refuse_in_an_import()
        from elastic.cluster.ray_train import train_types

        self._train = _train_function(self.program, self.train_loop_config)
        self._configs = (self.scaling_config is not None, self.run_config is not None)
        self._wanted = train_types.wanted(self.scaling_config, self.run_config)
        check_keys(self.job or {}, Path(), WHERE)  # before the program's file is read
        self._data, self._file = _job_of(self.program, self.job or {})
        if self.datasets and self._data.get("data"):
            raise SpecError(
                "datasets and job['data'] both say what the run reads: two ways at once; give one"
            )
        for name, right in OF_A_FUNCTION.items():
            if self._train is not None and getattr(self, name) is not None:
                raise SpecError(f"ElasticTrainer({name}=...): {right}")

    def fit(self) -> ray.train.Result:
        """Trains to the end. Raises ray.train.TrainingFailedError when the run failed, as
        TorchTrainer.fit does; KeyboardInterrupt after Ctrl-C and SystemExit after SIGTERM, once the
        run is saved.

        Uses the Ray cluster that this process is connected to, else $RAY_ADDRESS, else an embedded
        one on this machine.
        """
        from elastic.cluster.ray_train.train_types import FAILED

        with plainly(*OF_ITS_USER, FAILED, KeyboardInterrupt):
            return self._fitted()

    def _fitted(self) -> ray.train.Result:
        from elastic.cluster.ray_train import train_types
        from elastic.cluster.workers import train_function
        from elastic.worker.loop.loop import here

        if here.host is not None:
            raise SpecError(
                "ElasticTrainer.fit() starts a run by itself: start this file with python, not "
                "with elastic run --script"
            )
        with train_types.connected(ray_address(Options())) as address:
            data = self._job(address is not None)
            name = self._wanted.run_name if self._configs[1] else str(data["name"])
            if not RUN_NAME.fullmatch(name):
                raise SpecError(f"RunConfig(name='{name}'): letters, digits, '.', '_' and '-' only")
            run = open_storage(f"{find_runs.storage_uri(data.get('storage'))}/{name}")
            words = find_runs.python_words()
            naming = f"give RunConfig(name='{name}')" if train_types.MADE_UP.match(name) else ""
            options = Options(
                run_name=name,
                address=address,
                cluster=self.cluster,
                # who writes a drill beside the trainer means the cluster that it runs on, which
                # loses workers by it and no node: the script's own Ray may be of one node
                own_drill="drill" in (self.job or {}),
                spared=True,
                no_budget=self.no_budget,
                allow_changed=self.allow_changed,
                on_step=self.on_step,
                show=self._wanted.show,
                words=() if naming else words,
            )
            if self._wanted.show:
                print("".join(f"note: {note}\n" for note in self._wanted.notes), end="", flush=True)
            if self._train is not None:
                function = train_function.pickled(self._train, self.train_loop_config)
                result = run_train_function(
                    function, self._file, data, where=WHERE, options=options
                )
            else:
                check_storage(data.get("storage"), name)
                result = run_job(self._prepared(job_of(data, self._file, WHERE), run), options)
        return self._told(not_interrupted(result, words, naming=naming), run)

    def _job(self, on_cluster: bool) -> dict[str, Any]:
        """The job's keys with those of the configurations. Raises SpecError where the two
        disagree."""
        from elastic.cluster.ray_train import train_types

        data = dict(self._data)
        _agree(data, _said(self._wanted.job, self._configs))
        if self.cluster is not None and "pools" in data:
            raise SpecError(
                "job['pools'] and cluster both say what the nodes are: two ways at once; give one"
            )
        if not self._configs[0]:
            return data
        if self.cluster is not None:
            kinds = [pool.accelerator_type for pool in load_cluster(self.cluster).pools]
            train_types.check_pools(self._wanted, kinds, "cluster")
        elif "pools" not in data:
            data["pools"] = train_types.pools(self._wanted, on_cluster)
        else:
            kinds = [
                str(dict(pool).get("accelerator_type", PoolSpec(name="any").accelerator_type))
                for pool in data["pools"]
            ]
            train_types.check_pools(self._wanted, kinds, "job['pools']")
        return data

    def _prepared(self, spec: JobSpec, run: Storage) -> JobSpec:
        """Data and state from elsewhere are in the run's storage."""
        from elastic.cluster.ray_train import dataset_rows, train_types

        if self.datasets:
            spec = spec.model_copy(
                update={
                    "data": DataSpec.model_validate(dataset_rows.materialise(self.datasets, run))
                }
            )
        if self.resume_from_checkpoint is not None:

            def use(source: str) -> None:
                import_into(Import(source, run.uri, "", at_step=None), spec, run)

            if not _has_copies(run):
                train_types.read_checkpoint(self.resume_from_checkpoint, use)
        return spec

    def _told(self, result: Result, run: Storage) -> ray.train.Result:
        from elastic.cluster.ray_train import train_types
        from elastic.worker.checkpoint import checkpoint_index

        error = result.reason if result.outcome == "failed" else ""
        if result.log is not None:
            error = f"{error}; whole traceback: {result.log}"
        copies = [(item.uri, item.step) for item in checkpoint_index.find(run)]
        rows = rows_of(view_of(RunFolder.of(run).lines()))
        told = train_types.result_of(
            train_types.FinishedRun(str(run.uri), result.summary, rows, copies, error)
        )
        if told.error is not None:
            raise told.error
        return told


def _train_function(program: Any, config: Mapping[str, Any] | None) -> Callable[..., None] | None:
    """The train function; None = a Program or a folder. Raises SpecError."""
    if isinstance(program, Program | str | Path):
        if config is not None:
            raise SpecError(
                "ElasticTrainer(train_loop_config=...): it is for a train function; a program "
                "reads its own file"
            )
        return None
    if not inspect.isfunction(program):
        raise SpecError(
            f"ElasticTrainer({type(program).__name__}): give a Program, the folder of a job, or a "
            "train function that enters elastic.loop"
        )
    file = Path(program.__code__.co_filename)
    if not file.is_file():
        raise SpecError(
            "ElasticTrainer: the train function must stand in a file, by which the run knows it "
            "again"
        )
    if not enters_loop(file):
        raise SpecError(
            f"{file}: {program.__name__} does not enter elastic.loop, so elastic cannot change it "
            "live; enter it, or give a "
            "Program; as it is it can only be restarted: elastic run --script FILE"
        )
    return program


def _refuse_in_an_import() -> None:
    """Workers import the file that the program stands in: a trainer made at its top level would
    train in each of them."""
    for frame in outwards(inspect.currentframe()):
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(IMPORTED) and frame.f_code.co_name == "<module>":
            raise SpecError(
                f"{frame.f_code.co_filename}:{frame.f_lineno}: workers import this file for its "
                "`program`; put ElasticTrainer below `if __name__ == '__main__':`"
            )


def _job_of(program: Any, job: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """Unchecked keys of the job with its name, and the program's file. Raises SpecError."""
    if isinstance(program, Program):
        file = file_of(program)
        return {"name": file.parent.name, **job}, file
    if not isinstance(program, str | Path):
        file = Path(program.__code__.co_filename).resolve()
        return {"name": file.stem, **job}, file
    data, _ = job_data(program)
    data |= job
    file = Path(program).resolve() / str(data.pop("program", "program.py"))
    if not file.is_file():
        raise SpecError(
            f"{file}: no such file; a job folder needs a program.py that defines `program`"
        )
    return {"name": Path(program).resolve().name} | data, file


def _said(wanted: Mapping[str, Any], configs: tuple[bool, bool]) -> dict[str, Any]:
    """The keys that the configurations that were given speak of."""
    scaling, run = configs
    return {
        key: value
        for key, value in wanted.items()
        if (scaling if key in ("min_workers", "max_workers") else run)
    }


def _agree(data: dict[str, Any], said: Mapping[str, Any]) -> None:
    """Adds what the configurations say; where that is a default, the job may say otherwise. Raises
    SpecError for two ways."""
    from elastic.cluster.ray_train import train_types

    defaults = train_types.wanted(None, None).job
    for key, value in said.items():
        if key not in data:
            data[key] = value
        elif value != defaults.get(key) and value != data[key]:
            raise SpecError(
                f"job['{key}']={data[key]!r}, and the configurations say {value!r}: two ways at "
                "once; give one"
            )


def _has_copies(run: Storage) -> bool:
    from elastic.worker.checkpoint import checkpoint_index

    return bool(checkpoint_index.find(run))
