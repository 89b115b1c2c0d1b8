"""Do the layouts compute what one process does? Loss and gradients of one batch of a small copy, in
two real processes.

The processes are forked from one that has torch, the program and its small copy, meet over gloo on
this machine, and run the very code that training runs, without random numbers: TrainState, Stepper,
the pipeline's schedule.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from elastic.errors import ElasticError
from elastic.types import Job, Layout, Plan, WorkerId
from elastic.types.grid import coordinates
from elastic.types.orders import Rendezvous
from elastic.user_frames import told
from elastic.worker.equivalence.blocks_in_stages import even
from elastic.worker.equivalence.forward_trace import Batch, python_random
from elastic.worker.equivalence.no_randomness import DRAWN, Still, draws_left
from elastic.worker.equivalence.reference_pass import Outputs, Pass
from elastic.worker.equivalence.small_batch import first_positions, longest, positions
from elastic.worker.equivalence.small_copy import ROWS, WHOLE_MOST_PARAMETERS, SmallCopy, converted
from elastic.worker.equivalence.stages.unit_flow import with_flow
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.rendezvous import host_store, new_secret
from elastic.worker.process_groups.transport import is_collective_error
from elastic.worker.program.calls import call_model, loss_of
from elastic.worker.program.norms.batch_norms import norms_of
from elastic.worker.program.weights import cut
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.optimizer_step import Stepper

# cp's takes longest
FAMILIES = {
    "dp": Layout(dp_shard=2), "tp": Layout(tp=2), "pp": Layout(pp=2),
    "ep": Layout(dp_shard=2, ep=2), "cp": Layout(cp=2),
}  # fmt: skip
# relative; a gradient's to the largest element of the tensor
LOSS_AGREES, GRADIENT_AGREES = 1e-4, 3e-4
# times what a lower precision inside of the model explains; differences that it may
ROUNDING, ROUNDING_MOST = 4.0, 5e-2
REPEATS = 1e-6  # relative, of a loss that is computed twice
SMALL = 1e-6  # of the largest element of all gradients: what is below is rounding
FAMILY_MOST_S, MEET_S = 30.0, 20.0
HERE = "127.0.0.1"
LOST = (
    "its ranks lose each other: each of them must call the same modules and give gradients to the "
    "same weights"
)
WAITED = (
    "its ranks wait for each other: each of them must call the same modules and give gradients to "
    "the same weights, and "
    "forward must not use threads that were started when the program was imported"
)
FORKS = get_context("fork")


@dataclass(frozen=True)
class Words:
    """How what is compared is called; `lost`: what is to be added where its ranks have lost each
    other."""

    value: str = "the loss of"
    tp: str = "Program.tp"
    lost: str = ""


@dataclass(frozen=True)
class Compared:
    """Of one layout: '' in `problem` = it computes what one process does."""

    layout: str
    problem: str = ""
    seconds: float = 0.0
    loss: float = 0.0
    off: float = 0.0  # relative difference of the losses
    worst: float = 0.0  # of the gradients, the largest
    unclear: str = ""  # with what it was compared, where that is not enough to call it equal


OF_A_PROGRAM = Words()


def kept_between(small: SmallCopy, batch: Batch) -> str:
    """Does a second pass over the same samples, with the same weights and buffers, give another
    loss? '' = no, or it cannot be told; else what is said of it."""
    losses = _losses(small, [batch, batch], small.dtype)
    if not losses or math.isclose(*losses, rel_tol=REPEATS):
        return ""
    if DRAWN:
        return (
            f"{draws_left()}, which are other ones in each layout: take torch.rand or randn, and "
            "make of them what is drawn"
        )
    return (
        "a second forward pass over the same samples, with the same weights, gives another loss "
        f"({losses[0]:.6g}, then {losses[1]:.6g}): the program keeps something between steps that "
        "no new worker gets, or draws by something else than torch; keep it in buffers of the "
        "model, draw with torch, and keep nothing that follows from samples"
    )


def sees_others(small: SmallCopy, batch: Batch) -> str:
    """Is the loss of samples another one than that of each by itself? One way to share them out may
    not show it. '' = no, or it cannot be told; else what is said of it."""
    large = small.profile.n_params > WHOLE_MOST_PARAMETERS
    if large or small.program.batch_dependent or norms_of([small.model]):
        return ""
    ones = [{key: x[i : i + 1] for key, x in batch.items()} for i in range(ROWS)]
    # without what rounding makes of it
    losses = _losses(small, [double(one) for one in (batch, *ones)], torch.float64)
    if not losses or math.isclose(losses[0], sum(losses[1:]), rel_tol=LOSS_AGREES):
        return ""
    return unlike_each(losses[0], losses[1:], small.program.anyway)


def depends(anyway: str) -> str:
    """Why it is not, and what may be done. `anyway`: what says that it is meant so."""
    return (
        "a result depends on which samples stand beside it; compute each by itself, or say "
        f"{anyway} to train on all the same"
    )


def unlike_each(whole: float, ones: Sequence[float], anyway: str, *, n: int = 0) -> str:
    """What is said of samples whose loss is not the sum of those of each; `n`: how many they are,
    where `ones` are parts of them."""
    each, n = sum(ones), n or len(ones)
    one_by_one = "one by one" if n == len(ones) else f"in {len(ones)} parts"
    of_what = depends(anyway)
    if math.isclose(len(ones) * whole, each, rel_tol=LOSS_AGREES):
        of_what = (
            "a mean, it seems, maybe times a number that does not follow from the batch; the loss "
            "must be the sum over the batch (reduction='sum', or the mean times its own count)"
        )
    return (
        f"the loss of {n} samples is {whole:.6g}, that of the same {one_by_one} {each:.6g}: "
        f"{of_what}"
    )


def _losses(small: SmallCopy, batches: Sequence[Batch], dtype: torch.dtype) -> list[float]:
    """Of passes of one model, each with the buffers of the first; none where one raises."""
    program, model = small.program, converted(copy.deepcopy(small.model), dtype)
    model.train(not program.batch_dependent)
    before = {
        (module, name): buffer.clone()
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    losses = []
    with Still(), python_random(0.999):
        for batch in batches:
            for (module, name), value in before.items():
                module._buffers[name] = value.clone()
            given = {key: x.clone() for key, x in batch.items()}
            try:
                loss = loss_of(program, call_model(program, model, given), given)
            except Exception:  # noqa: BLE001 - the user's model: the layouts tell what it raises
                return []
            losses.append(float(loss.detach()))
    return losses


def double(batch: Batch) -> Batch:
    return {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}


def compare(
    small: SmallCopy,
    job: Job,
    batch: Batch,
    *,
    layout: Layout,
    words: Words = OF_A_PROGRAM,
    most_s: float = FAMILY_MOST_S,
) -> Compared:
    """Runs the layout in processes of its own. Never raises for what the program does there. Ranks
    that have parts of the sequences get these as long as this machine allows, of fewer samples
    where need be."""
    if layout.cp == 1 or small.long_batch is None:
        return _compare(small, job, batch, layout=layout, words=words, most_s=most_s)
    n = positions(small.long_batch)
    rows, most = longest(small, small.long_batch)
    long = {key: x[:rows] for key, x in small.long_batch.items()}
    cut = first_positions(long, most) if most < n else long
    found = _compare(small, job, cut, layout=layout, words=words, most_s=most_s)
    if found.problem.startswith(WAITED):
        found = _compare(small, job, batch, layout=layout, words=words, most_s=most_s)
        most = positions(batch)
    if most == n or found.problem:
        return found
    return replace(
        found,
        unclear=f"with {most} of {n} positions only, since more are too much for this machine",
    )


def _compare(
    small: SmallCopy, job: Job, batch: Batch, *, layout: Layout, words: Words, most_s: float
) -> Compared:
    began = time.monotonic()
    try:
        whole = small.one_process(batch, layout.cp)
    except Exception as error:  # noqa: BLE001 - the user's model
        said = str(error) if isinstance(error, ElasticError) else told(error)
        return Compared(str(layout), f"it raises {said}", time.monotonic() - began)
    store, ranks = host_store(HERE), tuple(WorkerId("here", i) for i in range(layout.world_size))
    at = Rendezvous(ranks, (HERE, store.port), MEET_S, new_secret())
    values = partial(_values, small, job, batch, whole=whole, layout=layout, at=at)
    with ExitStack() as stack:
        pipes = [
            stack.enter_context(_forked(_rank, partial(values, me=rank)))
            for rank in range(layout.world_size)
        ]
        found = _answers(pipes, began + most_s)
    seconds = time.monotonic() - began
    problems = [text for kind, text in found.values() if kind == "raised"]
    lost = [text for kind, text in found.values() if kind == "lost"]
    if problems:
        own = problems[0].removeprefix(f"{layout}, but ").removeprefix(f"{layout}: ")
        return Compared(str(layout), own if own != problems[0] else f"it raises {own}", seconds)
    if lost or len(found) < layout.world_size:
        return Compared(str(layout), LOST if lost else WAITED, seconds)
    answers = [answer for _, answer in found.values()]
    judged = _judged(layout, answers, words, seconds=seconds, times={})
    if not judged.problem:
        return judged
    times = _rounding(small, batch, layout.cp)
    if isinstance(times, str):
        text = (
            "it cannot be compared: in one process the loss of the same samples is another one the "
            f"second time; {times}"
        )
        return replace(judged, problem=text)
    explained = judged.worst < ROUNDING_MOST and judged.off < ROUNDING_MOST
    if not explained:
        return judged
    return _judged(layout, answers, words, seconds=seconds, times=times)


@contextmanager
def _forked(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process that tells what it finds by its first argument, the other end of this."""
    here, there = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _answers(pipes: list[Connection], until_s: float) -> dict[int, tuple[str, Any]]:
    found: dict[int, tuple[str, Any]] = {}
    while len(found) < len(pipes) and (left := until_s - time.monotonic()) > 0:
        asked = {i: pipe for i, pipe in enumerate(pipes) if i not in found}
        ready = wait(list(asked.values()), left)
        for i, pipe in asked.items():
            if pipe in ready:
                try:
                    found[i] = pipe.recv()
                except EOFError:
                    found[i] = ("lost", "")
    return found


def _rounding(small: SmallCopy, batch: Batch, cp: int) -> dict[str, float] | str:
    """What rounding alone makes of the loss ('') and of each gradient of one process, as a multiple
    of what is allowed: between float32 and float64. Empty where it cannot be told; a text where the
    loss is another one each time: what draws."""
    found: dict[str, float] | str = {}
    with _forked(_round, small, batch, cp) as here, suppress(EOFError):
        for _ in range(2):
            found = here.recv() if here.poll(FAMILY_MOST_S) else found
            if isinstance(found, str):
                break
    return found


def _round(pipe: Connection, small: SmallCopy, batch: Batch, cp: int) -> None:
    torch.set_num_threads(1)
    with Still(), python_random(0.999):
        once, again = small.alone(batch, cp), small.alone(batch, cp).loss
        pipe.send(
            {}
            if abs(once.loss - again) <= LOSS_AGREES * max(1e-3, abs(once.loss))
            else draws_left()
        )
        exact = small.alone(double(batch), cp, dtype=torch.float64)
    most = max((float(g.abs().max()) for g in exact.gradients.values() if g.numel()), default=0.0)
    found = {"": abs(once.loss - exact.loss) / (LOSS_AGREES * max(1e-3, abs(exact.loss)))}
    for name, gradient in once.gradients.items():
        if gradient.numel():
            allowed = GRADIENT_AGREES * float(exact.gradients[name].abs().max()) + SMALL * most
            found[name] = float((gradient - exact.gradients[name]).abs().max()) / max(
                allowed, 1e-30
            )
    pipe.send({name: max(1.0, ROUNDING * value) for name, value in found.items()})


def _judged(
    layout: Layout,
    answers: list[dict[str, Any]],
    words: Words,
    *,
    seconds: float,
    times: Mapping[str, float],
) -> Compared:
    """`times`: how much more may differ than float32 explains, of the loss ('') and of each
    gradient."""
    whole = answers[0]["whole"]
    loss = sum(answer["loss"] for answer in answers)
    differ = [
        (name, value, value / times.get(name, 1.0))
        for a in answers
        for name, value in a["differ"].items()
    ]
    at, worst, beyond = max(differ, key=lambda found: found[2], default=("", 0.0, 0.0))
    problem, off = "", abs(loss - whole) / max(1e-3, abs(whole))
    if not off <= times.get("", 1.0) * LOSS_AGREES:
        first = next((a["first"] for a in answers if a["first"]), "")
        where = f"; {first} is the first to give something else" if first else ""
        problem = (
            f"it computes another function: {words.value} {ROWS} samples is {loss:.6g}, in one "
            f"process it is {whole:.6g}{where}"
        )
    elif not beyond <= 1.0:
        by = f"{worst * GRADIENT_AGREES:.1%} of its largest element"
        problem = f"it computes other gradients than one process: that of {at} differs by {by}"
    return Compared(str(layout), problem, seconds, loss, off, worst * GRADIENT_AGREES)


def _rank(pipe: Connection, values: Callable[[], dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    try:
        answer: tuple[str, Any] = ("done", values())
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        answer = ("raised", str(error) if isinstance(error, ElasticError) else told(error))
        if not isinstance(error, ElasticError) and is_collective_error(error):
            answer = ("lost", "")
            time.sleep(0.5)  # who was the reason may still say so
    pipe.send(answer)


def _values(
    small: SmallCopy,
    job: Job,
    batch: Batch,
    *,
    whole: Pass,
    layout: Layout,
    at: Rendezvous,
    me: int,
) -> dict[str, Any]:
    n_rows = len(next(iter(batch.values())))
    # as torchrun gives them: a program may read them
    os.environ.update(RANK=f"{me}", LOCAL_RANK=f"{me}", WORLD_SIZE=f"{layout.world_size}")
    program, profile = small.program, small.profile
    if layout.pp > 1:
        profile = with_flow(program, profile, {key: x[:1] for key, x in batch.items()})
    with Still(), python_random(0.999):
        n = 2 if layout.pp > 1 else 1
        layers = even(profile.n_blocks, layout.n_stages)
        plan = Plan(1, layout, at.participants, even(n_rows, layout.dp), layers, n)
        groups = Groups(1, layout, torch.device("cpu"))
        try:
            groups.join(at, me)
            state = TrainState(
                program, profile, groups, layout=layout, layers=layers, rank=me, job=job
            )
            state.fill_fresh(0)  # its program gives the copy's weights and buffers
            stepper = Stepper(program, job, plan, state=state, groups=groups)
            state.train(not program.batch_dependent)
            dp = coordinates(layout, me).dp(layout)
            start = sum(plan.samples[:dp])
            rows = {key: x[start : start + plan.samples[dp]] for key, x in batch.items()}
            state.buffers.note()
            with Outputs(state.models, n_rows) as here:
                loss, _ = stepper.forward_backward([rows], train=True)
            own = state.gradients()
            stepper.add_shared(own)
            differ = _differ(state, own, whole.gradients)
            take = stepper.sequence.shard.take if stepper.sequence.shard is not None else None
            first = here.first_difference(
                whole.outputs, slice(start, start + plan.samples[dp]), take
            )
            return {
                "whole": whole.loss, "loss": loss if stepper.speaks else 0.0, "differ": differ,
                "first": first,
            }  # fmt: skip
        except Exception:
            groups.abort()
            raise


def _differ(
    state: TrainState, own: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> dict[str, float]:
    """How far each gradient is off, as a multiple of what is allowed."""
    most = max((float(g.abs().max()) for g in whole.values() if g.numel()), default=0.0)
    off: dict[str, float] = {}
    for fqn, parameter in state.local.items():
        if (
            not parameter.requires_grad
            or f"model.{fqn}" not in state.tensors
            or not parameter.numel()
        ):
            continue
        box, _ = state.tensors[f"model.{fqn}"]
        expected = cut(whole[fqn], box)
        got = own.get(fqn, torch.zeros_like(parameter))
        allowed = GRADIENT_AGREES * float(whole[fqn].abs().max()) + SMALL * most
        found = float((got - expected).abs().max()) / max(allowed, 1e-30)
        off[fqn] = found if found == found else math.inf
    return off
