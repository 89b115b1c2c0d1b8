"""Where a driver tells its numbers to Prometheus: `9500`, `0.0.0.0:9500`, or `ray`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic.errors import SpecError

LOOPBACK, RAY = "127.0.0.1", "ray"
PORT_MOST = 65535


@dataclass(frozen=True)
class MetricsPort:
    """`port` None = through Ray's own metrics alone; 0 = any that is free."""

    host: str = LOOPBACK
    port: int | None = None

    @classmethod
    def of(cls, value: Any) -> MetricsPort:
        """Raises SpecError."""
        text = " ".join(str(value).split())
        if text == RAY:
            return cls()
        host, colon, number = text.rpartition(":")
        digits = number.isascii() and number.isdigit()
        if (
            isinstance(value, bool)
            or not digits
            or int(number) > PORT_MOST
            or bool(colon) != bool(host)
        ):
            raise SpecError(
                f"must be a port (0 to {PORT_MOST}; 0 = any that is free), HOST:PORT for others "
                f"than this machine, or '{RAY}' for Ray's own metrics alone, not '{text:.60}'"
            )
        return cls(host.strip("[]") or LOOPBACK, int(number))
