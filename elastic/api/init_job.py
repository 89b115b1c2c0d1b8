"""init(): a job folder and a cluster file to begin with, written from the templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from elastic.errors import SpecError
from elastic.version import __version__

NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")  # as a cluster and a resource may be called

# what is trained -> its program (or script) and the keys of its job
KINDS: Mapping[str, tuple[str, str]] = {
    "module": ("module_program.py", "program.yaml"),
    "causal-lm": ("causal_lm_program.py", "text.yaml"),
    "lora": ("lora_program.py", "text.yaml"),
    "vision": ("vision_program.py", "program.yaml"),
    "script": ("loop_train.py", "script.yaml"),
}
# where it runs -> in a word, for whoever is asked
PLACES: Mapping[str, str] = {
    "aws": "AWS", "gcp": "Google Cloud", "azure": "Azure", "kubernetes": "Kubernetes (KubeRay)",
    "own-hosts": "hosts of your own, over SSH", "laptop": "this machine alone",
}  # fmt: skip
ABOUT: Mapping[str, str] = {
    "module": "a module of your own", "causal-lm": "a Hugging Face causal language model",
    "lora": "LoRA adapters on one", "vision": "pictures", "script": "a script with its own loop",
}  # fmt: skip
STORAGES: Mapping[str, str] = {
    "aws": "s3://BUCKET/PREFIX", "gcp": "gs://BUCKET/PREFIX", "azure": "az://CONTAINER/PREFIX",
    "kubernetes": "s3://BUCKET/PREFIX", "own-hosts": "/a/folder/that/all/hosts/share",
    "laptop": "./elastic_runs",
}  # fmt: skip
EXTRAS: Mapping[str, str] = {"gcp": "gcs", "azure": "azure"}
# what Ray's provider imports, on the head and where `ray up` is typed; of Azure as Ray's own
# azure/defaults.yaml pins it
CLIENTS: Mapping[str, str] = {
    "gcp": "google-api-python-client",
    "azure": "azure-common==1.1.28 azure-core==1.35.0 azure-identity==1.23.1 "
    "azure-mgmt-compute==35.0.0 azure-mgmt-network==29.0.0 azure-mgmt-resource==24.0.0 "
    "msrest==0.7.1 msrestazure==0.6.4.post1",
}
# what a worker ends itself with, where that is not a shutdown: on Azure that stops a machine, and
# a stopped one costs as much
ENDS: Mapping[str, str] = {
    "own-hosts": "$HOME/venv/bin/ray stop --force",
    "azure": "bash $HOME/venv/bin/delete_azure_vm.sh",
}
BY_LAUNCHER = ("aws", "gcp", "azure", "own-hosts")  # their files end with Ray's commands


class _Text(Template):
    """`@@{name}`: the files themselves are full of dollars, for shells."""

    delimiter = "@@"


@dataclass(frozen=True)
class NewJob:
    """What is asked for. `storage`: '' = that of the place, to be put in later."""

    folder: str
    kind: str = "module"
    place: str = "laptop"
    cluster: str = ""  # its file; '' = cluster.yaml beside the folder
    storage: str = ""

    @property
    def cluster_file(self) -> Path:
        return Path(self.cluster) if self.cluster else Path(self.folder).parent / "cluster.yaml"


@dataclass(frozen=True)
class Written:
    """`then`: what to type next, each with what it does."""

    files: tuple[Path, ...]
    then: tuple[tuple[str, str], ...]


def init(asked: NewJob) -> Written:
    """Writes the files; none that is there is touched. Raises SpecError."""
    if asked.kind not in KINDS:
        raise SpecError(f"--kind {asked.kind}: must be one of {', '.join(KINDS)}")
    if asked.place not in PLACES:
        raise SpecError(f"--on {asked.place}: must be one of {', '.join(PLACES)}")
    if asked.cluster in PLACES:
        raise SpecError(
            f"--cluster {asked.cluster}: that is where it runs, not a file; write --on "
            f"{asked.cluster}, and --cluster FILE where the file is to have a name of its own"
        )
    folder, name = Path(asked.folder), _name(asked)
    if not NAME.fullmatch(name):
        raise SpecError(
            f"{asked.folder}: a cluster cannot be called '{name}'; name the folder with letters, "
            "digits, '-' and '_'"
        )
    code, keys = KINDS[asked.kind]
    wanted = {
        folder / ("train.py" if asked.kind == "script" else "program.py"): _read("jobs", code),
        folder / "job.yaml": _Text(_read("jobs", keys)).substitute(
            name=name, storage=_storage(asked)
        ),
        asked.cluster_file: _cluster(asked, name),
    }
    for path in wanted:
        if path.exists():
            raise SpecError(f"{path} is there already, and nothing is overwritten; name another")
    for path, text in wanted.items():
        _write(path, text)
    return Written(tuple(wanted), _then(asked))


def _name(asked: NewJob) -> str:
    """Of its job and of its cluster."""
    return Path(asked.folder).resolve().name.lower().replace("_", "-")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror or error}") from error


def _read(room: str, name: str) -> str:
    return files("elastic.api.templates").joinpath(room, name).read_text(encoding="utf-8")


def _storage(asked: NewJob) -> str:
    if asked.storage:
        return f"storage: {asked.storage}"
    usual = STORAGES[asked.place]
    if asked.place == "laptop":
        return f"# storage: {usual}  # where runs lie, if nothing else is said"
    return f"# storage: {usual}  # a must on a cluster: all nodes read and write it"


def _cluster(asked: NewJob, name: str) -> str:
    text = _read("clusters", f"{asked.place.replace('-', '_')}.yaml")
    own = asked.place == "own-hosts"
    if asked.place in BY_LAUNCHER:
        text += _read("clusters", "ray_commands.yaml")
    extras = [EXTRAS[asked.place]] if asked.place in EXTRAS else []
    extras += ["huggingface"] if asked.kind in ("causal-lm", "lora") else []
    client = CLIENTS.get(asked.place, "")
    head_setup = f"[~/venv/bin/pip install -q {client}]" if client else "[]"
    return _Text(text).substitute(
        name=name, folder=asked.folder, file=asked.cluster_file, version=__version__,
        extra=f"[{','.join(extras)}]" if extras else "", head_setup=head_setup,
        ends="Ray on its host" if own else "its machine",
        end=f'END="{ENDS[asked.place]}" ' if asked.place in ENDS else "",
        labels="\n    --labels=elastic-pool=hosts,ray.io/market-type=owned" if own else "",
        own_folder=_read("clusters", "own_folder.yaml") if own else "",
        same_folder="  - *own_folder\n" if own else "",
        tmpdir=" export RAY_TMPDIR=/tmp/elastic-ray-$(id -u);" if own else "",
        temp_dir=" --temp-dir=$RAY_TMPDIR/ray" if own else "",
    )  # fmt: skip


def _then(asked: NewJob) -> tuple[tuple[str, str], ...]:
    job, file = asked.folder, asked.cluster_file
    checks = (
        (f"elastic cluster check {file} --job {job}", "what is left to be put in, and prices"),
        (f"elastic plan {job} --cluster {file}", "layout, memory, seconds and dollars"),
    )
    here = (f"elastic run {job} --cluster {file} --local", "on this machine, at once")
    if asked.place == "laptop":
        return (*checks, here)
    submit = (
        "ray job submit --address http://127.0.0.1:8265 --working-dir . -- elastic run "
        f"{job} --cluster {file} --run-name first --supervise"
    )
    return (*checks, here, *_started(asked), (submit, "the run"))


def _started(asked: NewJob) -> tuple[tuple[str, str], ...]:
    """The cluster, its token, and the port to which jobs are submitted."""
    file, name = asked.cluster_file, _name(asked)
    start = "start the cluster (docs/clusters.md)"
    if asked.place == "kubernetes":
        token = f"kubectl get secret {name} -o jsonpath='{{.data.auth_token}}'"
        return (
            (
                f"kubectl apply -f {file}",
                "its accounts first: start the cluster (docs/clusters.md)",
            ),
            (f"kubectl port-forward svc/{name}-head-svc 8265 &", "the head's port, here"),
            (
                f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$({token} | base64 -d)",
                "the token that the operator has made",
            ),
        )
    up = "RAY_UP_enable_autoscaler_v2=0 ray up" if asked.place == "own-hosts" else "ray up"
    client = CLIENTS.get(asked.place, "")
    return (
        *(
            [(f"pip install {client}", "once: what Ray's provider imports, here too")]
            if client
            else []
        ),
        ("ray get-auth-token --generate", "once: ~/.ray/auth_token, which the file takes along"),
        ("export RAY_AUTH_MODE=token", "without it Ray's commands do not show the token"),
        (f"{up} {file}", start),
        (f"ray dashboard {file} &", "the head's port 8265, here"),
    )


# ------------------------------------------------------------------------------------- questions


def asked_for(given: NewJob, ask: Callable[[str, str], str], known: frozenset[str]) -> NewJob:
    """With the answers to what was not given; `known`: fields that were. `ask`: a question and
    what an empty answer means -> the answer."""

    def one(
        field: str, question: str, usual: str, *, choices: Mapping[str, str] | None = None
    ) -> str:
        if field in known:
            return str(getattr(given, field))
        if choices:
            listed = "\n".join(
                f"  {n}  {word:<11} {about}" for n, (word, about) in enumerate(choices.items(), 1)
            )
            question = f"{question}\n{listed}\n"
        answer = ask(question, usual).strip() or usual
        numbered = dict(enumerate(choices or (), 1))
        return numbered.get(int(answer), answer) if answer.isdigit() and choices else answer

    folder = one("folder", "Which folder shall hold the job?", given.folder)
    kind = one("kind", "What is trained?", given.kind, choices=ABOUT)
    place = one("place", "Where does it run?", given.place, choices=PLACES)
    usual = NewJob(folder, kind, place)
    cluster = one("cluster", "Which file shall describe the cluster?", str(usual.cluster_file))
    storage = one("storage", "Where do runs lie (a URI that all nodes reach)? Empty: later", "")
    return NewJob(folder, kind, place, cluster, storage)
