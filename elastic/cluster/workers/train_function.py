"""The train function of an ElasticTrainer on its way to the workers: pickled by value as Ray Train
does it, so nothing of the user's file runs a second time. `python -m
elastic.cluster.workers.train_function FILE OUT < ASKED`: layout_check.py, of that in FILE.

It may still call what Ray Train prepares: a model and a DataLoader are given back as they are,
since elastic.loop cuts the one and reads the dataset of the other, and so a DistributedSampler has
the whole of it; get_checkpoint(), which has
none: the state is there when the loop begins; in its loop report(), whose numbers are logged, and
get_context(), which knows this process.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray.cloudpickle
import ray.train.torch
import torch
from torch.utils.data import DistributedSampler

from elastic.config.numbers.logged_names import STEP_NAMES
from elastic.errors import SpecError
from elastic.worker.loop.loop import Run, here

NOT_STORED = (
    "note: ray.train.report(checkpoint=...) is not stored: elastic makes checkpoints by itself "
    "(checkpoint_every says how often); result.checkpoint is one, a folder of DCP"
)
_told = list[str]()  # by this process
_OF_A_GROUP = DistributedSampler.__init__
PREPARED = ("prepare_model", "prepare_data_loader", "prepare_optimizer")


def pickled(function: Callable[..., None], config: Mapping[str, Any] | None) -> bytes:
    """The function with its configuration bound. Raises SpecError where something in it cannot be
    sent."""
    takes = inspect.signature(function).parameters
    bound = partial(function, dict(config or {})) if takes else function
    try:
        return bytes(ray.cloudpickle.dumps(bound))
    except Exception as error:  # a boundary: any object of the user's may refuse
        what = " ".join(str(error).split())
        raise SpecError(
            f"ElasticTrainer({function.__name__}): it holds what cannot be sent to workers "
            f"({what[:200]}); make that inside the function"
        ) from error


def loaded(data: bytes) -> Callable[[], None]:
    """In a worker, and in the driver while it runs the function up to its loop: with `as_they_are`
    in force."""
    function: Callable[[], None] = pickle.loads(data)
    return function


@contextmanager
def as_they_are() -> Iterator[None]:
    """What Ray Train's own workers prepare stays as it is, and no checkpoint is known."""
    before = keep_as_they_are()
    try:
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)


def keep_as_they_are() -> list[tuple[Any, str, Any]]:
    """The same for good: in a worker, which is no other run's. Returns what was there before."""
    instead: list[tuple[Any, str, Any]] = []
    instead += [(ray.train.torch, name, _given_back) for name in PREPARED]
    instead += [(ray.train, name, other) for name, other in _OF_TRAIN.items()]
    instead.append((ray.train.torch, "get_device", _device))
    before = []
    for place, name, other in instead:
        own = getattr(place, name, None)
        for module in (place, sys.modules.get(getattr(own, "__module__", ""))):
            if module is not None:
                before.append((module, name, getattr(module, name, None)))
                setattr(module, name, other)
    before.append((DistributedSampler, "__init__", _OF_A_GROUP))
    DistributedSampler.__init__ = _of_the_whole  # type: ignore[assignment, method-assign]
    return before


def _of_the_whole(
    self: Any, dataset: Any, num_replicas: int | None = None, rank: int | None = None, **more: Any
) -> None:
    """A sampler is made before there is a group, and of whose parts only elastic.loop knows."""
    _OF_A_GROUP(self, dataset, num_replicas or 1, rank or 0, **more)


def _no_checkpoint() -> None:
    return None


def _given_back(given: Any, *_: Any, **__: Any) -> Any:
    sampler = getattr(given, "sampler", None)
    if sampler is not None and not hasattr(sampler, "set_epoch"):
        sampler.set_epoch = lambda epoch: None  # each epoch has an order of its own here
    return given


def _in_loop(asked: str) -> Run:
    """The loop that this thread is in. Raises what Ray Train raises outside of it."""
    run = getattr(here.host, "run", None)
    if run is None:
        raise RuntimeError(f"`{asked}` cannot be used outside of a Ray Train training function")
    found: Run = run
    return found


def _reported(metrics: Mapping[str, Any], checkpoint: Any = None, **_: Any) -> None:
    """Its numbers are those of the step that was done last; loss and others are recorded already,
    and checkpoints are made by themselves."""
    run = _in_loop("report")
    own = {name: value for name, value in metrics.items() if name not in STEP_NAMES}
    run.log({name: value for name, value in own.items() if not isinstance(value, str | bool)})
    if checkpoint is not None and run.rank == 0 and not _told:
        _told.append(NOT_STORED)
        print(NOT_STORED, flush=True)


class _Place:
    """What a train function asks of its TrainContext."""

    def get_world_size(self) -> int:
        return _in_loop("get_context").world_size

    def get_world_rank(self) -> int:
        return _in_loop("get_context").rank


def _device() -> torch.device:
    found: torch.device = getattr(here.host, "device", torch.device("cpu"))
    return found


def _context() -> _Place:
    _in_loop("get_context")
    return _Place()


_OF_TRAIN: dict[str, Callable[..., Any]] = {
    "get_checkpoint": _no_checkpoint,
    "report": _reported,
    "get_context": _context,
}


def compared(file: str, *arguments: str) -> int:
    """What its layouts compute, as layout_check.py finds it."""
    from elastic.worker.equivalence.layout_check import main

    data = Path(file).read_bytes()
    with as_they_are():
        return main(arguments, lambda: loaded(data))


if __name__ == "__main__":
    sys.exit(compared(*sys.argv[1:]))
