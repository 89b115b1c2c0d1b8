"""Faults of a server that pass."""

from __future__ import annotations

from support.storage.faulty_proxy import Fault, slow_down, unavailable

PASSING = {
    "unavailable": unavailable(), "slow_down": slow_down(), "internal": Fault("error", status=500,
    code="InternalError"), "reset": Fault("reset"), "short": Fault("short"), "hang": Fault("hang"),
    "lost": Fault("lost"), "bad_gateway": Fault("error", status=502, code="nginx"),
    "wrong": Fault("wrong"), "wrong_sent": Fault("wrong_sent"),
}  # fmt: skip
