"""`run.model`: this rank's part of the model, called in the user's loop body, where a collective
may abort at any time.

What aborts is noted and not raised: it would end the user's `for`. From then on calls return zeros
of the true output's shape until `run.step()` (or the next batch) hands the error to the training
thread, which leaves the generation and comes back with the state and the batch from which training
continues.
"""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elastic.errors import ElasticError, ProgramError
from elastic.text import n_of
from elastic.user_frames import without_frames
from elastic.worker.process.call_log import CallLog
from elastic.worker.process.cuda_errors import of_device_or_memory
from elastic.worker.process_groups.transport import is_collective_error
from elastic.worker.program.calls import ModelCall, mapped, tensors_in
from elastic.worker.program.loop_program import ModuleNumbers

SAMPLED, ENDS_MOST = 62, 1 << 24  # elements of a weight that are noted; of one that has two more
# types of whose elements the smallest can be told, and any taken: of float8, say, they cannot
COMPARED = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
LOOKS_FIRST, LOOKS_EVERY = 4, 100  # steps in which they are compared: the first ones, then some


class GenerationAborted(ConnectionAbortedError):
    """A call had to return something and there was no way to know its shape. The script is started
    again from its top."""


class NoRows(ProgramError):
    """The model was called with a part of the batch that has no rows, and raised over it."""


class GivenModel:
    """The model that a script gave to its loop, which is not the one that is trained: what the
    script does to it there is lost, and what it asks it there is answered by initial weights."""

    def __init__(self, model: nn.Module) -> None:
        """In the script's thread."""
        self._modules = [(name, m, m.training) for name, m in model.named_modules()]
        self._weights = [(n, p, p.requires_grad, p._version) for n, p in model.named_parameters()]
        self._samples = {n: sample for n, p, *_ in self._weights if (sample := _Sample.of(p))}
        self._n_checks = 0
        script = threading.get_ident()

        def refuse(asks: str, module: nn.Module, *_: Any) -> None:
            # copies of the model have the hook too
            if module is model and threading.get_ident() == script:
                raise ProgramError(f"the script {asks} {NOT_TRAINED.format('use')}")

        self._hooks = (
            model.register_forward_pre_hook(partial(refuse, "calls"), prepend=True),
            model.register_state_dict_pre_hook(partial(refuse, "asks for the state_dict() of")),
        )

    def release(self) -> None:
        """The loop is over."""
        for hook in self._hooks:
            hook.remove()

    def check(self, model: LoopModel) -> None:
        """Raises ProgramError that names what was changed. `model`: that is trained, whose memory
        may be the same."""
        trained_there: set[int] | None = None  # where written weights may lie: all of them, or none
        looks = self._n_checks < LOOKS_FIRST or self._n_checks % LOOKS_EVERY == 0
        self._n_checks += 1
        for name, p, trained, version in self._weights:
            if p.requires_grad != trained:
                raise ProgramError(_frozen(name, trained))
            sample = self._samples.get(name) if looks else None  # p.data has no version
            if p._version == version and (sample is None or sample.is_in(p)):
                continue
            trained_there = model.memory() if trained_there is None else trained_there
            if p.data_ptr() not in trained_there:
                where = NOT_TRAINED.format("change")
                raise ProgramError(f"the script writes the weight {name} of {where}")
        for name, module, training in self._modules:
            if module.training != training:
                what, where = name or "the whole model", NOT_TRAINED.format("change")
                raise ProgramError(f"the script changes the mode of {what} of {where}")


@dataclass(frozen=True)
class _Sample:
    """Some elements of a weight in host memory: the smallest and the largest, which a clamp changes
    before any other, and some at equal distances."""

    places: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> _Sample | None:
        plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.dtype in COMPARED
        if not plain or weight.device.type != "cpu" or not weight.numel():
            return None
        held, n = weight.detach(), weight.numel()
        places = torch.linspace(0, n - 1, min(n, SAMPLED), dtype=torch.float64).long()
        if n <= ENDS_MOST and weight.is_floating_point():
            places = torch.cat([places, torch.stack([held.argmin(), held.argmax()])])
        return cls(places, torch.take(held, places))

    def is_in(self, weight: torch.Tensor) -> bool:
        """Or nobody knows: it is on a device, where reading would wait."""
        if weight.device.type != "cpu" or weight.shape.numel() <= int(self.places.max()):
            return weight.device.type != "cpu"
        if weight.dtype != self.values.dtype:
            return False
        values = torch.take(weight.detach(), self.places)
        return torch.equal(values.view(torch.uint8), self.values.view(torch.uint8))


def _frozen(name: str, trained: bool) -> str:
    return (
        f"the script has {'frozen' if trained else 'begun to train'} {name} inside of its loop, "
        "which no change of the workers takes along: do it before elastic.loop, or give it a group "
        "of the optimizer whose learning rate follows from run.step_index"
    )


NOT_TRAINED = (
    "the model that it gave to elastic.loop, which is not the one that is trained: {} "
    "run.model, or take model = run.model before the loop"
)


class LoopModel:
    """Calls and attributes go to the module of the generation that is running."""

    def __init__(
        self,
        build_meta: Callable[[], nn.Module],
        calls: CallLog,
        run_name: Callable[[], str] = lambda: "RUN",
        *,
        n_rows: Callable[[], int] = lambda: 0,
    ) -> None:
        """`calls`: where it is noted that the script calls the model; `run_name`: what commands
        call the run; `n_rows`: of the batch in hand."""
        self.__dict__.update(
            _build_meta=build_meta, _module=None, _live=False, _error=None, _outlines={}
        )
        self.__dict__.update(_calls=calls, _script=threading.get_ident(), _noted=False)
        self.__dict__["_run_name"] = run_name
        self.__dict__["_n_rows"] = n_rows
        self.__dict__["module_numbers"] = ModuleNumbers()

    def attach(self, module: nn.Module) -> None:
        """A new generation: its module, and no error."""
        tensors = module.state_dict(keep_vars=True)
        self.__dict__.update(_module=module, _live=True, _error=None, _tensors=tensors)
        self.__dict__["_trained"] = [(n, p, p.requires_grad) for n, p in module.named_parameters()]
        self.module_numbers.begin(module)
        module.register_forward_pre_hook(self._count, prepend=True)  # before FSDP's, which wait
        module.register_forward_hook(self._passed)

    def _count(self, *_: Any) -> None:
        """The script calls the model, maybe through a method of it (`run.model.generate`)."""
        if threading.get_ident() == self._script:
            self.module_numbers.look()
            self._calls.add("run.model", sys._getframe(1))

    def _passed(self, *_: Any) -> None:
        if threading.get_ident() == self._script:
            self.module_numbers.passed()

    def set_by_script(self) -> Mapping[str, float]:
        """Modes and numbers of modules, as they are now."""
        numbers: ModuleNumbers = self.module_numbers
        return numbers.kept()

    def check_trained(self) -> None:
        """Raises ProgramError where the script has changed what is trained."""
        for name, p, trained in self._trained:
            if p.requires_grad != trained:
                raise ProgramError(_frozen(name, trained))

    def memory(self) -> set[int]:
        """Where its whole weights lie."""
        return {p.data_ptr() for _, p, _ in self._trained if not isinstance(p, DTensor)}

    def leave(self) -> None:
        """The generation is over: no call reaches its groups any more."""
        self.__dict__["_live"] = False

    @property
    def broken(self) -> bool:
        return self._error is not None

    def take_error(self) -> BaseException | None:
        """What was noted since; forgotten here."""
        error = self._error
        self.__dict__["_error"] = None
        return error  # type: ignore[no-any-return]

    def attempt(self, call: Callable[[], Any]) -> bool:
        """Calls unless something has aborted before; False: it has, or does now."""
        if self._error is None and not self._live:
            self.__dict__["_error"] = GenerationAborted("the generation is over")
        if self._error is not None:
            return False
        try:
            call()
        except Exception as error:
            if self._live and not is_collective_error(error):
                raise
            self.__dict__["_error"] = without_frames(error)
            return False
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._module is None:
            raise ProgramError(
                "run.model was called before the first batch; it is there inside `for batch in run`"
            )
        if self.broken or not self._live:
            self._count()  # a call that is not made: the script makes it all the same
        outputs: list[Any] = []
        key = repr(_outline((args, kwargs))) + str(self._module.training)
        if self.attempt(lambda: outputs.append(self._called(args, kwargs))):
            self._outlines[key] = _outline(outputs[0])
            return outputs[0]
        if key not in self._outlines:
            self._outlines[key] = self._outline_on_meta(args, kwargs)
        device = next((p.device for p in self._module.parameters()), torch.device("cpu"))
        return _zeros(self._outlines[key], device)

    def _called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Raises NoRows."""
        try:
            return self._module(*args, **kwargs)
        except ElasticError:
            raise
        except Exception as error:
            given = (x for x in tensors_in([*args, *kwargs.values()]) if x.ndim)
            elsewhere = is_collective_error(error) or of_device_or_memory(error)
            if elsewhere or len(next(given, (0,))):
                raise
            raised, n = " ".join(f"{type(error).__name__}: {error}".split()), self._n_rows()
            raise NoRows(
                f"run.model(...) was given 0 rows, and raised {raised}; the batch of this rank, "
                f"its share of global_batch, has {n_of(n, 'row')}: take no more parts than the "
                "smallest share has rows (equally many on every rank), or give a larger "
                "global_batch, or fewer ranks (max_workers)"
            ) from error

    def _outline_on_meta(self, args: Any, kwargs: Any) -> Any:
        """Shapes of the output of a call that has never come back, by a module without memory.
        Raises GenerationAborted."""
        try:
            module = self._build_meta().train(self._module.training)
            with torch.device("meta"):
                args, kwargs = (mapped(part, lambda t: t.to("meta")) for part in (args, kwargs))
                return _outline(module(*args, **kwargs))
        except Exception as error:
            raise GenerationAborted(
                f"a collective aborted in the first call of run.model ({self._error})"
            ) from error

    def __getattr__(self, name: str) -> Any:
        if self._module is None:
            raise ProgramError(
                f"run.model.{name} was asked for before the first batch; it is there inside `for "
                "batch in run`"
            )
        if name == "module" and not hasattr(self._module, name):
            return self  # as of a model in DistributedDataParallel
        return getattr(self._module, name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's part, also where only some ranks ask: FSDP's own would gather again on those
        alone. Where it is not the whole, a note says so once."""
        self.__getattr__("state_dict")  # refused before the first batch
        found = {name: one.detach() for name, one in self._tensors.items()}
        n_parts = sum(is_part(one) for one in found.values())
        if n_parts and not self._noted:
            self.__dict__["_noted"] = True
            caller, name = sys._getframe(1), shlex.quote(self._run_name())
            print(
                f"note: {caller.f_code.co_filename}, line {caller.f_lineno}: state_dict() of "
                f"run.model is this rank's part of {n_parts} of {n_of(len(found), 'tensor')}; the "
                f"whole model: elastic checkpoint export {name} --to FOLDER",
                flush=True,
            )
        return found

    def gather_into(self, model: nn.Module) -> None:
        """The whole model as it is now goes into `model`, one tensor at a time. Every rank must
        call it. Raises GenerationAborted."""

        def gather() -> None:
            with torch.no_grad():
                for name, own in model.state_dict().items():
                    part = self._tensors[name].detach()
                    own.copy_(part.full_tensor() if isinstance(part, DTensor) else part)

        if not self.attempt(gather):
            raise GenerationAborted(f"a collective aborted while it was gathered ({self._error})")

    def __setattr__(self, name: str, value: Any) -> None:
        raise ProgramError(
            f"run.model.{name} cannot be set: the model may be rebuilt at any step; set it before "
            "elastic.loop"
        )


def is_part(tensor: torch.Tensor) -> bool:
    """Has another rank the rest of it?"""
    if not isinstance(tensor, DTensor):
        return False
    placed = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(size > 1 and not where.is_replicate() for where, size in placed)


class _Shape:
    """What is remembered of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.grad = tuple(tensor.shape), tensor.dtype, tensor.requires_grad

    def __repr__(self) -> str:
        return f"{self.shape}{self.dtype}"


def _outline(value: Any) -> Any:
    return mapped(value, _Shape)


def outline_of(call: ModelCall) -> str:
    """What it is called with, without values: names, shapes and kinds."""
    return repr(_outline((call.args, dict(call.kwargs))))


def _zeros(outline: Any, device: torch.device) -> Any:
    def zeros(shape: _Shape) -> torch.Tensor:
        return torch.zeros(shape.shape, dtype=shape.dtype, device=device, requires_grad=shape.grad)

    return mapped(outline, zeros, _Shape)
