"""The command itself: bad input, what it needs to be imported, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.child import child
from support.places import ROOT
from support.waiting import until

from elastic.certify import certify_command
from elastic.certify.checks import shared_gpu
from elastic.certify.harness import place
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.place import Place, find
from elastic.certify.result import CertifyReport
from elastic.certify.tasks import Tasks
from elastic.cli import command_line
from elastic.errors import SpecError
from elastic.scenarios.check import Check
from elastic.scenarios.limit import Failed, Limit, OutOfTime

BLOCKED = """
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "pydantic", "yaml", "boto3", "tenacity", "rich", "matplotlib", "safetensors"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
SEEN = [("0", "NVIDIA X"), ("1", "NVIDIA X"), ("2", "NVIDIA X")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minutes", "0"], "--minutes 0: it must be more than 0"),
        (["--minutes", "nan"], "--minutes nan"),
        (["--gpus", "-1"], "--gpus -1"),
        (["--out", "/nowhere/at/all.json"], "the folder /nowhere/at is not there"),
        (["--storage", "ftp://x"], "'ftp://' is not known"),
        (["--only", "kil,groop", "--no-ray"], "--only groop: no check begins so"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    for run in (
        lambda: command_line.main(["certify", *words]),
        lambda: certify_command.main(words),
    ):
        assert run() == 2
        shown = capsys.readouterr()
        assert said in shown.err
        assert shown.err.count("\n") == 1
        assert not shown.out


@pytest.mark.e2e
def test_it_needs_neither_ray_nor_pydantic() -> None:
    files = (ROOT / "elastic" / "certify").rglob("*.py")
    plain = [
        file
        for file in files
        if file.stem[0] != "_" and file.parent.name not in ("programs", "gpu")
    ]  # scripts; what needs a GPU
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in plain]
    assert len(names) > 15
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *names], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_what_a_place_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_visible", lambda: SEEN)
    assert find(None, True) == Place("several-gpus", 3, ("0", "1", "2"), ("NVIDIA X",) * 3)
    assert (find(2, True).ranks, find(1, True).kind, find(0, True).kind) == (
        2,
        "one-gpu",
        "cpu-gloo",
    )
    assert not find(None, True).ray
    with pytest.raises(SpecError, match="this machine has 3"):
        find(4, True)
    monkeypatch.setattr(place, "_visible", list)
    assert [find(n, True).ranks for n in (None, 0, 2)] == [4, 4, 2]
    with pytest.raises(SpecError, match="at most 64"):
        find(65, True)


def test_the_environment_of_each_rank() -> None:
    several = Place("several-gpus", 2, ("3", "5")).environments()
    assert [one["CUDA_VISIBLE_DEVICES"] for one in several] == ["3", "5"]
    assert all("NCCL_HOSTID" not in one for one in several)
    one = Place("one-gpu", 4, ("0",)).environments()
    assert len({env["NCCL_HOSTID"] for env in one}) == 4
    wanted = {
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NET": "Socket",
    }
    assert all(env.items() >= wanted.items() for env in one)
    assert Place("one-gpu", 1, ("0",)).environments() == [
        {"CUDA_VISIBLE_DEVICES": "0", "GLOO_SOCKET_IFNAME": "lo"}
    ]
    assert {env["CUDA_VISIBLE_DEVICES"] for env in Place("cpu-gloo", 2).environments()} == {""}


REFUSAL = """[rank1]: Traceback (most recent call last):
[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, invalid usage
Last error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000
"""


def test_where_nccl_refuses_its_message_is_kept_and_one_rank_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: object, **named: object) -> dict:
        raise Failed(f"elastic.certify.checks.shared_gpu failed: {REFUSAL}")

    monkeypatch.setattr(shared_gpu.bare_runs, "run", refuse)
    done = Tasks(lambda check: None)
    # too little for anything else
    certify_command.carry_out(Place("one-gpu", 4, ("0",)), str(tmp_path), done, budget_s=1.0)
    found = {check.name: check for check in done.checks}
    # with so little time it is not even asked
    assert "needs about" in found["ranks share one GPU"].why
    done = Tasks(lambda check: None)
    with Lab(Place("one-gpu", 4, ("0",))) as lab:
        done.run([shared_gpu.task(lab)], 60.0)
    (check,) = done.checks
    assert check.verdict == "not run"
    assert "Duplicate GPU detected" in check.why
    assert "invalid usage" in check.why
    assert {name: one.verdict for name, one in found.items() if name in ("kill", "abort",
        "reshard")} == {
        "kill": "not run", "abort": "not run", "reshard": "not run"
    }  # fmt: skip
    assert found["kill"].why == "it needs two ranks at least"
    assert "layout dp_shard=1" in found
    assert "layout dp_shard=2" not in found


def test_a_sum_that_is_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shared_gpu.bare_runs, "run", lambda *a, **named: {"sum_is_right": 0, "nccl": "2.27"}
    )
    done = Tasks(lambda check: None)
    with Lab(Place("one-gpu", 4, ("0",))) as lab:
        done.run([shared_gpu.task(lab)], 60.0)
    assert [check.verdict for check in done.checks] == ["fail"]


def test_only_some_checks(tmp_path: Path) -> None:
    done = Tasks(lambda check: None)
    certify_command.carry_out(
        Place("cpu-gloo", 2), str(tmp_path), done, budget_s=0.0, only=("kill", "planner")
    )
    assert [check.name for check in done.checks] == ["kill", "growth", "notice", "planner error"]


def test_with_hardly_any_time_nothing_is_run_and_that_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out.json"
    words = [
        "certify",
        "--minutes",
        "0.001",
        "--no-ray",
        "--json",
        "--storage",
        str(tmp_path / "s"),
        "--out",
        str(out),
    ]
    assert command_line.main(words) == 1
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads(out.read_text())
    assert data["verdicts"]["pass"] == data["verdicts"]["fail"] == 0
    assert {check["name"] for check in data["checks"]} > {
        "checkpoint",
        "groups",
        "kill",
        "reshard",
        "step time",
        "planner error",
    }
    assert not (tmp_path / "s").exists()


@pytest.mark.whole
def test_ctrl_c_ends_all_processes_and_prints_what_was_found(tmp_path: Path) -> None:
    mark = f"certify-{os.getpid()}"
    words = [
        sys.executable,
        "-m",
        "elastic.certify",
        "--no-ray",
        "--gpus",
        "2",
        "--storage",
        str(tmp_path / "s"),
    ]
    environment = {
        **os.environ,
        "ELASTIC_TEST_RUN": mark,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
    }
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with child(words, env=environment, cwd=tmp_path, **piped) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        while not first.startswith(("pass", "fail")):
            first = process.stdout.readline()
            assert first, process.communicate()
        until(lambda: len(below(mark)) >= 3 or process.poll() is not None, "workers")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    # a busy machine's disk: told, and no fault here
    slow = first.startswith("fail") and "failed: checkpoint\n" in out
    assert process.returncode == (1 if slow else 3), out + err
    assert "checkpoint" in first
    assert " checkpoint  " not in out, "no row is printed twice"
    assert out.splitlines()[-1].endswith("(interrupted)")
    assert "Traceback" not in err
    until(lambda: not below(mark), "the end of all that it started")
    assert not list(tmp_path.glob("elastic-certify-*"))


def below(mark: str) -> list[int]:
    """Processes that carry the mark in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if (
                    f"ELASTIC_TEST_RUN={mark}".encode()
                    in Path(f"/proc/{name}/environ").read_bytes()
                ):
                    found.append(int(name))
            except OSError:
                continue
    return found


def test_in_a_folder_the_file_has_the_name_of_the_place(tmp_path: Path) -> None:
    report = CertifyReport(Place("one-gpu", 4, ray=True).plain("s3://b/p"), (), 1.0, 1.0)
    assert certify_command._file(tmp_path, report) == tmp_path / "one-gpu.json"
    assert report.place["storage"] == "s3"
    without = CertifyReport(Place("cpu-gloo", 4).plain("/srv/runs"), (), 1.0, 1.0)
    assert certify_command._file(tmp_path, without) == tmp_path / "cpu-gloo-no-ray.json"
    assert certify_command._file(tmp_path / "x.json", without) == tmp_path / "x.json"
    assert without.place["storage"] == "a local folder"


def test_lines_say_verdict_name_and_seconds() -> None:
    assert Check("kill", "pass", {"pause_s": 0.25}, seconds=1.5).line().split() == [
        "pass",
        "kill",
        "1.5",
        "s",
        "pause_s",
        "0.25",
    ]


def test_a_worker_group_that_was_only_starting_is_kept_and_one_that_had_begun_is_not() -> None:
    def used(lab: Lab, error: BaseException, entered: bool) -> bool:
        with pytest.raises(type(error)):
            with lab.worker_pool(Limit.after(60)) as worker_pool:
                if entered:
                    worker_pool.stores[1] = None
                raise error
        return lab._worker_pool is worker_pool

    with Lab(Place("cpu-gloo", 1)) as lab:
        assert used(lab, OutOfTime("starting"), entered=False)
        assert not used(lab, OutOfTime("stepping"), entered=True)
        assert not used(lab, Failed("broken"), entered=False)
