"""`torchrun -m elastic.worker JOB`: without Ray, the losses of one process, whatever the layout, and
a journal as on a cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.child import child
from support.observe.read_trackers import WHERE, read_back
from support.observe.scraped import scraped
from support.places import PROGRAMS, ROOT
from support.reference import train
from support.waiting import until
from support.worker.torchrun import (
    SLOW,
    TINY,
    cmdline,
    command,
    elastic,
    environment,
    job,
    losses,
    ranks_of,
    run,
    started,
)
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    error_handler,
)

from elastic.config.job import JobSpec, load_job
from elastic.errors import LostContact, SpecError
from elastic.ledger.lease import Lease, Times, newest
from elastic.observe import find_runs
from elastic.observe.metrics.step_rows import read_rows
from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import Layout, StepDone, WorkerId, parse_layout
from elastic.worker import __main__ as worker_command
from elastic.worker.checkpoint import checkpoint_index
from elastic.worker.hosting.resume_checks import check_layouts
from elastic.worker.program.job_program import with_job
from elastic.worker.program.model_profile import trace
from elastic.worker.standalone.layout_started import layout_of
from elastic.worker.standalone.meeting import Meeting, Started
from elastic.worker.standalone.rank_link import CommittedCheckpoint, StandaloneResult
from elastic.worker.standalone.standalone_run import StandaloneOptions, StandaloneRun

TOLERANCE = 2e-5
pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return train(
        load_program(TINY), {"seed": 3, "global_batch": 12, "clip_grad_norm": 1.0}, 12
    ).losses


def follows(said: str, alone: list[float], first: int = 1) -> None:
    found = losses(said)
    assert sorted(found) == list(range(first, 13))
    # as many digits as are printed
    assert max(abs(found[step] - alone[step - 1]) for step in found) < 1e-4


@pytest.mark.e2e
def test_one_process_trains_as_plain_torch_does_and_its_copies_are_read_by_dcp(
    tmp_path: Path, alone: list[float]
) -> None:
    folder = job(tmp_path)
    code, last, said = run(1, folder)
    assert code == 0, said
    follows(said, alone)
    assert (last["outcome"], last["steps"], last["resumed_at"]) == ("succeeded", 12, 0)
    assert abs(last["final_loss"] - alone[-1]) < TOLERANCE
    found = checkpoint_index.find(open_storage(folder / "runs" / "tiny"))
    # keep_last; none is begun while another is being written
    assert [item.step for item in found] in ([12, 8], [12, 4])
    assert all(not checkpoint_index.verify(item.uri) for item in found)
    program = load_program(TINY)
    model = program.model()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=last["checkpoint"], no_dist=True)
    want = train(
        program, {"seed": 3, "global_batch": 12, "clip_grad_norm": 1.0}, 12
    ).model.state_dict()
    assert all((state["model"][name] - value).abs().max() < 1e-4 for name, value in want.items())
    code, _, said = run(1, folder)
    assert code == 0
    assert "run 'tiny' is done (12 steps)" in said


@pytest.fixture
def without_ray(tmp_path: Path) -> Path:
    """A folder that comes before the installed packages: ray cannot be imported."""
    (tmp_path / "hidden" / "ray").mkdir(parents=True)
    (tmp_path / "hidden/ray/__init__.py").write_text("raise ImportError('no ray here')\n")
    return tmp_path / "hidden"


@pytest.mark.e2e
def test_two_ranks_are_watched_stop_at_sigterm_and_go_on_as_another_layout(
    tmp_path: Path, without_ray: Path
) -> None:
    """Profiled, told to a tracker, scraped by Prometheus; Ray is not there."""
    store = tmp_path / "mlflow"
    trackers = ["mlflow"] if find_spec("mlflow") else []
    own = WHERE["mlflow"](store) | {"PYTHONPATH": f"{ROOT}:{without_ray}"}
    folder = job(
        tmp_path, program=str(SLOW), steps=100_000, durable_every=0, metrics_port=0,
        trackers=trackers,
    )  # fmt: skip
    slow = train(
        load_program(SLOW), {"seed": 3, "global_batch": 12, "clip_grad_norm": 1.0}, 12
    ).losses
    log, place = tmp_path / "log", str(folder / "runs" / "tiny")
    with started(command(2, folder, "--layout", "tp=2"), log, **own) as process:
        until(lambda: 5 in losses(log.read_text()) or process.poll() is not None, log.read_text)
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2, log.read_text()
        (url,) = re.findall(r"run tiny: metrics for Prometheus: (http\S+)", log.read_text())
        until(lambda: scraped(url).get("elastic_step", 0) > 4, log.read_text)
        assert scraped(url)["elastic_workers"] == 2
        asked = ("--steps", "2", "--ranks", "1", "--json")
        (one,) = json.loads(elastic("profile", place, *asked))["ranks"]
        assert (one["rank"], one["at"]) == (1, "tp 1/2") and {"tp", "compute"} <= set(one["parts"])
        os.kill(ranks[1], signal.SIGTERM)  # one rank hears it, both save and leave
        assert process.wait(300) == 1  # torchrun's own code; it lists that of each rank
    said = log.read_text()
    assert said.count("exitcode  : 3") == 2, said
    assert "stopped: another rank was told to stop; saved at step" in said
    at = max(losses(said))
    assert checkpoint_index.find(open_storage(folder / "runs" / "tiny"))[0].step == at
    more = ("--layout", "dp_shard=2", "--set", f"steps={at + 4}", "--set", "durable_every=2")
    code, last, said = run(2, folder, *more, **own)
    assert code == 0, said
    assert last["resumed_at"] == at
    assert f"resumes from step {at}" in said
    for step, loss in losses(said).items():
        if step <= len(slow):
            assert abs(loss - slow[step - 1]) < 1e-4
    assert sorted(losses(said)) == list(range(at + 1, at + 5))
    all_steps = list(range(1, at + 5))
    rows = read_rows((Path(place) / "metrics.csv").read_text())
    assert [row["step"] for row in rows] == all_steps
    for library in trackers:
        (told,) = read_back(library, store, "tiny").values()
        assert [step for step, _ in told["train/train_loss"]] == all_steps
    replayed = json.loads(elastic("replay", place, "--json"))
    assert replayed["identical"] and not replayed["reworded"]
    why = elastic("why", place, "--all")
    assert "stop requested: signal SIGTERM (rank 1)" in why
    assert "generation 2: dp_shard=2 on 2 workers of 1 node" in why
    assert "tp=2" in elastic("ledger", place) and "productive" in elastic("ledger", place)
    assert "succeeded" in elastic("status", place)


@pytest.mark.whole
def test_pipeline_and_replicas_have_the_same_losses(tmp_path: Path, alone: list[float]) -> None:
    """Also with loader processes; none of them is left."""
    code, last, said = run(
        4, job(tmp_path, data={"loader_workers": 1}), "--layout", "pp=2,dp_replicate=2"
    )
    assert code == 0, said
    assert not left_readers()
    assert last["layout"] == "pp=2,dp_replicate=2"
    follows(said, alone)


@pytest.mark.whole
def test_a_damaged_copy_is_passed_over(tmp_path: Path, alone: list[float]) -> None:
    folder = job(tmp_path)
    assert run(1, folder, "--set", "steps=8")[0] == 0
    newest = checkpoint_index.find(open_storage(folder / "runs" / "tiny"))[0]
    assert newest.step == 8
    shard = Path(newest.uri) / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    code, last, said = run(1, folder)
    assert code == 0, said
    assert "__0_0.distcp" in said
    assert "the copy before it is taken" in said
    assert last["resumed_at"] == 4
    follows(said, alone, first=5)


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is missing"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            "RANK=2, WORLD_SIZE=2: ranks go from 0",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "no MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "MASTER_PORT is missing"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
    ],
)
def test_half_an_environment_is_named(environment: dict[str, str], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Started.of(environment)


def spec(tmp_path: Path, **more: Any) -> JobSpec:
    return load_job(job(tmp_path, **more))


@pytest.mark.parametrize("by", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_only_ranks_that_the_launcher_starts_again_are_no_persons_start(
    by: str, tmp_path: Path
) -> None:
    """They obey what lies in the inbox."""
    wishes = StandaloneOptions(storage=str(tmp_path / "runs"))
    for told, again in (({}, False), ({by: "0"}, False), ({by: "2"}, True)):
        run = StandaloneRun(spec(tmp_path), wishes, told)
        assert (run.begun_at_s is None) == again


@pytest.mark.slow
def test_what_a_person_has_stopped_stays_so_where_the_launcher_starts_it_again(
    tmp_path: Path,
) -> None:
    """Both where it has stopped, and where it was killed before it had."""
    folder = job(tmp_path, program=str(SLOW), steps=100_000, durable_every=0)
    place = open_storage(folder / "runs" / "tiny")

    def ask(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            find_runs.order(place, {"stop": "enough"})

    def ended(told: dict[str, str], *more: str) -> StandaloneResult:
        wishes = StandaloneOptions(storage=str(folder / "runs"), hear=ask)
        return StandaloneRun(load_job(folder, more), wishes, told).to_the_end()

    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    first = ended({})
    assert first.outcome == "stopped"
    with pytest.raises(SpecError, match="was stopped: enough; it trains on once .* by hand") as no:
        ended(again)
    assert no.value.exit_code == 2
    journal = tmp_path / "runs" / "tiny" / "journal.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(True)[:-1]))
    for key in place.list("inbox/"):
        place.delete(key)
    more = f"steps={first.step + 2}"
    second = ended(again, more)
    assert (second.outcome, second.tokens) == ("stopped", 0)
    assert ended({}, more).outcome == "succeeded"


def test_ranks_that_share_a_gpu_are_refused_before_anything_is_opened(tmp_path: Path) -> None:
    run = StandaloneRun(spec(tmp_path), StandaloneOptions(storage=str(tmp_path / "runs")), {})
    met = Meeting(run.me, WorkerId("node-0", 0), gpus=("GPU-1a of h", "GPU-1a of h"))
    unused: Any = None
    with pytest.raises(SpecError, match="ranks 0, 1 have GPU-1a of h: NCCL takes one rank"):
        run._driven(met, unused, unused)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("world_size", "asked", "more", "says"),
    [
        (2, "tp=4", {}, r"2 ranks were started, its layout is 'tp=4' \(4 ranks\)"),
        (3, None, {"layout": {4: "tp=4", 2: "tp=2"}}, r"'tp=2' \(2 ranks\) or 'tp=4' \(4 ranks\)"),
        (16, None, {}, "global_batch=12 has fewer samples"),
        (2, "sp=2", {}, "'sp' is not an axis"),
    ],
)
def test_a_layout_that_is_not_that_of_the_ranks(
    world_size: int, asked: str | None, more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=says):
        layout_of(spec(tmp_path, **more), world_size, asked)


def test_the_layout_of_a_map_is_that_of_the_ranks(tmp_path: Path) -> None:
    assert layout_of(spec(tmp_path, layout={4: "tp=4", 2: "pp=2"}), 2) == Layout(pp=2)
    assert layout_of(spec(tmp_path), 3) == Layout(dp_shard=3)


@pytest.mark.parametrize(
    ("layout", "more", "says"),
    [
        ("tp=4", {}, "tp=4, but tp must divide 2 for this model"),
        ("pp=5", {}, "`blocks` matches only 4 modules"),
        ("cp=2", {"compile": True}, "has cp=2, compile: true does not go with that"),
    ],
)
def test_a_layout_that_the_model_cannot_be_cut_into(
    layout: str, more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=says):
        given = spec(tmp_path, **more).at(parse_layout(layout))
        check_layouts(given, trace(load_program(TINY)))


def test_what_a_person_should_know_of_the_program_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    given = spec(tmp_path, program=str(PROGRAMS / "tiny_resnet.py"))
    program = with_job(load_program(given.program), given.job())
    place = SimpleNamespace(
        script=None, dataset=program.dataset(), job=given.job(), program=program,
        profile=trace(program),
    )  # fmt: skip
    run = SimpleNamespace(spec=given, layout=Layout(), wishes=StandaloneOptions(hear=told.append))
    StandaloneRun._checked(run, place)  # type: ignore[arg-type]
    assert any(line.startswith("note: stem.1 is a SyncBatchNorm") for line in told)


@pytest.mark.slow
def test_changed_mathematics_are_refused_and_epochs_grow(tmp_path: Path) -> None:
    folder = job(tmp_path)
    run_folder = open_storage(folder / "runs" / "tiny")
    Lease(run_folder, "tiny").release()
    wishes = StandaloneOptions(storage=str(folder / "runs"))
    ended = StandaloneRun(load_job(folder, ["steps=4"]), wishes, {}).to_the_end()
    assert ended.outcome == "succeeded"
    assert checkpoint_index.find(run_folder)[0].epoch == 2
    sign = newest(run_folder)
    assert sign is not None and sign.released and sign.epoch == 2
    with pytest.raises(SpecError, match=r"started with other values: seed \(3, now 5\)"):
        StandaloneRun(load_job(folder, ["seed=5"]), wishes, {}).to_the_end()


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "lease" not in path.parts
    }


@pytest.mark.e2e
def test_a_run_that_another_process_drives_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = job(tmp_path)
    wishes = StandaloneOptions(storage=str(folder / "runs"))
    StandaloneRun(load_job(folder, ["steps=4"]), wishes, {}).to_the_end()
    unfinished = folder / "runs" / "tiny" / "checkpoints" / "step-00000008.g0001"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"half, by the one that drives it")
    before, lease = files(folder / "runs"), Lease(open_storage(folder / "runs" / "tiny"), "tiny")
    try:
        with pytest.raises(
            SpecError, match=f"run 'tiny' is driven by process {os.getpid()} on .*; stop it first"
        ):
            StandaloneRun(load_job(folder), wishes, {}).to_the_end()
        assert files(folder / "runs") == before
    finally:
        lease.release()


@pytest.mark.slow
def test_it_is_refused_to_others_meanwhile_and_ends_where_it_was_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is stored after that: the run is somebody else's."""
    folder = job(tmp_path, program=str(SLOW), steps=100_000, durable_every=1_000)
    run_folder = open_storage(folder / "runs" / "tiny")
    refused: list[str] = []
    monkeypatch.setattr(
        "elastic.worker.hosting.resume_checks.Lease",
        partial(Lease, times=Times(renew_s=0.05, ttl_s=600.0)),
    )

    def take_over(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            with pytest.raises(SpecError) as error:
                Lease(run_folder, "tiny")
            refused.append(str(error.value))
            sign = newest(run_folder)
            assert sign is not None
            after = replace(sign, epoch=sign.epoch + 1, n=0, host="elsewhere", boot="other")
            run_folder.put(after.key, json.dumps(asdict(after)).encode())

    with pytest.raises(LostContact, match=r"its lease \(epoch 1\) was taken over"):
        StandaloneRun(
            load_job(folder), StandaloneOptions(storage=str(folder / "runs"), hear=take_over), {}
        ).to_the_end()
    assert f"driven by process {os.getpid()} on" in refused[0]
    last = newest(run_folder)
    assert (
        checkpoint_index.find(run_folder) == []
        and last is not None
        and (last.epoch, last.released) == (2, False)
    )


@pytest.mark.e2e
@pytest.mark.whole  # two of them: the next tests above
def test_of_three_ways_in_at_once_one_has_the_run(tmp_path: Path) -> None:
    folder = job(tmp_path, program=str(SLOW), steps=400, durable_every=10)
    run_folder = open_storage(folder / "runs" / "tiny")
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with child(command(1, folder), env=environment(), **piped) as first:
        until(
            lambda: checkpoint_index.find(run_folder) or first.poll() is not None, "the first copy"
        )
        assert first.poll() is None
        driver = [
            sys.executable,
            "-m",
            "elastic",
            "run",
            str(folder),
            "--run-name",
            "tiny",
            "--local",
            "--set",
        ]
        for words in (command(1, folder), [*driver, f"storage={folder / 'runs'}"]):
            second = subprocess.run(
                words, capture_output=True, text=True, env=environment(), timeout=300, cwd=tmp_path
            )
            assert second.returncode == 2, second.stderr
            (line,) = second.stderr.strip().splitlines()
            assert f"run 'tiny' is driven by process {first.pid} on" in line
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        out, err = first.communicate(timeout=300)
    last = json.loads(out.strip().splitlines()[-1])
    assert (first.returncode, last["outcome"]) == (3, "stopped"), err
    assert checkpoint_index.find(run_folder)[0].step == last["steps"]
    assert all(
        checkpoint_index.verify(found.uri) == [] for found in checkpoint_index.find(run_folder)
    )
    code, last, said = run(1, folder, "--set", f"steps={last['steps'] + 2}")
    assert (code, last["outcome"]) == (0, "succeeded"), said


def test_a_group_that_was_there_is_there_again_and_leftovers_are_removed(tmp_path: Path) -> None:
    folder = job(tmp_path, steps=2)
    left = tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000001.g0001"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(b"half")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ended = StandaloneRun(
            load_job(folder), StandaloneOptions(storage=str(tmp_path / "runs")), {}
        ).to_the_end()
        assert (ended.outcome, ended.step) == ("succeeded", 2)
        assert dist.is_initialized() and dist.get_world_size() == 1
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
    assert not left.exists()


@pytest.mark.slow
def test_each_copy_is_told_of_once_with_the_metrics_of_its_step(tmp_path: Path) -> None:
    told: list[CommittedCheckpoint] = []
    wishes = StandaloneOptions(storage=str(tmp_path / "runs"), on_copy=told.append)
    ended = StandaloneRun(
        load_job(job(tmp_path, program=str(SLOW), durable_every=5)), wishes, {}
    ).to_the_end()
    assert [copy.step for copy in told] == [5, 10, 12]
    assert all(
        copy.metrics["step"] == copy.step and copy.metrics["train_loss"] > 0 for copy in told
    )
    assert (told[-1].uri, told[-1].metrics["train_loss"]) == (ended.checkpoint, ended.final_loss)


@pytest.mark.parametrize(
    ("words", "says"),
    [(("no",), "no such folder"), ((".", "--set", "stepz=3"), "unknown key 'stepz'")],
    ids=["folder", "key"],
)
def test_bad_input_is_one_line_and_code_2(
    words: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own stay
    monkeypatch.chdir(job(tmp_path))
    assert worker_command.main(words) == 2
    shown = capfd.readouterr()
    assert shown.out == "" and says in shown.err
    assert len(shown.err.splitlines()) == 1, shown.err


def left_readers() -> list[int]:
    """Loader processes of this very test."""
    mine = os.environ["PYTEST_CURRENT_TEST"].split()[0].encode(), str(ROOT).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            of_mine = all(mark in path.read_bytes() for mark in mine)
            if of_mine and "elastic.data.loader_processes" in cmdline(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


WRONG = {
    ("--set", "stepz=3"): "unknown key 'stepz'",
    ("--layout", "tp=3"): "2 ranks were started, its layout is 'tp=3' (3 ranks)",
}


def test_a_refusal_is_the_last_line_of_torchrun_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torchrun shows of each rank what its error file holds: before the rule that ends its block.
    What is the same on every rank rank 0 says."""
    warned: list[Any] = []
    monkeypatch.setattr(error_handler.logger, "warning", lambda *words: warned.append(words))
    for name, value in ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1"):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(job(tmp_path))
    for rank, shown in ((0, 1), (1, 0)):
        file = tmp_path / f"error-{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        for words, said in WRONG.items():
            assert worker_command.main((".", *words)) == 2
            assert capfd.readouterr().err.count(said) == shown
            failed = ProcessFailure(local_rank=rank, pid=1, exitcode=2, error_file=str(file))
            block = str(ChildFailedError("elastic.worker", {rank: failed})).rstrip().splitlines()
            assert block[-2].startswith("  elastic.worker: ") and said in block[-2]
            assert set(block[-1]) == {"="}
            # before, torchrun warns of a form that is not its own
            error_handler.ErrorHandler().dump_error_file(str(file), 2)
            assert not [text for text, *_ in warned if "message format" in text]
