"""The wheel alone: in an environment that has its dependencies and nothing of this repository, and in
an empty folder, jobs and cluster files of one's own work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path
from sysconfig import get_path

import pytest
import yaml
from support.docs.pages import blocks
from support.places import ROOT

from elastic.version import __version__

WHEEL = f"elastic_ray-{__version__}-py3-none-any.whl"
PAGE = "install.md"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git has of the working tree."""
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("the setuptools of this environment is older than 77")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("elastic", "deploy"):
        ignored = shutil.ignore_patterns("__pycache__", "elastic_runs", "node_modules")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    words = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", ".")
    run([sys.executable, "-m", "pip", *words], folder)
    (made,) = (folder / "dist").iterdir()
    assert made.name == WHEEL
    return made


@pytest.fixture(scope="module")
def there(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment: its dependencies are those of this one, an editable install is not seen."""
    home = tmp_path_factory.mktemp("there")
    run([sys.executable, "-m", "venv", "--without-pip", str(home)], home)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(get_path("purelib") + "\n")
    python = str(home / "bin" / "python")
    run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", str(wheel)],
        home,
    )
    return home


def run(words: list[str], folder: Path) -> str:
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """An empty folder with the job and the cluster file of the page."""
    (tmp_path / "job").mkdir()
    for kind in ("yaml", "python"):
        for found in blocks(PAGE, kind):
            name = re.match(r"# (job/\S+)\n", found.text)
            if name:
                (tmp_path / name[1]).write_text(found.text)
    mounts, start = (found.text for found in blocks(PAGE, "yaml")[1:])
    command, of_own_hosts = yaml.safe_load(start)
    assert of_own_hosts.startswith("END=")
    text = (ROOT / "cluster_configs" / "aws_g6e_g5_cheap.yaml").read_text()
    cluster = yaml.safe_load(text) | yaml.safe_load(mounts)
    commands = cluster["worker_start_ray_commands"]
    (n,) = (n for n, word in enumerate(commands) if "end_without_head" in word)
    commands[n] = command
    (tmp_path / "wheels").mkdir()
    for name in ("constraints.txt", WHEEL):
        (tmp_path / "wheels" / name).touch()
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    return tmp_path


@pytest.mark.e2e
def test_what_the_wheel_brings(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (about,) = (name for name in names if name.endswith("/METADATA"))
        metadata = Parser().parsestr(opened.read(about).decode())
    tables = {
        "py.typed", "catalog/prices.csv", "config/clusters/kuberay_schema.json",
        "api/templates/jobs/program.yaml", "api/templates/clusters/aws.yaml",
    }  # fmt: skip
    assert {f"elastic/{name}" for name in tables} <= set(names)
    page = {name for name in names if name.startswith("elastic/observe/dashboard/static/")}
    assert {Path(name).suffix for name in page} == {".html", ".js", ".css", ".svg", ".txt"}
    assert not any("/dashboard/page/" in name for name in names)
    assert {name.rpartition("/")[2] for name in names if ".data/scripts/" in name} == {
        "delete_azure_vm.sh",
        "end_without_head.sh",
        "pre_stop.sh",
    }
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"elastic", *(name for name in tops if name.startswith("elastic_ray-"))}
    extras = set(metadata.get_all("Provides-Extra") or ())
    text = (ROOT / "docs" / PAGE).read_text()
    assert {"huggingface", "test", "lint", "audit", "dev"} <= extras
    assert f"elastic-ray=={__version__}" in text and text.count(WHEEL) >= 4


@pytest.mark.e2e
def test_a_job_of_ones_own_runs_and_is_planned(there: Path, own: Path) -> None:
    elastic, python = str(there / "bin" / "elastic"), str(there / "bin" / "python")
    where = run([python, "-c", "import elastic; print(elastic.__file__)"], own)
    assert where.startswith(str(there))
    said = run([elastic, "run", "job", "--storage", "runs"], own)
    assert "succeeded (all 6 steps finished" in said and "samples     every step trained" in said
    workers = "".join(path.read_text() for path in own.glob("runs/*/logs/**/*") if path.is_file())
    assert str(ROOT) not in workers
    assert "best: " in run([elastic, "plan", "job", "--layout", "auto"], own)
    assert run([elastic, "--version"], own).split()[-1] == __version__


@pytest.mark.whole
def test_what_init_writes_is_checked_and_planned(there: Path, tmp_path: Path) -> None:
    """Each kind and each place, in one process of the environment that has the wheel alone; all
    pairs: tests/api/test_init_job.py."""
    play = """
import json, os, shlex, sys
from contextlib import redirect_stdout
from io import StringIO
from elastic.api.init_job import KINDS, PLACES
from elastic.cli.command_line import main
kinds, places = list(KINDS), list(PLACES)
pairs = [(kinds[i % len(kinds)], places[i % len(places)]) for i in range(max(len(kinds), len(places)))]
for kind, place in pairs:
    os.makedirs(f"{kind}-{place}"); os.chdir(f"{kind}-{place}")
    with redirect_stdout(StringIO()) as said:
        assert main(["init", "job", "--kind", kind, "--on", place, "--json"]) == 0
        for command in json.loads(said.getvalue())["next"][:2]:
            assert main(shlex.split(command)[1:]) == 0, (kind, place, command)
    os.chdir("..")
print(len(pairs), "pairs")
"""
    assert "6 pairs" in run([str(there / "bin" / "python"), "-c", play], tmp_path)


@pytest.mark.e2e
def test_a_cluster_file_of_ones_own_is_checked_and_planned_on(there: Path, own: Path) -> None:
    elastic = str(there / "bin" / "elastic")
    said = run([elastic, "cluster", "check", "cluster.yaml", "--job", "job"], own)
    assert "cluster.yaml: 0 errors" in said and "placeholders" in said
    planned = run([elastic, "plan", "job", "--cluster", "cluster.yaml"], own)
    assert "A10G-24GB, spot (4 x 8, g5.48xlarge" in planned
    assert os.access(there / "bin" / "end_without_head.sh", os.X_OK)
    assert os.access(there / "bin" / "pre_stop.sh", os.X_OK)


def test_the_version_is_the_same_wherever_it_stands() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == __version__
    for name in ("Dockerfile", "kubernetes/raycluster.yaml", "kubernetes/rayjob.yaml"):
        text = (ROOT / "deploy" / name).read_text()
        assert set(re.findall(r"/elastic:(\d[\w.]*)", text)) == {__version__}, name
    makefile = (ROOT / "Makefile").read_text()
    assert "pip wheel -q --no-deps -w dist ." in makefile and "cp constraints.txt dist/" in makefile
    pins = dict(re.findall(r"^(torch|ray)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert f"torch=={pins['torch'].partition('+')[0]}" in (ROOT / "docs" / PAGE).read_text()
