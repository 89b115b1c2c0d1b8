"""The command line: parse, call, print. Importing this module imports neither torch nor ray."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from elastic import __version__, api
from elastic.api.running.supervise import command_of, supervised
from elastic.certify import certify_command as certify
from elastic.cli import plan as planning
from elastic.errors import ElasticError, SpecError
from elastic.observe import doctor, find_runs, logs, report, run_tables
from elastic.observe.plans import price_list

EXIT = {"succeeded": 0, "failed": 1, "stopped": 3}
RUN = "run name (or how it begins, or the job's name: its newest run), its folder or its URI"
EPILOG = """exit codes: 0 done, 1 the run failed, 2 the input is wrong (one line says where), 3 stopped by a person or budget,
4 the driver has lost its run (storage out of reach, its Ray cluster gone, or another one drives it): run it again

JOB is a folder with job.yaml and program.py; RUN is a run name, its folder or its URI;
or how its name begins, or the name of a job: its newest run.
Runs lie in ./elastic_runs, unless the job's `storage`, --storage or $ELASTIC_STORAGE says otherwise."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)  # what follows belongs to the user's script
    given = parser().parse_args(words[:cut], argparse.Namespace(args=words[cut + 1 :], words=words))
    try:
        if given.args and getattr(given, "script", None) is None:
            raise SpecError(f"'{given.args[0]}' after -- is an argument of a script; name that by --script FILE before the --")
        return int(given.handler(given))
    except ElasticError as error:
        print(f"elastic: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("elastic: interrupted", file=sys.stderr)
        return EXIT["stopped"]
    except BrokenPipeError:
        sys.stderr.close()  # the reader, as in `| head`, has had enough
        return 0


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="elastic",
        description="Elastic training on Ray: the run keeps going while nodes come and go.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"elastic {__version__}")
    verbs = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    _add_run(verbs)
    planning.add_arguments(_verb(verbs, "plan", _plan, planning.ABOUT))
    _add_readers(verbs)
    _add_orders(verbs)
    _add_checkpoint(verbs)
    _add_cluster(verbs)
    _add_profile(verbs)
    certify.add_arguments(_verb(verbs, "certify", certify.run, certify.ABOUT))
    return top


def _verb(verbs: Any, name: str, handler: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = verbs.add_parser(name, help=about, description=about[:1].upper() + about[1:] + ".")
    made.set_defaults(handler=handler)
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument(
        "--storage", metavar="URI", help="folder that holds the runs (default: $ELASTIC_STORAGE or ./elastic_runs)"
    )
    return made


def _add_run(verbs: Any) -> None:
    made = _verb(verbs, "run", _run, "train a job to its end; with the name of an interrupted run: go on with it")
    made.add_argument("job", metavar="JOB", nargs="?", help="folder with job.yaml and program.py (with --script: without)")
    made.add_argument(
        "--script", metavar="FILE", help="a training script instead of a program.py; its arguments come last, after --"
    )
    made.set_defaults(refuse=made.error)
    made.add_argument("--run-name", metavar="NAME", help="default: the job's name and the time; a known name is resumed")
    made.add_argument(
        "--supervise", action="store_true", help="start a driver again that was killed or has lost its run; needs --run-name"
    )
    made.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)  # what --supervise starts
    made.add_argument("--local", action="store_true", help="use an embedded cluster on this machine even if RAY_ADDRESS is set")
    made.add_argument("--cluster", metavar="FILE", help="a cluster file; its pools are used instead of the job's own")
    made.add_argument(
        "--allow-changed", action="store_true", help="resume although program.py, the data or the mathematics have changed"
    )
    made.add_argument(
        "--from-checkpoint", action="store_true", help="of a run whose journal is damaged: go on from its newest durable copy"
    )
    made.add_argument(
        "--no-budget", action="store_true", help="paid pools without a limit: the job has neither budget_usd nor max_nodes"
    )
    made.add_argument("--drill", metavar="FILE", help="notices, kills and growth to carry out, instead of the job's own")
    made.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="over job.yaml; repeatable"
    )


def _add_readers(verbs: Any) -> None:
    _verb(verbs, "ls", _ls, "list the runs")
    for name, handler, about in (
        ("status", _status, "where a run stands"),
        ("why", _why, "what happened in a run, and why each decision was taken"),
        ("ledger", _ledger, "where the time and the money of a run went"),
        ("report", _report, "write loss.png and report.json of a run again and print the report"),
        ("replay", _replay, "take all decisions of a run again from its journal alone and compare"),
    ):
        _verb(verbs, name, handler, about).add_argument("run", metavar="RUN", help=RUN)
    verbs.choices["why"].add_argument("--last", metavar="N", type=int, default=0, help="only the last N lines")
    made = _verb(verbs, "logs", _logs, "what the workers of a run have printed: the end of each one's file")
    made.add_argument("run", metavar="RUN", help=RUN)
    made.add_argument("--last", metavar="N", type=_natural, default=20, help="lines of each (default: 20; 0 = all)")
    made.add_argument("--worker", metavar="NAME", default="", help="only files whose name begins so, as in spot-1")
    made = _verb(verbs, "doctor", _doctor, "check this machine; with RUN, what went wrong in that run")
    made.add_argument("run", metavar="RUN", nargs="?", help=RUN)


def _add_orders(verbs: Any) -> None:
    made = _verb(verbs, "stop", _stop, "ask a live run to save its state and stop")
    made.add_argument("run", metavar="RUN", help=RUN)
    made.add_argument("--reason", default="asked on the command line", help="written to the journal")
    made = _verb(verbs, "drill", _drill, "take a node from a live run, or add one, to see what it does")
    made.add_argument("run", metavar="RUN", help=RUN)
    made.add_argument(
        "entry",
        metavar="KEY=VALUE",
        nargs="+",
        help="notice=NODE [deadline_s=30], kill=NODE, hang=NODE, partition=NODE [for_s=30] or add=POOL, at once or at_step=N; "
        "NODE is any, any-spot, rank0, rank:N, a node id, or several with commas",
    )


def _add_checkpoint(verbs: Any) -> None:
    about = "durable checkpoints of a run"
    actions = verbs.add_parser("checkpoint", help=about, description=about.capitalize() + ".").add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_Parser
    )
    _verb(actions, "ls", _checkpoint_ls, "list them").add_argument("run", metavar="RUN", help=RUN)
    made = _verb(actions, "verify", _checkpoint_verify, "read every byte of them and compare with the digests")
    made.add_argument("run", metavar="RUN", help=RUN)
    made = _verb(actions, "export", _checkpoint_export, "write the weights of one as safetensors")
    made.add_argument("run", metavar="RUN", help=RUN)
    made.add_argument("--step", metavar="N", type=int, help="default: the newest")
    made.add_argument("--to", metavar="FOLDER", required=True, help="an empty folder, or a URI; files of at most 5 GB")
    made.add_argument("--job", metavar="JOB", help="folder of its job: also writes config.json and the like, or adapters alone")
    made.add_argument("--merged", action="store_true", help="of a job with adapters: the whole model with them added")
    about = "make a new run that begins with the weights (and moments) of another trainer"
    made = _verb(actions, "import", _checkpoint_import, about)
    made.add_argument("source", metavar="SOURCE", help="a .safetensors file, a folder of them, or a checkpoint of plain DCP")
    made.add_argument("--into", metavar="RUN", required=True, help="name of the new run: elastic run JOB --run-name RUN")
    made.add_argument("--job", metavar="JOB", required=True, help="folder with job.yaml and program.py")
    made.add_argument("--at-step", metavar="N", type=_natural, default=0, help="step that the run goes on from (default: 0)")
    made.add_argument("--ignore-extra", action="store_true", help="leave out tensors that the program does not have")
    made = _verb(actions, "rm", _checkpoint_rm, "remove those of a step, whole or interrupted")
    made.add_argument("run", metavar="RUN", help=RUN)
    made.add_argument("--step", metavar="N", type=int, required=True)
    made.add_argument("--force", action="store_true", help="also the only good one, or the newest of a live run")


def _add_cluster(verbs: Any) -> None:
    made = _verb(verbs, "prices", _prices, "what instances cost: a cluster file's pools now, or the table that comes with this")
    instead = made.add_mutually_exclusive_group()
    instead.add_argument("--cluster", metavar="FILE", help="a cluster file; AWS is asked for the prices of its pools")
    instead.add_argument("--chips", action="store_true", help="the GPUs instead: peaks, memory, links, sources")
    made.add_argument("--gpu", metavar="NAME", default="", help="only with this GPU, in any spelling, as h100 or A100-80GB")
    made.add_argument("--cloud", metavar="NAME", default="", help="only of this cloud: aws, gcp, azure or one of your own")
    made.add_argument("--region", metavar="NAME", default="", help="only in this region")
    made.add_argument("--catalog", metavar="FILE", action="append", default=[], help="own entries (also: $ELASTIC_CATALOG)")
    about = "cluster files: what `ray up` launches"
    actions = verbs.add_parser("cluster", help=about, description=about.capitalize() + ".").add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_Parser
    )
    made = _verb(actions, "check", _cluster_check, "say what is wrong in a cluster file, and print its pools with their prices")
    made.add_argument("file", metavar="FILE", help="a file of Ray's cluster launcher, or a RayCluster or RayJob of KubeRay")
    made.add_argument("--job", metavar="JOB", help="folder of a job: also whether it can run there")
    made = _verb(actions, "reap", _cluster_reap, "list the EC2 instances that a dead cluster has left behind, and end them")
    made.add_argument("file", metavar="FILE", help="the file that `ray up` launched it from")
    made.add_argument("--yes", action="store_true", help="end them")
    made.add_argument("--alive", action="store_true", help="also where the cluster's head runs")


def _add_profile(verbs: Any) -> None:
    about = "measure what a job computes on this machine, or on a node of each kind of the Ray cluster; plan and run read it"
    made = _verb(verbs, "profile", _profile, about)
    made.add_argument("job", metavar="JOB", help="folder with job.yaml and program.py")
    made.add_argument("--local", action="store_true", help="this machine even if RAY_ADDRESS is set")
    made.add_argument("--out", metavar="FILE", help="default: elastic/hardware/KIND.json in the user's cache folder")
    made.add_argument("--seconds", metavar="S", type=_natural, default=60, help="about how long it may take (default: 60)")
    made.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="over job.yaml; repeatable"
    )


def _natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number of at least 0")
    return int(text)


def _show(given: argparse.Namespace, data: Any, lines: Sequence[str]) -> None:
    """One JSON document, or lines."""
    print(json.dumps(data, default=str) if given.json else "\n".join(lines))


# ------------------------------------------------------------------------------------------------ run


def _run(given: argparse.Namespace) -> int:
    if given.supervise:
        if not given.run_name:
            given.refuse("--supervise needs --run-name NAME: by it a driver that is started again goes on with the run")
        return supervised(command_of(given.words), lambda text: print(f"elastic: {text}", file=sys.stderr, flush=True))
    overrides = list(given.overrides) + ([f"storage={given.storage}"] if given.storage else [])
    options = api.Options(
        run_name=given.run_name,
        local=given.local,
        overrides=tuple(overrides),
        drill=given.drill,
        cluster=given.cluster,
        from_checkpoint=given.from_checkpoint,
        allow_changed=given.allow_changed,
        supervised=given.supervised,
        no_budget=given.no_budget,
        stream=sys.stderr if given.json else sys.stdout,
    )
    if given.script is not None:
        result = api.run_script(given.script, given.args, given.job, options)
    elif given.job is None:
        given.refuse("JOB is missing: a folder with job.yaml and program.py; or give --script FILE")
    else:
        result = api.run(given.job, options=options)
    if given.json:
        print(json.dumps(result.summary))
    elif result.outcome != "succeeded":
        print(f"elastic: run {result.run} {result.outcome}: {result.reason}", file=sys.stderr)
    return EXIT[result.outcome]


def _plan(given: argparse.Namespace) -> int:
    found = planning.answer(given)
    _show(given, found.plain, found.lines)
    return 0


# ------------------------------------------------------------------------------------------------ readers


def _ls(given: argparse.Namespace) -> int:
    rows = [
        run_tables.Row(find_runs.view(run), api.holder(run.storage), find_runs.age_s(run))
        for _, run in find_runs.all_runs(given.storage)
    ]
    _show(
        given,
        [row.plain() for row in rows],
        run_tables.ls(rows) if rows else [f"no runs in {find_runs.storage_uri(given.storage)}"],
    )
    return 0


def _status(given: argparse.Namespace) -> int:
    run = find_runs.open_run(given.run, given.storage)
    view, holder = find_runs.view(run), api.holder(run.storage)
    _show(given, run_tables.status_plain(view, holder), run_tables.status(view, holder))
    return 0


def _why(given: argparse.Namespace) -> int:
    view = find_runs.view(find_runs.open_run(given.run, given.storage))
    _show(given, run_tables.why_plain(view, given.last), run_tables.why(view, given.last))
    return 0


def _ledger(given: argparse.Namespace) -> int:
    _show(given, *report.ledger(find_runs.lines_of(find_runs.open_run(given.run, given.storage))))
    return 0


def _report(given: argparse.Namespace) -> int:
    data, lines = report.write(find_runs.open_run(given.run, given.storage))
    _show(given, data, lines)
    return 0


def _replay(given: argparse.Namespace) -> int:
    from elastic.sim.replay import replay

    found = replay(find_runs.lines_of(find_runs.open_run(given.run, given.storage)))
    data: dict[str, Any] = {"decisions": found.n_decisions, "identical": found.identical}
    lines = [f"{found.n_decisions} decisions taken again: {'all identical' if found.identical else 'NOT identical'}"]
    if found.first_difference is not None:
        first = found.first_difference
        data["first_difference"] = {"at_s": first.at_s, "recorded": first.recorded.reason, "again": first.again.reason}
        lines += [f"first difference at {first.at_s:.3f} s:", f"  recorded: {first.recorded}", f"  again:    {first.again}"]
    _show(given, data, lines)
    return 0 if found.identical else 1


def _logs(given: argparse.Namespace) -> int:
    found = logs.logs(find_runs.open_run(given.run, given.storage), given.last, given.worker)
    _show(given, [log.plain() for log in found], logs.shown(found))
    return 0


def _doctor(given: argparse.Namespace) -> int:
    if given.run:
        checks = doctor.run_troubles(find_runs.view(find_runs.open_run(given.run, given.storage)))
    else:
        checks = doctor.machine(find_runs.storage_uri(given.storage))
    rows = [(check.verdict, check.name, check.found + (f"  ({check.hint})" if check.hint else "")) for check in checks]
    _show(given, [check.plain() for check in checks], run_tables.columns(rows))
    return 1 if any(check.verdict == "bad" for check in checks) else 0


# ------------------------------------------------------------------------------------------------ orders


def _stop(given: argparse.Namespace) -> int:
    run = find_runs.open_run(given.run, given.storage)
    api.stop(run.storage, given.reason)
    _show(given, {"run": run.name, "asked": "stop"}, [f"run {run.name} is asked to stop: elastic status {given.run}"])
    return 0


def _drill(given: argparse.Namespace) -> int:
    run = find_runs.open_run(given.run, given.storage)
    entry = api.drill(run.storage, given.entry)
    _show(given, {"run": run.name, "drill": entry}, [f"run {run.name} is told: {entry}"])
    return 0


def _checkpoint_ls(given: argparse.Namespace) -> int:
    found, problems = api.checkpoints(find_runs.open_storage_of(given.run, given.storage))
    rows: list[tuple[str, ...]] = [("STEP", "GENERATION", "COMMITTED", "LAYOUT", "RANKS", "SIZE", "AGE", "URI")]
    rows += [run_tables.checkpoint(item) for item in found]
    lines = run_tables.columns(rows, right=(0, 1, 4, 5, 6)) if found else ["no committed checkpoint"]
    _show(given, {"checkpoints": found, "problems": problems}, lines + problems)
    return 0


def _checkpoint_verify(given: argparse.Namespace) -> int:
    found = api.verify(find_runs.open_storage_of(given.run, given.storage))
    bad = [item for item in found if item["problems"]]
    lines = [f"step {c['step']}: {'; '.join(c['problems']) or 'every byte is as it was written'}" for c in found]
    _show(given, found, lines or ["no committed checkpoint"])
    return 1 if bad else 0


def _checkpoint_export(given: argparse.Namespace) -> int:
    done = api.export(find_runs.open_storage_of(given.run, given.storage), given.step, given.to, given.job, given.merged)
    _show(given, done, [f"step {done['step']}: {done['tensors']} tensors in {', '.join(done['files'])} under {done['to']}"])
    return 0


def _checkpoint_import(given: argparse.Namespace) -> int:
    order = api.Import(given.source, given.into, given.job, given.storage, given.at_step, given.ignore_extra)
    done = api.import_state(order)
    taken = f"{done['weights']} weights and {done['moments']} tensors of the optimizer are taken over"
    lines = [f"{done['uri']}: {taken}", *(f"  {text}" for text in done["converted"][:8])]
    if done["ignored"]:
        lines.append(f"  left out: {len(done['ignored'])} tensors, the first is {done['ignored'][0]}")
    _show(given, done, [*lines, f"go on with it: elastic run {given.job} --run-name {given.into}"])
    return 0


def _checkpoint_rm(given: argparse.Namespace) -> int:
    gone = api.remove(find_runs.open_storage_of(given.run, given.storage, exact=True), given.step, given.force)
    _show(given, {"removed": gone}, [f"removed {uri}" for uri in gone])
    return 0


# ------------------------------------------------------------------------------------------------ clusters


def _prices(given: argparse.Namespace) -> int:
    wanted = api.Wanted(given.gpu, given.cloud, given.region, tuple(given.catalog))
    if given.chips:
        rows = api.gpus(wanted)
        _show(given, {"chips": rows}, price_list.chips(rows))
        return 0
    found = api.prices(given.cluster, wanted)
    _show(given, found.plain(), [*price_list.prices(found.rows), *found.problems, f"table of {found.plain()['table_at']}"])
    return 0


def _cluster_check(given: argparse.Namespace) -> int:
    found = api.check_cluster(given.file, given.job)
    rows: list[tuple[str, ...]] = [run_tables.POOLS]
    rows += [run_tables.pool(pool, found.spec.prices_of.get(pool.name, "")) for pool in found.spec.pools]
    n_errors = sum(not problem.warning for problem in found.problems)
    verdict = f"{given.file}: {n_errors} errors, {len(found.problems) - n_errors} warnings"
    _show(given, found.plain(), [*found.lines(), *run_tables.columns(rows, right=(3, 4, 5, 6)), verdict])
    return 0 if found.ok else 2


def _cluster_reap(given: argparse.Namespace) -> int:
    found = api.reap(given.file, given.yes, given.alive)
    rows: list[tuple[str, ...]] = [run_tables.MACHINES, *(tuple(i.plain().values()) for i in found.instances)]
    _show(given, found.plain(), [*(run_tables.columns(rows) if found.instances else []), found.verdict()])
    return 1 if found.left else 0


def _profile(given: argparse.Namespace) -> int:
    overrides = list(given.overrides) + ([f"storage={given.storage}"] if given.storage else [])
    found = api.profile(given.job, api.ProfileWishes(given.out, given.seconds, tuple(overrides), given.local))
    _show(given, {"hardware": [one.plain() for one in found]}, [line for one in found for line in one.lines()])
    return 0
