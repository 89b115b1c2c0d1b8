"""The user's script: run in the driver until it has entered `elastic.loop` and its first step, and
in a worker to its end, in a thread of its own."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from elastic.config.masking import masked_text
from elastic.data.progress import gets_on, heard_by
from elastic.errors import ElasticError, Interrupted, NodeMemoryFull, ProgramError, SpecError
from elastic.types import Job
from elastic.user_frames import log_text, raised_at, user_traceback
from elastic.worker.loop import refused_calls, without_gpu
from elastic.worker.loop.handoff import Handoff, HandoffMessage
from elastic.worker.loop.loop import OfferedBatch, Outcome, Run, here
from elastic.worker.loop.loop_model import GenerationAborted, outline_of
from elastic.worker.loop.trial import Entered, FirstBatch, Steps, Trial, is_found, trains
from elastic.worker.parallel.keyed_draws import KeyedDraws
from elastic.worker.process.call_log import CallLog
from elastic.worker.process.cuda_errors import out_of_memory
from elastic.worker.process.readback import Number
from elastic.worker.process_groups.transport import is_collective_error
from elastic.worker.program.calls import ModelCall
from elastic.worker.program.commit import Commit
from elastic.worker.program.job_program import with_job
from elastic.worker.program.loop_program import (
    GROUPS,
    LoopProgram,
    NotOfModel,
    OptimizerFactory,
    Settings,
    clear_by,
    rebind,
)
from elastic.worker.state.train_state import TrainState

if TYPE_CHECKING:
    from elastic.program import Program
    from elastic.types import Plan
    from elastic.worker.program.extra_state import ExtraState

log = logging.getLogger(__name__)

TrainFunction = Callable[[], Callable[[], None]]  # gives one, anew for each start
# what comes before the loop may take this long, from its start or since it said that it makes
# progress, before the worker says no more that it makes some
BEFORE_MOST_S = 3600.0
AFTER_MOST_S = 300.0  # what comes after the loop may take this long before the run is called done
LOOK_S = 1.0
RAY_TRAIN = re.compile(r"`(\w+)` cannot be used outside of a Ray Train training function")
INSTEAD = {  # of what ray.train gives to its own workers
    "report": "each step's loss and gradient norm are recorded without "
    "it; run.log tells numbers of your own, validation= and evaluate= of "
    "elastic.loop give more",
    "get_context": "run.rank and run.world_size say where this is, inside of the loop; a "
    "batch_size that is divided by the number of workers need not be, global_batch is that of all",
    "get_checkpoint": "the state is there when the loop begins; what else must "
    "be remembered is extra_state= of "
    "elastic.loop",
    "get_dataset_shard": "give elastic.loop the whole dataset=; each batch is this "
    "rank's share of it",
}
NO_CALL = (
    "the body of its loop was not followed to its first run.model(...): {why}; call run.model "
    "itself, with tensors, before what ends there"
)
DONE_ALREADY = "run.model and the batches are this rank's parts, on its device"
OTHERS_BYTES = 4 << 30  # on a GPU that a script has for itself: CUDA's contexts
RAISED = (ProgramError, SpecError, NodeMemoryFull)  # a script does not begin again by itself
WHOLE_MODEL = (
    "it is before its first batch, and the whole model need not fit on one GPU: leave .to(device) "
    "out, elastic.loop puts this rank's part of the model there"
)


@dataclass(frozen=True)
class ScriptSource:
    """A script and how it is called. `function`: gives the train function that stands in it, which
    is called instead of the whole file."""

    file: str
    args: tuple[str, ...] = ()
    seed: int = 0
    function: TrainFunction | None = None

    @classmethod
    def of(cls, job: Job, function: TrainFunction | None = None) -> ScriptSource:
        return cls(str(job.script), job.args, job.seed, function)

    def run(self) -> None:
        """As `python FILE ARGS` would, under the job's seed. Raises what the script raises."""
        random.seed(self.seed)
        np.random.seed(self.seed % (1 << 32))
        torch.manual_seed(self.seed)
        if self.function is not None:
            with self._in_place_of_main(sys.modules["__main__"]):
                self.function()()
            return
        module = types.ModuleType("__main__")
        module.__dict__.update(__file__=self.file, __builtins__=__builtins__)
        with self._in_place_of_main(module):
            # the user's own code
            exec(compile(Path(self.file).read_bytes(), self.file, "exec"), module.__dict__)

    @contextmanager
    def _in_place_of_main(self, module: types.ModuleType) -> Iterator[None]:
        folder = os.getcwd()
        before = sys.argv, sys.modules["__main__"], list(sys.path)
        sys.argv, sys.modules["__main__"] = [self.file, *self.args], module
        sys.path.insert(0, str(Path(self.file).parent))
        try:
            yield
        finally:
            sys.argv, sys.modules["__main__"], sys.path[:] = before
            os.chdir(folder)

    def told(self, error: BaseException) -> str:
        """In one line: where in the user's code, and what was raised."""
        place = raised_at(error)
        where = f"{place.filename}, line {place.lineno}" if place else self.file
        what = str(error) if isinstance(error, ElasticError) else f"{type(error).__name__}: {error}"
        if found := RAY_TRAIN.match(str(error)):
            what = _instead(
                found.group(1), [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            )
        if without_gpu.NO_GPU.search(str(error)):
            what = f"{what.splitlines()[0]}: {without_gpu.ADVICE}"
        if isinstance(error, torch.OutOfMemoryError):
            what = f"{what.partition(' Including ')[0]}: {WHOLE_MODEL}"
        return " ".join(f"{where}: {what}".split())


def _instead(asked: str, frames: Sequence[str]) -> str:
    """The answer to a script that asks Ray Train, which has not started it. `frames`: names of
    functions, outermost first."""
    prepare = next((name for name in frames if name.startswith("prepare_")), "")
    advice = DONE_ALREADY if prepare else INSTEAD.get(asked, DONE_ALREADY)
    return f"ray.train's {prepare or asked} has no meaning in elastic.loop, leave it out: {advice}"


# ------------------------------------------------------------------------------------ in the driver


def capture(
    file: Path, args: Sequence[str], seed: int, *, function: TrainFunction | None = None
) -> LoopProgram:
    """Runs the script until it enters `elastic.loop`, and tries its loop once: the program that it
    has made. Raises SpecError where it never enters it, and for what the trial has found."""
    trial, _ = tried(ScriptSource(str(file), tuple(args), seed, function))
    assert trial.program is not None
    notes = (*trial.program.notes, *trial.notes)
    called = next(filter(trains, trial.calls), next(iter(trial.calls), None))
    return replace(trial.program, called=called, notes=notes)


def first_call(source: ScriptSource, first: FirstBatch) -> LoopProgram:
    """The same with values, up to the first call of its model that trains, with the samples of
    `first`: what it is `called` with, and what before, if that is another call. Raises SpecError
    where the script comes to no call."""
    return called_of(*tried(source, first))


def called_of(trial: Trial, why: str) -> LoopProgram:
    """What such a trial has found. `why`: it went no further."""
    assert trial.program is not None
    if not trial.calls:
        raise SpecError(NO_CALL.format(why=why))
    first_one, called = trial.calls[0], replace(trial.calls[-1], evaluates=False)
    before = first_one if unlike(first_one, called) else None
    note = (
        f"its loop was not followed to a run.model(...) that trains: {why}; what tp makes of its "
        "first call was compared in its place"
    )
    notes = () if trains(trial.calls[-1]) else (note,)
    return replace(trial.program, called=called, called_before=before, notes=notes)


def unlike(one: ModelCall, other: ModelCall) -> bool:
    """In what they are called with, or in their mode."""
    return one.evaluates != other.evaluates or outline_of(one) != outline_of(other)


def tried(
    source: ScriptSource, first: FirstBatch | None = None, steps: Steps | None = None
) -> tuple[Trial, str]:
    """The script, run up to its loop, and the body of that: on shapes, or with the samples of
    `first` up to a call of its model, or through `steps`. And why it went no further."""
    why = "it has none"
    with ExitStack() as stack:
        stack.enter_context(refused_calls.refused())
        stack.enter_context(without_gpu.answered())
        here.host = trial = Trial(stack, first, steps)
        try:
            source.run()
        except Entered as end:
            why = end.why or why  # what it trains is known
        except Interrupted:  # no sys.exit of the script: a signal
            raise
        except Exception as error:  # noqa: BLE001 - a boundary: the user's script may raise anything
            certain = steps is None or isinstance(error, NotOfModel)
            if trial.program is None or certain and is_found(error):
                told = _refused(source, error, entered=trial.program is not None)
                # what ours say in one line is all
                raise told from (None if isinstance(error, ElasticError) else error)
            why = masked_text(source.told(error))  # a journal has it
        except SystemExit as error:
            if trial.program is None:
                raise _refused(source, error) from error
        finally:
            here.host = None
            if torch.cuda.is_initialized():  # a driver's workers need what it would keep of a GPU
                gc.collect()
                torch.cuda.empty_cache()
    if trial.program is None:
        raise SpecError(f"{source.file}: it ended before it entered elastic.loop")
    return trial, why


def _refused(source: ScriptSource, error: BaseException, *, entered: bool = False) -> SpecError:
    if isinstance(error, SystemExit):
        said = " ".join(source.args) or "no arguments"
        return SpecError(
            f"{source.file}: it ended before it entered elastic.loop (exit code {error.code}, with "
            f"{said})"
        )
    before = "" if entered else "before it entered elastic.loop: "
    return SpecError(f"{before}{source.told(error)}")


# -------------------------------------------------------------------------------------- in a worker


AGAIN = object()  # the answer to a script that has ended: from its top


def _of_exit(error: SystemExit) -> BaseException:
    """What the script has caught before it left by sys.exit, if anything."""
    caught = error.__cause__ or error.__context__
    return caught if isinstance(caught, Exception) else error


class Script:
    """The script of a job, in its own thread; the training thread calls all methods but `entered`
    and `_work`.

    The script stands before its next batch, or works on one, or waits in run.step() until it is
    decided what became of the step: done here, or not. Where a collective has aborted outside of
    run.model, where the script raises over what it has of a step that is lost, or where steps are
    done again that it is past, it is started from its top; what it must remember is extra state.
    """

    def __init__(
        self,
        source: ScriptSource,
        device: torch.device,
        calls_file: Path | None = None,
        *,
        run_name: str = "RUN",
    ) -> None:
        """`calls_file`: where it is kept what the script calls. `run_name`: for messages."""
        self.run_name = run_name
        self.source, self.device, self.calls_file = source, device, calls_file
        self.handoff = Handoff()
        self.run: Run | None = None  # of the loop that was entered last
        self.clip_grad_norm: float | None = None  # as told in run.step()
        self.draws: KeyedDraws | None = None  # by which its model draws
        self.finished = False
        self._inside = False
        self._stop_told = False
        self._raised: HandoffMessage | None = None  # that its node has no memory
        self._before_loop = ExitStack()  # what ends where the script enters its loop
        self._progress_s = time.monotonic()  # when it has said last that it makes some

    def start(self) -> LoopProgram:
        """Returns when the script stands before its loop; makes progress until then. Raises
        ProgramError where it never comes there."""
        threading.Thread(target=self._work, name="script", daemon=True).start()
        late = False
        while self.handoff.hear(LOOK_S) is None:
            before, late = late, time.monotonic() > self._progress_s + BEFORE_MOST_S
            if not late:
                gets_on()
            elif not before:
                log.warning(
                    "%s: what comes before its loop takes more than %.0f s",
                    self.source.file,
                    BEFORE_MOST_S,
                )
        return self._stand().program

    # -------------------------------------------------------------------------- the script's thread

    def entered(self, run: Run) -> Run:
        if self._inside:
            raise ProgramError("elastic.loop is entered a second time; a script has one loop")
        self._before_loop.close()
        self._inside, self.run, run.handoff = True, run, self.handoff
        run.name = self.run_name
        if self.calls_file is not None:
            with suppress(OSError):  # a full disk: then only who waits can be asked
                run.calls.keep_in(self.calls_file)
        return run

    def _made_progress(self) -> None:
        self._progress_s = time.monotonic()

    def _work(self) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        here.host = self
        while True:
            self._inside = False
            with heard_by(self._made_progress):
                word = self._once()
            if self.run is not None:
                self.run.model.module_numbers.hand_over()
                if self.run.given is not None:
                    self.run.given.release()
            self.handoff.say(word)

    def _once(self) -> HandoffMessage:
        try:
            with refused_calls.unscaled(), self._before_loop:
                self._before_loop.enter_context(without_gpu.unplaced())
                self.source.run()
        except SystemExit as error:
            if error.code not in (None, 0):
                return HandoffMessage("ended", error=self._why(_of_exit(error)))
        except BaseException as error:  # noqa: BLE001 - a boundary: the user's script may raise anything
            return HandoffMessage("ended", error=self._why(error))
        if self.run is None:
            return HandoffMessage(
                "ended",
                error=ProgramError(f"{self.source.file}: it ended before it entered elastic.loop"),
            )
        return HandoffMessage("ended")

    def _why(self, error: BaseException) -> BaseException:
        """A collective that aborted outside of run.model, and memory that gave out over a batch,
        stay what they are; memory that gave out before is the script's only on a GPU that it has
        for itself. What the script makes of zeros, or of numbers that are not there, is no error of
        its own."""
        has_a_batch = self._inside and "step_index" in vars(self.run)
        full = out_of_memory(error) and has_a_batch
        if full or self._inside and is_collective_error(error):
            return error.with_traceback(None)
        own = isinstance(error, Exception | SystemExit)
        if self._inside and self.run is not None and self.run.lost and own:
            log.warning(
                "%s; this step was not committed: the script is started again from its top",
                self.source.told(error),
            )
            return GenerationAborted(str(error))
        kind = NodeMemoryFull if self._of_the_node(error) else ProgramError
        told = kind(self.source.told(error))
        if not isinstance(error, ElasticError):  # what ours say in one line is all
            print(masked_text(log_text(error)), end="", file=sys.stderr)
            told.add_note(masked_text(user_traceback(error)))
        return told

    def _of_the_node(self, error: BaseException) -> bool:
        """Did memory give out that others may have taken, as that of the host?"""
        if self.device.type != "cuda" or isinstance(error, MemoryError):
            return isinstance(error, MemoryError)
        if not out_of_memory(error):
            return False
        try:
            free, total = torch.cuda.mem_get_info(self.device)
        except RuntimeError:
            return True  # filled, or lost: it cannot be asked
        return total - free - torch.cuda.memory_reserved(self.device) > OTHERS_BYTES

    # -------------------------------------------------------------------------- the training thread

    def _stand(self) -> Run:
        """Waits until the script stands before its next batch, from wherever it is. Where it waits
        in run.step(), nobody here knows what the step came to: it was not committed, or the state
        that comes is that of a later one."""
        while True:
            word = self.handoff.hear()
            assert word is not None
            if word.kind == "next" and self.run is not None and not self.finished:
                return self.run
            if word.kind == "step":
                self.handoff.answer(Outcome(False))
            elif word.kind == "next":
                self.handoff.answer(None)  # past its loop: to its end, and from the top
            elif isinstance(word.error, RAISED) and word is not self._raised and not self.finished:
                if isinstance(word.error, NodeMemoryFull):
                    self._raised = word  # whoever asks again wants it to try again
                raise word.error
            else:
                self.finished = False
                self.handoff.answer(AGAIN)

    def begin(self, plan: Plan, state: TrainState, job: Job, *, extra: ExtraState) -> Program:
        """A generation begins: its state goes to the script's own objects. Returns the program that
        they make."""
        run = self._stand()
        program = self.keyed(with_job(run.program, job))
        extra.objects = dict(program.extra_state)
        rebind(run.optimizer, state.optimizers.each)
        if isinstance(run.program.optimizer, OptimizerFactory):
            clear_by(run.program.optimizer, run.optimizer, state.model)
        if isinstance(settings := extra.objects.get(GROUPS), Settings):
            settings.expect(state.profile.optimizers, state.step)
            settings.modules = run.model.module_numbers
        extra.load(state.tensors)
        run.model.attach(state.model)
        run.rank, run.world_size, run.steps = state.rank, plan.layout.world_size, job.steps
        run.n_shares = plan.layout.dp
        run.step_index = state.step
        run.calls.enter(plan.generation)
        return program

    def keyed(self, program: Program) -> Program:
        """With what it draws keyed."""
        return program if self.draws is None else self.draws.of(program)

    @property
    def calls(self) -> CallLog:
        assert self.run is not None
        return self.run.calls

    def compute(
        self, batch: Mapping[str, torch.Tensor], step: int, epoch: int, *, ends_epoch: bool = False
    ) -> tuple[Number, Number]:
        """One pass through the loop's body up to run.step(): loss sum and tokens of this rank,
        scalar tensors where they are still on the device. Raises what aborted there."""
        self.handoff.answer(OfferedBatch(batch, step, epoch, ends_epoch))
        word = self._heard(step)
        self.clip_grad_norm = word.clip_grad_norm
        return word.loss_sum, word.tokens

    def applied(self, commit: Commit, step: int, live: bool = True) -> None:
        """The step is done. Returns when the script stands before the next one, or has left the
        loop after the last; `live`: collectives that aborted on the way there are raised."""
        self.handoff.answer(Outcome(True, commit.train_loss, commit.grad_norm))
        assert self.run is not None
        if live:
            self._heard(step, last=step == self.run.steps)
        else:
            self.handoff.hear()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """What a validation has found; of every rank the same."""
        assert self.run is not None
        self.run.validated = metrics

    def logged(self) -> dict[str, float]:
        """What the script has told of the step that is done, before run.step() and since. Raises
        ProgramError where something of it is no number."""
        assert self.run is not None
        return self.run.logged.taken()

    def stops(self) -> bool:
        """Has it called run.stop()? True once."""
        assert self.run is not None
        first = self.run.stops and not self._stop_told
        self._stop_told = self._stop_told or first
        return first

    def _heard(self, step: int, last: bool = False) -> HandoffMessage:
        word = self.handoff.hear()
        assert word is not None
        if word.error is not None:
            raise word.error
        if word.kind == "ended" and not last:
            assert self.run is not None
            if self.run.lost:
                raise GenerationAborted("the script has left its loop over a step that is lost")
            raise ProgramError(
                f"{self.source.file}: it left its loop at step {step} of {self.run.steps}; a loop "
                "ends by itself: after the last of `steps`, or where run.stop() is called before"
            )
        return word

    def finish(self, tick: Callable[[], None], aborted: Callable[[], bool]) -> None:
        """All steps are done: the loop ends, and what comes after it is waited for. An error there
        is written to the log."""
        self.finished = True
        until_s = time.monotonic() + AFTER_MOST_S
        while time.monotonic() < until_s:
            tick()
            if aborted():
                raise ConnectionAbortedError("aborted while the script was past its loop")
            word = self.handoff.hear(LOOK_S)
            if word is not None and word.kind == "ended":
                if isinstance(word.error, GenerationAborted):
                    raise word.error
                if word.error is not None:
                    log.error("after its loop: %s", masked_text(str(word.error)))
                return
            if word is not None:
                self.handoff.answer(None)
        log.warning(
            "%s: what comes after its loop takes more than %.0f s and is not waited for",
            self.source.file,
            AFTER_MOST_S,
        )

    def leave(self) -> None:
        """The generation is over."""
        if self.run is not None:
            self.run.model.leave()
