"""`elastic init`: each kind in each place passes the commands that it prints next."""

from __future__ import annotations

import ast
import importlib.util
import json
import shlex
from pathlib import Path

import pytest
import yaml
from support.cases import meeting
from support.places import ROOT

from elastic.api.init_job import CLIENTS, KINDS, PLACES, NewJob, asked_for, init
from elastic.cli.command_line import main
from elastic.errors import SpecError

# a program is of its kind, a cluster file of its place
PAIRS = meeting(list(KINDS), list(PLACES), n=1)


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(kind: str, place: str, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    assert main(["init", "my_job", "--kind", kind, "--on", place, "--json"]) == 0
    found: dict[str, list[str]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "place"), PAIRS)
def test_what_is_written_passes_check_and_plan_as_it_is(
    kind: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = written(kind, place, capsys)
    assert all(Path(name).is_file() for name in found["files"])
    check, plan = (shlex.split(command)[1:] for command in found["next"][:2])
    assert (check[:2], plan[0]) == (["cluster", "check"], "plan")
    assert main(check) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert ": 0 errors" in said
    assert place == "laptop" or "REPLACE" in said
    assert main(plan) == 0, capsys.readouterr()
    for name in found["files"]:
        assert "@@" not in Path(name).read_text()


def test_files_are_short_and_say_where_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    found = written("lora", "gcp", capsys)
    program, job, cluster = (Path(name).read_text() for name in found["files"])
    assert "hf download" in program and len(program.splitlines()) < 50
    assert "storage: gs://" in job and "name: my-job" in job and len(job.splitlines()) < 20
    assert "[gcs,huggingface]" in cluster and "cluster_name: my-job" in cluster


def test_all_that_is_typed_from_the_files_to_a_run() -> None:
    """As docs/clusters.md has it for the files of the repository."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    for place, file, n in (
        ("aws", "cluster_configs/aws_p5_p4d_spot.yaml", 4),
        ("kubernetes", "deploy/kubernetes/raycluster.yaml", 3),
    ):
        done = init(NewJob(f"{place}/my_job", place=place))
        start = [command for command, _ in done.then[3:-1]]
        assert len(start) == n
        for command in start:
            if not command.startswith("kubectl apply"):  # of several files, there
                typed = command.replace(f"{place}/cluster.yaml", file).replace("my-job", "elastic")
                assert typed in page


DISTRIBUTIONS = ("azure-common", "azure-core", "azure-identity", "azure-mgmt-compute",
                 "azure-mgmt-network", "azure-mgmt-resource")  # fmt: skip


def azure_imports() -> set[str]:
    """What Ray's provider imports when it is loaded."""
    (folder,) = importlib.util.find_spec("ray.autoscaler").submodule_search_locations  # type: ignore[union-attr,misc]
    found = set()
    for file in (Path(folder) / "_private" / "_azure").glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
    return {name for name in found if name.startswith("azure.")}


def test_the_head_has_the_libraries_of_rays_provider_for_azure() -> None:
    """At the versions that Ray names itself."""
    words = CLIENTS["azure"].split()
    asked = {word.partition("==")[0] for word in words}
    assert len(azure_imports()) >= 6
    for module in azure_imports():
        name = module.replace(".", "-")
        of = [known for known in DISTRIBUTIONS if f"{name}-".startswith(f"{known}-")]
        assert of and set(of) <= asked, module
    (folder,) = importlib.util.find_spec("ray.autoscaler").submodule_search_locations  # type: ignore[union-attr,misc]
    defaults = yaml.safe_load((Path(folder) / "azure" / "defaults.yaml").read_text())
    assert set(words) <= set(" ".join(defaults["head_setup_commands"]).split())


@pytest.mark.parametrize("place", sorted(CLIENTS))
def test_the_clients_of_a_cloud_are_installed_here_and_on_the_head(place: str) -> None:
    """`ray up` loads the provider too."""
    done = init(NewJob("my_job", place=place))
    typed = [command for command, _ in done.then]
    install = f"pip install {CLIENTS[place]}"
    assert typed.index(install) < typed.index("ray up cluster.yaml")
    assert install in (ROOT / "docs" / "clusters.md").read_text()
    (head,) = yaml.safe_load(Path("cluster.yaml").read_text())["head_setup_commands"]
    assert head == f"~/venv/bin/pip install -q {CLIENTS[place]}"


def test_on_azure_only_the_head_has_a_public_address() -> None:
    """Those of workers would stay, and be paid, where Azure takes a spot machine."""
    init(NewJob("my_job", place="azure"))
    provider = yaml.safe_load(Path("cluster.yaml").read_text())["provider"]
    assert provider["use_internal_ips"] is provider["use_external_head_ip"] is True
    assert provider["resource_group"] == "my-job"  # its own, which `reap` has deleted as a whole


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    written("module", "laptop", capsys)
    Path("my_job/job.yaml").write_text("mine: 1\n")
    Path("my_job/program.py").unlink()
    assert main(["init", "my_job", "--yes"]) == 2
    told = capsys.readouterr().err
    assert "my_job/job.yaml is there already, and nothing is overwritten" in told
    assert told.count("\n") == 1
    assert Path("my_job/job.yaml").read_text() == "mine: 1\n"
    assert not Path("my_job/program.py").exists(), "all or nothing"


def test_without_a_terminal_nothing_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda text: pytest.fail("asked"))
    assert main(["init"]) == 0
    said = capsys.readouterr().out
    assert "wrote job/program.py, job/job.yaml, cluster.yaml" in said
    assert "elastic run job --cluster cluster.yaml --local" in said


def test_five_questions_and_none_whose_answer_was_given() -> None:
    asked: list[str] = []

    def ask(question: str, usual: str) -> str:
        asked.append(question)
        return {"What is trained?": "3", "Where does it run?": "aws"}.get(
            question.splitlines()[0], ""
        )

    found = asked_for(NewJob("job"), ask, frozenset())
    assert len(asked) == 5 and "lora" in asked[1] and "Kubernetes" in asked[2]
    assert found == NewJob("job", "lora", "aws", "cluster.yaml", "")
    asked.clear()
    known = frozenset({"folder", "kind", "place", "cluster"})
    asked_for(NewJob("job", "vision", "gcp", "c.yaml"), ask, known)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (NewJob("job", "poem"), "--kind poem: must be one of module"),
        (NewJob("job", "module", "moon"), "--on moon: must be one of aws"),
        (NewJob("job", cluster="aws"), "--cluster aws: that is where it runs, not a file; write"),
        (NewJob("a job!"), "a cluster cannot be called"),
    ],
)
def test_what_is_none_is_refused_by_name(wrong: NewJob, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        init(wrong)
    assert not list(Path().iterdir())


# that each is planned, for which its program is built: above; that such a job runs from the wheel:
# tests/deploy/test_wheel.py
@pytest.mark.whole
@pytest.mark.parametrize("kind", list(KINDS))
def test_each_kind_trains_on_this_machine(
    kind: str, capsys: pytest.CaptureFixture[str], empty: Path
) -> None:
    found = written(kind, "laptop", capsys)
    run = shlex.split(found["next"][-1])[1:]
    assert main([*run, "--set", "steps=4", "--storage", str(empty / "runs"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["steps"] == 4 and summary["samples_exact"] is True
