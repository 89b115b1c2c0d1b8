"""Fits the constants of elastic/planner/cost/kernels.csv to published measurements: coordinate
descent on log errors.

Half of the weight goes to rows, half to sources, so that no long table outvotes the others; large
errors count up to a bound, and a constant that the rows say little of stays near where it began.
`--half`: fits one half of the sources and scores the other with it, and the other way round;
nothing is written then. `--smoke`: fits to four measurements that it makes up.
"""

from __future__ import annotations

import csv
import math
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import report

from elastic.planner.cost import compute
from elastic.planner.cost.kernels import PARENT, UNFUSED, Kernels
from elastic.planner.published.measurements import Case, cases
from elastic.planner.published.score import quantile

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("ELASTIC_SHARED") or ROOT.parent / "shared")
KERNELS = ROOT / "elastic" / "planner" / "cost" / "kernels.csv"
PARTS = ("all", "half")
ROUNDS, FIRST_STEP = 8, 0.25
MOST = 1.2  # of a log error, that counts
DRAWN = 6e-4  # to where a constant began, per square of its log distance
BETTER = 1e-6
# One half of the sources, by parts of their names: of each software generation that several sources
# used, some.
HALF = ("prequel", "NeMo@", "asyncTP", "202506", "4d88a8a44", "docs/performance-summary.md")

Key = tuple[str, str, str]  # software, architecture, constant; '' = all of them
EVERYWHERE = {"tail": 0.4, "crowd": 0.2, "jitter": 0.01, "link": 0.6, "node": 0.7, "bandwidth": 0.8}
OF_SOFTWARE = {
    "megatron-2022": {
        "microbatch_s": 5e-3, "moved": 1.0, "crowd": 0.8, "dp_hidden": 0.3, "tp_hidden": 0.01,
        "host_s": 8e-6,
    },
    "megatron-2024": {
        "microbatch_s": 1e-3, "moved": 0.25, "tp_hidden": 0.3, "dp_hidden": 0.6, "casts": 2.0,
        "host_s": 1.2e-5,
    },
    "megatron-2026": {"moved": 0.2, "casts": 2.0, "host_s": 4e-6},
    "fsdp1": {"moved": 0.8, "host_s": 8e-6},
    "fsdp2": {"moved": 0.6, "casts": 3.0, "tp_hidden": 0.01},
    "fsdp2-compiled": {"moved": 0.3, "casts": 2.0},
}  # fmt: skip
BOUNDS = {
    "matmul": (0.3, 1.0), "low8": (0.3, 1.0), "low4": (0.2, 1.0), "attend_forward": (0.02, 1.0),
    "attend_backward": (0.02, 1.0), "odd_heads": (0.02, 1.0), "moved": (0.05, 3.0),
    "tp_hidden": (0.001, 0.9), "dp_hidden": (0.001, 1.0), "jitter": (5e-4, 0.05), "crowd": (0.01,
    1.0), "tail": (0.05, 1.0), "link": (0.2, 0.95), "node": (0.2, 0.95), "bandwidth": (0.5, 0.95),
    "casts": (0.5, 8.0), "host_s": (1e-6, 6e-5), "microbatch_s": (1e-5, 0.2),
}  # fmt: skip


def family(software: str) -> str:
    """The generation whose constants per architecture it shares."""
    return PARENT.get(software, software)


def arch(case: Case) -> str:
    return case.site.chip.gpu.arch


def start(found: Sequence[Case]) -> dict[Key, float]:
    made: dict[Key, float] = {("", "", name): value for name, value in EVERYWHERE.items()}
    made |= {
        (software, "", name): value
        for software, some in OF_SOFTWARE.items()
        for name, value in some.items()
    }
    for case in found:
        own = {"matmul": 0.82, "attend_forward": 0.5}
        own |= {"odd_heads": 0.1} if case.software in UNFUSED else {"attend_backward": 0.45}
        own |= {"float8": {"low8": 0.75}, "float4": {"low4": 0.6}}.get(case.step.dtype, {})
        made |= {(family(case.software), arch(case), name): value for name, value in own.items()}
    return made


def kernels(constants: Mapping[Key, float], software: str, arch: str) -> Kernels:
    """As elastic/planner/cost/kernels.py reads them."""
    lines = [("", ""), (family(software), ""), (software, ""), (family(software), arch)]
    own = {name: v for line in lines for (of, on, name), v in constants.items() if (of, on) == line}
    return Kernels(fused_attention=software not in UNFUSED, **own)


def errors(constants: Mapping[Key, float], found: Sequence[Case]) -> list[float]:
    """Log of predicted over measured."""
    compute.matmul_s.cache_clear()
    made = {
        pair: kernels(constants, *pair) for pair in {(case.software, arch(case)) for case in found}
    }
    return [
        math.log(case.predicted_tokens_per_s(made[case.software, arch(case)]) / case.tokens_per_s)
        for case in found
    ]


def loss(
    off: Sequence[float],
    found: Sequence[Case],
    constants: Mapping[Key, float],
    began: Mapping[Key, float],
) -> float:
    by: dict[str, list[float]] = defaultdict(list)
    for error, case in zip(off, found):
        bounded = min(abs(error), MOST)
        by[case.source].append(bounded + bounded * bounded / 2)
    rows = sum(map(sum, by.values())) / len(found)
    sources = sum(sum(some) / len(some) for some in by.values()) / len(by)
    return (rows + sources) / 2 + DRAWN * sum(
        math.log(constants[key] / began[key]) ** 2 for key in constants
    )


def touched(key: Key, found: Sequence[Case]) -> list[int]:
    """Cases that a constant is of."""
    software, on, _ = key
    return [
        i
        for i, case in enumerate(found)
        if not software
        or (software in (case.software, family(case.software)) and on in ("", arch(case)))
    ]


def fit(found: Sequence[Case], began: Mapping[Key, float]) -> dict[Key, float]:
    """One constant after the other, up or down by a step that is halved where neither helps."""
    constants, steps = dict(began), dict.fromkeys(began, FIRST_STEP)
    off = errors(constants, found)
    least = loss(off, found, constants, began)
    for at in range(ROUNDS):
        for key in began:
            mine = touched(key, found)
            for factor in (1 + steps[key], 1 / (1 + steps[key])) if mine else ():
                low, high = BOUNDS[key[2]]
                tried = constants | {key: min(high, max(low, constants[key] * factor))}
                again = list(off)
                for i, error in zip(mine, errors(tried, [found[i] for i in mine])):
                    again[i] = error
                value = loss(again, found, tried, began)
                if value < least - BETTER:
                    constants, off, least = tried, again, value
                    break
            else:
                steps[key] /= 2
        print(f"round {at + 1}: {least:.4f}", file=sys.stderr)
    return constants


def figures(constants: Mapping[Key, float], found: Sequence[Case]) -> dict[str, float]:
    off = [abs(math.exp(error) - 1) for error in errors(constants, found)]
    return {
        "rows": len(off),
        "median_abs_err": round(median(off), 4),
        "p90_abs_err": round(quantile(off, 0.9), 4),
    }


def halves(
    found: Sequence[Case], began: Mapping[Key, float], half: Sequence[str]
) -> dict[str, dict[str, float]]:
    """`half`: parts of the names of those sources that are one half."""
    one = [case for case in found if any(part in case.source for part in half)]
    two = [case for case in found if case not in one]
    to_two, to_one = fit(two, began), fit(one, began)
    return {
        "fitted_a": figures(to_two, two), "unseen_b": figures(to_two, one),
        "fitted_b": figures(to_one, one), "unseen_a": figures(to_one, two),
    }  # fmt: skip


def write(constants: Mapping[Key, float], path: Path = KERNELS) -> None:
    with path.open("w", encoding="utf-8", newline="") as opened:
        table = csv.writer(opened, lineterminator="\n")
        table.writerow(["software", "arch", "constant", "value"])
        table.writerows([*key, f"{value:.4g}"] for key, value in sorted(constants.items()))


# ----------------------------------------------------------------------------- made-up measurements

ROW = {
    "source": "s", "model": "llama3-8b", "params_b": "8.03", "layers": "32", "hidden": "4096",
    "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256", "gpu": "H100-80GB-SXM",
    "tp": "1", "pp": "1", "precision": "bf16", "activation_ckpt": "selective",
    "zero_stage": "fsdp2", "tokens_per_s_per_gpu": "1",
}  # fmt: skip
# GPUs and length of a sequence
SIZES = (("8", "2048"), ("8", "8192"), ("64", "8192"), ("64", "2048"))
SMOKE_HALF = ("64",)
SLOWER = {("fsdp2", "Hopper", "matmul"): 0.6, ("fsdp2", "", "moved"): 1.5}


def made_up() -> list[Case]:
    """Measurements of a world in which products and network are slower than where the fit begins;
    one source per size."""
    found = cases([ROW | {"source": f"{n}", "gpus": n, "seq_len": seq} for n, seq in SIZES])
    of = kernels(start(found) | SLOWER, "fsdp2", "Hopper")
    return [replace(case, tokens_per_s=case.predicted_tokens_per_s(of)) for case in found]


def published(shared: Path) -> list[Case]:
    with (shared / "planner" / "public.csv").open(encoding="utf-8") as opened:
        return [case for case in cases(csv.DictReader(opened)) if case.tokens_per_s]


# -------------------------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--shared",
        type=Path,
        default=SHARED,
        help=f"folder with planner/public.csv (default {SHARED})",
    )
    parser.add_argument(
        "--half",
        action="store_true",
        help="fit on one half of the sources, score on the other; both ways",
    )
    parser.add_argument(
        "--write", action="store_true", help="write elastic/planner/cost/kernels.csv"
    )
    given = parser.parse_args(arguments)
    given.parts = PARTS[given.half :][:1]
    if not given.smoke and not (path := given.shared / "planner" / "public.csv").exists():
        print(
            f"planner_fit: {path} is not there; --shared names the folder of the measurements",
            file=sys.stderr,
        )
        return 2
    found = made_up() if given.smoke else published(given.shared)
    began = start(found)
    if given.half:
        return report.tell(
            "planner_fit", given, halves(found, began, SMOKE_HALF if given.smoke else HALF)
        )
    constants = fit(found, began)
    fitted = figures(constants, found)
    if given.write and not given.smoke:
        write(constants)
    return report.tell(
        "planner_fit", given, {"all": fitted, "median_abs_err": fitted["median_abs_err"]}
    )


if __name__ == "__main__":
    sys.exit(main())
