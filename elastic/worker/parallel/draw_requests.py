"""Operations of torch that draw, as what they draw: a tensor of noise by a distribution, and what
is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from elastic.worker.parallel.keyed_numbers import Distribution

STANDARD_UNIFORM, STANDARD_NORMAL = Distribution("uniform_", (0.0, 1.0)), Distribution("normal_")
# in place, with torch's own arguments
IN_PLACE = {
    "uniform_": ("from", "to"), "normal_": ("mean", "std"), "exponential_": ("lambd",),
    "geometric_": ("p",), "cauchy_": ("median", "sigma"), "log_normal_": ("mean", "std"),
    "random_": ("from", "to"),
}  # fmt: skip


@dataclass(frozen=True)
class DrawRequest:
    """`noise`: to be filled by `distribution`; `finish` makes the operation's result of it."""

    noise: Tensor
    distribution: Distribution
    finish: Callable[[Tensor], Any]


def arguments_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an operation is called with, by name."""
    schema = func._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    return given | {a.name: x for a, x in zip(schema, args, strict=False)} | dict(kwargs)


def by_generator(generator: torch.Generator, func: Any, args: Any, *, kwargs: Any) -> Any:
    """What an operation gives that draws, with numbers of this generator of the CPU; as ever where
    it has one of its own, takes none, or is on another device."""
    given, one = arguments_of(func, args, kwargs), _with_generator(func)
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    on = {torch.device(given.get("device") or "cpu").type, *(x.device.type for x in tensors)}
    if one is None or given.get("generator") is not None or on != {"cpu"}:
        return func(*args, **kwargs)
    return one(*args, **{**kwargs, "generator": generator})


@lru_cache
def _with_generator(func: Any) -> Any:
    """The operation, or its overload, that takes a generator beside the same arguments."""
    names = {a.name for a in func._schema.arguments} | {"generator"}
    packet = func.overloadpacket
    each = (func, *(getattr(packet, name) for name in packet.overloads()))
    return next((one for one in each if {a.name for a in one._schema.arguments} == names), None)


def request_of(func: Any, args: Any, kwargs: Any) -> DrawRequest | None:
    """None = an operation that is not known here, or that draws from a generator of its own, or
    nothing."""
    given = arguments_of(func, args, kwargs)
    if given.get("generator") is not None:
        return None
    name = func.overloadpacket.__name__
    own = next((x for x in args if isinstance(x, Tensor)), None)
    if own is None or name.endswith("_like"):
        return _made(name.removesuffix("_like"), given, own)
    if name in IN_PLACE:
        arguments = [given[key] for key in IN_PLACE[name] if given.get(key) is not None]
        return DrawRequest(own, Distribution(name, tuple(arguments)), same)
    if name in ("bernoulli", "bernoulli_"):
        return _bernoulli(own, given.get("p"), name.endswith("_"))
    if name == "native_dropout":
        return _dropout(own, float(given["p"]))
    if name == "normal":
        mean, std = given.get("mean", 0.0), given.get("std", 1.0)
        shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor)))
        return DrawRequest(own.new_empty(shape), STANDARD_NORMAL, lambda noise: noise * std + mean)
    return None


def same(noise: Tensor) -> Tensor:
    return noise


def _made(kind: str, given: dict[str, Any], like: Tensor | None) -> DrawRequest | None:
    """A tensor that the operation makes."""
    arguments = {
        "rand": STANDARD_UNIFORM,
        "randn": STANDARD_NORMAL,
        "randint": Distribution("random_", (given.get("low", 0), given.get("high"))),
    }
    if kind not in arguments:
        return None
    options = {key: given.get(key) for key in ("dtype", "device")}
    options = {key: value for key, value in options.items() if value is not None}
    if kind == "randint" and not isinstance(options.get("dtype", torch.int64), torch.dtype):
        del options["dtype"]  # its default is a number
    if kind == "randint" and like is None:
        options.setdefault("dtype", torch.int64)
    noise = (
        torch.empty_like(like, **options)
        if like is not None
        else torch.empty(given["size"], **options)
    )
    return DrawRequest(noise, arguments[kind], same)


def _bernoulli(own: Tensor, p: Any, in_place: bool) -> DrawRequest:
    if isinstance(p, float):
        return DrawRequest(
            own if in_place else torch.empty_like(own), Distribution("bernoulli_", (p,)), same
        )
    chances = p if isinstance(p, Tensor) else own
    noise = torch.empty_like(own, dtype=torch.float32)
    into = own if in_place else torch.empty_like(own)
    return DrawRequest(noise, STANDARD_UNIFORM, lambda drawn: into.copy_(drawn < chances))


def _dropout(own: Tensor, p: float) -> DrawRequest:
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return DrawRequest(
        torch.empty_like(own),
        Distribution("bernoulli_", (1.0 - p,)),
        lambda kept: (own * kept * scale, kept.bool()),
    )
