"""The command line as a whole: one line per error, exit codes, what an import brings, and in which
file each verb stands."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli.calls import called
from support.places import PROGRAMS, ROOT

from elastic import api
from elastic.api.running.run import JobRun
from elastic.cli import command_line, read_commands
from elastic.cli.command_line import GROUPS, main, parser
from elastic.config.job import JobSpec
from elastic.driver import interruptible
from elastic.errors import Interrupted, SpecError
from elastic.ledger.journal import Journal
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.observe.find_runs import JOURNAL
from elastic.storage import open_storage
from elastic.types import DriverStarted, Job, ModelProfile

ALONE = """
import sys
from elastic.cli.command_line import main
try:
    main(["--help"])
finally:
    print("brought:", *sorted({"torch", "ray"} & set(sys.modules)))
"""

READING = """
import sys
from elastic.cli.command_line import main
HEAVY = {
    "torch", "ray", "boto3", "botocore", "pandas", "pydantic", "yaml", "asyncio", "starlette",
    "matplotlib", "numpy", "elastic.planner.layout_search", "elastic.driver", "elastic.sim", "elastic.policy.decide", "elastic.api.running",
    "elastic.cluster.backend", "elastic.worker.session", "elastic.scenarios",
}
for words in (["ls"], ["status", "tiny-1", "--json"], ["why", "tiny-1"]):
    code = main(words)
    print("brought:", words[0], code, *sorted(HEAVY & set(sys.modules)))
"""


@pytest.mark.usefixtures("storage", "live")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status", "tiny-2"), "no run 'tiny-2' here or in"),
        (("drill", "tiny-1", "kill"), "'kill' must be key=value"),
        (("drill", "tiny-1", "kil=any"), "unknown key 'kil'; did you mean 'kill'?"),
        (("drill", "tiny-1", "kill=any", "add=spot"), "exactly one of"),
        (("drill", "tiny-1", "kill=spot-77"), "drill: 'spot-77' is no node; standing are "),
        (("drill", "tiny-1", "add=spto"), "drill: there is no pool 'spto'; the pools are spot"),
        (("run", "nowhere"), "nowhere: no such folder"),
        (("status", "s3://Bucket_/run"), "no name of a bucket; use s3://bucket/prefix"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_what_a_file_says_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = called(capsys, "run", f"no\x1b[2Jwhere\u202e{'x' * 9000}")
    assert code == 2 and err.count("\n") == 1 and len(err) < 4500
    assert "no\\x1b[2Jwhere\\u202exxx" in err and err[:-1].isprintable()


@pytest.mark.parametrize("words", [(), ("fly",), ("run",), ("ls", "--jsn"), ("checkpoint",)])
def test_bad_usage_is_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(words)
    assert error.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan JOB --deadline 2h", "elastic plan: unrecognized arguments: --deadline 2h; did you "
         "mean --within?; see elastic plan --help"),
        ("simulate JOB --budget 100", "; a key of the job: --set budget_usd=100; see elastic sim"),
        ("run JOB --steps=50 --local", "; a key of the job: --set steps=50; see elastic run"),
        ("run JOB --checkpoint-every 50", "--set checkpoint_every=50"),
        ("run JOB --lokal", "did you mean --local?"),
        ("ls --fly", "elastic ls: unrecognized arguments: --fly; see elastic ls --help"),
        ("checkpoint ls RUN --run 1", "elastic checkpoint ls: unrecognized arguments: --run 1; s"),
    ],
)  # fmt: skip
def test_an_option_that_there_is_not_is_told_by_its_verb_with_what_was_meant(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(words.split())
    assert error.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp_shard=2,tp=2", ""),
        ("dp_shard=9", "tiny: layout 'dp_shard=9' needs 9 workers; the pools give at most 8"),
        ("dp=2", "elastic: layout 'dp=2': 'dp' is not an axis; did you mean 'dp_replicate' or"),
        ("auto,dp=2", "elastic: layout 'dp=2': 'dp' is not an axis"),
    ],
)
def test_run_takes_one_layout(
    layout: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the job's key for this run; what does not fit is one line before anything starts."""
    asked: list[JobSpec] = []

    def to_the_end(run: JobRun) -> Any:
        asked.append(run.spec)
        raise SpecError("goes no further here")

    monkeypatch.setattr(JobRun, "to_the_end", to_the_end)
    job = tmp_path / "tiny"
    job.mkdir()
    (job / "program.py").write_text((PROGRAMS / "tiny.py").read_text())
    pools = "pools: [{name: p, market_type: owned, gpus_per_node: 4, max_nodes: 2}]"
    (job / "job.yaml").write_text(f"steps: 3\nglobal_batch: 16\n{pools}\n")
    code, _, err = called(capsys, "run", str(job), "--local", "--layout", layout)
    assert (code, err.count("\n")) == (2, 1)
    assert (said or "goes no further") in err
    assert [str(spec.layout) for spec in asked] == ([] if said else [layout])
    twice = called(capsys, "run", str(job), "--layout", layout, "--set", f"layout={layout}")
    assert "two ways at once" in twice[2]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [(KeyboardInterrupt, 3, "elastic: interrupted\n"), (BrokenPipeError, 0, "")],
)
def test_ctrl_c_and_a_reader_that_has_had_enough(
    error: type[BaseException],
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks_off(storage: str | None) -> list[Any]:
        raise error

    monkeypatch.setattr(read_commands.find_runs, "all_runs", breaks_off)
    monkeypatch.setattr(sys.stderr, "close", lambda: None)
    assert called(capsys, "ls") == (code, "", line)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_loop_takes_down_what_was_started(number: signal.Signals) -> None:
    before, done = signal.getsignal(number), []
    with pytest.raises(Interrupted) as found, interruptible():
        try:
            signal.raise_signal(number)
            done.append("it goes on")
        finally:
            signal.raise_signal(number)  # a second one, while that is under way
            done.append("taken down")
    assert found.value.code == 128 + number and done == ["taken down"]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_a_run_has_begun_is_one_line(
    number: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "run", lambda *given, **named: signal.raise_signal(number))
    line = f"elastic: ended by {number.name}; nothing that it had started is left\n"
    assert called(capsys, "run", "nowhere") == (128 + number, "", line)


SIGNALLED = """
import signal, sys
class Importing:
    def find_spec(self, name, path=None, target=None):
        if name == "elastic.cli":
            try:
                signal.raise_signal({number})
            except BaseException:  # as a library may that is being imported
                pass
sys.meta_path.insert(0, Importing())
sys.argv[1:] = ["--version"]
from elastic.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_is_one_line(number: signal.Signals) -> None:
    code = SIGNALLED.format(number=int(number))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    line = f"elastic: ended by {number.name} before anything was started\n"
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", line)


SCRIPT = """
import signal, torch, elastic
{first}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with elastic.loop(model=model, optimizer=optimizer, dataset=torch.ones(8, 2), steps=4, global_batch=4) as run:
    for x in run:
        {then}
        run.backward(run.model(x).sum())
        run.step()
"""


@pytest.mark.parametrize("moment", ["first", "then"])
def test_a_signal_while_the_driver_runs_a_script_is_no_error_of_it(
    moment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    words = {"first": "", "then": "pass"} | {moment: "signal.raise_signal(signal.SIGTERM)"}
    file.write_text(SCRIPT.format(**words))
    code, _, err = called(capsys, "run", "--script", str(file))
    assert (code, err) == (143, "elastic: ended by SIGTERM; nothing that it had started is left\n")


def test_help_brings_neither_torch_nor_ray() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("usage: elastic") and done.stdout.endswith("brought:\n"), (
        done.stderr
    )


def test_looking_at_a_run_brings_nothing_that_trains_or_plans_one(storage: Path) -> None:
    """Whoever asks for the status every few seconds pays for its imports each time."""
    done = subprocess.run(
        [sys.executable, "-c", READING],
        capture_output=True,
        text=True,
        cwd=storage.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    brought = [line for line in done.stdout.splitlines() if line.startswith("brought:")]
    assert brought == ["brought: ls 0", "brought: status 0", "brought: why 0"], done.stderr


def test_of_a_verb_only_its_own_file_is_imported_and_no_verb_has_two() -> None:
    every = dict(handlers(parser()))
    words = {name.split()[0] for name in every}
    alone = dict(entry for word in words for entry in handlers(parser([word])))
    assert alone.keys() == every.keys()
    for name, verbs in GROUPS.items():
        assert {w.split()[0] for w, _ in handlers(parser(verbs[:1]))} == {*verbs}, name


def test_each_name_of_the_api_stands_where_it_is_looked_for() -> None:
    listed = [name for names in api.HOMES.values() for name in names]
    assert sorted(listed) == sorted(api.__all__)
    for name in api.__all__:
        assert getattr(api, name).__name__ == name
    with pytest.raises(AttributeError, match=r"module 'elastic\.api' has no attribute 'runn'"):
        api.runn  # noqa: B018


def handlers(of: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    """The words of each verb, and the function that does it."""
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for made in action.choices.values():
                yield from handlers(made)
    if handler := of.get_default("handler"):
        yield of.prog.removeprefix("elastic "), handler


def test_each_verb_is_named_at_the_top_of_its_file() -> None:
    """Who looks for a verb finds it by the first lines of the files."""
    verbs = dict(handlers(parser()))
    assert {
        "run",
        "plan",
        "why",
        "stop",
        "checkpoint rm",
        "cluster reap",
        "profile",
        "certify",
    } <= verbs.keys()
    for words, handler in verbs.items():
        module = inspect.getmodule(handler)
        assert module is not None and module is not command_line
        first = (ast.get_docstring(ast.parse(inspect.getsource(module))) or "").partition("\n\n")[0]
        assert set(words.split()) <= set(
            first.replace("`", " ").replace(",", " ").replace(":", " ").replace(".", " ").split()
        )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "jobs/a"], "elastic run --run-name a-1 jobs/a"),
        (["run", "jobs/a", "--run-name", "a-1"], "elastic run jobs/a --run-name a-1"),
        (["run", "jobs/a", "--run-name=a-1"], "elastic run jobs/a --run-name=a-1"),
        (
            ["run", "--script", "t.py", "--", "--run-name", "x y"],
            "elastic run --run-name a-1 --script t.py -- --run-name 'x y'",
        ),
    ],
)
def test_a_stopped_run_says_how_to_resume_it(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = api.Result("a-1", "stopped", {"reason": "signal SIGINT"}, ROOT)
    monkeypatch.setattr(api, "run", lambda *_, **__: stopped)
    monkeypatch.setattr(api, "run_script", lambda *_, **__: stopped)
    assert main(words) == 3
    assert capsys.readouterr().err.splitlines() == [
        "elastic: run a-1 stopped: signal SIGINT",
        f"elastic: to resume it: {line}",
    ]


def test_a_run_that_is_named_without_its_job_is_told_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its script, or by the folder of its job; nothing is known of a name that is no run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    script = tmp_path / "train.py"
    script.touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "job.yaml").touch()
    begun = {
        "one": Job(folder=str(tmp_path), script=str(script), args=("--lr", "1"), steps=9),
        "two": Job(folder=str(tmp_path / "mine"), steps=9),
    }
    for name, job in begun.items():
        run = tmp_path / "elastic_runs" / name
        run.mkdir(parents=True)
        journal = Journal(run / JOURNAL, 1)
        journal.append(0.0, [(0.0, DriverStarted(name, 1, job, (), ModelProfile(0, 0, ())))], None)
        journal.close()
    ways = {"one": "--script train.py -- --lr 1", "two": "mine"}
    for name, way in ways.items():
        line = f"same --set as before: elastic run --run-name {name} {way}\n"
        for words in ([name], ["--run-name", name]):
            assert main(["run", *words]) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"elastic: '{name}' is a run (") and said.endswith(line)
        assert main(["status", name]) == 0
        assert f"to resume it: elastic run --run-name {name} {way}" in capsys.readouterr().out
    assert main(["run", "nope"]) == 2 and "nope: no such folder" in capsys.readouterr().err


def test_what_was_typed_resumes_a_run_from_wherever_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its script, and not the one that the folder's job.yaml names; with its --set. Where the
    folder is another, it says which; a password is not told."""
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    (tmp_path / "job.yaml").touch()
    script = tmp_path / "other.py"
    script.touch()
    run = tmp_path / "elastic_runs" / "one"
    run.mkdir(parents=True)
    job = Job(folder=str(tmp_path), script=str(script), steps=9)
    journal = Journal(run / JOURNAL, 1)
    journal.append(0.0, [(0.0, DriverStarted("one", 1, job, (), ModelProfile(0, 0, ())))], None)
    journal.close()
    words = ["run", "--script", "other.py", "--set", "steps=9", "--", "--api-key", "abcdefgh12345"]
    monkeypatch.chdir(tmp_path)
    find_runs.remember(RunFolder.of(open_storage(str(run))), words)
    line = "elastic run --run-name one --script other.py --set steps=9 -- --api-key "
    assert main(["status", "one"]) == 0
    said = capsys.readouterr().out
    assert f"to resume it: {line}" in said and "abcdefgh12345" not in said
    monkeypatch.chdir(run)
    assert main(["status", str(run)]) == 0
    assert f"to resume it: cd {tmp_path} && {line}" in capsys.readouterr().out
    (run / "command.json").write_text("[]")
    assert main(["status", str(run)]) == 0
    assert "to resume it: elastic run --run-name one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "is_shown"),
    [
        (["run", "mine", "--set", "steps=9"], True),
        (["run", "--set=steps=9", "../here/mine"], True),
        (["run", "other"], False),
        (["run", "mine", "--set", "program=other/program.py"], False),
        (["run", "--script", "other/train.py"], False),
        (["run"], False),
        (["python", "-u", "mine/fit.py", "--lr", "1"], True),
        (["python", "other/fit.py"], False),
        (["python", "-c", "print()"], False),
        (["python", "-uc", "print()"], False),
        (["python", "-m", "mine.fit"], False),
        (["python"], False),
        (["bash", "-c", "mine/program.py"], False),
    ],
)
def test_what_was_typed_is_shown_where_it_starts_the_job_of_the_journal(
    words: list[str], is_shown: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who may write the run's storage would have it pasted otherwise."""
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    here = tmp_path / "here"
    for name in ("mine", "other"):
        (here / name).mkdir(parents=True)
        (here / name / "job.yaml").touch()
    monkeypatch.chdir(here)
    run = RunFolder.of(open_storage(str(here / "elastic_runs" / "one")))
    find_runs.remember(run, words)
    job = Job(folder=str(here / "mine"), program=str(here / "mine" / "program.py"))
    found = find_runs.resuming(run, job)
    assert (found == "elastic run --run-name one mine") is not is_shown
    assert (found == find_runs.again(words, "one")) is is_shown


def test_a_reason_of_a_stop_fills_no_screen() -> None:
    told = find_runs.stopped_lines("r", "\x1b]0;x\x07\n" * 9999, ["run", "a\x1bb"])
    assert "\x1b" not in told and "\x07" not in told and told.count("\n") == 2


@pytest.mark.e2e
def test_what_libraries_warn_of_while_they_are_imported_is_not_shown() -> None:
    """torchao's, which transformers imports: a file for another build of torch is no news here."""
    for name in ("torchao", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed (it is in the extra 'test')")
    words = [sys.executable, "-m", "elastic", "plan", str(ROOT / "jobs" / "qwen_lora")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("qwen_lora: ")
    assert done.stderr == ""
