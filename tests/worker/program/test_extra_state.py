"""The state of the program's own objects as bytes: what goes in comes out, nothing is unpickled,
and it keeps to its box."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from elastic.errors import ProgramError, SpecError, StateLost
from elastic.types import TensorSpec
from elastic.worker.program.extra_state import HEAD_BYTES, ExtraState, capacity, decode, encode
from elastic.worker.session.takeover import differing


class Kept:
    """An object with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def boxes(extra: ExtraState) -> dict[str, tuple[None, torch.Tensor]]:
    return {spec.fqn: (None, torch.zeros(spec.shape, dtype=torch.uint8)) for spec in extra.specs()}


def again(state: Any) -> Any:
    """Through a box and back."""
    extra = ExtraState({"it": Kept(state)})
    held = boxes(extra)
    extra.note(held)
    other = Kept(None)
    extra.objects["it"] = other
    extra.load(held)
    return other.state


PLAIN = {
    "n": 3, "x": 0.1, "big": 1 << 70, "nan": float("inf"), "yes": True, "none": None, "text": "ä",
    "list": [1, [2.5, ()]], "pair": (0.9, 0.95), 7: "seven", "counter": Counter({30: 1, 60: 2}),
}  # fmt: skip


def test_numbers_texts_lists_and_dicts_come_back_as_they_were() -> None:
    got = again(PLAIN)
    assert got == PLAIN and list(got) == list(PLAIN)
    assert (
        isinstance(got["pair"], tuple)
        and isinstance(got["counter"], Counter)
        and got["yes"] is True
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64], ids=str
)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    there = {
        "t": (torch.randn(3, 5) * 10).to(dtype),
        "empty": torch.empty(0, 2, dtype=dtype),
        "scalar": torch.tensor(1).to(dtype),
    }
    got = again(there)
    for key, tensor in there.items():
        assert got[key].dtype == dtype and torch.equal(got[key], tensor)
    array = again({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "i": np.int64(4)})
    assert isinstance(array["a"], np.ndarray) and array["a"][1, 2] == 5 and array["i"] == 4


def test_a_schedule_of_torch_goes_on_where_it_was() -> None:
    def made() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        then = torch.optim.lr_scheduler.MultiStepLR(optimizer, [6, 8])
        return optimizer, torch.optim.lr_scheduler.ChainedScheduler([first, then])

    optimizer, schedule = made()
    extra = ExtraState({"schedule": schedule})
    for _ in range(7):
        optimizer.step()
        schedule.step()
    held = boxes(extra)
    extra.note(held)
    optimizer_2, extra.objects["schedule"] = made()
    extra.load(held)
    optimizer_2.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    for each, scheduler in ((optimizer, schedule), (optimizer_2, extra.objects["schedule"])):
        for _ in range(3):
            each.step()
            scheduler.step()
    assert (
        optimizer_2.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    )


def test_a_fresh_start_has_the_state_of_the_first_moment() -> None:
    held = Kept({"n": 0})
    extra = ExtraState({"it": held})
    held.state = {"n": 9}
    tensors = boxes(extra)
    extra.fresh(tensors)
    extra.load(tensors)
    assert held.state == {"n": 0}


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(
        ProgramError,
        match=r"extra_state\['it'\]\['f'\]\[1\] is a function; a state_dict\(\) may hold numbers",
    ):
        ExtraState({"it": Kept({"f": [1, lambda: 0]})})
    with pytest.raises(
        SpecError,
        match=r"extra_state\['it'\] is the class Kept; it must be an object with state_dict",
    ):
        ExtraState({"it": Kept})
    with pytest.raises(SpecError, match=r"extra_state\['it'\] is a int"):
        ExtraState({"it": 3})


def test_a_state_that_outgrows_its_box_is_refused_with_numbers() -> None:
    held = Kept([0.5] * 10)
    extra = ExtraState({"it": held})
    tensors = boxes(extra)
    held.state = [1 / 3] * 100
    extra.note(tensors)  # digits may grow
    held.state = [0.5] * 10_000
    with pytest.raises(
        ProgramError,
        match=r"takes \d+ bytes now, its box holds \d+; tensors and lists in it must keep",
    ):
        extra.note(tensors)


def test_bytes_that_are_no_state_are_lost_and_never_run() -> None:
    import pickle

    evil = b"\0" * HEAD_BYTES + pickle.dumps(print)
    box = torch.zeros(capacity(len(evil)), dtype=torch.uint8)
    whole = len(evil).to_bytes(HEAD_BYTES, "little") + evil
    box[: len(whole)] = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    with pytest.raises(StateLost, match=r"extra_state\['it'\]: its bytes are no state"):
        decode("it", box)
    data = encode("it", {"t": torch.zeros(2)}).replace(b"float32", b"Tensor\x20")
    whole = len(data).to_bytes(HEAD_BYTES, "little") + data
    box[: len(whole)] = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    with pytest.raises(StateLost, match="no state"):
        decode("it", box)
    assert math.isinf(again({"x": math.inf})["x"])


def test_only_what_follows_from_the_job_may_begin_anew() -> None:
    def box(fqn: str, n: int = 4) -> tuple[dict[str, TensorSpec], dict[str, Any]]:
        return {fqn: TensorSpec(fqn, (n,), "uint8")}, {fqn: ((n,), "uint8")}

    for fqn in ("extra.guards", "extra.dataset", "elastic.loss_scale"):
        mine, there = box(fqn)
        assert differing(mine, there, True) == set()
        assert (
            differing(mine, {}, True)
            == differing({}, there, True)
            == differing(mine, box(fqn, 5)[1], True)
            == {fqn}
        )
    assert differing(box("extra.dataset")[0], {}, stream=False) == set(), "the program's own"
    assert (
        differing(box("extra.ema")[0], {}, True) == differing({}, box("model.w")[1], True) == set()
    )
