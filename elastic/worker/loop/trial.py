"""The first pass through a loop's body, in the driver: on the meta device, where nothing is
computed and nothing can be read. What is wrong with the loss is found before a worker starts. Or
with values, up to the first call of its model: what it is called with; or through several steps,
whose samples somebody else gives."""

from __future__ import annotations

import io
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
)
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.data.batches import item_of
from elastic.data.collate import collate
from elastic.errors import ProgramError, unknown_keyword
from elastic.user_frames import user_line
from elastic.worker.loop.handoff import Handoff, HandoffMessage
from elastic.worker.loop.loop import WITH_A_BATCH, OfferedBatch, Outcome, Run
from elastic.worker.loop.loop_model import NoRows
from elastic.worker.loop.loss_reduction import A_MEAN, Means, check_any_rows
from elastic.worker.parallel.draw_requests import arguments_of
from elastic.worker.parallel.keyed_draws import TELLS, DrawOperations
from elastic.worker.process.readback import Number
from elastic.worker.program.calls import ModelCall, ModelCalls, count_of
from elastic.worker.program.loop_program import EVALUATE, LoopProgram, NotOfModel, Own, evaluated

log = logging.getLogger(__name__)

FirstBatch = Callable[[Any], dict[str, torch.Tensor]]  # of a dataset
# nothing that one rank is to do alone is done; on shapes nothing that comes every so many steps
NOT_THE_FIRST = {"rank": 1, "world_size": 2, "n_shares": 2, "step_index": 0, "epoch": 0}
ON_SHAPES = NOT_THE_FIRST | {"world_size": 1, "n_shares": 1, "step_index": 1}
SOME_STEPS = 1000  # of a job, where a script that only asks does not say how many itself
MOST_S = 10.0  # of a body that does not come to its run.step()
STEPS_MOST_S = 30.0  # of several steps with values
CALLED_BACK = ("weakref", "_weakrefset")
AGAIN_S = 0.5  # after an alarm that could not end it
LATE = "it has not come there in"
ANY = 1.0  # of a step whose numbers nobody knows
ROWS = 2  # of one sample a mean cannot be told from a sum
OWN_BACKWARD = (
    "loss.backward() at {where} makes gradients that no other rank has: write run.backward(loss) "
    "in its place, and run.step() in that of optimizer.step()"
)
# what torch says of layers that do not fit each other, whatever the batch is
SHAPES = re.compile(
    r"shapes cannot be multiplied|must have same reduction dim|Given normalized_shape|"
    r"Given groups=|but got input of size|to match target batch_size"
)


class Entered(BaseException):
    """Ends the script in the driver: what it trains is known, and nothing was found. `why`: it goes
    no further."""

    def __init__(self, program: LoopProgram, why: str = "") -> None:
        self.program, self.why = program, why


class Steps(Protocol):
    """Gives a body the samples of several steps, and looks at what it makes of them."""

    done: bool  # all of them

    def begin(
        self,
        program: LoopProgram,
        optimizer: Own,
        module: nn.Module,
        *,
        batch: dict[str, torch.Tensor],
    ) -> None:
        """`module`: that is trained; `batch`: what there is to be given."""

    @property
    def here(self) -> Mapping[str, int]:
        """What run.rank and the like are now."""

    def next(self) -> dict[str, torch.Tensor] | None:
        """The samples of the next step; None: there is none."""

    def backward(self, call: Callable[[], None]) -> None:
        """Does what run.backward does."""

    def stepped(self, loss_sum: Number, count: Number) -> None:
        """The body has come to run.step()."""

    def close(self) -> None:
        """The body was left."""


class Trial:
    """The driver as the host of a script. `program`: what it trains, once it has entered its loop;
    `calls`: of its model. With values: the first that trains, and the first, which may be another.
    """

    def __init__(
        self, stack: ExitStack, first: FirstBatch | None = None, steps: Steps | None = None
    ) -> None:
        """`first`: the batch that is given with its values, up to the first call of the model that
        trains, or through `steps`; None = two samples without values, up to run.step()."""
        self.program: LoopProgram | None = None
        self.first, self.steps = first, steps
        self.run: TriedRun | None = None
        self.calls: list[ModelCall] = []
        self.drawn: dict[str, str] = {}  # beside its model: file and line -> what draws there
        self._stack = stack
        self._apart = False

    def entered(self, run: Run) -> Run:
        self.program = run.program
        if run.given is not None:
            self._stack.callback(run.given.release)
        if threading.current_thread() is not threading.main_thread():
            raise Entered(run.program)  # nothing could end a body that hangs
        most_s = MOST_S if self.steps is None else STEPS_MOST_S
        self._stack.enter_context(_ended_after(most_s, run.program))
        for muted in (redirect_stdout, redirect_stderr):
            self._stack.enter_context(muted(io.StringIO()))
        self.run = TriedRun(run, self)
        return self.run

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that a person is to know of what the body draws."""
        return tuple(
            f"{where} draws ({operation}) outside of run.model(...), each rank its own: {TELLS}; "
            "draw in the model's forward pass"
            for where, operation in self.drawn.items()
        )

    def watch(self, module: nn.Module, n_rows: int) -> None:
        """From now on, in the body: calls of the model, and what is drawn beside them."""
        if self.first is None:
            self._stack.enter_context(StaysOnMeta())  # type: ignore[no-untyped-call]
        self._stack.enter_context(ModelCalls(n_rows, self._called).of(module))
        self._stack.enter_context(DrawOperations(self._drawn))

    def leaves(self, steps: Steps) -> None:
        """They are closed where the body is left."""
        self._stack.callback(steps.close)

    @property
    def inside(self) -> bool:
        """Is what happens now the model's, or run.backward's?"""
        return self._apart

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is drawn inside is the model's."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def _called(self, call: ModelCall) -> AbstractContextManager[None]:
        known = self.calls and trains(self.calls[-1])  # then no other is asked for
        if self.first is None or not self.calls or trains(call) and not known:
            self.calls.append(call)
        ends = self.first is not None and self.steps is None and trains(call)
        if ends and self.program is not None:
            raise Entered(self.program)
        return self.apart()

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = arguments_of(func, args, kwargs)
        draws = given.get("generator") is None and given.get("dropout_p") != 0.0  # of attention
        if draws and not self._apart and (where := user_line()):
            self.drawn.setdefault(where, func.overloadpacket.__name__)
        return func(*args, **kwargs)


def trains(call: ModelCall) -> bool:
    return call.graph and not call.evaluates


def is_found(error: Exception) -> bool:
    """Is what was raised in the trial raised in a worker too? Of what has only no values here, or
    fewer samples than it is cut into parts, nobody knows."""
    own = isinstance(error, ProgramError | NameError) and not isinstance(error, NoRows)
    if not own and not SHAPES.search(str(error)):
        log.info("its loop was not tried: %s", " ".join(str(error).split())[:200])
        return False
    return True


class StaysOnMeta(TorchDispatchMode):
    """`x.to(device)`, which stands in most loops, needs values of its own in no other place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            kwargs = {**kwargs, "device": args[0].device}
        return func(*args, **kwargs)


class TriedRun(Run):
    """Gives the first samples once, or those of several steps. Whoever asks where he is, as for `if
    run.rank == 0:`, may do what is to be done only once: the trial goes on as that of another rank,
    in another step."""

    def __init__(self, run: Run, trial: Trial) -> None:
        whole, device = run.program, "meta" if trial.first is None else "cpu"

        def there(batch: Mapping[str, torch.Tensor]) -> Any:
            return whole.given({key: value.to(device) for key, value in batch.items()})

        super().__init__(replace(whole, given=there), run.optimizer)
        self._whole, self.handoff = whole, _NoWorker(whole, trial.steps)
        if trial.steps is not None:  # one of many steps, before which others were done
            self.committed, self.train_loss, self.grad_norm = True, ANY, ANY
        self._begun = False  # has the first batch been given?
        with torch.device(device):
            self._module = whole.model()
        self.model.attach(self._module)
        self._trial = trial
        self._own_backward: str | None = None  # file and line that put gradients there beside ours
        if trial.first is None:
            for parameter in self._module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._has_gradient)

    def __getattr__(self, name: str) -> Any:
        if name in WITH_A_BATCH and not self.__dict__["_begun"]:
            return super().__getattr__(name)  # refused, as in a worker
        trial: Trial = self.__dict__["_trial"]
        here: Mapping[str, int] = ON_SHAPES if trial.first is None else NOT_THE_FIRST
        here = here if trial.steps is None else trial.steps.here
        if name in here:
            return here[name]
        if name == "steps":
            return int(self.__dict__["_whole"].settings.get("steps") or SOME_STEPS)
        raise Entered(self.__dict__["_whole"], f"it asks for run.{name} before")

    def __next__(self) -> Any:
        if self._batch is not None:
            self._refuse_own_backward()
            raise Entered(self._whole, "it leaves a batch without run.step()")
        return super().__next__()

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        if not self._trial.inside:
            self._own_backward = user_line()

    def _refuse_own_backward(self) -> None:
        """What stands in most loops. Raises ProgramError."""
        if self._own_backward is not None and not self._n_backward:
            raise ProgramError(OWN_BACKWARD.format(where=self._own_backward))

    def _offered(self) -> OfferedBatch:
        steps = self._trial.steps
        if not self._begun:
            batch: dict[str, torch.Tensor] | None = self._begin()
        elif steps is None:
            raise Entered(self._whole)
        if steps is not None and (batch := steps.next()) is None:
            raise Entered(self._whole)
        self._in_a_step = True
        self.logged.begin()
        assert batch is not None
        return OfferedBatch(batch, 0, 0)

    def _begin(self) -> dict[str, torch.Tensor]:
        """The samples that there are."""
        assert self._whole.dataset is not None
        if self._trial.first is None:
            self._evaluate()
        self._begun = True
        batch = (self._trial.first or _first)(self._whole.dataset())
        self._trial.watch(self._module, len(next(iter(batch.values()))))
        if (steps := self._trial.steps) is not None:
            self._trial.leaves(steps)
            steps.begin(self._whole, self.optimizer, self._module, batch=batch)
            self.model.module_numbers.passed()  # is of the trial
        return batch

    def step(self, clip_grad_norm: float | None = None, **unknown: Any) -> bool:
        for name in unknown:
            raise ProgramError(unknown_keyword("run.step", name, ["clip_grad_norm"]))
        if not self._n_backward:  # what is missing may be what another rank or step does
            self._refuse_own_backward()
            raise Entered(self._whole, "it comes to run.step() without run.backward(loss)")
        if all(parameter.grad is None for parameter in self._module.parameters()):
            raise NotOfModel
        return super().step(clip_grad_norm)

    def backward(self, loss: torch.Tensor) -> None:
        with self._trial.apart():  # what is computed again
            if self._trial.steps is None:
                super().backward(loss)
            else:
                self._trial.steps.backward(partial(super().backward, loss))

    def _evaluate(self) -> None:
        """What the script gives for its validation set, on shapes. Raises ProgramError for a mean,
        and where it does not take any number of rows."""
        if self._whole.evaluation is None or self._whole.validation is None:
            return
        validation, evaluation = self._whole.validation(), self._whole.evaluation
        means = Means(count_of(self._whole, _first(validation)))

        def called(n: int, mode: Means) -> tuple[Number, Mapping[str, Any]]:
            without = {key: x.to("meta") for key, x in _first(validation, n).items()}
            with mode:
                return evaluated(evaluation(self.model, without))

        value: Number = 0.0
        beside: Mapping[str, Any] = {}
        self.model.eval()
        try:
            try:
                value, beside = called(ROWS, means)
            except Exception as error:  # the user's own code
                if is_found(error):
                    raise
            check_any_rows(EVALUATE, called)
        finally:
            self.model.train()
        for name, one in {"": value, **beside}.items():
            if one in means:
                what = f"{EVALUATE}['{name}']" if name else EVALUATE
                raise ProgramError(f"{what} is {A_MEAN}")


def _first(dataset: Any, n: int = ROWS) -> dict[str, torch.Tensor]:
    """The first rows of a batch."""
    return collate([item_of(dataset, i, None) for i in range(min(n, len(dataset)))])


class _NoWorker(Handoff):
    def __init__(self, program: LoopProgram, steps: Steps | None) -> None:
        super().__init__()
        self._program, self._steps = program, steps

    def say(self, word: HandoffMessage) -> Outcome:
        if self._steps is not None and word.kind == "step":
            self._steps.stepped(word.loss_sum, word.tokens)
            return Outcome(True, ANY, ANY)
        raise Entered(self._program, f"it comes to run.{word.kind}() without one")


@contextmanager
def _ended_after(seconds: float, program: LoopProgram) -> Iterator[None]:
    """An alarm that somebody else has set is rung when it was to be."""

    def end(number: int, frame: FrameType | None) -> None:
        if not _clears_up(frame):
            raise Entered(program, f"{LATE} {seconds:.0f} s")

    began_s = time.monotonic()
    before = signal.signal(signal.SIGALRM, end)
    left_s, again_s = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if left_s:
            rest_s = left_s - (time.monotonic() - began_s)
            signal.setitimer(signal.ITIMER_REAL, max(0.001, rest_s), again_s)


def _clears_up(frame: FrameType | None) -> bool:
    """Is this within what Python calls when an object goes? What is raised there is lost."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") in CALLED_BACK:
            return True
        frame = frame.f_back
    return False
