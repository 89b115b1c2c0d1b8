"""Each code block of README.md and of docs/ is run or validated here, or stands in OTHERS: with the
test that does it, or with the reason why it cannot be."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.docs.pages import COMMANDS, Block, blocks, commands, pages, text_of
from support.places import ROOT, TESTS
from torch.distributed.run import get_args_parser

from elastic import catalog
from elastic.cli import command_line
from elastic.config.clusters.elastic_section import own_section
from elastic.config.drill import DrillSpec
from elastic.config.job import load_job
from elastic.config.key_names import stored_keys
from elastic.config.masking import is_secret
from elastic.worker import __main__ as worker
from elastic.worker.hosting import resume_checks

# sessions above half a second
SLOW = ("--within 3w --gpus H100,", "jobs/gpt2_124m", "--scaling", "--what-if")
PLACEHOLDERS = {
    "JOB",
    "RUN",
    "FILE",
    "FOLDER",
    "ARGS",
    "SOURCE",
    "MODEL_FOLDER",
    "TEXT_FILE",
    "my_job",
    "train.py",
    "fit.py",
    ".",
}
NOT_RUN = "not run: "
# page -> how a block begins -> the test that takes it from the page, or why none does
OTHERS = {
    "README.md": {
        "run         quickstart-": NOT_RUN
        + "what one run printed; its times are those of that machine",
        "import torch, elastic": "docs/test_pages_in_layouts.py::test_the_program_of_the_page_computes_the_same_in_its_layouts",
    },
    "metrics.md": {
        "import pandas as pd": "observe/metrics/test_metrics_files.py::test_the_page_names_every_column_and_its_code_runs",
        "elastic.run(": "observe/metrics/test_metrics_files.py::test_the_page_names_every_column_and_its_code_runs",
        "# in a loop": "observe/metrics/test_metrics_files.py::test_the_page_names_every_column_and_its_code_runs",
        "# in a program": "observe/metrics/test_metrics_files.py::test_the_page_names_every_column_and_its_code_runs",
        "# in a script": "observe/metrics/test_metrics_files.py::test_the_page_names_every_column_and_its_code_runs",
        "trackers: [": "config/numbers/test_where_numbers_go.py::test_the_jobs_of_the_page_are_read",
        "trackers:\n": "config/numbers/test_where_numbers_go.py::test_the_jobs_of_the_page_are_read",
    },
    "training-shapes.md": {
        "steps: 60000": "config/test_phases.py::test_the_job_of_the_page_is_read",
        "step 1/120": NOT_RUN + "what one run printed",
        "PHASE": NOT_RUN + "what elastic plan prints of a job; its times are guesses",
    },
    "profile.md": {
        "run live, profile": "docs/test_profile_page.py::test_the_page_shows_what_is_printed",
        "WORKERS": "docs/test_profile_page.py::test_the_page_shows_what_is_printed",
    },
    "capacity.md": {
        "52 min": "sim/test_capacity_page.py::test_the_example_of_the_page",
        "114 min": "sim/test_capacity_page.py::test_the_example_of_the_page",
        "mix  ": "sim/test_mix_runs.py::test_the_mix_meets_deadlines_that_spot_misses_for_less_than_on_demand",
    },
    "checkpoints.md": {
        "import torch, torch.distributed": "worker/session/test_pages_trained.py::test_plain_dcp_loads_a_copy"
    },
    "certify.md": {
        "Scenario(": "scenarios/test_story_checks.py::test_the_entry_of_the_page_is_a_scenario"
    },
    "data.md": {
        "mkdir -p notes": "docs/test_data_page.py::test_the_job_of_the_page_trains",
        "# program.py": "docs/test_pages_in_layouts.py::test_the_program_of_the_page_computes_the_same_in_its_layouts",
        "for i in $(seq 200)": "docs/test_data_page.py::test_the_cut_of_unequal_samples_is_what_the_page_says",
    },
    "how-it-works.md": {
        "job.yaml, command line": "docs/test_how_it_works_page.py::test_the_drawing_names_the_rooms",
        "cli\n": "docs/test_how_it_works_page.py::test_the_order_of_imports_is_the_linters",
        "cli ": "docs/test_how_it_works_page.py::test_the_map_says_of_each_room_what_the_room_says",
    },
    "huggingface.md": {
        "# program.py": "docs/test_pages_in_layouts.py::test_the_program_of_the_page_computes_the_same_in_its_layouts",
        "import torch": "docs/test_ways_in.py::test_the_trainer_of_the_page_trains",
        "with FileLock": "worker/loop/test_before_the_trainer.py::test_what_the_page_keeps_is_made_once",
        "+import elastic": "docs/test_ways_in.py::test_the_diff_at_the_end_is_that_of_the_files",
    },
    "install.md": {
        "make dist": "deploy/test_wheel.py::test_the_version_is_the_same_wherever_it_stands",
        "# job/job.yaml": "deploy/test_wheel.py::test_a_job_of_ones_own_runs_and_is_planned",
        "# job/program.py": "deploy/test_wheel.py::test_a_job_of_ones_own_runs_and_is_planned",
        "elastic run job ": "deploy/test_wheel.py::test_a_job_of_ones_own_runs_and_is_planned",
        "file_mounts:": "deploy/test_wheel.py::test_a_cluster_file_of_ones_own_is_checked_and_planned_on",
        "- LIMIT_S": "deploy/test_wheel.py::test_a_cluster_file_of_ones_own_is_checked_and_planned_on",
        "elastic cluster check": "deploy/test_wheel.py::test_a_cluster_file_of_ones_own_is_checked_and_planned_on",
    },
    "layouts.md": {
        "generation 1: cp=8": NOT_RUN + "a line of a plan for GPUs that was cut short",
        "generation 2: dp_shard=128": NOT_RUN + "a line of a plan for GPUs that was cut short",
        "not pp=2,dp_shard=2": "docs/test_layouts_page.py::test_unequal_gpus_get_what_the_table_says",
        "tp={": "docs/test_pages_in_layouts.py::test_the_program_of_the_page_computes_the_same_in_its_layouts",
        "# program.py": "docs/test_pages_in_layouts.py::test_the_program_of_the_page_computes_the_same_in_its_layouts",
    },
    "loop.md": {
        "class Averaged": "worker/program/test_optimizer_limits.py::test_state_that_begins_as_the_weights_do_is_made_by_its_owner",
        "import torch": "worker/session/test_pages_trained.py::test_the_loop_of_the_page_in_its_layouts",
        "run = elastic.loop(": "docs/test_ways_in.py::test_the_loop_over_epochs_of_the_page_trains_as_the_other_one",
        "+import elastic": "docs/test_ways_in.py::test_the_diff_at_the_end_is_that_of_the_files",
    },
    "models.md": {
        'blocks=["vision': "worker/equivalence/test_groups_in_stages.py::test_the_page_names_the_groups_of_the_towers",
        "73.5 s  step 64": NOT_RUN + "what one run printed; its times are those of that machine",
        "from elastic.models.distillation": "models/test_distillation.py::test_the_call_of_the_page",
        "def __getitem__": "models/test_distillation.py::test_logits_that_were_computed_once_are_a_field_like_any_other",
        "program = elastic.Program(..., weights": (
            "worker/session/test_pages_trained.py::test_weights_of_a_folder_in_its_layouts"
        ),
        "from elastic.models.lora": (
            "docs/test_pages_in_layouts.py::test_the_program_of_the_page_computes_the_same_in_its_layouts"
        ),
    },
    "network.md": {"group=$(aws": NOT_RUN + "it makes a security group in an account of AWS"},
    "notices.md": {
        "env: [{name": NOT_RUN
        + "a part of a pod; what its hook writes is read in cluster/notices/test_sources.py",
        "trap ": "cluster/notices/test_sources.py::test_a_trap_on_sigterm_writes_the_file",
    },
    "optimization.md": {
        "def optimizers": "worker/session/test_pages_trained.py::test_two_optimizers_in_their_layouts",
        "# muon/program.py": "docs/test_optimisation_page.py::test_muon_and_adamw_are_asked_for_as_the_page_says",
        "# muon/job.yaml": "docs/test_optimisation_page.py::test_muon_and_adamw_are_asked_for_as_the_page_says",
        "torchrun --standalone": "docs/test_optimisation_page.py::test_muon_and_adamw_are_asked_for_as_the_page_says",
    },
    "program.md": {
        "# program.py": "docs/test_pages_in_layouts.py::test_the_program_of_the_page_computes_the_same_in_its_layouts",
        "layout 'pp=2': no pp": "docs/test_ways_in.py::test_what_the_page_warns_of_is_refused_as_it_says",
        "+import elastic": "docs/test_ways_in.py::test_the_diff_of_a_program",
    },
    "ray-train.md": {
        "file=fit.py": "docs/test_ray_train_page.py::test_fit_through_a_kill_then_a_plain_ray_train_job_then_back",
        "file=go_on.py": "docs/test_ray_train_page.py::test_fit_through_a_kill_then_a_plain_ray_train_job_then_back",
        "file=resume.py": "docs/test_ray_train_page.py::test_fit_through_a_kill_then_a_plain_ray_train_job_then_back",
        "file=rows.py": "docs/test_ray_train_page.py::test_rows_of_a_ray_data_dataset_have_the_losses_of_the_dataset_itself",
        "file=hosted.py": "docs/test_ray_train_page.py::test_a_job_inside_a_torch_trainer",
        "file=sums.py": "docs/test_ray_train_page.py::test_the_script_before_it_was_changed_is_one_that_ray_train_runs",
        "file=sums_elastic.py": "docs/test_ray_train_page.py::test_the_train_function_through_a_kill_a_notice_and_a_growth",
        "--- sums.py": "docs/test_ray_train_page.py::test_the_diff_of_the_page_is_that_of_its_scripts_and_small",
    },
    "script.md": {
        "whole = [": "docs/test_script_page.py::test_a_trainer_resumes_from_the_newest_whole_checkpoint",
        "# train.py": "docs/test_script_page.py::test_the_command_of_the_page",
        "# train_function.py": "docs/test_script_page.py::test_the_command_of_the_page",
        "- torchrun": "docs/test_script_page.py::test_the_script_needs_no_change",
    },
    "heterogeneous-gpus.md": {
        "60.3 s  step 38": NOT_RUN + "a line of one simulated run, broken into several"
    },
}


def begins(block: Block) -> str:
    return f"file={block.file}" if block.file else block.text.lstrip()


def listed(block: Block) -> str | None:
    """What OTHERS says of a block."""
    found = [
        said
        for start, said in OTHERS.get(block.page, {}).items()
        if begins(block).startswith(start)
    ]
    assert len(found) < 2, f"{block} is in OTHERS twice"
    return found[0] if found else None


def of_kind(kind: str) -> list[Block]:
    """Those that nothing else runs."""
    return [block for page in pages() for block in blocks(page, kind) if listed(block) is None]


@pytest.mark.parametrize("page", pages())
def test_every_block_is_run_or_says_why_not(page: str) -> None:
    found = blocks(page)
    assert len(re.findall(r"^ *```", text_of(page), re.MULTILINE)) == 2 * len(found), (
        "a fence is not closed"
    )
    here = ("yaml", "shell", "session", "json")
    new = [
        f"{block.page}:{block.line}"
        for block in found
        if block.kind not in here and listed(block) is None
    ]
    assert new == [], "no test runs these: write one, and name it in OTHERS"
    for start, said in OTHERS.get(page, {}).items():
        assert sum(begins(block).startswith(start) for block in found) == 1, (
            f"{page}: '{start}' is no block, or several"
        )
        if not said.startswith(NOT_RUN):
            file, _, name = said.partition("::")
            text = (TESTS / file).read_text()
            assert f"def {name}(" in text and page in text, f"{said} does not read {page}"


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b, marks=pytest.mark.slow if any(s in b.first for s in SLOW) else ())
        for b in of_kind("session")
    ],
    ids=lambda block: block.first[:70],
)
def test_a_command_prints_what_stands_below_it(
    block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    # of a model this large it takes seconds; tests/jobs run the job
    monkeypatch.setattr(resume_checks, "check_loss", lambda job, program: None)
    first, _, printed = block.text.partition("\n")
    words = shlex.split(first.removeprefix("$ "))
    assert words[0] == "elastic"
    assert command_line.main(words[1:]) == (2 if printed.startswith("elastic: ") else 0)
    out, err = capsys.readouterr()
    assert (err + out).rstrip() == printed.rstrip()


@pytest.mark.parametrize("block", of_kind("shell"), ids=str)
def test_a_command_is_one_that_there_is(block: Block) -> None:
    found = commands(block.text)
    assert found
    for words in found:
        taken(words)


def taken(words: list[str]) -> None:
    """Parsed as the program itself does it, without running it."""
    if words[0] == "python" and words[1].endswith(".py"):
        pages = (ROOT / "docs").glob("*.md")
        assert any(f"```python file={words[1]}\n" in page.read_text() for page in pages)
        return
    if words[0] == "python":
        assert words[1] == "-m"
        words = {
            "elastic": ["elastic"],
            "elastic.worker": ["worker"],
            "elastic.certify": ["elastic", "certify"],
        }[words[2]] + words[3:]
    if words[0] == "torchrun":
        given = get_args_parser().parse_args(words[1:])
        assert given.module and given.training_script == "elastic.worker"
        words = ["worker", *given.training_script_args]
    if words[0] == "elastic":
        cut = words.index("--") if "--" in words else len(words)
        numbered = ["1" if word == "N" else word for word in words[1:cut]]
        assert command_line.parser().parse_args(numbered).handler
    elif words[0] == "worker":
        assert worker.parser().parse_args(words[1:])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "ray":
        of_ray(words[1:])
        if "--" in words:
            taken(words[words.index("--") + 1 :])
    elif words[0] == "kubectl":
        assert words[1] in ("apply", "delete", "port-forward", "get")
        words = [word for word in words if not word.startswith("svc/")]
    else:
        assert words[0] == "export" and re.fullmatch(r"[A-Z_]+=\S+", words[1]), (
            f"'{words[0]}': what checks it?"
        )
    for word in words:
        if (
            re.search(r"/|\.(py|yaml)$", word)
            and not word.startswith(("http", "/"))
            and "://" not in word
            and word not in PLACEHOLDERS
        ):
            assert (ROOT / word).exists() or "--out" in words, f"{word} is not there"


def of_ray(words: list[str]) -> None:
    """Ray's own commands and options."""
    scripts = pytest.importorskip("ray.scripts.scripts")
    group = scripts.cli
    while hasattr(group, "commands"):
        assert words[0] in group.commands, f"ray has no command {words[0]}"
        group, words = group.commands[words[0]], words[1:]
    options = {name for one in group.params for name in one.opts}
    own = words[: words.index("--")] if "--" in words else words
    assert {word for word in own if word.startswith("--")} <= options


@pytest.mark.parametrize("block", of_kind("yaml"), ids=str)
def test_a_file_is_one_that_is_taken(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(catalog.VARIABLE, raising=False)
    data: Any = yaml.safe_load(block.text)
    if isinstance(data, list):
        assert [DrillSpec.model_validate(entry).plain() for entry in data]
    elif "instances" in data:
        (tmp_path / "own.yaml").write_text(block.text)
        assert set(catalog.instance_types([tmp_path / "own.yaml"])) >= set(data["instances"])
    elif "metadata" in data:
        assert own_section(data)[1] == []
    else:
        (tmp_path / "program.py").write_text("")
        (tmp_path / "job.yaml").write_text(
            yaml.safe_dump({"steps": 1000, "global_batch": 12, "optimizer": ADAM} | data)
        )
        job = load_job(tmp_path).plain()
        assert set(stored_keys(data, "page")) <= set(job)


ADAM = {"path": "torch.optim.AdamW", "lr": 1e-3}  # the rate that lr_scaling scales


@pytest.mark.parametrize("block", of_kind("json"), ids=str)
def test_json_is_json(block: Block) -> None:
    assert json.loads(block.text)["Statement"]


# NAME=value or "NAME": "value"; $NAME and $(command) are no values
GIVEN = re.compile(r"""([A-Za-z]+(?:_[A-Za-z0-9]+)+)["']?\s*[:=]\s*["']?([^\s"'$,{}]+)""")
TYPED = (*COMMANDS, "aws", "curl", "docker", "kubectl", "pip", "ssh", "RAY_")


def typed_secrets(text: str) -> list[str]:
    """Variables with the name of a secret whose value stands in a command."""
    return [name for name, value in GIVEN.findall(text) if is_secret(name, value)]


@pytest.mark.parametrize("page", pages())
def test_no_secret_is_typed_on_a_command_line(page: str) -> None:
    """Every user of a host reads those of its processes."""
    typed = [block.text for block in blocks(page) if block.kind in ("shell", "session")]
    spans = re.findall(r"`([^`\n]+)`", text_of(page))
    typed += [span for span in spans if span.startswith(TYPED)]
    assert [name for text in typed for name in typed_secrets(text)] == []
    assert [text for text in typed if "--runtime-env-json" in text] == [], "--runtime-env FILE"


def test_a_secret_on_a_command_line_is_seen() -> None:
    in_json = """ray job submit --runtime-env-json '{"env_vars": {"HF_TOKEN": "..."}}' -- x"""
    assert typed_secrets(in_json) == ["HF_TOKEN"]
    assert typed_secrets("env WANDB_API_KEY=abc elastic run JOB") == ["WANDB_API_KEY"]
    assert typed_secrets("export RAY_AUTH_TOKEN=$(cat FILE); elastic run JOB --set a_b=3") == []


@pytest.mark.parametrize("page", pages())
def test_commands_inside_of_sentences_are_there(page: str) -> None:
    """`elastic verb --option` between backticks."""
    text = re.sub(r"^ *```.*?^ *```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    verbs = command_line.parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for span in re.findall(r"`(elastic [a-z][^`]*)`", text):
        words = span.split()
        named = words[1].rstrip(",").split("|")
        assert set(named) <= set(verbs), span
        options = {
            option
            for verb in named
            for action in nested(verbs[verb])
            for option in action.option_strings
        }
        own = words[: words.index("--")] if "--" in words else words
        unknown = [
            word
            for word in own
            if word.startswith("--") and word.rstrip(",").partition("=")[0] not in options
        ]
        assert unknown == [], span


def nested(parser: Any) -> list[Any]:
    """Its options, and those of what stands below it."""
    found = list(parser._actions)
    for action in parser._actions:
        for below in (action.choices or {}).values() if isinstance(action.choices, dict) else ():
            found += nested(below)
    return found
