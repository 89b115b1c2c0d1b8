"""What shall be trained: a job folder's program, or a published decoder, or one of given sizes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.api.planning.made_up_data import made_up_data
from elastic.api.planning.plan_nodes import MachineGroup, of_pool, with_counts
from elastic.api.planning.run_nodes import run_nodes
from elastic.api.running.entry import keys_beside, loaded_from
from elastic.api.running.layout_question import LayoutCheck, asked_of, checked
from elastic.api.running.local_pools import on_cluster
from elastic.api.running.start_checks import check_drill
from elastic.config.clusters import ClusterSpec
from elastic.config.job import JobSpec, job_data
from elastic.config.pool_checks import unlimited
from elastic.config.script import script_file
from elastic.errors import SpecError
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.published import known_decoders
from elastic.program import Program
from elastic.text import n_of
from elastic.types import Job, ModelProfile, Pool, SampleProfile
from elastic.types.typed_job import Precision

MUCH = 2.0  # times the published batch
OF_JOB = "the job"  # where the price of a pool is from that the job names, or has by default
OF_A_SCRIPT = (
    "a script's own lines are not counted, its loss neither: planned from the first run.model(...) "
    "of its loop"
)
OWN_POOLS = (
    "neither the job nor --cluster names pools: planned for what elastic run would start on this "
    "machine"
)


@dataclass(frozen=True)
class Subject:
    """`pools`: its own, of a job. `steps`: 0 = not said. `sample_bytes`: of its tensors as the
    loader hands them on, 0 = not known. `literal`: a layout that it names is planned with the
    options that `elastic run` gives it, not with the best ones. `phases`: of a job with several,
    each for itself; this one is then the first of them, and `whole` the job of them all. `cluster`:
    the file whose pools stand in for the job's own, where one is given. `compared`: its layouts are
    known to compute the same, as far as that is tried before a run."""

    name: str
    model: ModelProfile
    job: Job
    pools: tuple[Pool, ...] = ()
    steps: int = 0
    notes: tuple[str, ...] = ()
    sample_bytes: int = 0
    literal: bool = False
    phases: tuple[Subject, ...] = ()
    whole: Job | None = None
    compared: bool = True
    cluster: ClusterSpec | None = None

    @property
    def sample_tokens(self) -> int:
        """Of a sample; of models without tokens a sample counts as one."""
        sample = self.model.sample
        return (sample.tokens if sample else 0) or 1

    @property
    def step_tokens(self) -> int:
        return self.sample_tokens * self.job.global_batch

    @property
    def tokens(self) -> float:
        """Of all steps that the job has; 0 = not said."""
        return float(self.steps * self.step_tokens)

    @property
    def each_phase(self) -> tuple[Subject, ...]:
        return self.phases or (self,)

    @property
    def phase_samples(self) -> tuple[SampleProfile | None, ...]:
        """What a sample asks of the model in each phase; () = it has none."""
        return tuple(phase.model.sample for phase in self.phases)

    def with_layout(self, text: str) -> Subject:
        """Its options stand for themselves: keys of the job of the same names are left out."""
        if not text:
            return self
        each = tuple(phase.with_layout(text) for phase in self.phases)
        return replace(self, job=replace(self.job, layout=text), phases=each)

    def plain(self) -> dict[str, Any]:
        sample = self.model.sample
        return {
            "name": self.name, "n_params": self.model.n_params,
            "n_expert_params": self.model.n_expert_params, "n_blocks": self.model.n_blocks,
            "state_bytes": int(ModelCost.of(self.model).state_bytes),
            "sample_tokens": sample.tokens if sample else 0,
            "unit": "tokens" if sample and sample.tokens else "samples",
            "global_batch": self.job.global_batch, "step_tokens": self.step_tokens,
            "precision": self.job.precision, "layout": str(self.job.layout), "steps": self.steps,
        }  # fmt: skip


def of_model(text: str, batch: int = 0, precision: Precision = "bfloat16") -> Subject:
    """`batch`: samples of a step, 0 = what the model was published with, or about 4 M tokens.
    Raises SpecError."""
    found = known_decoders.find(text)
    decoder = replace(found.decoder, compute=precision)
    size = batch or max(1, round(found.batch_tokens / decoder.seq))
    job = Job(name=found.name, global_batch=size, precision=precision)
    return Subject(
        found.name,
        decoder.profile(),
        job,
        notes=_batch_notes(found, size, decoder.seq, said=bool(batch)),
    )


def _batch_notes(
    found: known_decoders.KnownDecoder, size: int, seq: int, *, said: bool
) -> tuple[str, ...]:
    """Where the batch comes from, or that it is larger than is of use."""
    if not said:
        told = f"{size * seq / 1e6:.3g} M tokens" + ("" if found.params_b else ", as is usual")
        return (f"a step has {n_of(size, 'sequence')} ({told}): say another with --batch",)
    times = size * seq / found.batch_tokens
    if not found.params_b or times < MUCH:
        return ()
    return (
        f"a step of {size * seq / 1e6:.3g} M tokens is {times:.1f} times that of its own "
        "training: above the critical batch, "
        "more samples to a step save hardly any steps (McCandlish et al. 2018, section 2)",
    )


def of_job(
    folder: str,
    overrides: Sequence[str] = (),
    check: bool = False,
    *,
    drilled: bool = False,
    cluster: ClusterSpec | None = None,
) -> Subject:
    """Traces the program on the meta device; nothing is allocated. `check`: compares what its
    layouts compute, as a run does before it starts; `drilled`: refuses what such a run refuses of
    its drill; `cluster`: whose pools, floor and price of the head it has, as a run there. Raises
    SpecError, ProgramError."""
    data, where = job_data(folder, overrides)
    if (
        "script" not in data
        and not (Path(folder) / str(data.get("program", "program.py"))).is_file()
    ):
        raise SpecError(
            f"{folder}: it has no program.py, which says what is trained; or plan a model by its "
            "sizes: --model 8b"
        )
    return _of_data(folder, data, where, check=check, drilled=drilled, cluster=cluster)


def of_script(
    script: str,
    args: Sequence[str] = (),
    job: str | None = None,
    *,
    overrides: Sequence[str] = (),
    check: bool = False,
    drilled: bool = False,
    cluster: ClusterSpec | None = None,
) -> Subject:
    """The same of a script by itself, which is run up to its loop; `job`: as in `run_script`."""
    file = script_file(script)
    data, where = keys_beside(file, job, overrides)
    data |= {"script": str(file.resolve()), "args": list(args)}
    folder = job or str(file.parent)
    return _of_data(folder, data, where, check=check, drilled=drilled, cluster=cluster)


def of_job_or_script(
    job: str | None,
    script: str | None,
    args: Sequence[str] = (),
    *,
    overrides: Sequence[str] = (),
    check: bool = False,
    drilled: bool = False,
    cluster: ClusterSpec | None = None,
) -> Subject:
    """Whichever a command line names; a script wins, `job` is then as in `of_script`."""
    if script:
        return of_script(
            script, args, job, overrides=overrides, check=check, drilled=drilled, cluster=cluster
        )
    assert job
    return of_job(job, overrides, check, drilled=drilled, cluster=cluster)


def _of_data(
    folder: str,
    data: Mapping[str, Any],
    where: str,
    *,
    check: bool,
    drilled: bool,
    cluster: ClusterSpec | None,
) -> Subject:
    spec, program = loaded_from(folder, data, where)
    if cluster is not None:
        spec = on_cluster(spec, cluster)
    if drilled:
        check_drill(spec.drill, [pool.pool() for pool in spec.pools], embedded=True)
    notes: tuple[str, ...] = () if "pools" in data else (OWN_POOLS,)
    pools = tuple(pool.pool() for pool in spec.pools)
    # beside the trace
    comparison = LayoutCheck(asked_of(spec, pools, program), sys.stderr) if check else None
    with closing(comparison or ExitStack()):
        first, *later = (
            replace(
                _of_spec(each, program, where, notes=notes, comparison=comparison), cluster=cluster
            )
            for each in spec.each_phase()
        )
    if not later:
        return first
    about = (
        f"the offers are those of phase 1, its first {first.steps} steps; the table of phases has "
        "the best one of each; deadline and budget are those of all phases"
    )
    phases, notes = (first, *later), (*first.notes, about)
    return replace(first, phases=phases, notes=notes, whole=spec.job())


def _of_spec(
    spec: JobSpec, program: Program, where: str, *, notes: tuple[str, ...],
    comparison: LayoutCheck | None,
) -> Subject:  # fmt: skip
    from elastic.worker.equivalence.job_numbers import model_profile_of, sample_of_call, samples_of
    from elastic.worker.hosting.resume_checks import check_loss

    pools = tuple(pool.pool() for pool in spec.pools)
    with made_up_data(spec.job()) as job:
        check_loss(job, program)  # in the words of a run
        model = model_profile_of(program, job)
        even = replace(job, microbatch_tokens=None)
        n_bytes: int = sum(
            getattr(value, "nbytes", 0)
            for sample in samples_of(program, even, 1)
            for value in sample.values()
        )
        if spec.script and (called := sample_of_call(program, job)):
            model, notes = replace(model, sample=called), (*notes, OF_A_SCRIPT)
        unequal = model.sample is None
        model = model_profile_of(program, even) if unequal else model
        model = _closed(spec, program, model, job=job, comparison=comparison)
    if model.sample is None:
        raise SpecError(
            f"{where}: its loop was not followed to its first run.model(...), so it cannot be "
            f"planned; plan a model of its size ({n_of(model.n_params, 'parameter')}): elastic "
            "plan --model 1b --cluster FILE"
        )
    if unequal:
        like = (
            "samples are of unequal length: planned as if each were like the first, of "
            f"{model.sample.tokens} tokens"
        )
        notes = (*notes, like)
    own = even if unequal else spec.job()
    if not spec.script and program.validation is None and own.data.validation is None:
        own = replace(own, eval_every=0)  # a run makes none
    return Subject(
        spec.name,
        model,
        own,
        pools,
        spec.steps,
        notes,
        n_bytes,
        literal=True,
        compared=comparison is not None,
    )


def _closed(
    spec: JobSpec,
    program: Program,
    model: ModelProfile,
    *,
    job: Job,
    comparison: LayoutCheck | None,
) -> ModelProfile:
    """With what the program's structure, or a comparison of small copies, says against an axis."""
    if comparison:
        return checked(model, comparison.result(), program)
    from elastic.worker.equivalence.job_numbers import structure_of_job

    return structure_of_job(program, job).close(model) if not spec.script else model


def machines_of(
    subject: Subject, counts: Mapping[str, int], *, deadline_h: float = 0.0
) -> tuple[MachineGroup, ...]:
    """Of the cluster file's pools, else the job's own: as many as a run of the job has, with this
    deadline, or its own; of those in `counts` so many. Raises SpecError."""
    if subject.cluster is not None:
        pools, prices = subject.cluster.pools, dict(subject.cluster.prices_of)
    else:
        pools, prices = (
            subject.pools,
            dict.fromkeys((pool.name for pool in subject.pools), OF_JOB),
        )
    nodes = with_counts(pools, counts)
    standby = dict.fromkeys(nodes, 0)
    notes: list[str] = []
    if subject.literal:
        job = replace(subject.job, deadline_h=deadline_h or subject.job.deadline_h)
        given = [replace(pool, max_nodes=n) for pool in pools if (n := nodes[pool.name])]
        of_run = run_nodes(job, subject.model, given)
        notes += of_run.notes
        nodes |= {**of_run.nodes, **counts}
        standby |= {name: n for name, n in of_run.standby.items() if name not in counts}
    found = [
        replace(
            of_pool(pool, nodes[pool.name], prices.get(pool.name, "")), standby=standby[pool.name]
        )
        for pool in pools
        if nodes[pool.name]
    ]
    refused = unlimited(subject.job, pools) if subject.literal else ""
    notes += [f"elastic run refuses this: {refused}"] if refused else []
    found[0] = replace(found[0], notes=(*found[0].notes, *notes))
    return tuple(found)
