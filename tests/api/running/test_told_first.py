"""What is told before anything of the user's is read: a metrics port that is taken, a key that does
not exist or a value that it cannot have, a cluster file that is wrong, a layout that no pool fits, a
storage that cannot be written."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.api.tiny_job import START

import elastic
from elastic.api import trainer
from elastic.api.running import program_file, start_checks
from elastic.api.running.entry import run_script
from elastic.config.fingerprint import KEY, code_digest, fingerprint
from elastic.config.job import job_of
from elastic.errors import SpecError
from elastic.ledger.journal import Journal, Line
from elastic.program import load_program
from elastic.types import Copy, CopyStored, Decision, DriverStarted, Layout, ModelProfile, Stop
from elastic.worker.hosting import resume_checks

RAISES = "raise RuntimeError('it was read')\n"
LOOP = f"import elastic\n{RAISES}with elastic.loop() as run:\n    pass\n"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as here:
        here.bind(("127.0.0.1", 0))
        here.listen()
        yield int(here.getsockname()[1])


def refusal(port: int) -> str:
    return f"metrics_port: 127.0.0.1:{port} is not to be had (Address already in use)"


def test_before_the_program(folder: Path, taken: int) -> None:
    (folder / "program.py").write_text(RAISES)
    with pytest.raises(SpecError) as caught:
        elastic.run(folder, options=elastic.Options(metrics_port=taken))
    assert str(caught.value).startswith(refusal(taken))
    with pytest.raises(SpecError) as caught:
        elastic.run(folder, options=elastic.Options(overrides=(f"metrics_port={taken}",)))
    assert str(caught.value).startswith(refusal(taken))


def test_before_a_script(folder: Path, taken: int) -> None:
    script = folder / "train.py"
    script.write_text(LOOP)
    for options in (
        elastic.Options(metrics_port=taken),
        elastic.Options(overrides=(f"metrics_port={taken}",)),
    ):
        with pytest.raises(SpecError) as caught:
            run_script(script, options=options)
        assert str(caught.value).startswith(refusal(taken))


def test_a_cluster_file_that_is_wrong_is_told_before_a_script_is_run(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(LOOP)
    with pytest.raises(SpecError, match=r"nowhere\.yaml: no such file; a cluster file is what"):
        run_script(script, options=elastic.Options(cluster="nowhere.yaml"))


def test_an_unknown_key_is_told_before_a_script_is_run(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(LOOP)
    with pytest.raises(SpecError, match=r"--set: unknown key 'chekpoint_every'.*checkpoint_every"):
        run_script(script, options=elastic.Options(overrides=("chekpoint_every=5",)))
    for known in ("epochs=2", "steps=2", "durable_every=5"):
        with pytest.raises(SpecError, match="it was read"):
            run_script(script, options=elastic.Options(overrides=(known,)))


def test_a_wrong_port_of_the_keys_is_told_with_the_other_keys(folder: Path) -> None:
    with pytest.raises(SpecError) as caught:
        elastic.run(folder, options=elastic.Options(overrides=("metrics_port=ninety",)))
    assert "key 'metrics_port': must be a port" in str(caught.value)
    (folder / "program.py").write_text(RAISES)
    with pytest.raises(SpecError) as caught:
        elastic.run(folder, options=elastic.Options(metrics_port="ninety"))
    assert str(caught.value).startswith("--metrics-port: must be a port")


IMPOSSIBLE = {
    "steps=many": r"--set: key 'steps'.*it is 'many'",
    "global_batch=0": r"--set: key 'global_batch'",
    "layout=dp_shard=": r"--set: .*dp_shard",
    "layout=dp_shard=64": r"train: layout 'dp_shard=64' needs 64 workers; the pools give at most 6",
    "layout=pp=2": r"layout 'pp=2': no pp: its script calls the whole model; take pp=1",
    "layout=auto,cp=2": r"no cp: a script gets whole sequences; take cp=1",
    "min_workers=7": r"train: min_workers=7; the pools give at most 6",
    "pools=[{name: a, min_nodes: 3, max_nodes: 2}]": r"--set: .*min_nodes=3 is more than",
    "storage=/proc/elastic": r"storage /proc/elastic.* cannot be written",
}


@pytest.mark.parametrize("key", IMPOSSIBLE)
def test_what_cannot_be_is_told_before_a_script_is_run(folder: Path, key: str) -> None:
    script = folder / "train.py"
    script.write_text(LOOP)
    with pytest.raises(SpecError, match=IMPOSSIBLE[key]):
        run_script(script, options=elastic.Options(overrides=(key,), run_name="a"))


def test_what_goes_with_other_keys_waits_for_those_of_the_script(folder: Path) -> None:
    """A script may say by what it becomes right: more pools, the steps of its phases, samples."""
    script = folder / "train.py"
    script.write_text(LOOP.replace("loop()", "loop(pools=[dict(name='a', max_nodes=64)])"))
    at = f"storage={folder / 'runs'}"
    for key in ("layout=dp_shard=64", "purpose=deadline", "phases=[{at_step: 5, seq: 3}]"):
        with pytest.raises(SpecError, match="it was read"):
            run_script(script, options=elastic.Options(overrides=(key, at)))


def test_a_drill_that_no_pool_can_have_is_told_before_a_script_is_run(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(LOOP)
    with pytest.raises(SpecError, match="there is never a node 'spot-9'"):
        run_script(script, options=elastic.Options(drill="kill spot-9 at 40"))


@pytest.mark.parametrize("way", ["a file in the way", "its own name is a file", "no such place"])
def test_a_storage_that_cannot_be_written_is_told_before_the_program(
    folder: Path, way: str
) -> None:
    (folder / "program.py").write_text(RAISES)
    at, name = folder / "runs", "mine"
    if way == "a file in the way":
        at.write_text("")
    elif way == "its own name is a file":
        at.mkdir()
        (at / name).write_text("")
    else:
        at = Path("/proc/elastic")
    options = elastic.Options(overrides=(f"storage={at}",), run_name=name)
    with pytest.raises(SpecError, match=f"storage {at}/{name} cannot be written") as caught:
        elastic.run(folder, options=options)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    script = folder / "train.py"
    script.write_text(LOOP)
    with pytest.raises(SpecError, match=f"storage {at}/{name} cannot be written"):
        run_script(script, options=options)


def test_a_storage_that_the_script_may_name_waits_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("ELASTIC_STORAGE", str(folder / "file"))
    script = folder / "train.py"
    for text, said in ((LOOP, "cannot be written"), (f"storage = 'runs'\n{LOOP}", "cannot be")):
        script.write_text(text)
        with pytest.raises(SpecError, match=said):
            run_script(script)
    script.write_text(LOOP.replace("loop()", "loop(storage='runs')"))
    with pytest.raises(SpecError, match="it was read"):
        run_script(script)


def test_keys_in_python_are_told_before_the_file_is_imported_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr(program_file, "file_of", read.append)
    monkeypatch.setattr(trainer, "file_of", read.append)
    program = load_program(folder / "program.py")
    for keys, said in (
        ({"steps": 0, "global_batch": 4}, "key 'steps'"),
        ({"steps": 9, "global_batch": 4, "storage": "/proc/elastic"}, "cannot be written"),
        ({"steps": 9, "global_batch": 4, "layout": "dp_shard=64"}, "needs 64 workers"),
    ):
        with pytest.raises(SpecError, match=said):
            elastic.run(program, keys)
    with pytest.raises(SpecError, match=r"ElasticTrainer\(job=\.\.\.\): key 'steps'"):
        elastic.ElasticTrainer(program, job={"steps": 0})
    assert not read


def test_other_arguments_of_a_run_that_is_there_are_told_before_its_script_is_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its newest driver had them, where the newest checkpoint is of an older one."""
    script = folder / "train.py"
    script.write_text(LOOP)
    stored, drivers = {"args": ["--steps", "60"]}, [{"args": ["--steps", "60"]}]

    def found(storage: object) -> resume_checks.FoundCopies:
        return resume_checks.FoundCopies((), {KEY: stored}, ())

    def lines(place: object) -> list[Line]:
        started = [DriverStarted("a", 1, {KEY: had}, (), ModelProfile(0, 0, ())) for had in drivers]
        return [Line(float(n), n, ((0.0, event),)) for n, event in enumerate(started)]

    monkeypatch.setattr(start_checks, "found_copies", found)
    monkeypatch.setattr(start_checks.RunFolder, "lines", lines)
    options = elastic.Options(run_name="a")
    with pytest.raises(SpecError, match=r"'a' was started with other values: args \(.*'60'.*'90'"):
        run_script(script, ["--steps", "90"], options=options)
    for same in (["--steps", "60"], ["--steps", "90"]):
        drivers[-1] = {"args": same}
        with pytest.raises(SpecError, match="it was read"):
            run_script(script, same, options=options)
    drivers[-1] = stored
    with pytest.raises(SpecError, match="it was read"):
        changed = elastic.Options(run_name="a", allow_changed=True)
        run_script(script, ["--steps", "90"], options=changed)


@pytest.fixture
def done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script of run `a`, which has done its 20 steps with the arguments `--steps 20`."""
    script, run = folder / "train.py", folder / "runs" / "a"
    script.write_text(LOOP)
    monkeypatch.setenv("ELASTIC_STORAGE", str(folder / "runs"))
    stored = Copy(20, "durable", 1, Layout(), uri=str(run / "checkpoint-20"))
    journal = Journal(run / "journal.jsonl", 1)
    journal.append(0.0, [(0.0, START), (8.0, CopyStored(stored))], None)
    journal.append(9.0, [], Decision((Stop("succeeded", "done"),), "done"))
    journal.close()
    mark = {"args": ["--steps", "20"], "program": code_digest(script)}

    def found(storage: object) -> resume_checks.FoundCopies:
        return resume_checks.FoundCopies((), {KEY: mark}, ())

    monkeypatch.setattr(start_checks, "found_copies", found)
    for path in folder.iterdir():  # they were there before the run has ended
        os.utime(path, (1.0, 1.0))
    return script


SAME = ["--steps", "20"]


def test_a_run_that_is_done_is_told_before_its_script_is_run(done: Path) -> None:
    with pytest.raises(SpecError, match=r"run 'a' is done \(20 steps\); more steps .* starts over"):
        run_script(done, SAME, options=elastic.Options(run_name="a"))
    given = elastic.Options(run_name="a", overrides=("steps=20",), allow_changed=True)
    with pytest.raises(SpecError, match=r"run 'a' is done \(20 steps\)"):
        run_script(done, SAME, options=given)


@pytest.mark.parametrize("way", ["steps", "epochs", "allowed", "code", "beside", "named", "other"])
def test_a_script_that_may_ask_for_more_steps_is_run_to_see(done: Path, way: str) -> None:
    """Its steps may have changed: by a key, in the script, in a file that it reads."""
    args, more = list(SAME), ()
    if way in ("steps", "epochs"):
        more = (f"{way}=21",)
    elif way == "code":
        done.write_text(f"more = 1\n{LOOP}")
    elif way == "beside":
        (done.parent / "config.yaml").write_text("steps: 30\n")
    elif way == "named":
        (done.parent / "runs" / "big").write_text("steps: 30\n")
        args.append(f"--config={done.parent / 'runs' / 'big'}")
    name = "b" if way == "other" else "a"
    options = elastic.Options(
        run_name=name, overrides=more, allow_changed=way in ("allowed", "code", "named")
    )
    with pytest.raises(SpecError, match="it was read"):
        run_script(done, args, options=options)


def test_a_run_that_is_done_is_told_before_its_program_is_read(done: Path) -> None:
    (done.parent / "program.py").write_text(RAISES)
    steps = elastic.Options(run_name="a", overrides=("steps=20",))
    with pytest.raises(SpecError, match=r"run 'a' is done \(20 steps\); --set steps=N"):
        elastic.run(done.parent, options=steps)
    with pytest.raises(SpecError, match="it was read"):
        elastic.run(done.parent, options=replace(steps, overrides=("steps=21",)))


def test_a_secret_among_the_arguments_is_the_same_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, words = folder / "train.py", ["--hf-token", "abcdefghij"]
    script.write_text(LOOP)
    monkeypatch.setenv("ELASTIC_STORAGE", str(folder / "runs"))
    model = ModelProfile(0, 0, ())
    keys = {"steps": 2, "global_batch": 2, "script": str(script), "args": words}
    job = job_of(keys, script, "job").job()
    stored = fingerprint(script, job, model, n_samples=4)
    assert "abcdefghij" not in str(stored)

    def found(storage: object) -> resume_checks.FoundCopies:
        return resume_checks.FoundCopies((), {KEY: stored}, ())

    monkeypatch.setattr(start_checks, "found_copies", found)
    monkeypatch.setattr(start_checks.RunFolder, "lines", lambda place: [])
    options = elastic.Options(run_name="a")
    with pytest.raises(SpecError, match="it was read"):
        run_script(script, words, options=options)
    with pytest.raises(SpecError, match="was started with other values: args"):
        run_script(script, ["--hf-token", "jihgfedcba"], options=options)
