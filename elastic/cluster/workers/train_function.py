"""The train function of an ElasticTrainer on its way to the workers: pickled by value as Ray Train
does it, so nothing of the user's file runs a second time.

It may still call what Ray Train prepares: a model and a DataLoader are given back as they are,
since elastic.loop cuts the one and reads the dataset of the other; and get_checkpoint(), which has
none: the state is there when the loop begins.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray.cloudpickle
import ray.train.torch

from elastic.errors import SpecError

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

    def given_back(given: Any, *_: Any, **__: Any) -> Any:
        return given

    instead: list[tuple[Any, str, Callable[..., Any]]] = [
        (ray.train, "get_checkpoint", lambda: None)
    ]
    before = []
    for place, name, other in [*instead, *((ray.train.torch, one, given_back) for one in PREPARED)]:
        own = getattr(place, name, None)
        for module in (place, sys.modules.get(getattr(own, "__module__", ""))):
            if module is not None:
                before.append((module, name, getattr(module, name, None)))
                setattr(module, name, other)
    return before
