"""Is a program's loss a sum over the batch? Found out on shapes, without a weight in memory: by the
driver before a worker starts, and by workers of a model that is too large to be built whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from elastic.data.batches import item_of
from elastic.data.budget import Cut, Microbatch, budget_of, no_rows
from elastic.data.collate import collate
from elastic.data.open_datasets import Sets, validation_of
from elastic.data.order import sample_ids
from elastic.errors import ElasticError, ProgramError
from elastic.models.experts import MixtureOfExperts
from elastic.program import Program, drawing
from elastic.text import n_of
from elastic.types import Job, Layout, is_auto
from elastic.user_frames import told
from elastic.worker.loop.loss_reduction import ROWS_TRIED, Means, check_any_rows, is_own
from elastic.worker.program.calls import call_model, count_of, loss_of, mapped, tensors_in
from elastic.worker.program.job_program import with_job
from elastic.worker.program.model_profile import build_meta
from elastic.worker.step.logged_sums import Sums

log = logging.getLogger(__name__)

Batch = dict[str, Tensor]
STEPS_LOOKED, SIZES_LOOKED = 20, 8  # for micro-batches without samples
MOST_PARAMETERS = 1 << 27  # of a model that is run with values here
NO_GRADIENTS = "does not require grad"
ENABLE = "; passes of a validation have no gradients: take them under torch.enable_grad()"
MOST_ELEMENTS = 1 << 26  # of an output that the driver makes up: logits of long sequences are more


def check_before_start(program: Program, job: Job, dataset: Any) -> str:
    """Raises ProgramError for a loss that is a mean, or numbers beside it, for a first sample that
    the program takes no input from, and for what the program raises over it on shapes and with
    values too. What cannot run without values and is too large to be run with them is not judged:
    the workers run it. Returns a note, '' = none."""
    program, note = with_job(program, job), ""
    _check_lr_factor(program)
    with torch.random.fork_rng(devices=[]):
        try:
            model = build_meta(program)
            _check_filling(model, job)
            stopped = check_on_shapes(
                program,
                model,
                lambda n: first_sample(job, dataset, n, within=False),
                most=MOST_ELEMENTS,
            )
            if stopped is None:
                note = check_no_rows(program, model, job, dataset=dataset)
                validation = cache(partial(validation_of, program, job))
                check_beside(program, model, job, train=lambda: dataset, validation=validation)
                check_evaluate(program, model, job, validation=validation)
                check_validation(program, model, job, validation=validation)
        except ElasticError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's model and dataset
            stopped = error
        if stopped is not None:
            log.info("its loss was not looked at: %s", " ".join(str(stopped).split())[:200])
            _check_with_values(program, lambda: first_sample(job, dataset, 1), stopped)
    return note


def _check_filling(model: nn.Module, job: Job) -> None:
    """Raises ProgramError for a mixture that is balanced by all places of micro-batches, of which
    another number are filling in each layout."""
    for name, module in model.named_modules() if job.microbatch_tokens else ():
        if isinstance(module, MixtureOfExperts):
            biased = module.bias_rate and module.gate.weight.requires_grad
            by = "balance" if module.balance else "bias_rate" if biased else ""
            if by:
                raise ProgramError(
                    f"{name} is balanced by {by}, which counts filling as tokens, and with "
                    f"microbatch_tokens each layout has another number of these; leave {by} out, "
                    "or fill all samples up to one length (data: pack: pad) without "
                    "microbatch_tokens"
                )


def _check_lr_factor(program: Program) -> None:
    """Raises ProgramError for one that counts its calls: a step that is done again asks again, and
    a new worker has not asked before."""
    if program.lr_factor is None:
        return
    once, again = program.lr_factor(1), program.lr_factor(1)
    if once != again:
        raise ProgramError(
            f"Program.lr_factor gives {once:g} for step 1, and {again:g} where it is asked again; "
            "it must follow from the number of the step alone"
        )


def _check_with_values(program: Program, batch: Callable[[], Batch], stopped: Exception) -> None:
    """`stopped`: what it raised on shapes. What stops it in the same way with values, and is no
    matter of the device, is its own. Raises ProgramError."""
    try:
        one = batch()
        if sum(p.numel() for p in build_meta(program).parameters()) > MOST_PARAMETERS:
            return
        model = program.model()
        if program.init is not None:
            program.init(model)
    except Exception:  # noqa: BLE001 - the user's model and dataset: the workers tell what it is
        return
    try:
        with torch.no_grad():
            loss_of(program, call_model(program, model, one), one)
    except Exception as error:
        if type(error) is type(stopped) and is_own(error):
            shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in one.items())
            hint = ENABLE if NO_GRADIENTS in str(error) else ""
            raise ProgramError(f"{told(error)}, over the first sample: {shapes}{hint}") from error


def check_beside(
    program: Program,
    model: nn.Module,
    job: Job,
    *,
    train: Callable[[], Any],
    validation: Callable[[], Any],
) -> None:
    """What is summed beside the loss, as `check_on_shapes` does with it. Raises ProgramError."""
    for where, numbers, opened in (
        ("Program.log", program.log, train),
        ("Program.metrics", program.metrics, validation),
    ):
        samples = _one_set(opened()) if numbers is not None else None
        if numbers is None or samples is None:
            continue
        batches = [first_sample(job, samples, n, within=False) for n in (1, 2)]
        try:
            with torch.no_grad():
                outputs = [call_model(program, model, _on_meta(batch)) for batch in batches]
        except (NotImplementedError, RuntimeError) as error:
            log.info("%s was not looked at: %s", where, " ".join(str(error).split())[:200])
            continue
        if _n_elements(outputs[1]) > MOST_ELEMENTS:
            continue
        for key in (None, *batches[0]):
            once, twice = (
                _sums(where, partial(numbers, _right(output, batch[key] if key else None), batch))
                for output, batch in zip(outputs, batches, strict=True)
            )
            for name in once.keys() & twice.keys():
                if once[name] and abs(twice[name] - once[name]) < 1e-3 * abs(once[name]):
                    raise ProgramError(
                        f"{where}['{name}'] is {once[name]:.4g} for one sample and for the same "
                        "sample twice: a mean, it seems; it must be the sum over the batch (.sum()"
                        " in place of .mean()), which elastic divides by the global count"
                    )


def check_no_rows(program: Program, model: nn.Module, job: Job, *, dataset: Any) -> str:
    """A rank with fewer samples than another has micro-batches computes some without rows. Raises
    ProgramError where the program cannot, and one of the first steps has such on the fewest ranks
    that the job may have; where only more ranks would have them, that is returned."""
    budget = budget_of(job, dataset)
    if budget is None:
        return ""
    cut = replace(budget, length=cache(budget.length)).cut
    fewest, most = _ranks(job)
    always = said = _has_no_rows(job, cut, len(dataset), sizes=[fewest])
    if not always:
        sizes = range(most, fewest, -1)[:SIZES_LOOKED]
        said = _has_no_rows(job, cut, len(dataset), sizes=sizes)
    if not said:
        return ""
    none = {key: value[:0] for key, value in first_sample(job, dataset, 1).items()}
    try:
        with torch.no_grad():
            output = call_model(program, model, _on_meta(none))
        loss_of(program, made_up(output), none)
    except Exception as error:
        if is_own(error):
            text = no_rows(job, told(error), said)
            if always:
                raise ProgramError(text) from error
            return f"it cannot train on as many ranks as it may have: {text}"
        log.info("0 rows were not looked at: %s", " ".join(str(error).split())[:200])
    return ""


def _has_no_rows(
    job: Job,
    cut: Callable[[Sequence[int], Sequence[int]], Cut],
    n_samples: int,
    *,
    sizes: Iterable[int],
) -> str:
    """Of which of these numbers of ranks one has a micro-batch without samples; '' = of none, as
    far as one looks."""
    for step in range(min(job.steps, STEPS_LOOKED)):
        ids = sample_ids(n_samples, job.global_batch, job.seed, step=step)
        for n in sizes:
            for rank in cut(ids, (1,) * n):
                if not all(part.ids for part in rank):
                    mine = sum(len(part.ids) for part in rank)
                    return (
                        f"of {n} data-parallel ranks one has {n_of(mine, 'sample')} of a step, and "
                        f"another {len(rank)} micro-batches"
                    )
    return ""


def _ranks(job: Job) -> tuple[int, int]:
    """The fewest and the most data-parallel ones that the job may have."""
    if is_auto(job.layout):
        least = Layout(**job.pins)
        n = sum(pool.max_nodes * pool.gpus_per_node for pool in job.pools)
        workers = (job.min_workers, min(n, job.max_workers or n))
        each = [n * least.dp // least.world_size for n in workers]
    else:
        named = job.layout.values() if isinstance(job.layout, Mapping) else (job.layout,)
        each = [job.layout_of(text).dp for text in named]
    most = max(1, min(max(each), job.global_batch))
    return max(1, min(*each, most)), most


def _one_set(samples: Any) -> Any:
    """The first where there are several."""
    return next(iter(samples.values())) if isinstance(samples, Sets) else samples


def check_evaluate(
    program: Program, model: nn.Module, job: Job, *, validation: Callable[[], Any]
) -> None:
    """What `Program.evaluate` returns, on shapes. Raises ProgramError for a mean: ranks and layouts
    have other numbers of samples in a batch. What it does with process groups is not tried."""
    samples = _one_set(validation()) if program.evaluate is not None else None
    if program.evaluate is None or samples is None:
        return
    batch = first_sample(job, samples, 2, within=False)
    means = Means(count_of(program, batch))
    try:
        with torch.no_grad(), means:
            found = program.evaluate(model.eval(), _on_meta(batch))
    except NameError as error:
        raise ProgramError(f"Program.evaluate raised {told(error)}") from error
    except Exception as error:  # noqa: BLE001 - the user's own code, which may want values
        log.info("Program.evaluate was not looked at: %s", " ".join(str(error).split())[:200])
        return
    finally:
        model.train()
    for name, value in found.items() if isinstance(found, Mapping) else ():
        if value in means:
            raise ProgramError(
                f"Program.evaluate['{name}'] is a mean over the batch; it must be the sum "
                "(reduction='sum', .sum() in place of .mean()), which elastic divides by the sum "
                "of 'count'"
            )


def check_validation(
    program: Program, model: nn.Module, job: Job, *, validation: Callable[[], Any]
) -> None:
    """What a validation calls, on shapes. Raises ProgramError where the model cannot be called with
    as many rows as ranks have, or `evaluate` with any number: of a last batch it gets fewer, where
    the model gets others beside them."""
    samples = None if program.batch_dependent else _one_set(validation())
    if samples is None:
        return
    first = _on_meta(first_sample(job, samples, 1, within=False))

    def called(call: Callable[[nn.Module, Batch], object], n: int, mode: Means) -> None:
        with torch.no_grad(), mode:
            call(model, {key: x.new_empty((n, *x.shape[1:])) for key, x in first.items()})

    any_rows = job.microbatch_tokens is not None
    model.eval()
    try:
        check_any_rows(
            "the model in evaluation mode",
            partial(called, partial(call_model, program)),
            ROWS_TRIED if any_rows else _shares(job),
        )
        if program.evaluate is not None:
            check_any_rows("Program.evaluate", partial(called, program.evaluate))
    finally:
        model.train()


def _shares(job: Job) -> list[int]:
    """Samples of a step that a rank may have, where all have equally many or one more: the two
    smallest numbers, and the largest."""
    fewest, most = _ranks(job)
    batch, found = job.global_batch, set[int]()
    for ranks in range(fewest, most + 1):
        found |= {batch // ranks, -(-batch // ranks)}
    return sorted({*sorted(found)[:2], max(found)})


def _sums(where: str, numbers: Callable[[], Any]) -> Sums:
    """Raises ProgramError where they are none, and for names that do not exist."""
    found = Sums()
    try:
        found.add(numbers(), where)
    except (KeyError, NameError) as error:
        raise ProgramError(f"{where} raised {told(error)}") from error
    return found


def _right(output: Any, places: Tensor | None) -> Any:
    """A made-up output; scores of classes are highest at `places`, what the batch has for them:
    counts of what is right are then not zero."""
    found = made_up(output)
    if places is None or not isinstance(found, Tensor) or not found.is_floating_point():
        return found
    fits = places.shape == found.shape[:-1] and not places.is_floating_point()
    if not fits or not places.numel() or int(places.max()) >= found.shape[-1]:
        return found
    index = places.long().clamp(min=0).unsqueeze(-1)
    return found.scatter(-1, index, float(found.max()) + 1.0)


def first_sample(
    job: Job, dataset: Any, times: int, *, multiple: int = 1, within: bool = True
) -> Batch:
    """The first sample, `times` over; of what a job gives micro-batches by tokens, filled up, and
    (`within`) no more than go into one. A dataset that draws (crops, noise) gives the same one each
    time."""
    budget = budget_of(job, dataset, multiple)
    part = Microbatch((0,) * times)
    if budget is not None:
        fits = budget.of_one(0, times)
        part = fits if within else replace(part, length=fits.length)
    with drawing(0):
        item = item_of(dataset, 0, part.length)
    return collate([item] * len(part.ids))


def check_on_shapes(
    program: Program, model: nn.Module, batch: Callable[[int], Batch], *, most: int | None = None
) -> Exception | None:
    """`model`: on the meta device; `batch`: the first sample, so many times over. The loss is that
    of made-up outputs of the right shape. A model that wants values is not judged; what it raised
    is returned."""
    ones, twos = batch(1), batch(2)
    try:
        with torch.no_grad():
            once, twice = (call_model(program, model, _on_meta(one)) for one in (ones, twos))
    except (NotImplementedError, RuntimeError) as error:
        log.info("not rehearsed: %s", " ".join(str(error).split())[:200])
        return error
    if most is not None and _n_elements(twice) > most:
        return None
    torch.manual_seed(0)
    refuse_a_mean(
        float(loss_of(program, made_up(once), ones)), float(loss_of(program, made_up(twice), twos))
    )
    return None


def refuse_a_mean(once: float, twice: float) -> None:
    """The same sample twice must double the loss. Raises ProgramError for a mean: its scale would
    change with the layout."""
    if once and abs(twice - once) < 1e-3 * abs(once):
        raise ProgramError(
            f"Program.loss returned {once:.4f} for one sample and {twice:.4f} for the same sample "
            "twice: a mean, it seems; it must return the sum over the batch (reduction='sum'), "
            "which elastic divides by the global count of the step"
        )


def made_up(output: Any) -> Any:
    """Numbers in the shape of an output on the meta device; every row is the same."""

    def numbers(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        row = torch.randn(x.shape[1:]).to(x.dtype)
        return row.expand(x.shape).contiguous() if x.ndim else torch.ones((), dtype=x.dtype)

    return mapped(output, numbers)


def _on_meta(batch: Batch) -> Batch:
    return {key: value.to("meta") for key, value in batch.items()}


def _n_elements(output: Any) -> int:
    return sum(x.numel() for x in tensors_in(output))
