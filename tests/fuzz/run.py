"""Gives readers inputs that are none: `make fuzz N=100000`. Each is read, or refused by an error
that its reader declares, in seconds. One that ends otherwise is told with the seed and the number
that make it again, and the exit code is 1."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support.fuzz.fuzzing import fuzz  # noqa: E402
from support.fuzz.targets import opened  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1000, help="inputs of each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=(), help="names of readers")
    given = parser.parse_args()
    failed = 0
    with opened() as targets:
        for target in targets:
            if given.only and target.name not in given.only:
                continue
            found = fuzz(target, given.n, given.seed)
            print(found, flush=True)
            failed += len(found.failures)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
