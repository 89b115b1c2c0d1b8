"""How a step is shared out under a layout, and why a model, a job or a batch cannot have it."""

from __future__ import annotations

from elastic.errors import InfeasiblePlan
from elastic.planner.cost.memory import Step
from elastic.planner.hetero import unequal_shares
from elastic.types import Job, Layout, ModelProfile


def step_of(model: ModelProfile, job: Job, layout: Layout, *, per_node: int) -> Step:
    """How a step is shared out over ranks that are equally fast. Raises InfeasiblePlan where the
    model, the job or the batch cannot have this layout."""
    check_axes(model, job, layout)
    return share_out(job, layout, per_node=per_node, together=model.together)


def share_out(job: Job, layout: Layout, *, per_node: int, together: int) -> Step:
    """Of a layout whose axes model and job can have. Raises InfeasiblePlan."""
    global_batch = job.global_batch
    m = unequal_shares.microbatches(global_batch, layout, together)
    unit = m * max(1, together)
    share = -(-(global_batch // unit) // layout.dp) * unit
    return Step(m, share, global_batch, per_node, job.precision)


def check_axes(model: ModelProfile, job: Job, layout: Layout) -> None:
    """Whether model, job and batch can have its axes, whatever its other options are but for the
    number of stages. Raises InfeasiblePlan."""
    if why := model.refusal(layout):
        raise InfeasiblePlan(why)
    if layout.tp > 1 and model.tp_limit % layout.tp:
        raise InfeasiblePlan(
            f"tp={layout.tp} must divide {model.tp_limit}, the most that the model's "
            "tensor-parallel plan allows"
        )
    if layout.tp > 1 and job.float8:
        raise InfeasiblePlan(f"tp={layout.tp} does not go with float8: true")
    if layout.tp > 1 and job.compile and job.microbatch_tokens:
        raise InfeasiblePlan(
            f"tp={layout.tp} goes with compile: true or with microbatch_tokens, not with both"
        )
    for axis in ("cp", "ep") if job.compile else ():
        if (n := getattr(layout, axis)) > 1:
            raise InfeasiblePlan(f"{axis}={n} does not go with compile: true")
    if job.microbatch_tokens and not model.together:
        raise InfeasiblePlan(
            "microbatch_tokens cuts what a rank has of a step, and results of this program depend "
            "on which samples stand together; leave microbatch_tokens out"
        )
    if layout.pp > 1 and job.microbatch_tokens:
        raise InfeasiblePlan(
            f"pp={layout.pp} needs micro-batches of one shape, which microbatch_tokens does not "
            "give"
        )
    _check_sequence(model, layout)
    if layout.pp > 1 and not model.pipeline:
        raise InfeasiblePlan(
            f"pp={layout.pp}, but this program cannot be spread over pipeline stages"
        )
    unequal_shares.check_stages(model.n_blocks, layout.n_stages)
    unit = max(1, model.together)
    if layout.dp > job.global_batch // unit:
        of = f"groups of {unit} samples (batch_norm)" if unit > 1 else "samples"
        raise InfeasiblePlan(
            f"{layout.dp} data-parallel ranks are more than the {job.global_batch // unit} {of} of "
            "a step"
        )


def _check_sequence(model: ModelProfile, layout: Layout) -> None:
    """As elastic/worker/parallel/context_parallel.py and elastic/models/attention.py cut it. Raises
    InfeasiblePlan."""
    sample = model.sample
    if sample is None:
        return
    if layout.cp > 1 and sample.no_cp:
        raise InfeasiblePlan(f"cp={layout.cp}, but {sample.no_cp}")
    if layout.cp > 1 and sample.sequence % (2 * layout.cp):
        raise InfeasiblePlan(
            f"cp={layout.cp} needs a multiple of {2 * layout.cp} positions, a sample has "
            f"{sample.sequence}"
        )
    if layout.tp > 1 and sample.sequence_parallel and sample.sequence // layout.cp % layout.tp:
        raise InfeasiblePlan(
            f"tp={layout.tp} with sequence parallelism needs a multiple of {layout.tp} positions "
            f"on a rank, not {sample.sequence // layout.cp}"
        )
