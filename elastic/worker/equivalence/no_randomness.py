"""Random numbers switched off, for the time in which two computations are compared.

Dropout keeps everything; what is drawn is the middle of what it may be. Of a model, `quiet` takes
the probabilities of dropout that reach kernels which draw by themselves (attention, recurrent
layers)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.worker.equivalence.forward_trace import eager_flex_attention
from elastic.worker.parallel.draw_requests import arguments_of

# positions of the probability of dropout among the arguments
DROPOUT_AT = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
MEDIANS = {"exponential_": 0.6931, "log_normal_": 1.0, "geometric_": 1.0, "cauchy_": 0.0}
DRAWN: set[str] = set()  # names of operations that drew all the same, since the last Still began


def quiet(model: nn.Module) -> None:
    """No module of it drops anything."""
    for module in model.modules():
        mine = "drop" in type(module).__name__.lower()
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name.lower() or (mine and name == "p")):
                setattr(module, name, 0.0)


class Still:
    """A context without random numbers."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def __enter__(self) -> Still:
        DRAWN.clear()
        self.stack.enter_context(eager_flex_attention())
        self.stack.enter_context(_Kept())
        self.stack.enter_context(_Middle())  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()


class _Kept(TorchFunctionMode):
    """Dropout, where it is a call of its own or an argument of one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "dropout" in getattr(func, "__name__", "") and args and torch.is_tensor(args[0]):
            return args[0]
        at = DROPOUT_AT.get(func)
        if at is not None:
            args = (*args[:at], 0.0, *args[at + 1 :]) if len(args) > at else args
            kwargs |= {"dropout_p": 0.0} if len(args) <= at else {}
        return func(*args, **kwargs)


class _Middle(TorchDispatchMode):
    """Operations that draw."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = arguments_of(func, args, kwargs)
        if (found := _drawn(func, given, args, kwargs=kwargs)) is not None:
            return found
        if given.get("dropout_p"):
            return func(**given | {"dropout_p": 0.0})
        if "dropout_p" not in given:
            DRAWN.add(name)
        return func(*args, **kwargs)


def _drawn(func: Any, given: dict[str, Any], args: Any, *, kwargs: dict[str, Any]) -> Any:
    """What an operation gives in the place of what it draws; None = it has to draw."""
    name = func.overloadpacket.__name__
    own = next((x for x in args if isinstance(x, Tensor)), None)
    if own is not None and name in ("bernoulli", "bernoulli_"):
        return own.fill_(1) if name.endswith("_") else torch.ones_like(own)
    if own is not None and name == "native_dropout":
        return own.clone(), torch.ones_like(own, dtype=torch.bool)
    if own is not None and name == "multinomial":
        n = int(given["num_samples"])
        order = own.argsort(dim=-1, descending=True, stable=True)
        return (
            order[..., :1].expand(*own.shape[:-1], n).clone()
            if given.get("replacement")
            else order[..., :n].clone()
        )
    if own is not None and name == "poisson":
        return own.clone()
    if (value := _middle(name, given)) is None:
        return None
    if own is not None and name.endswith("_"):
        return own.fill_(value)
    out = func(*args, **kwargs)
    if name == "randperm":
        return out.copy_(torch.arange(out.numel(), dtype=out.dtype, device=out.device))
    if name == "normal" and isinstance(given.get("mean"), Tensor):
        return out.copy_(given["mean"].expand_as(out))
    return out.fill_(value)


def _middle(name: str, given: dict[str, Any]) -> float | None:
    plain = name.removesuffix("_like")
    if plain in ("rand", "uniform_", "uniform"):
        low, high = given.get("from", 0.0), given.get("to", 1.0)
        return (float(low) + float(high)) / 2
    if plain in ("randn", "normal_", "normal", "normal_functional"):
        mean = given.get("mean", 0.0)
        return 0.0 if isinstance(mean, Tensor) else float(mean)
    if plain in ("randint", "random_"):
        low, high = given.get("low", given.get("from")) or 0, given.get("high", given.get("to"))
        return float((int(low) + int(high)) // 2) if isinstance(high, int) else 1.0
    return 0.0 if plain == "randperm" else MEDIANS.get(plain)


def draws_left() -> str:
    """Why a loss does not repeat, in words: the operations that drew all the same, if any did."""
    if DRAWN:
        return f"it draws random numbers by {', '.join(sorted(DRAWN))}"
    return (
        "it draws random numbers that are not torch's, or keeps something from one call to the "
        "next (a count, a running mean) outside of the model's buffers, which are moved and stored"
    )
