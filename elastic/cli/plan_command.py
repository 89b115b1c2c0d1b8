"""`elastic plan`: its arguments, which question they ask, and the answer as plain data and as
lines."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from rich.console import Console
from rich.text import Text

from elastic.api.planning import aim_limits, model_source, plan_nodes, scoring, sizing
from elastic.api.planning import query as answers
from elastic.api.planning.model_source import Subject
from elastic.api.planning.plan_nodes import MachineGroup
from elastic.api.planning.quantities import GpuRequest, gpus_of, hours_of, tokens_of, usd_of
from elastic.api.simulate import Simulation, simulate
from elastic.cli.parser import add_job_or_script, add_overrides, number, option, show, verb, whole
from elastic.config.clusters import load_cluster
from elastic.errors import SpecError
from elastic.observe.plans import plan_bars, plan_tables, simulated
from elastic.observe.plans.phase_table import phase_table
from elastic.observe.reporting.pictures import asked_for
from elastic.planner.offers import Aim, Purpose

ABOUT = (
    "which layout, how fast, how many dollars: a job on its pools, or a model on GPUs, before "
    "anything is started"
)
MOST_SAMPLES = 1_000_000  # of a step: more is a slip of the finger
TRACE_STARTS = 12
KINDS = "A100-80GB,H100,H200,B200"  # that --within looks at, where --gpus names none
EPILOG = """examples:
  elastic plan jobs/gpt2_124m --cluster cluster_configs/aws_p5_p4d_spot.yaml --explain
  elastic plan --script train.py --gpus H100:8 -- --epochs 3
  elastic plan --model llama3-70b --gpus H100:256 --tokens 1T
  elastic plan --model 8b --what-if H100:8 --what-if H100:8@spot --what-if A100:16 --tokens 20B
  elastic plan --model 8b --gpus H100 --scaling
  elastic plan --model llama3-70b --tokens 1T --within 3w --gpus H100,A100-80GB,B200

GPUS are KIND:COUNT, KIND a GPU or an instance type; with commas several pools at once. Behind it
may stand @2x8 (nodes x GPUs), @spot, @reserved or @owned, and @usd=2.50 (your price per GPU-hour;
else the catalog's cheapest)."""


@dataclass(frozen=True)
class PlanAnswer:
    plain: Mapping[str, Any]
    lines: Sequence[str]


SHARE = number("a share between 0 and 1, as in 0.8", lambda share: 0 < share < 1)


def add(verbs: Any) -> None:
    made = verb(verbs, "plan", _answered, about=ABOUT)
    made.epilog, made.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    _add_subject(made)
    _add_nodes(made)
    why = made.add_argument_group("for what")
    option(
        why,
        "--purpose",
        "what the best one is (default: fastest, or deadline)",
        choices=get_args(Purpose),
    )
    option(why, "--tokens N", "to be trained on in all: 300B, 1T (default: the job's steps)")
    option(why, "--within TIME", "3w, 10d, 36h; without counts of GPUs: how many it takes")
    option(why, "--budget USD", "dollars in all: 500, 200k, 1.5M")
    shown = made.add_argument_group("what is shown")
    option(shown, "--top N", "offers (default: 5)", type=whole(1), default=5)
    option(
        shown, "--explain N", "where the time of offer N goes", type=whole(1), nargs="?", const=1
    )
    option(shown, "--png FILE", "a picture of that, all offers side by side")
    option(shown, "--what-if GPUS", "compare pools; repeatable", action="append", default=[])
    option(shown, "--scaling", "8, 16, 32 ... GPUs, until efficiency is under --efficiency")
    option(shown, "--score FILE", "instead: predictions against the measurements of a CSV file")
    option(
        shown,
        "--trace PATH",
        "a line on time and dollars on this spot trace (elastic simulate says more)",
    )
    option(shown, "--efficiency X", "(default: 0.8)", type=SHARE, default=0.8)


def _add_subject(made: argparse.ArgumentParser) -> None:
    what = made.add_argument_group("what is trained")
    add_job_or_script(what)
    option(
        what,
        "--model NAME",
        "or a published model: 8b, llama3-70b,seq=16384; or layers=80,hidden=...",
    )
    option(what, "--batch N", "sequences of an optimizer step (default: as published)", type=_batch)
    option(
        what,
        "--precision",
        "(default: bfloat16, or the job's)",
        choices=("bfloat16", "float16", "float32"),
    )
    option(what, "--check", "compare first what the job's layouts compute (a small copy)")
    add_overrides(what)


def _add_nodes(made: argparse.ArgumentParser) -> None:
    where = made.add_argument_group("on what")
    option(where, "--cluster FILE", "the pools of a cluster file (default: the job's own)")
    option(where, "--nodes POOL=N", "not all that a pool may have", action="append", default=[])
    option(where, "--gpus GPUS", "or GPUs by kind: H100:64, A100:16@2x8,H100:8@spot")
    option(where, "--cloud NAME", "prices and nodes of this cloud: aws, gcp, azure", default="")
    option(
        where, "--layout LAYOUT", "this one: 'dp_shard=8,tp=4', or a part: 'auto,tp=4'", default=""
    )


def _batch(text: str) -> int:
    if whole(1)(text) > MOST_SAMPLES:
        raise argparse.ArgumentTypeError(
            f"'{text}' must be at most {MOST_SAMPLES:,} sequences a step"
        )
    return int(text)


def _answered(given: argparse.Namespace) -> int:
    found = answer(given)
    show(given, found.plain, found.lines)
    return 0


def answer(given: argparse.Namespace) -> PlanAnswer:
    """Raises SpecError, InfeasiblePlan."""
    if given.score:
        return _scored(given)
    _check(given)
    asked = gpus_of(given.gpus) if given.gpus else ()
    tokens = tokens_of(given.tokens) if given.tokens else 0.0
    within_h = hours_of(given.within) if given.within else 0.0
    subject = _subject(given)
    aim = _aim(given, subject, tokens, within_h=within_h)
    query = answers.Query(subject, aim)
    if given.what_if:
        choices = [
            (text, _machines(gpus_of(text, "--what-if"), given.cloud)) for text in given.what_if
        ]
        data = answers.what_if(query, choices)
        return PlanAnswer(data, plan_tables.what_if(data))
    if given.scaling:
        one = _one(asked, given.cloud) if asked else _of_files(given, query)[0]
        data = answers.scaling(query, one, given.efficiency, n_most=asked[0].n_gpus if asked else 0)
        return PlanAnswer(data, plan_tables.scaling(data))
    if aim.deadline_h and not _has_nodes(given, asked):
        _check_shown(given, "--within without counts of GPUs")
        kinds = [plan_nodes.of_asked(each, given.cloud) for each in asked or gpus_of(KINDS)]
        data = sizing.capacity(query, kinds)
        return PlanAnswer(data, plan_tables.capacity(data))
    machines = _counted(asked, given.cloud) if asked else _of_files(given, query)
    return _plan(given, query, machines)


def _scored(given: argparse.Namespace) -> PlanAnswer:
    if given.job or given.model or given.script:
        raise SpecError(f"plan: {_named(given)} and --score are two questions; ask one of them")
    found = scoring.scored(given.score)
    data = found.plain()
    return PlanAnswer(data, plan_tables.scored(data, found.table()))


def _named(given: argparse.Namespace) -> str:
    return "JOB" if given.job else "--model" if given.model else "--script"


def _plan(
    given: argparse.Namespace, query: answers.Query, found: tuple[MachineGroup, ...]
) -> PlanAnswer:
    data = aim_limits.plan(query, found)
    if given.explain and given.explain > len(data["offers"]):
        raise SpecError(
            f"--explain {given.explain}: there are {len(data['offers'])} offers; --top N shows more"
        )
    lines = [*plan_tables.plan(data), *phase_table(data)]
    if given.trace:
        asked = Simulation(
            query.subject,
            trace=given.trace,
            compare=("on-demand",),
            deadline_h=query.aim.deadline_h,
            n_starts=TRACE_STARTS,
        )
        data["simulated"] = simulate(asked).plain()
        lines += ["", simulated.one_line(data["simulated"]), *data["simulated"]["notes"]]
    if given.explain:
        width = min(100, shutil.get_terminal_size().columns)
        lines += ["", *_colored(plan_bars.explain(data, given.explain, width))]
    if given.png:
        with asked_for(given.png):
            data["png"] = str(plan_bars.save(data, given.png))
        lines += ["", f"picture: {data['png']}"]
    return PlanAnswer(data, lines)


def _colored(texts: Sequence[Text]) -> list[str]:
    """With colors where somebody looks at it."""
    if not sys.stdout.isatty():
        return [text.plain for text in texts]
    console, lines = Console(highlight=False, soft_wrap=True), []
    for text in texts:
        with console.capture() as captured:
            console.print(text)
        lines.append(captured.get().rstrip("\n"))
    return lines


# ------------------------------------------------------------------------------------ what is asked


def _check(given: argparse.Namespace) -> None:
    """Raises SpecError for what is missing or asked in two ways."""
    if not given.job and not given.model and not given.script:
        raise SpecError(
            "plan: JOB, --script or --model is missing: elastic plan jobs/gpt2_124m, or elastic "
            "plan --model 8b --gpus H100:8"
        )
    pairs = (
        ("JOB", given.job, "--model", given.model),
        ("--script", given.script, "--model", given.model),
        ("--cluster", given.cluster, "--gpus", given.gpus),
        ("--gpus", given.gpus, "--what-if", given.what_if),
        ("--scaling", given.scaling, "--what-if", given.what_if),
        ("--cluster", given.cluster, "--what-if", given.what_if),
        ("--nodes", given.nodes, "--what-if", given.what_if),
        ("--cloud", given.cloud, "--cluster", given.cluster),
        ("--nodes", given.nodes, "--gpus", given.gpus),
        ("--set", given.overrides, "--model", given.model),
        ("--check", given.check, "--model", given.model),
        ("--trace", given.trace, "--model", given.model),
        ("--trace", given.trace, "--gpus", given.gpus),
        ("--trace", given.trace, "--nodes", given.nodes),
    )
    for name, one, other_name, other in pairs:
        if one and other:
            raise SpecError(f"plan: {name} and {other_name} are two ways at once; give one of them")
    for name, one in (("--what-if", given.what_if), ("--scaling", given.scaling)):
        if one:
            _check_shown(given, name)
    sized = given.within and given.tokens
    if given.model and not (given.gpus or given.cluster or given.what_if or sized or given.scaling):
        raise SpecError(
            "plan: --model needs nodes: --gpus H100:64, --cluster FILE, --what-if, or --tokens N "
            "--within TIME"
        )
    if given.model and given.scaling and not (given.gpus or given.cluster):
        raise SpecError("plan: --scaling needs a kind of GPU: --gpus H100")


def _check_shown(given: argparse.Namespace, question: str) -> None:
    """Raises SpecError for what is shown of offers on given nodes only."""
    shown = (("--explain", given.explain), ("--png", given.png), ("--trace", given.trace))
    for name, one in shown:
        if one:
            raise SpecError(
                f"plan: {name} shows an offer on given nodes, {question} compares several; ask for "
                "one of them by --gpus or --cluster"
            )


def _subject(given: argparse.Namespace) -> Subject:
    # what is wrong there is said before a model is built and tried
    cluster = load_cluster(given.cluster) if given.cluster is not None else None
    if given.model:
        found = model_source.of_model(given.model, given.batch or 0, given.precision or "bfloat16")
        head_usd_per_h = cluster.head_usd_per_h if cluster is not None else 0.0
        job = replace(found.job, head_usd_per_h=head_usd_per_h)
        found = replace(found, job=job, cluster=cluster)
    else:
        overrides = [f"global_batch={given.batch}"] if given.batch else []
        overrides += [f"precision={given.precision}"] if given.precision else []
        overrides, drilled = [*given.overrides, *overrides], not given.cluster
        found = model_source.of_job_or_script(
            given.job,
            given.script,
            given.args,
            overrides=overrides,
            check=given.check,
            drilled=drilled,
            cluster=cluster,
        )
    return found.with_layout(given.layout)


def _aim(given: argparse.Namespace, subject: Subject, tokens: float, *, within_h: float) -> Aim:
    """What the command line does not say, the job does."""
    within_h = within_h or (subject.job.deadline_h or 0.0)
    tokens = tokens or subject.tokens
    own = subject.job.purpose
    default: Purpose = "fastest" if own == "auto" else own
    if given.within or own == "auto":
        default = "deadline" if within_h else default
    purpose: Purpose = given.purpose or default
    if purpose == "deadline" and not within_h:
        raise SpecError("--purpose deadline: until when? give --within 3w")
    if within_h and not tokens:
        raise SpecError(f"--within {given.within}: for how many tokens? give --tokens 300B")
    budget_usd = usd_of(given.budget) if given.budget else 0.0
    return Aim(purpose, tokens, within_h, given.top, budget_usd)


def _has_nodes(given: argparse.Namespace, asked: Sequence[GpuRequest]) -> bool:
    """Are nodes named, so that their number is no question?"""
    if asked:
        return any(each.n_gpus for each in asked)
    return bool(given.cluster or given.job or given.script)


def _one(asked: Sequence[GpuRequest], cloud: str) -> MachineGroup:
    if len(asked) > 1:
        raise SpecError("--scaling looks at one kind of GPU; give one: --gpus H100")
    return plan_nodes.of_asked(asked[0], cloud)


def _counted(asked: Sequence[GpuRequest], cloud: str) -> tuple[MachineGroup, ...]:
    for each in asked:
        if not each.n_gpus:
            raise SpecError(
                f"--gpus {each.text}: how many? give {each.kind}:64 (or --tokens and --within, "
                "which find that)"
            )
    return _machines(asked, cloud)


def _machines(asked: Sequence[GpuRequest], cloud: str) -> tuple[MachineGroup, ...]:
    for each in asked:
        if not each.n_gpus:
            raise SpecError(f"{each.text}: how many? as in {each.kind}:64")
    return tuple(plan_nodes.of_asked(each, cloud) for each in asked)


def _of_files(given: argparse.Namespace, query: answers.Query) -> tuple[MachineGroup, ...]:
    counts, deadline_h = plan_nodes.nodes_of(given.nodes), query.aim.deadline_h
    return model_source.machines_of(query.subject, counts, deadline_h=deadline_h)
