"""`elastic.log`: numbers of its own that a script tells which is started over at each change of
capacity. It is a line of its output, which the process above reads with its steps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from elastic.cluster.ray_train.script_output import LOGGED
from elastic.config.numbers.logged_names import NamesSeen, checked_names, number_of
from elastic.errors import ProgramError

WHERE = "elastic.log"
seen = NamesSeen()


def log(numbers: Mapping[str, Any]) -> None:
    """Of a script that does not enter elastic.loop: numbers of the step that it prints next, by
    name. They stand beside its loss in metrics.csv, in TensorBoard and in trackers. What rank 0
    tells counts; under plain torchrun it is a line of output and no more."""
    loop = sys.modules.get("elastic.worker.loop.loop")
    if loop is not None and loop.here.host is not None:
        raise ProgramError("elastic.log was called where elastic.loop is; there it is run.log(...)")
    found = checked_names(numbers, WHERE)
    seen.add(found, WHERE)
    told = {name: number_of(value, name, WHERE) for name, value in found.items()}
    if os.environ.get("RANK", "0") == "0":
        print(LOGGED + json.dumps(told), flush=True)
