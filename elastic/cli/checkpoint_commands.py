"""`elastic checkpoint`: ls, verify, export, import, rm."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from elastic import api
from elastic.cli.parser import option, run_verb, show, verb, verb_group, whole
from elastic.observe import find_runs, run_tables
from elastic.program import WEIGHT_TYPES

BEST = "best"  # in the place of a step


def add(verbs: Any) -> None:
    actions = verb_group(verbs, "checkpoint", "checkpoints of a run")
    run_verb(actions, "ls", _ls, about="list them")
    run_verb(
        actions, "verify", _verify, about="read every byte of them and compare with the digests"
    )
    made = run_verb(actions, "export", _export, about="write the weights of one as safetensors")
    about = f"default: the newest; {BEST}: the one with the least validation loss"
    option(made, "--step N", about, type=_step)
    option(made, "--to FOLDER", "an empty folder, or a URI; files of at most 5 GB", required=True)
    option(
        made,
        "--job JOB",
        "folder of its job: also writes config.json and the like, or adapters alone",
    )
    option(made, "--merged", "of a job with adapters: the whole model with them added")
    option(
        made,
        "--weights",
        "the type that they are written in, for transformers (int8, float8: through torchao)",
        choices=WEIGHT_TYPES,
        default="",
    )
    option(
        made,
        "--state NAME",
        "in place of weights what the optimizer keeps of them under NAME, as an average",
        default="",
    )
    about = "make a new run that begins with the weights (and moments) of another trainer"
    made = verb(actions, "import", _import, about=about)
    option(made, "SOURCE", "a .safetensors file, a folder of them, or a checkpoint of plain DCP")
    option(made, "--into RUN", "name of the new run: elastic run JOB --run-name RUN", required=True)
    option(made, "--job JOB", "folder with job.yaml and program.py", required=True)
    option(
        made, "--at-step N", "step that the run resumes from (default: 0)", type=whole(0), default=0
    )
    option(made, "--ignore-extra", "leave out tensors that the program does not have")
    made = run_verb(actions, "rm", _rm, about="remove those of a step, whole or interrupted")
    made.add_argument("--step", metavar="N", type=int, required=True)
    option(made, "--force", "also the only good one, or the newest of a live run")


def _step(text: str) -> int | str:
    if text == BEST:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' must be a step, or {BEST}") from None


def _ls(given: argparse.Namespace) -> int:
    found, problems = api.checkpoints(find_runs.open_storage_of(given.run, given.storage))
    rows: list[tuple[str, ...]] = [
        ("STEP", "GENERATION", "COMMITTED", "LAYOUT", "RANKS", "SIZE", "VALIDATION", "AGE", "URI")
    ]
    rows += [run_tables.checkpoint(item) for item in found]
    lines = (
        run_tables.columns(rows, right=(0, 1, 4, 5, 7)) if found else ["no committed checkpoint"]
    )
    show(given, {"checkpoints": found, "problems": problems}, lines + problems)
    return 0


def _verify(given: argparse.Namespace) -> int:
    found = api.verify(find_runs.open_storage_of(given.run, given.storage))
    bad = [item for item in found if item["problems"]]
    gone, right = "the run removed it while it was read", "every byte is as it was written"
    lines = [
        f"step {c['step']}: {'; '.join(c['problems']) or (gone if c['removed'] else right)}"
        for c in found
    ]
    show(given, found, lines or ["no committed checkpoint"])
    return 1 if bad else 0


def _export(given: argparse.Namespace) -> int:
    done = api.export(
        find_runs.open_storage_of(given.run, given.storage),
        given.step,
        given.to,
        job=given.job,
        merged=given.merged,
        weights=given.weights,
        state=given.state,
    )
    show(
        given,
        done,
        [
            f"step {done['step']}: {done['tensors']} tensors in {', '.join(done['files'])} under "
            f"{done['to']}"
        ],
    )
    return 0


def _import(given: argparse.Namespace) -> int:
    order = api.Import(
        given.source, given.into, given.job, given.storage, given.at_step, given.ignore_extra
    )
    done = api.import_state(order)
    taken = (
        f"{done['weights']} weights and {done['moments']} tensors of the optimizer are taken over"
    )
    lines = [f"{done['uri']}: {taken}", *(f"  {text}" for text in done["converted"][:8])]
    if done["ignored"]:
        lines.append(
            f"  left out: {len(done['ignored'])} tensors, the first is {done['ignored'][0]}"
        )
    words = ["elastic", "run", given.job, "--run-name", given.into]
    if given.storage:
        words += ["--storage", given.storage]
    show(given, done, [*lines, f"continue with it: {shlex.join(words)}"])
    return 0


def _rm(given: argparse.Namespace) -> int:
    gone = api.remove(
        find_runs.open_storage_of(given.run, given.storage, exact=True), given.step, given.force
    )
    show(given, {"removed": gone}, [f"removed {uri}" for uri in gone])
    return 0
