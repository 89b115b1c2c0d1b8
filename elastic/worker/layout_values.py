"""Do the layouts compute what one process does? Loss and gradients of one batch of a small copy, in two real processes.

The copy has the program's own modules with weights drawn at random (zeros that a fresh model begins with would hide much), few
of its blocks where it is large, and no random numbers while it runs. The processes are forked from one that has torch and the
program, meet over gloo on this machine, and run the very code that training runs: TrainState, Stepper, the pipeline's schedule.
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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from elastic.data.loader import collate
from elastic.errors import ElasticError, ProgramError
from elastic.mesh import coordinates
from elastic.models.attention import over
from elastic.program import Program
from elastic.types import Layout, ModelProfile, Plan, WorkerId
from elastic.worker.calls import call_model, loss_of
from elastic.worker.fixed import even
from elastic.worker.forward_trace import Batch, python_random
from elastic.worker.groups import Groups, is_collective_error
from elastic.worker.model_profile import block_names, build_meta, trace
from elastic.worker.pipeline import PassThrough
from elastic.worker.rendezvous import host_store, new_secret
from elastic.worker.sequence import before_cut, tensors_in
from elastic.worker.step import Stepper
from elastic.worker.structure import told
from elastic.worker.train_state import TrainState
from elastic.worker.weights import cut

FAMILIES = {"dp": Layout(dp_shard=2), "tp": Layout(tp=2), "cp": Layout(cp=2), "pp": Layout(pp=2)}
ROWS = 4  # samples of the batch
WHOLE_MOST_PARAMETERS = 30_000_000  # of a model that is copied with all of its blocks
BLOCKS = 3  # of a copy of a larger one
MOST_PARAMETERS = 150_000_000  # of a copy: beyond it nothing is compared on this machine
LONG, SHORT = 128, 64  # positions: of longer sequences so many are taken, where the model allows it
MOST_FLOP = 3e11  # of the passes of one process
PERTURBED = 0.05  # standard deviation of what is added to each weight, of its own or of 1
LOSS_AGREES, GRADIENT_AGREES = 1e-4, 3e-4  # relative; a gradient's to the largest element of the tensor
ROUNDING, ROUNDING_MOST = 4.0, 5e-2  # times what a lower precision inside of the model explains; differences that it may
SMALL = 1e-6  # of the largest element of all gradients: what is below is rounding
FAMILY_MOST_S, MEET_S = 30.0, 20.0
HERE = "127.0.0.1"
LOST = "its ranks lose each other: each of them must call the same modules and give gradients to the same weights"
FORKS = get_context("fork")
NOT_OF_A_LAYOUT = (
    "optimizer", "precision", "reduce_dtype", "compile", "float8", "guards", "noise_scale", "microbatch_tokens",
    "clip_grad_norm", "layout",
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


class Copy:
    """A small copy of a program: `program` builds it anew with equal weights, `model` is one."""

    def __init__(self, program: Program, profile: ModelProfile) -> None:
        self.n_blocks = profile.n_blocks
        whole = profile.n_params <= WHOLE_MOST_PARAMETERS
        self.model = _whole(program) if whole else self._cut(program)
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in self.model.parameters()):
            self.model.float()
        _perturb(self.model)
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
        model = build_meta(program)
        self.n_blocks = shorten(model, block_names(model, program.blocks))
        if (n_params := sum(p.numel() for p in model.parameters())) > MOST_PARAMETERS:
            raise TooLarge(f"{n_params / 1e6:.0f} M parameters are left of it with {self.n_blocks} blocks")
        kept = set(model.state_dict())
        plain = [name for name, _ in model.named_buffers() if name not in kept]
        model.to_empty(device="cpu")
        if plain and not (program.buffers is not None and program.buffers(model)):
            raise TooLarge(f"the values of its buffer {plain[0]} are known to the whole model only")
        _fill(model)
        return model

    def _build(self) -> nn.Module:
        if torch.get_default_device().type != "meta":
            return copy.deepcopy(self.model)
        memo: dict[int, Any] = {}
        for p in self.model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for b in self.model.buffers():
            memo[id(b)] = torch.empty_like(b, device="meta")
        return copy.deepcopy(self.model, memo)


def _no_steps(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Which keeps nothing: no step is made."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)


class TooLarge(Exception):
    """The program cannot be compared on this machine."""


def shorten(model: nn.Module, blocks: list[str]) -> int:
    """Leaves the first blocks of a model, where they stand in one list. Returns how many there are now."""
    parents = {name.rpartition(".")[0] for name in blocks}
    if len(parents) != 1 or len(blocks) <= BLOCKS:
        return len(blocks)
    parent = parents.pop()
    held = model.get_submodule(parent)
    if not isinstance(held, nn.ModuleList | nn.Sequential) or len(held) != len(blocks):
        return len(blocks)
    owner, _, leaf = parent.rpartition(".")
    setattr(model.get_submodule(owner), leaf, held[:BLOCKS])
    return BLOCKS


def _whole(program: Program) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = program.model()
    if program.weights is not None:
        _fill(model)
    elif program.init is not None:
        program.init(model)
    return model


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Weights as fresh modules of their kinds have them, where these say so; else of a usual size."""
    torch.manual_seed(0)
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
            continue
        for name, p in module.named_parameters(recurse=False):
            p.normal_(std=p[0].numel() ** -0.5) if p.ndim > 1 else p.fill_(1.0 if name.endswith("weight") else 0.0)


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    """So that no weight is 0 by design and none equals another."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.is_floating_point():
            size = float(p.abs().mean()) or 1.0
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * (PERTURBED * size if p.ndim else 0.01 * size))


class Still(TorchFunctionMode):
    """Random numbers switched off: dropout keeps everything, what is drawn is the middle of its range."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name and args and torch.is_tensor(args[0]):
            return args[0]
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            kwargs["dropout_p"] = 0.0
        if name in ("bernoulli", "bernoulli_"):
            return torch.ones_like(args[0]) if name == "bernoulli" else args[0].fill_(1)
        out = func(*args, **kwargs)
        if name in ("rand", "rand_like", "uniform_") and torch.is_tensor(out):
            return out.fill_(0.5)
        if name in ("randn", "randn_like", "normal_") and torch.is_tensor(out):
            return out.fill_(0.0)
        return out


def job_of_copy(job: Mapping[str, Any]) -> dict[str, Any]:
    """The job in plain float32, without what is no mathematics of a layout."""
    kept = {key: value for key, value in job.items() if key not in NOT_OF_A_LAYOUT}
    return kept | {"global_batch": ROWS, "n_samples": ROWS, "steps": 1, "seed": 0}


def batch_of(dataset: Any, budget: Any, n_rows: int = ROWS) -> Batch:
    """The first samples; of a job with a budget of tokens, or of a dataset with fewer, the first one again and again."""
    from elastic.data.batches import item_of

    if budget is not None:
        part = budget.of_one(0, 1)
        return collate([item_of(dataset, 0, part.length)] * n_rows)
    streams = not hasattr(dataset, "__len__") or len(dataset) < n_rows or type(dataset).__name__ == "Stream"
    return collate([dict(item_of(dataset, 0 if streams else i, None)) for i in range(n_rows)])


# ------------------------------------------------------------------------------------------ one layout


def compare(small: Copy, job: Mapping[str, Any], batch: Batch, layout: Layout, most_s: float = FAMILY_MOST_S) -> Compared:
    """Runs the layout in processes of its own. Never raises for what the program does there."""
    began = time.monotonic()
    store, secret = host_store(HERE), new_secret()
    mine, processes = [], []
    for rank in range(layout.world_size):
        here, there = FORKS.Pipe(duplex=False)
        process = FORKS.Process(
            target=_rank, args=(there, small, dict(job), batch, (layout, rank, store.port, secret)), daemon=True
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
        return Compared(str(layout), f"it raises {problems[0]}", seconds)
    if lost or len(found) < layout.world_size:
        return Compared(str(layout), LOST if lost else LOST.replace("lose", "wait for"), seconds)
    judged = _judged(layout, [answer for _, answer in found.values()], seconds)
    if judged.problem and judged.worst < ROUNDING_MOST and judged.off < ROUNDING_MOST:
        return _judged(layout, [answer for _, answer in found.values()], seconds, _rounding(small, batch, layout.cp))
    return judged


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


def _rounding(small: Copy, batch: Batch, cp: int) -> float:
    """What rounding alone makes of the loss and the gradients of one process, as a multiple of what is allowed: between float32
    and float64. 1 where it computes in no other precision than it says, or cannot be told."""
    here, there = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_round, args=(there, small, batch, cp), daemon=True)
    process.start()
    there.close()
    try:
        return float(here.recv()) if here.poll(FAMILY_MOST_S) else 1.0
    except EOFError:
        return 1.0
    finally:
        process.kill()
        process.join()


def _round(pipe: Connection, small: Copy, batch: Batch, cp: int) -> None:
    torch.set_num_threads(1)
    with Still(), python_random(0.999):
        loss, gradients, _ = _alone(small, batch, cp)
        double = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
        exact, exactly, _ = _alone(small, double, cp, torch.float64)
    most = max((float(g.abs().max()) for g in exactly.values() if g.numel()), default=0.0)
    found = [abs(loss - exact) / (LOSS_AGREES * max(1e-3, abs(exact)))]
    for name, gradient in gradients.items():
        allowed = GRADIENT_AGREES * float(exactly[name].abs().max()) + SMALL * most
        found.append(float((gradient - exactly[name]).abs().max()) / max(allowed, 1e-30))
    pipe.send(max(1.0, ROUNDING * max(found)))


def _judged(layout: Layout, answers: list[dict[str, Any]], seconds: float, times: float = 1.0) -> Compared:
    """`times`: how much more may differ than float32 explains."""
    whole = answers[0]["whole"]
    loss = sum(answer["loss"] for answer in answers)
    at, worst = max(((a["worst_at"], a["worst"]) for a in answers), key=lambda pair: pair[1])
    problem, off = "", abs(loss - whole) / max(1e-3, abs(whole))
    if not off <= times * LOSS_AGREES:
        first = next((a["first"] for a in answers if a["first"]), "")
        where = f"; {first} is the first to give something else" if first else ""
        problem = (
            f"it computes another function: the loss of {ROWS} samples is {loss:.6g}, in one process it is {whole:.6g}{where}"
        )
    elif not worst <= times:
        by = f"{worst * GRADIENT_AGREES:.1%} of its largest element"
        problem = f"it computes other gradients than one process: that of {at} differs by {by}"
    return Compared(str(layout), problem, seconds, loss, whole, off, worst * GRADIENT_AGREES, at)


def _rank(pipe: Connection, small: Copy, job: dict[str, Any], batch: Batch, place: tuple[Layout, int, int, str]) -> None:
    torch.set_num_threads(1)
    try:
        answer: tuple[str, Any] = ("done", _values(small, job, batch, place))
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        lost = not isinstance(error, ElasticError) and is_collective_error(error)
        answer = ("lost", "") if lost else ("raised", str(error) if isinstance(error, ElasticError) else told(error))
    if answer[0] == "lost":
        time.sleep(0.5)  # who was the reason may still say so
    pipe.send(answer)


def _values(small: Copy, job: dict[str, Any], batch: Batch, place: tuple[Layout, int, int, str]) -> dict[str, Any]:
    layout, rank, port, secret = place
    program, profile = small.program, small.profile
    with Still(), python_random(0.999):
        whole, gradients, outputs = _alone(small, batch, layout.cp)
        n = 2 if layout.pp > 1 else 1
        ranks = tuple(WorkerId("here", i) for i in range(layout.world_size))
        layers = even(profile.n_blocks, layout.n_stages)
        plan = Plan(1, layout, ranks, even(ROWS, layout.dp), layers, n)
        groups = Groups(1, layout, torch.device("cpu"))
        try:
            groups.join((HERE, port), rank, layout.world_size, MEET_S, secret)
            state = TrainState(program, profile, groups, (layout, layers, rank), job)
            _give(state, small)
            stepper = Stepper(program, job, plan, state, groups)
            state.train(not program.batch_dependent)
            at = coordinates(layout, rank).dp(layout)
            start = sum(plan.samples[:at])
            rows = {key: x[start : start + plan.samples[at]] for key, x in batch.items()}
            with Outputs(state.models) as here:
                loss, _ = stepper.forward_backward([rows], train=True)
            own = state.gradients()
            stepper.add_shared(own)
            worst, worst_at = _differ(state, own, gradients)
            take = stepper.sequence.shard.take if stepper.sequence.shard is not None else None
            first = here.first_difference(outputs, slice(start, start + plan.samples[at]), take)
            return {
                "whole": whole, "loss": loss if stepper.speaks else 0.0, "worst": worst, "worst_at": worst_at, "first": first,
            }  # fmt: skip
        except Exception:
            groups.abort()
            raise


class Outputs:
    """What each module gives back in forward passes, by name, in the order in which they are done."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models, self.found, self.hooks = models, dict[str, list[Tensor]](), list[Any]()

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
        """The first module whose output is another than in the whole model; '' = none that can be compared."""
        for name in whole.found:
            expected, mine = _joined(whole.found[name]), _joined(self.found.get(name, []))
            if expected is None or mine is None or expected.ndim < 1 or expected.shape[0] != ROWS:
                continue
            expected = expected[rows]
            mine = mine[-expected.shape[0] :]  # a pipeline stage is called once before, with made-up values
            if take is not None and expected.ndim > 1 and expected.shape != mine.shape:
                expected = take(expected) if expected.shape[1] % (2 * 2) == 0 else expected
            if expected.shape == mine.shape and not torch.allclose(
                mine, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
            ):
                return name
        return ""


def _joined(calls: list[Tensor]) -> Tensor | None:
    """Of several microbatches; None where they do not go together."""
    if not calls or any(x.shape[1:] != calls[0].shape[1:] or not x.ndim or not x.is_floating_point() for x in calls):
        return None
    return torch.cat(calls)


def _alone(small: Copy, batch: Batch, cp: int, dtype: torch.dtype = torch.float32) -> tuple[float, dict[str, Tensor], Outputs]:
    """Loss, gradients and the modules' outputs of one process."""
    model = copy.deepcopy(small.model).to(dtype).train(not small.program.batch_dependent)
    given = before_cut(small.program, batch) if cp > 1 else batch
    with over(None) if cp > 1 else nullcontext(), Outputs([model]) as outputs:
        output = call_model(small.program, model, given)
    loss = loss_of(small.program, output, given)
    loss.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    gradients = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in named.items()}
    return float(loss.detach()), gradients, outputs


@torch.no_grad()
def _give(state: TrainState, small: Copy) -> None:
    """The copy's weights and buffers."""
    source = small.model.state_dict(keep_vars=True)
    for fqn, (box, tensor) in (*state.tensors.items(), *state.frozen.items()):
        if fqn.startswith("model."):
            tensor.copy_(cut(source[fqn.removeprefix("model.")].detach(), box))
        elif fqn.startswith("optim."):
            tensor.zero_()


def _differ(state: TrainState, own: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference of a gradient, as a multiple of what is allowed."""
    most = max((float(g.abs().max()) for g in whole.values() if g.numel()), default=0.0)
    worst, at = 0.0, ""
    for fqn, parameter in state.local.items():
        if not parameter.requires_grad or f"model.{fqn}" not in state.tensors or not parameter.numel():
            continue
        box, _ = state.tensors[f"model.{fqn}"]
        expected = cut(whole[fqn], box)
        got = own.get(fqn, torch.zeros_like(parameter))
        allowed = GRADIENT_AGREES * float(whole[fqn].abs().max()) + SMALL * most
        found = float((got - expected).abs().max()) / max(allowed, 1e-30)
        if not found <= worst:
            worst, at = (found if found == found else math.inf), fqn
    return worst, at


def shortened(small: Copy, batch: Batch) -> Batch:
    """With the first positions of long sequences, where that is all the same to the model."""
    n = max((x.shape[1] for x in batch.values() if x.ndim == 2), default=0)
    if n <= LONG:
        return batch
    cut = {key: x[:, :SHORT] if x.ndim > 1 and x.shape[1] == n else x for key, x in batch.items()}
    try:
        with torch.no_grad(), Still():
            output = call_model(small.program, copy.deepcopy(small.model), {key: x[:1] for key, x in cut.items()})
            loss_of(small.program, output, {key: x[:1] for key, x in cut.items()})
    except Exception:  # noqa: BLE001 - the user's model: its length is its own
        return batch
    return cut


def check_rows(small: Copy, batch: Batch) -> None:
    """Raises ProgramError where even one process has no finite loss, TooLarge where its passes would take too long."""
    tokens = max((x.shape[1] for x in batch.values() if x.ndim > 1), default=1) * ROWS
    n_params = sum(p.numel() for p in small.model.parameters())
    if 6.0 * n_params * tokens > MOST_FLOP:
        raise TooLarge(f"{6.0 * n_params * tokens:.1e} FLOP for {ROWS} samples")
    with torch.no_grad(), Still():
        model = copy.deepcopy(small.model)
        value = float(loss_of(small.program, call_model(small.program, model, batch), batch))
    if not math.isfinite(value):
        raise ProgramError(f"the loss of {ROWS} samples of a fresh model is {value}")
