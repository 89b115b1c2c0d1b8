"""`elastic.loop`: a training script of one's own, changed live.

```python
with elastic.loop(model=model, optimizer=opt, dataset=ds) as run:
    for batch in run:
        run.backward(loss_sum(run.model, batch))
        run.step()
```
The script runs in a thread of its own; the same session as for a Program trains, and hands the
script one batch at a time.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from elastic.config.job import loop_keys
from elastic.data.batches import PAIR
from elastic.errors import ProgramError, SpecError
from elastic.models.blocks import blocks_of
from elastic.models.huggingface import files_of
from elastic.worker.loop.forgotten_state import forgotten, taken
from elastic.worker.loop.handoff import Handoff, HandoffMessage
from elastic.worker.loop.logged_numbers import LoggedNumbers
from elastic.worker.loop.loop_model import GivenModel, LoopModel
from elastic.worker.loop.loss_reduction import A_MEAN, is_mean
from elastic.worker.process.call_log import CallLog
from elastic.worker.process.environment import RESTARTED, tell_launcher
from elastic.worker.process.readback import Number, join_default_stream
from elastic.worker.program.calls import count_of, count_there, targets_in
from elastic.worker.program.loop_program import (
    EPOCHS,
    GROUPS,
    WHERE,
    LoopProgram,
    Numbered,
    OptimizerFactory,
    Own,
    Settings,
    as_tuple,
    given_of,
    map_style,
    module_factory,
    no_loss,
    numbers_of,
)
from elastic.worker.program.model_profile import hook_on_weight
from elastic.worker.program.optimizers import by_name

NO_HOST = (
    "elastic.loop was entered outside of `elastic run --script FILE`: start the script with that; "
    "a program.py has no loop, it defines `program = elastic.Program(...)`"
)

IN_ANOTHER_FILE = (
    "elastic.loop is called in a module that {file} imports, and so {file} was started as a script "
    "that is restarted: the call of elastic.loop (or elastic.prepare_trainer) must stand in {file}"
)

PLAIN_START = (
    "{file} enters elastic.loop, which neither python nor torchrun can start: `elastic run "
    "--script {file} -- ARGS` does, on this machine (--local) or on a Ray cluster"
)


OF_TOKENS = ("int16", "int32", "int64", "uint16", "uint32")
COUNTS_SAMPLES = (
    "elastic.loop: the loss is divided by the number of samples, and {}; "
    "if they are tokens, count=lambda rows: ... says how many the loss sums over (docs/loop.md)"
)


EVALUATES = (
    "elastic.loop: the model is in evaluation mode, as from_pretrained leaves it: dropout is off; "
    "call model.train() before the loop"
)


class Host(Protocol):
    """What has started the script."""

    def entered(self, run: Run) -> Run: ...


class _Here(threading.local):
    host: Host | None = None


here = _Here()  # the script's thread knows by whom it was started


@dataclass(frozen=True, kw_only=True, init=False)
class loop:
    """What to train, out of a script.

    model:       the whole, plain `nn.Module`, with its initial (or pretrained) weights; every
                 process must build the same one.
    optimizer:   over its parameters, without state, or a dict of several by name;
                 parameters that none holds are not trained.
    dataset:     map-style: `len()` and `[sample id]` -> tensors or arrays of equal shape: one, or a
                 tuple or dict of them. Of a torch DataLoader its dataset: order and batches are
                 elastic's.
    blocks:      module-name pattern of the repeated blocks, as in "layers.*", or a list of them;
                 default: the longest list of equal modules.
    tp, tp_limit, count, validation, extra_state: as in `elastic.Program`; `evaluate`: (model,
                 batch) -> summed loss of a batch of the validation set, or a dict of sums with
                 "loss" among them: each is reported per token (or sample), "loss" as
                 validation_loss. `validation` and `evaluate`: both or none.
    files:       as in `elastic.Program`; default: config.json and the like of a model of
                 transformers.
    epochs:      instead of `steps`: so many steps that the dataset is gone through as often.
    job:         every other keyword is a key of job.yaml, with the value that it has there (steps,
                 global_batch, seed, eval_every, pools ...): what the job says where neither its
                 job.yaml nor --set does.

    Entering it gives a `Run`; so does `.start()`, without `with`. Raises SpecError where it is
    wrong, or where no `elastic run --script` has started the script.
    """

    model: nn.Module
    optimizer: Own
    dataset: Any
    blocks: str | Sequence[str] | None = None
    tp: Mapping[str, str] = field(default_factory=dict)
    tp_limit: int = 0
    count: Callable[[Any], Any] | None = None
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    validation: Any = None
    evaluate: Callable[[Any, Any], Any] | None = None
    files: Callable[[], Mapping[str, bytes]] | None = None
    epochs: int | None = None
    job: Mapping[str, Any] = field(default_factory=dict)

    def __init__(self, *, model: nn.Module, optimizer: Own, dataset: Any, **more: Any) -> None:
        given = {"model": model, "optimizer": optimizer, "dataset": dataset, **more}
        own = [one for one in fields(self) if one.name != "job"]
        for one in own:
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            object.__setattr__(self, one.name, given.pop(one.name, default))
        object.__setattr__(self, "job", loop_keys(given, [one.name for one in own]))
        object.__setattr__(self, "dataset", map_style(self.dataset, "dataset"))
        if self.validation is not None:
            object.__setattr__(self, "validation", map_style(self.validation, "validation"))
        self._check()

    def _check(self) -> None:
        if type(self.model).__name__ in (
            "DistributedDataParallel",
            "OptimizedModule",
        ) or not isinstance(self.model, nn.Module):
            raise SpecError(
                f"elastic.loop: model is a {type(self.model).__name__}; give the plain nn.Module, "
                "not wrapped and not compiled (and ElasticTrainer in the place of TorchTrainer)"
            )
        if hook := hook_on_weight(self.model):
            raise SpecError(f"elastic.loop: {hook}, or leave it out")
        if any(
            state for one in by_name(self.optimizer, WHERE).values() for state in one.state.values()
        ):
            raise SpecError(
                "elastic.loop: the optimizer has state already; give a fresh one (elastic "
                "checkpoint import takes moments over)"
            )
        if (self.validation is None) != (self.evaluate is None):
            raise SpecError(
                "elastic.loop: validation (a dataset) and evaluate ((model, batch) -> summed "
                "loss) belong together"
            )
        if GROUPS in self.extra_state:
            raise SpecError(
                f"elastic.loop: extra_state['{GROUPS}'] is the optimizer's; choose another name"
            )

    def __enter__(self) -> Run:
        return self._entered(inspect.currentframe())

    def start(self) -> Run:
        """The same without `with`: the lines of the loop keep their indentation."""
        return self._entered(inspect.currentframe())

    def _entered(self, frame: types.FrameType | None) -> Run:
        host = here.host
        if host is None:
            if restarted := os.environ.get(RESTARTED):
                raise SpecError(IN_ANOTHER_FILE.format(file=os.path.basename(restarted)))
            _refuse_a_plain_start(frame)
            raise SpecError(NO_HOST)
        caller = frame.f_back if frame is not None else None
        mine = {**by_name(self.optimizer), **{f"extra {k}": x for k, x in self.extra_state.items()}}
        lines = forgotten(caller, taken(self.model, mine))
        if self.count is None and (what := _of_tokens(self.dataset[0])):
            lines = (*lines, COUNTS_SAMPLES.format(what))
        if not self.model.training:
            lines = (*lines, EVALUATES)
        run = Run(replace(self._program(), notes=lines), self.optimizer)
        run.given = GivenModel(self.model)
        return host.entered(run)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        pass

    def _program(self) -> LoopProgram:
        # the whole of it takes no room on the device: run.model is this rank's part
        self.model.to("cpu")
        factory = OptimizerFactory(self.model, self.optimizer)
        every = by_name(self.optimizer).values()
        trained = {id(p) for one in every for group in one.param_groups for p in group["params"]}
        for parameter in self.model.parameters():
            if id(parameter) not in trained:
                parameter.requires_grad_(False)
        given = given_of(self.dataset[0])
        dataset, validation = (
            d if given is dict else Numbered(d) for d in (self.dataset, self.validation)
        )
        return LoopProgram(
            model=module_factory(self.model),
            optimizer=factory,
            dataset=lambda: dataset,
            validation=(lambda: validation) if self.validation is not None else None,
            loss=no_loss,
            count=self._counted(
                given, pairs=given is as_tuple and len(self.dataset[0]) == len(PAIR)
            ),
            blocks=self.blocks or blocks_of(self.model),
            tp=self.tp,
            tp_limit=self.tp_limit,
            extra_state={**self.extra_state, GROUPS: Settings(self.optimizer)},
            pipeline=False,
            settings=self.job if self.epochs is None else {**self.job, EPOCHS: self.epochs},
            evaluation=self._evaluation(given),
            given=given,
            files=self.files or files_of(self.model),
        )

    def _counted(self, given: Callable[[Any], Any], *, pairs: bool) -> Callable[[Any], Any] | None:
        count = self.count
        if count is not None:
            return lambda batch: count(given(batch))
        # as in a Program, where a pair is of an input and a target
        return (lambda batch: targets_in(given(batch)[1])) if pairs else None

    def _evaluation(self, given: Callable[[Any], Any]) -> Callable[[Any, Any], Any] | None:
        evaluate = self.evaluate
        return None if evaluate is None else lambda model, batch: evaluate(model, given(batch))


# ---------------------------------------------------------------------------------- inside the loop


@dataclass(frozen=True)
class OfferedBatch:
    """A batch for the script, and where it belongs."""

    batch: Mapping[str, torch.Tensor]
    step: int
    epoch: int
    ends_epoch: bool = False  # the next one belongs to a later one, or there is none


@dataclass(frozen=True)
class Outcome:
    """How a step ended. Numbers: of one that was committed."""

    committed: bool
    train_loss: float | None = None
    grad_norm: float | None = None


WITH_A_BATCH = ("step_index", "epoch", "steps", "rank", "world_size", "n_shares")


class Run:
    """What `with elastic.loop(...) as run` gives. All of it belongs to the script's thread.

    model:      this rank's part of the model; call it, read attributes of it. Rebuilt when the
                workers change.
    optimizer:  the script's own (or the dict of them), over this rank's part; `step()` is
                run.step's.
    epochs():   for scripts whose loop has an outer one over epochs: see there.
    step_index: the number of the batch in hand, from 0: how many steps were done before it. It
                stays until the next batch, also behind `step()`. `epoch`: times that the dataset
                was gone through before; `steps`: all that the job does.
    committed:  of the last `step()`, which returns it too: was it done? If not, nothing of it
                counts, and the step is done again: with the next batch.
    train_loss: of the last `step()`, over all ranks, per token (or sample); `grad_norm` likewise,
                before clipping. None where it was not committed.
    rank, world_size: of this process now; they change when the workers do.

    What depends on the batch or on the workers is there with the first batch, and refused before.
    """

    step_index: int
    epoch: int
    steps: int
    rank: int
    world_size: int
    n_shares: int  # of a step's samples: ranks of one tp, cp or pp group have the same

    def __init__(self, program: LoopProgram, optimizer: Own) -> None:
        self.program, self.optimizer = program, optimizer
        self.name = "RUN"  # what commands call it
        self.calls = CallLog()
        self.model = LoopModel(
            lambda: _on_meta(program), self.calls, lambda: self.name, n_rows=self._n_rows
        )
        self.given: GivenModel | None = None
        self.handoff = Handoff()
        self.committed = False
        self.train_loss: float | None = None
        self.grad_norm: float | None = None
        # by the last validation; before the end it may be there on some ranks only
        self.validated: Mapping[str, float] = {}
        self._batch: Mapping[str, torch.Tensor] | None = None
        self._held: OfferedBatch | None = None  # asked for, and not given to the script yet
        self._epoch: int | None = None  # that `epochs()` has given last
        self._ends_epoch = False  # the batch in hand
        self._at_end = False  # its step was committed, and there is no other batch yet
        # of the batch in hand; on the device, where nobody has to wait for it
        self._loss_sum: Number = 0.0
        self._n_backward = 0
        self._looked, self._mean = False, False  # at the first loss: is it a mean?
        self._lost = False  # step() has said no, and there is no other batch yet
        self._in_a_step = False  # from its batch to the next one
        self.stops = False  # stop() was called
        self.logged = LoggedNumbers()

    def __getattr__(self, name: str) -> Any:
        if name == "world_size":
            raise ProgramError(
                "run.world_size was asked for before the first batch; it is there inside `for "
                "batch in run`, and changes when workers do: global_batch, and with it the "
                "learning rate, does not depend on it"
            )
        if name in WITH_A_BATCH:
            raise ProgramError(
                f"run.{name} was asked for before the first batch; it is there inside `for batch "
                "in run`. What one process alone is to do before belongs where the run is started"
            )
        raise AttributeError(f"run has no attribute '{name}'")

    def _n_rows(self) -> int:
        return len(next(iter(self._batch.values()))) if self._batch else 0

    @property
    def lost(self) -> bool:
        """Is what the script has in hand no result: zeros in the place of the model's outputs, or a
        step without numbers?"""
        return self.model.broken or self._lost

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """This rank's share of the next step, as the dataset gives it, collated, on this rank's
        device. Inside of `epochs()` it ends with each epoch."""
        if self._batch is not None:
            raise ProgramError(
                f"the batch of step {self.step_index + 1} was left without run.step(); call it "
                "once for each batch"
            )
        if self._epoch is not None and self._at_end:
            self._at_end = False  # what comes now belongs to that step still
            raise StopIteration
        offer = self._held if self._held is not None else self._offered()
        self._held = None
        if offer is None or self._epoch is not None and offer.epoch > self._epoch:
            self._held = offer
            raise StopIteration
        self._batch, self._loss_sum, self._n_backward = offer.batch, 0.0, 0
        return self.program.given(offer.batch)

    def epochs(self) -> Iterator[int]:
        """`for epoch in run.epochs(): for batch in run: ...`: the number of each epoch, from that
        of the step with which this process begins. What stands behind the inner loop, as an
        evaluation by run.model, is done after the last step of the epoch; again, where that step
        has to be done again."""
        while (offer := self._held if self._held is not None else self._offered()) is not None:
            self._held, self._epoch = offer, offer.epoch
            yield offer.epoch
            if self._held is offer:
                raise ProgramError("`for epoch in run.epochs()` has no `for batch in run` inside")

    def _offered(self) -> OfferedBatch | None:
        """Asks for the next batch."""
        word = HandoffMessage("next", error=self.model.take_error())
        offer: OfferedBatch | None = self._handed_over(word)
        self._lost, self._in_a_step = False, offer is not None
        self.logged.begin()
        if offer is not None:
            self.step_index, self.epoch = offer.step, offer.epoch
            self._ends_epoch, self._at_end = offer.ends_epoch, False
            self.calls.begin(2 * offer.step)
        elif self.given is not None:
            self.given.release()
        return offer

    def _handed_over(self, word: HandoffMessage) -> Any:
        """The answer. What calls the model meanwhile changes numbers of modules by its own."""
        self.model.module_numbers.hand_over()
        answer = self.handoff.say(word)
        self.model.module_numbers.take_back()
        return answer

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a loss that is a sum over this batch's tokens (or samples). May be called for
        parts of a batch; every rank must call it equally often."""
        if self._batch is None:
            raise ProgramError(
                "run.backward was called without a batch in hand; it belongs between the batch "
                "and run.step()"
            )
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            found = (
                f"a tensor of shape {list(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else f"a {type(loss).__name__}"
            )
            raise ProgramError(
                f"run.backward was given {found}; it must be the loss summed over the batch, a "
                "scalar tensor"
            )
        self._n_backward += 1
        self.calls.add("run.backward", sys._getframe(1))
        if not self._looked:
            self._mean = is_mean(loss, count_of(self.program, dict(self._batch)))
        self.model.module_numbers.look()
        done = self.model.attempt(loss.backward)
        self.model.module_numbers.passed()  # by blocks that were computed again
        if done:
            self._loss_sum = self._loss_sum + loss.detach().double()

    def step(self, clip_grad_norm: float | None = None) -> bool:
        """Commit and optimizer step, over all ranks; `clip_grad_norm`: instead of the job's.
        Returns when it is decided: was the step committed? If not, the next batch is the one from
        which training continues."""
        if self._batch is None:
            raise ProgramError(
                "run.step() was called without a batch in hand; call it once for each batch of "
                "`for batch in run`"
            )
        if not self._n_backward and not self.model.broken:
            raise ProgramError(
                f"run.step() of step {self.step_index + 1} without run.backward(loss) before it"
            )
        tokens = count_there(self.program, dict(self._batch))
        if not self._looked:
            self._refuse_a_mean(int(tokens))
        if self.given is not None and not self.model.broken:
            self.given.check(self.model)
            self.model.check_trained()
        if not self.model.broken:
            self.calls.note_settings({**self.model.set_by_script(), **numbers_of(self.optimizer)})
        self._batch = None
        self.calls.begin(2 * self.step_index + 1)
        join_default_stream(self._loss_sum)
        word = HandoffMessage(
            "step", self._loss_sum, tokens, clip_grad_norm, self.model.take_error()
        )
        outcome: Outcome = self._handed_over(word)
        self.committed, self._lost = outcome.committed, not outcome.committed
        self._at_end = outcome.committed and self._ends_epoch
        self.train_loss, self.grad_norm = outcome.train_loss, outcome.grad_norm
        return outcome.committed

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Numbers of your own of this step, by name: they stand beside its loss in metrics.csv, in
        TensorBoard and in trackers. May be called before and after `step()`, and by some ranks
        only: what rank 0 tells counts. Of a step that is not committed nothing is reported. A
        tensor need not be read before."""
        if not self._in_a_step:
            raise ProgramError(
                "run.log was called without a step to tell it of; it belongs inside `for batch in "
                "run`"
            )
        if not self.lost:
            self.logged.add(numbers)

    def stop(self) -> None:
        """Ends the run as one that is done, before its last step: at one of the next ones, with a
        checkpoint of that. The `for` continues until then, and nothing behind it is run. What rank
        0 says counts; of a step that is not committed it says nothing."""
        if not self._in_a_step:
            raise ProgramError(
                "run.stop() was called without a step; it belongs inside `for batch in run`"
            )
        self.stops = self.stops or not self.lost

    def _refuse_a_mean(self, count: int) -> None:
        """Looks once, at the first step whose batch can tell. The mean of a part that is one sample
        (or token) is its sum: there are as many parts then."""
        if self._mean and self._n_backward < count:
            raise ProgramError(f"run.backward was given {A_MEAN}")
        self._looked = count > 1 and not self.model.broken


def _of_tokens(sample: Any) -> str:
    """What whole numbers there are of a sample that is one tensor, or array, of them, or has them
    as its labels, or ids; '' = none, or a target that is counted."""
    what = "a sample is"
    if isinstance(sample, Mapping):
        key = next((key for key in ("labels", "input_ids") if key in sample), "")
        if not key or "target" in sample or "label" in sample:
            return ""
        what, sample = f"'{key}' of a sample is", np.asarray(sample[key])
    sizes, dtype = getattr(sample, "shape", ()), str(getattr(sample, "dtype", ""))
    whole = dtype.removeprefix("torch.") in OF_TOKENS and prod(sizes) > 1
    return f"{what} {prod(sizes)} whole numbers" if whole else ""


def _refuse_a_plain_start(frame: types.FrameType | None) -> None:
    """`python FILE` and `torchrun FILE` end with one line, of rank 0, and exit code 2. Nothing
    where the caller is another."""
    caller = frame.f_back.f_globals if frame is not None and frame.f_back is not None else {}
    file = caller.get("__file__")
    if caller.get("__name__") != "__main__" or not file:
        return
    said = f"elastic: {PLAIN_START.format(file=os.path.relpath(str(file)))}"
    if os.environ.get("RANK", "0") == "0":
        print(said, file=sys.stderr)
    tell_launcher(said)
    raise SystemExit(SpecError.exit_code)


def _on_meta(program: LoopProgram) -> nn.Module:
    with torch.device("meta"):
        built: nn.Module = program.model()
    return built
