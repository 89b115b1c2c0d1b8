"""Do the layouts compute what one process does? Loss and gradients of one batch of a small copy, in
two real processes.

The copy has the program's own modules with weights drawn at random (zeros that a fresh model begins
with would hide much), few of its blocks where it is large, and no random numbers while it runs. The
processes are forked from one that has torch and the program, meet over gloo on this machine, and
run the very code that training runs: TrainState, Stepper, the pipeline's schedule.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic.data.collate import collate
from elastic.errors import ElasticError, ProgramError
from elastic.models.attention import over
from elastic.program import Program
from elastic.types import Job, Layout, ModelProfile, Plan, WorkerId
from elastic.types.grid import coordinates
from elastic.types.orders import Rendezvous
from elastic.worker.equivalence.forward_trace import Batch, python_random
from elastic.worker.equivalence.no_randomness import Still, draws_left, quiet
from elastic.worker.equivalence.small_copy import (
    converted,
    fill,
    first_positions,
    kept_blocks,
    perturb,
    positions,
    spread_samples,
)
from elastic.worker.equivalence.static_plan import even
from elastic.worker.equivalence.structure import told
from elastic.worker.parallel.context_parallel import before_cut, tensors_in
from elastic.worker.parallel.pipeline import PassThrough
from elastic.worker.process.free_memory import free_host_bytes
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.rendezvous import host_store, new_secret
from elastic.worker.process_groups.transport import is_collective_error
from elastic.worker.program.calls import call_model, loss_of
from elastic.worker.program.model_profile import block_names, build_meta, trace
from elastic.worker.program.weights import cut
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.optimizer_step import Stepper

# cp's takes longest
FAMILIES = {"dp": Layout(dp_shard=2), "tp": Layout(tp=2), "pp": Layout(pp=2), "cp": Layout(cp=2)}
ROWS = 4  # samples of the batch
WHOLE_MOST_PARAMETERS = 30_000_000  # of a model that is copied with all of its blocks
BLOCKS = (3, 2)  # of a copy of a larger one: the first number where so many are not too large
MOST_PARAMETERS = 400_000_000  # of a copy: beyond it nothing is compared
# of memory for each: a model with its gradients, and what two ranks have of it and gather
BYTES = 40
# positions: of longer sequences so many are taken, where the model allows it
LONG, SHORT, LEAST = 128, 64, 8
LONGEST = 2048  # for cp, which cuts them
MOST_FLOP = 4e11  # of the passes of one process
# relative; a gradient's to the largest element of the tensor
LOSS_AGREES, GRADIENT_AGREES = 1e-4, 3e-4
# times what a lower precision inside of the model explains; differences that it may
ROUNDING, ROUNDING_MOST = 4.0, 5e-2
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
NOT_OF_A_LAYOUT = (
    "optimizer", "precision", "reduce_dtype", "compile", "float8", "guards", "noise_scale",
    "microbatch_tokens", "clip_grad_norm", "layout",
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """Of one layout: '' in `problem` = it computes what one process does."""

    layout: str
    problem: str = ""
    seconds: float = 0.0
    loss: float = 0.0
    whole_loss: float = 0.0
    off: float = 0.0  # relative difference of the losses
    worst: float = 0.0  # of the gradients, the largest
    worst_at: str = ""
    unclear: str = ""  # with what it was compared, where that is not enough to call it equal


class SmallCopy:
    """A small copy of a program: `program` builds it anew with equal weights, `model` is one."""

    def __init__(self, program: Program, profile: ModelProfile) -> None:
        self.n_blocks = profile.n_blocks
        whole = profile.n_params <= WHOLE_MOST_PARAMETERS
        self.model = _whole(program) if whole else self._cut(program)
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in self.model.parameters()):
            converted(self.model, torch.float32)
        perturb(self.model)
        quiet(self.model)
        self.flop = 6.0 * n_multiplied(self.model)  # of a position's passes
        self._passes: list[tuple[Batch, Pass]] = []
        # with sequences of full length, where others are compared with short ones
        self.long_batch: Batch | None = None
        self.program = replace(
            program,
            model=self._build,
            init=None,
            weights=None,
            buffers=None,
            lr_factor=None,
            extra_state={},
            adapter=None,
            optimizer=_no_steps,
        )
        self.profile = trace(self.program)

    def _cut(self, program: Program) -> nn.Module:
        most = min(MOST_PARAMETERS, free_host_bytes() // BYTES)
        for n in BLOCKS:
            model = build_meta(program)
            self.n_blocks = shorten(model, block_names(model, program.blocks), n)
            if (n_params := sum(p.numel() for p in model.parameters())) <= most:
                break
        else:
            left = f"{n_params / 1e6:.0f} M parameters are left of it with {self.n_blocks} blocks"
            raise TooLarge(f"{left}, {most / 1e6:.0f} M can be compared")
        kept = set(model.state_dict())
        plain = [name for name, _ in model.named_buffers() if name not in kept]
        model.to_empty(device="cpu")
        if plain and not (program.buffers is not None and program.buffers(model)):
            raise TooLarge(f"the values of its buffer {plain[0]} are known to the whole model only")
        fill(model)
        return model

    def one_process(self, batch: Batch, cp: int) -> Pass:
        """What one process makes of a batch. With cp = 1 it is kept, for the next layout."""
        for known, found in self._passes:
            if known is batch and cp == 1:
                return found
        with Still(), python_random(0.999):
            found = _alone(self, batch, cp)
        self._passes += [(batch, found)] if cp == 1 else []
        return found

    def _build(self) -> nn.Module:
        if torch.get_default_device().type != "meta":
            return copy.deepcopy(self.model)
        memo: dict[int, Any] = {}
        for p in self.model.parameters():
            memo[id(p)] = nn.Parameter(
                torch.empty_like(p, device="meta"), requires_grad=p.requires_grad
            )
        for b in self.model.buffers():
            memo[id(b)] = torch.empty_like(b, device="meta")
        return copy.deepcopy(self.model, memo)


def _no_steps(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Which keeps nothing: no step is made."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)


class TooLarge(Exception):
    """The program cannot be compared on this machine."""


def n_multiplied(model: nn.Module) -> int:
    """Parameters that are multiplied with at each position, at least 1: all but tables that are
    only looked up in."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    others = {
        id(p)
        for m in model.modules()
        if not isinstance(m, nn.Embedding)
        for p in m.parameters(recurse=False)
    }
    return max(1, sum(p.numel() for p in model.parameters() if id(p) not in tables - others))


def shorten(model: nn.Module, blocks: list[str], n: int) -> int:
    """Leaves about n blocks of a model, some of each kind, where they stand in one list. Returns
    how many there are now."""
    parents = {name.rpartition(".")[0] for name in blocks}
    if len(parents) != 1 or len(blocks) <= n:
        return len(blocks)
    held = model.get_submodule(parents.pop())
    if not isinstance(held, nn.ModuleList | nn.Sequential) or len(held) != len(blocks):
        return len(blocks)
    kept = kept_blocks(list(held), n)
    if len(kept) > BLOCKS[0] + 2:
        raise TooLarge(f"its blocks are of {len(kept)} kinds")
    for i in reversed(range(len(held))):
        if i not in kept:
            del held[i]
    return len(kept)


def _whole(program: Program) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = program.model()
    if program.weights is not None:
        fill(model)
    elif program.init is not None:
        program.init(model)
    return model


def job_of_copy(job: Job) -> Job:
    """The job in plain float32, without what is no mathematics of a layout."""
    plain = {key: getattr(Job, key) for key in NOT_OF_A_LAYOUT}
    return replace(job, **plain, global_batch=ROWS, n_samples=ROWS, steps=1, seed=0)


def batch_of(dataset: Any, budget: Any, n_rows: int = ROWS) -> Batch:
    """Samples from all over the dataset; of a job with a budget of tokens, of a stream, or of a
    dataset with fewer, the first one again and again."""
    from elastic.data.batches import item_of

    if budget is not None:
        part = budget.of_one(0, 1)
        return collate([item_of(dataset, 0, part.length)] * n_rows)
    if (
        not hasattr(dataset, "__len__")
        or len(dataset) < n_rows
        or type(dataset).__name__ == "Stream"
    ):
        return collate([dict(item_of(dataset, 0, None)) for _ in range(n_rows)])
    try:
        return collate(spread_samples(dataset, n_rows))
    except Exception:  # noqa: BLE001 - the user's dataset: what is wrong with its first samples is told
        return collate([dict(item_of(dataset, i, None)) for i in range(n_rows)])


# ------------------------------------------------------------------------------------------ one
# layout


def compare(
    small: SmallCopy, job: Job, batch: Batch, *, layout: Layout, most_s: float = FAMILY_MOST_S
) -> Compared:
    """Runs the layout in processes of its own. Never raises for what the program does there. Ranks
    that have parts of the sequences get these as long as this machine allows, of fewer samples
    where need be."""
    if layout.cp == 1 or small.long_batch is None:
        return _compare(small, job, batch, layout=layout, most_s=most_s)
    n = positions(small.long_batch)
    rows, most = longest(small, small.long_batch)
    long = {key: x[:rows] for key, x in small.long_batch.items()}
    found = _compare(
        small, job, first_positions(long, most) if most < n else long, layout=layout, most_s=most_s
    )
    if found.problem.startswith(WAITED):
        found = _compare(small, job, batch, layout=layout, most_s=most_s)
        most = positions(batch)
    if most == n or found.problem:
        return found
    return replace(
        found,
        unclear=f"with {most} of {n} positions only, since more are too much for this machine",
    )


def _compare(
    small: SmallCopy, job: Job, batch: Batch, *, layout: Layout, most_s: float
) -> Compared:
    began = time.monotonic()
    try:
        whole = small.one_process(batch, layout.cp)
    except Exception as error:  # noqa: BLE001 - the user's model
        said = str(error) if isinstance(error, ElasticError) else told(error)
        return Compared(str(layout), f"it raises {said}", time.monotonic() - began)
    store, ranks = host_store(HERE), tuple(WorkerId("here", i) for i in range(layout.world_size))
    at = Rendezvous(ranks, (HERE, store.port), MEET_S, new_secret())
    mine, processes = [], []
    for rank in range(layout.world_size):
        here, there = FORKS.Pipe(duplex=False)
        process = FORKS.Process(
            target=_rank,
            args=(there, small, job),
            kwargs={"batch": batch, "whole": whole, "layout": layout, "at": at, "me": rank},
            daemon=True,
        )
        process.start()
        there.close()
        mine.append(here)
        processes.append(process)
    try:
        found = _answers(mine, began + most_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    seconds = time.monotonic() - began
    problems = [text for kind, text in found.values() if kind == "raised"]
    lost = [text for kind, text in found.values() if kind == "lost"]
    if problems:
        own = problems[0].removeprefix(f"{layout}, but ").removeprefix(f"{layout}: ")
        return Compared(str(layout), own if own != problems[0] else f"it raises {own}", seconds)
    if lost or len(found) < layout.world_size:
        return Compared(str(layout), LOST if lost else WAITED, seconds)
    answers = [answer for _, answer in found.values()]
    judged = _judged(layout, answers, seconds, times={})
    if not judged.problem:
        return judged
    times = _rounding(small, batch, layout.cp)
    if isinstance(times, str):
        text = (
            "it cannot be compared: the loss does not repeat in one process, which draws random "
            f"numbers by {times}"
        )
        return replace(judged, problem=text)
    explained = judged.worst < ROUNDING_MOST and judged.off < ROUNDING_MOST
    return _judged(layout, answers, seconds, times=times) if explained else judged


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
    here, there = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_round, args=(there, small, batch, cp), daemon=True)
    process.start()
    there.close()
    found: dict[str, float] | str = {}
    try:
        for _ in range(2):
            found = here.recv() if here.poll(FAMILY_MOST_S) else found
            if isinstance(found, str):
                return found
        return found
    except EOFError:
        return found
    finally:
        process.kill()
        process.join()


def _round(pipe: Connection, small: SmallCopy, batch: Batch, cp: int) -> None:
    torch.set_num_threads(1)
    with Still(), python_random(0.999):
        once, again = _alone(small, batch, cp), _alone(small, batch, cp).loss
        pipe.send(
            {}
            if abs(once.loss - again) <= LOSS_AGREES * max(1e-3, abs(once.loss))
            else draws_left()
        )
        double = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
        exact = _alone(small, double, cp, dtype=torch.float64)
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
    layout: Layout, answers: list[dict[str, Any]], seconds: float, *, times: Mapping[str, float]
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
            f"it computes another function: the loss of {ROWS} samples is {loss:.6g}, in one "
            f"process it is {whole:.6g}{where}"
        )
    elif not beyond <= 1.0:
        by = f"{worst * GRADIENT_AGREES:.1%} of its largest element"
        problem = f"it computes other gradients than one process: that of {at} differs by {by}"
    return Compared(str(layout), problem, seconds, loss, whole, off, worst * GRADIENT_AGREES, at)


def _rank(
    pipe: Connection,
    small: SmallCopy,
    job: Job,
    *,
    batch: Batch,
    whole: Pass,
    layout: Layout,
    at: Rendezvous,
    me: int,
) -> None:
    torch.set_num_threads(1)
    try:
        answer: tuple[str, Any] = (
            "done",
            _values(small, job, batch, whole=whole, layout=layout, at=at, me=me),
        )
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        lost = not isinstance(error, ElasticError) and is_collective_error(error)
        answer = (
            ("lost", "")
            if lost
            else ("raised", str(error) if isinstance(error, ElasticError) else told(error))
        )
    if answer[0] == "lost":
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
    program, profile = small.program, small.profile
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
            _give(state, small)
            stepper = Stepper(program, job, plan, state=state, groups=groups)
            state.train(not program.batch_dependent)
            dp = coordinates(layout, me).dp(layout)
            start = sum(plan.samples[:dp])
            rows = {key: x[start : start + plan.samples[dp]] for key, x in batch.items()}
            with Outputs(state.models) as here:
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


class Outputs:
    """What each module releases in forward passes of a batch, by name, in the order in which they
    are done."""

    def __init__(self, models: Sequence[nn.Module], n_rows: int = ROWS) -> None:
        self.models, self.n_rows, self.found, self.hooks = (
            models,
            n_rows,
            dict[str, list[Tensor]](),
            list[Any](),
        )

    def __enter__(self) -> Outputs:
        for model in self.models:
            for name, module in model.named_modules():
                if name and not isinstance(module, PassThrough):
                    self.hooks.append(module.register_forward_hook(self._note(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = next(tensors_in(output), None)
            if first is not None and not isinstance(first, DTensor):
                self.found.setdefault(name, []).append(first.detach().clone())

        return hook

    def first_difference(self, whole: Outputs, rows: slice, take: Any) -> str:
        """The first module whose output is another than in the whole model; '' = none that can be
        compared."""
        for name in whole.found:
            expected, mine = _joined(whole.found[name]), _joined(self.found.get(name, []))
            if (
                expected is None
                or mine is None
                or expected.ndim < 1
                or expected.shape[0] != whole.n_rows
            ):
                continue
            expected = expected[rows]
            # a pipeline stage is called once before, with made-up values
            mine = mine[-expected.shape[0] :]
            if take is not None and expected.ndim > 1 and expected.shape != mine.shape:
                expected = take(expected) if expected.shape[1] % (2 * 2) == 0 else expected
            if expected.shape == mine.shape and not torch.allclose(
                mine, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
            ):
                return name
        return ""


def _joined(calls: list[Tensor]) -> Tensor | None:
    """Of several microbatches; None where they do not go together."""
    if not calls or any(
        x.shape[1:] != calls[0].shape[1:] or not x.ndim or not x.is_floating_point() for x in calls
    ):
        return None
    return torch.cat(calls)


@dataclass(frozen=True)
class Pass:
    """What one process makes of a batch."""

    loss: float
    gradients: dict[str, Tensor]
    outputs: Outputs  # of the modules


def _alone(small: SmallCopy, batch: Batch, cp: int, *, dtype: torch.dtype = torch.float32) -> Pass:
    """Of one process."""
    model = converted(copy.deepcopy(small.model), dtype).train(not small.program.batch_dependent)
    given = before_cut(small.program, batch) if cp > 1 else batch
    with (
        over(None) if cp > 1 else nullcontext(),
        Outputs([model], len(next(iter(batch.values())))) as outputs,
    ):
        output = call_model(small.program, model, given)
    loss = loss_of(small.program, output, given)
    loss.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    gradients = {
        name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in named.items()
    }
    return Pass(float(loss.detach()), gradients, outputs)


@torch.no_grad()
def _give(state: TrainState, small: SmallCopy) -> None:
    """The copy's weights and buffers."""
    source = small.model.state_dict(keep_vars=True)
    for fqn, (box, tensor) in (*state.tensors.items(), *state.frozen.items()):
        if fqn.startswith("model."):
            tensor.copy_(cut(source[fqn.removeprefix("model.")].detach(), box))
        elif fqn.startswith("optim."):
            tensor.zero_()


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


def shortened(small: SmallCopy, batch: Batch) -> Batch:
    """With the first positions of long sequences, where that is all the same to the model; not for
    cp (`compare`)."""
    n = positions(batch)
    if n <= LONG:
        return batch
    allowed = int(MOST_FLOP / (small.flop * ROWS))
    cut = first_positions(batch, max(LEAST, min(SHORT, allowed // LEAST * LEAST)))
    try:
        with torch.no_grad(), Still():
            output = call_model(
                small.program, copy.deepcopy(small.model), {key: x[:1] for key, x in cut.items()}
            )
            loss_of(small.program, output, {key: x[:1] for key, x in cut.items()})
    except Exception:  # noqa: BLE001 - the user's model: its length is its own
        return batch
    small.long_batch = batch
    return cut


def longest(small: SmallCopy, batch: Batch) -> tuple[int, int]:
    """Samples and positions of a batch whose passes this machine can do: all positions of one
    rather than some of each."""
    n, most = positions(batch), MOST_FLOP / small.flop
    for rows in (ROWS, 2, 1):
        if n * rows <= most and n <= LONGEST:
            return rows, n
    return 1, max(LEAST, min(LONGEST, int(most)) // LEAST * LEAST)


def check_rows(small: SmallCopy, batch: Batch) -> None:
    """Raises ProgramError where even one process has no finite loss, TooLarge where its passes
    would take too long."""
    tokens = max((x.shape[1] for x in batch.values() if x.ndim > 1), default=1) * ROWS
    if small.flop * tokens > MOST_FLOP:
        raise TooLarge(
            f"{small.flop * tokens:.1e} FLOP for {ROWS} samples, {MOST_FLOP:.0e} are done"
        )
    with torch.no_grad(), Still():
        model = copy.deepcopy(small.model)
        value = float(loss_of(small.program, call_model(small.program, model, batch), batch))
    if not math.isfinite(value):
        raise ProgramError(f"the loss of {ROWS} samples of a fresh model is {value}")
