"""How well predictions hold: against published measurements, and against saying that every GPU kind
has one MFU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from elastic.planner.cost.memory import USABLE
from elastic.planner.published.measurements import Case, cases

NEAR = 1.05  # of the best measured layout: a choice within that is a good one
LEAST_RANKED = 4  # measurements of a source whose order is compared


@dataclass(frozen=True)
class ScoreRow:
    """A row: what was measured and what is predicted; nan = not measured."""

    case: Case
    predicted: float
    error: float
    constant_error: float
    memory_error: float | None
    fits_predicted: bool


@dataclass(frozen=True)
class Score:
    """Errors are |predicted / measured - 1| of tokens per second and GPU, and of bytes."""

    lines: tuple[ScoreRow, ...]
    n_rows: int

    def plain(self) -> dict[str, Any]:
        timed = [line for line in self.lines if line.case.tokens_per_s]
        errors, constant = [line.error for line in timed], [line.constant_error for line in timed]
        sized = [line.memory_error for line in self.lines if line.memory_error is not None]
        by_source = _grouped(timed, lambda line: line.case.source)
        regrets = [regret for _, regret in self.regrets()]
        return {
            "rows": self.n_rows,
            "rows_timed": len(timed),
            "median_abs_err": median(errors),
            "p90_abs_err": quantile(errors, 0.9),
            "source_mean_abs_err": mean(
                median(line.error for line in some) for some in by_source.values()
            ),
            "constant_mfu_median_abs_err": median(constant),
            "constant_mfu_source_mean_abs_err": mean(
                median(ln.constant_error for ln in some) for some in by_source.values()
            ),
            "mem_rows": len(sized),
            "mem_median_abs_err": median(sized) if sized else None,
            "fits_accuracy": mean(line.fits_predicted == line.case.fits for line in self.lines),
            "fits_table": self.fits_table(),
            "spearman_by_source": {
                name: spearman(some) for name, some in by_source.items() if _ranked(some)
            },
            "choices": len(regrets),
            "best_choice_within_5pct": mean(r <= NEAR - 1 for r in regrets) if regrets else None,
            "regret_median": median(regrets) if regrets else None,
            "regret_p90": quantile(regrets, 0.9) if regrets else None,
            "by_source": {
                name: {"rows": len(some), "median_abs_err": median(line.error for line in some)}
                for name, some in by_source.items()
            },
        }

    def fits_table(self) -> dict[str, int]:
        """Confusion: what fits, as measured and as predicted."""
        found = {"fits_said_fits": 0, "fits_said_not": 0, "not_said_fits": 0, "not_said_not": 0}
        for line in self.lines:
            measured = "fits" if line.case.fits else "not"
            said = "fits" if line.fits_predicted else "not"
            found[f"{measured}_said_{said}"] += 1
        return found

    def regrets(self) -> list[tuple[tuple[str, ...], float]]:
        """Of each model, GPU kind and number with several measured layouts: how much slower the
        layout is that is predicted to be the fastest than the one that was. Layouts that were
        measured several times count with their median."""
        found = []
        timed = [line for line in self.lines if line.case.tokens_per_s]
        for key, some in _grouped(timed, _question).items():
            layouts = _grouped(
                some, lambda line: (line.case.layout, line.case.step.global_batch)
            ).values()
            if len(layouts) < 2:
                continue
            measured = [median(line.case.tokens_per_s for line in same) for same in layouts]
            predicted = [median(line.predicted for line in same) for same in layouts]
            chosen = measured[max(range(len(predicted)), key=lambda i: predicted[i])]
            found.append((key, max(measured) / chosen - 1))
        return found

    def table(self) -> list[tuple[str, ...]]:
        """Rows for people: id, model, GPUs, layout, measured, predicted, error."""
        return [
            (
                line.case.name, line.case.model, f"{line.case.n_gpus} {line.case.gpu}",
                str(line.case.layout), f"{line.case.tokens_per_s:.4g}", f"{line.predicted:.4g}",
                f"{line.predicted / line.case.tokens_per_s - 1:+.0%}",
            )
            for line in self.lines
            if line.case.tokens_per_s
        ]  # fmt: skip


def score(rows: Iterable[Mapping[str, str]]) -> Score:
    """Of the rows of a table in the columns of `published.COLUMNS` and more. Raises SpecError."""
    every = list(rows)
    found = cases(every)
    constants = constant_flop_per_s(found)
    lines = []
    for case in found:
        predicted, measured = case.predicted_tokens_per_s(), case.tokens_per_s
        constant = constants.get(case.gpu, 0.0) / case.work.model.flop_per_token
        needs = case.predicted_bytes()
        lines.append(
            ScoreRow(
                case,
                predicted,
                abs(predicted / measured - 1) if measured else float("nan"),
                abs(constant / measured - 1) if measured else float("nan"),
                abs(needs / case.memory_bytes - 1) if case.memory_bytes else None,
                case.allocated_bytes() <= case.site.chip.gpu.memory_bytes * FITS,
            )
        )
    return Score(tuple(lines), len(every))


FITS = (1 + USABLE) / 2  # of a GPU's memory: between what is safe and what is there


def constant_flop_per_s(found: Sequence[Case]) -> dict[str, float]:
    """The baseline: each GPU kind does as many of a model's FLOPs per second (6 per parameter and
    token) as its median row."""
    rates = defaultdict(list)
    for case in found:
        if case.tokens_per_s:
            rates[case.gpu].append(case.tokens_per_s * case.work.model.flop_per_token)
    return {gpu: median(some) for gpu, some in rates.items()}


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spearman(lines: Sequence[ScoreRow]) -> float:
    """Rank correlation of predicted and measured tokens per second; of equal values the ranks are
    averaged."""
    one = ranks([line.case.tokens_per_s for line in lines])
    two = ranks([line.predicted for line in lines])
    middle = (len(lines) + 1) / 2
    covariance = sum((a - middle) * (b - middle) for a, b in zip(one, two))
    spread = (sum((a - middle) ** 2 for a in one) * sum((b - middle) ** 2 for b in two)) ** 0.5
    return covariance / spread if spread else 0.0


def ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    first = {value: order.index(value) for value in set(order)}
    return [first[value] + (order.count(value) + 1) / 2 for value in values]


def _ranked(lines: Sequence[ScoreRow]) -> bool:
    """Does the source vary layouts?"""
    return len(lines) >= LEAST_RANKED and len({line.case.layout for line in lines}) > 1


def _question(line: ScoreRow) -> tuple[str, ...]:
    case = line.case
    heads = [a.heads for a in case.work.sample.attentions] if case.work.sample else []
    shape = f"{case.work.n_blocks} {case.work.block.total:.0f} {heads}"
    return (
        case.source,
        case.model,
        shape,
        case.gpu,
        str(case.n_gpus),
        str(case.tokens),
        case.step.dtype,
    )


def _grouped(
    lines: Iterable[ScoreRow], key: Callable[[ScoreRow], Any]
) -> dict[Any, list[ScoreRow]]:
    found: dict[Any, list[ScoreRow]] = {}
    for line in lines:
        found.setdefault(key(line), []).append(line)
    return found
