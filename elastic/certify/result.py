"""A whole run of certify: its checks, its exit code, and its form as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic.errors import SpecError
from elastic.scenarios.check import VERDICTS, Bound, Check, Verdict

FORMAT = 1


@dataclass(frozen=True)
class CertifyReport:
    """A whole run of certify. `place`: what it ran on, as plain data."""

    place: dict[str, Any]
    checks: tuple[Check, ...]
    budget_s: float
    seconds: float
    interrupted: bool = False

    def count(self, verdict: Verdict) -> int:
        return sum(1 for check in self.checks if check.verdict == verdict)

    @property
    def counts(self) -> str:
        words: dict[Verdict, str] = {"pass": "passed", "fail": "failed", "not run": "not run"}
        return ", ".join(f"{self.count(verdict)} {word}" for verdict, word in words.items())

    @property
    def exit_code(self) -> int:
        """0 all that ran passed (and something ran), 1 something failed or nothing ran, 3 stopped
        by a person."""
        if self.count("fail"):
            return 1
        if self.interrupted:
            return 3
        return 0 if self.count("pass") else 1

    def plain(self) -> dict[str, Any]:
        verdicts = {verdict.replace(" ", "_"): self.count(verdict) for verdict in VERDICTS}
        checks = [
            asdict(check) | {"bounds": [asdict(bound) for bound in check.bounds]}
            for check in self.checks
        ]
        return {
            "certify": FORMAT, "place": self.place, "budget_s": self.budget_s,
            "seconds": self.seconds, "interrupted": self.interrupted, "verdicts": verdicts,
            "checks": checks,
        }  # fmt: skip

    @classmethod
    def from_plain(cls, data: Any, where: str) -> CertifyReport:
        """The inverse of `plain`. Raises SpecError that begins with `where`."""
        if not isinstance(data, Mapping) or data.get("certify") != FORMAT:
            raise SpecError(
                f'{where}: not what `elastic certify --json` prints ("certify": {FORMAT})'
            )
        try:
            checks = tuple(
                Check(**{**check, "bounds": tuple(Bound(**bound) for bound in check["bounds"])})
                for check in data["checks"]
            )
            return cls(
                data["place"], checks, data["budget_s"], data["seconds"], data["interrupted"]
            )
        except (KeyError, TypeError) as error:
            raise SpecError(
                f"{where}: a result of another form ({error}); run elastic certify --json again"
            ) from error

    def summary(self) -> list[str]:
        """What stands below the rows."""
        broken = [check.name for check in self.checks if check.verdict == "fail"]
        end = " (interrupted)" if self.interrupted else ""
        return [
            "",
            *([f"failed: {', '.join(broken)}"] if broken else []),
            f"{self.counts} in {self.seconds:.0f} s{end}",
        ]


def place_lines(place: Mapping[str, Any]) -> list[str]:
    """What it ran on."""
    rows = [(key, value) for key, value in place.items() if value not in ("", None, [])]
    return [
        f"{key:10} {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in rows
    ]
