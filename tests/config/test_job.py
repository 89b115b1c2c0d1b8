"""job.yaml, drill files and overrides: what is right is read, what is wrong is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic.config.job import JobSpec, drill_entry, embedded_pools, load_drill, load_job
from elastic.config.pool_checks import check_fit
from elastic.errors import SpecError
from elastic.planner.layout_choice import named_for
from elastic.types import Pool

GOOD = "steps: 10\nglobal_batch: 8\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "tiny"
    root.mkdir()
    (root / "program.py").write_text("program = None\n")
    (root / "job.yaml").write_text(GOOD)
    return root


def load(folder: Path, text: str, *overrides: str) -> JobSpec:
    (folder / "job.yaml").write_text(text)
    return load_job(folder, overrides)


def test_defaults(folder: Path) -> None:
    job = load(folder, GOOD)
    assert (job.name, job.steps, job.global_batch, job.layout) == ("tiny", 10, 8, "auto")
    assert Path(job.program) == folder / "program.py"
    assert [(p.name, p.market_type, p.max_nodes, p.gpus_per_node) for p in job.pools] == [
        ("spot", "spot", 2, 2), ("on-demand", "on-demand", 1, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("n_gpus", "wanted"),
    [
        (0, [("spot", "CPU", 2, 2), ("on-demand", "CPU", 1, 2)]),
        (1, [("on-demand", "GPU", 1, 1)]),
        (3, [("spot", "GPU", 2, 1), ("on-demand", "GPU", 1, 1)]),
        (8, [("spot", "GPU", 3, 2), ("on-demand", "GPU", 1, 2)]),
    ],
)
def test_embedded_pools(n_gpus: int, wanted: list[tuple[str, str, int, int]]) -> None:
    found = embedded_pools(n_gpus)
    assert [(p.name, p.accelerator_type, p.max_nodes, p.gpus_per_node) for p in found] == wanted
    assert sum(p.max_nodes * p.gpus_per_node for p in found) == (n_gpus or 6)


def test_plain_survives_json(folder: Path) -> None:
    job = load(
        folder,
        GOOD + "layout: {2: tp=2, 4: 'dp_shard=2,tp=2'}\ndrill: [{at_step: 3, kill: rank0}]\n",
    )
    plain = job.plain()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["layout"] == {"2": "tp=2", "4": "dp_shard=2,tp=2"}
    assert plain["drill"] == [{"at_step": 3, "kill": "rank0"}]
    assert plain["orphan_lease_s"] == 900.0
    assert JobSpec(**plain).plain() == plain


def test_overrides(folder: Path) -> None:
    job = load(folder, GOOD, "steps=3", "layout=dp_shard=2,tp=2", "durable_every=5", "storage=null")
    assert (job.steps, job.layout, job.durable_every, job.storage) == (
        3,
        "dp_shard=2,tp=2",
        5,
        None,
    )


def test_the_layout_named_for_a_number_of_workers(folder: Path) -> None:
    job = load(folder, GOOD + "layout: {2: tp=2, 4: 'pp=2,dp_shard=2'}\n").job()
    assert [named_for(job, n) for n in (1, 3, 6)] == ["", "tp=2", "pp=2,dp_shard=2"]
    assert named_for(load(folder, GOOD).job(), 4) == ""


BOMB = (
    "args: [&a0 [x, x], " + ", ".join(f"&a{k} [*a{k - 1}, *a{k - 1}]" for k in range(1, 40)) + "]\n"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: 10\nglobal_bach: 8\n", "unknown key 'global_bach'; did you mean 'global_batch'?"),
        (GOOD + "quux: 1\n", "unknown key 'quux'; keys are name, program, steps"),
        (
            GOOD + "pools: [{name: a, market: spot}]\n",
            "unknown key 'pools.0.market'; did you mean 'market_type'?",
        ),
        ("global_batch: 8\n", "key 'steps' is missing"),
        (
            "steps: 10\nglobal_batch: 0\n",
            "key 'global_batch': input should be greater than 0 (it is 0)",
        ),
        ("steps: ten\nglobal_batch: 8\n", "key 'steps': input should be a valid integer"),
        (
            GOOD + "layout: dp=4\n",
            "layout 'dp=4': 'dp' is not an axis; did you mean 'dp_replicate' or 'dp_shard'?",
        ),
        (GOOD + "layout: dp_shard=0\n", "dp_shard must be a whole number of at least 1, not '0'"),
        (
            GOOD + "layout: {4: tp=2}\n",
            "key 'layout': the entry for 4 workers is 'tp=2', a layout of 2",
        ),
        (
            GOOD + "layout: dp_shard=16\n",
            "layout 'dp_shard=16' has 16 data-parallel ranks, global_batch=8 has fewer samples",
        ),
        (GOOD + "min_workers: 4\nmax_workers: 2\n", "max_workers=2 is less than min_workers=4"),
        (
            GOOD + "peer_copies: -1\n",
            "key 'peer_replicas' (also 'peer_copies'): must be 'auto' or a number of copies on "
            "other nodes",
        ),
        (
            GOOD + "copy_link_share: 2\n",
            "key 'copy_link_share': input should be less than or equal to 1 (it is 2)",
        ),
        (
            GOOD + "peer_every: -1\n",
            "key 'replica_every' (also 'peer_every'): must be 'auto' or a number of steps (0 = "
            "off), not -1",
        ),
        (
            GOOD + "precision: bf16\n",
            "key 'precision': input should be 'float32', 'bfloat16' or 'float16' (it is 'bf16')",
        ),
        (GOOD + "deadline_h: 0\n", "key 'deadline_h': input should be greater than 0 (it is 0)"),
        (
            GOOD + "on_demand_floor: -1\n",
            "key 'on_demand_floor': must be a word or a number of at least 0, not -1",
        ),
        (GOOD + "on_demand_floor: all\n", "key 'on_demand_floor'"),
        (
            GOOD + "waiting_usd_per_h: -2\n",
            "key 'waiting_usd_per_h': must be a word or a number of at least 0, not -2",
        ),
        (
            GOOD + "purpose: best\n",
            "key 'purpose': input should be 'auto', 'fastest', 'cheapest' or 'deadline' (it is 'best')",
        ),
        (
            GOOD + "budget_usd: .inf\n",
            "key 'budget_usd': input should be a finite number (it is inf)",
        ),
        (
            GOOD + "waiting_usd_per_h: .nan\n",
            "key 'waiting_usd_per_h': input should be a finite number (it is nan)",
        ),
        (
            GOOD + "orphan_lease_s: 1e-300\n",
            "key 'orphan_lease_s': input should be greater than or equal to 1 (it is",
        ),
        (
            GOOD + "orphan_lease_s: .inf\n",
            "key 'orphan_lease_s': input should be a finite number (it is inf)",
        ),
        (
            GOOD + "orphan_lease_s: 1e9\n",
            "key 'orphan_lease_s': input should be less than or equal to 2592000 (it is",
        ),
        (
            GOOD + "pools: [{name: a, ends_at_s: .nan}]\n",
            "key 'pools.0.ends_at_s': input should be a finite number (it is nan)",
        ),
        (GOOD + 'pools: [{name: "a\\nb"}]\n', "key 'pools.0.name': string should match pattern"),
        (GOOD + "pools: [{name: ../a}]\n", "key 'pools.0.name': string should match pattern"),
        (
            GOOD + "seed: 99999999999999999999\n",
            "key 'seed': input should be less than or equal to 9007199254740992 (it is",
        ),
        (
            GOOD + f"eval_samples: {10**30}\n",
            "key 'eval_samples': input should be less than or equal to 1000000000 (it is",
        ),
        (
            GOOD + f"microbatch_size: {10**30}\n",
            "key 'microbatch_size': input should be less than or equal to 1000000000",
        ),
        (
            f"steps: {10**30}\nglobal_batch: 8\n",
            "key 'steps': input should be less than or equal to 1000000000000 (it is",
        ),
        (f"steps: 10\nglobal_batch: {'9' * 5000}\n", "not YAML: Exceeds the limit (4300"),
        (GOOD + "name: 2001-99-99\n", "not YAML: month must be in 1..12"),
        (GOOD + f"peer_every: {10**30}\n", "000000; at most 1e+12"),
        (
            GOOD + "optimizer: {path: torch.optim.SGD, lr: 1e999}\n",
            "inf is no number that a class of optimizers takes",
        ),
        (
            GOOD + "drill: [{at_step: 1, notice: any, deadline_s: .inf}]\n",
            "key 'drill.0.deadline_s': input should be a finite",
        ),
        (GOOD + "args: " + "[" * 100_000 + "]" * 100_000, "nested more than 100 deep"),
        (
            GOOD + BOMB,
            "it holds more than 1,000,000 values, those behind aliases counted each time",
        ),
        (GOOD + "pools: [{name: a}, {name: a}]\n", "two pools have the same name (a, a)"),
        (
            GOOD + "pools: [{name: a, min_nodes: 3}]\n",
            "pool 'a': min_nodes=3 is more than max_nodes=1",
        ),
        (GOOD + "drill: [{kill: any}]\n", "an entry of the drill has no at_step"),
        ("- a\n", "it must hold keys and values, not a list"),
        ("steps: [\n", "line 2: not YAML"),
        (GOOD + "folder: /tmp\n", "unknown key 'folder'"),
        (GOOD + "program: other.py\n", "other.py: no such file; a job folder needs a program.py"),
    ],
)
def test_bad_job_is_one_line(folder: Path, text: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        load(folder, text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert "tiny/" in str(error.value)


def test_missing_folder_and_file(folder: Path) -> None:
    with pytest.raises(SpecError, match="no such folder"):
        load_job(folder / "nowhere")
    (folder / "job.yaml").unlink()
    with pytest.raises(SpecError, match="no such file; a job folder needs a job.yaml"):
        load_job(folder)


@pytest.mark.parametrize("text", ["steps", "=3"])
def test_bad_override(folder: Path, text: str) -> None:
    with pytest.raises(SpecError, match="must be key=value"):
        load(folder, GOOD, text)


def test_unknown_override_names_the_nearest(folder: Path) -> None:
    with pytest.raises(SpecError, match="unknown key 'stepz'; did you mean 'steps'"):
        load(folder, GOOD, "stepz=3")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps=abc", "--set steps: key 'steps': input should be a valid integer"),
        ("stepz=3", "--set stepz: unknown key 'stepz'"),
        ("durable_every=x", "--set checkpoint_every: key 'checkpoint_every'"),
    ],
)
def test_an_override_is_blamed_where_it_was_given(folder: Path, override: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        load(folder, GOOD, override)
    assert str(error.value).startswith(said)


def test_what_the_file_and_an_override_say_together_names_both(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"job.yaml \(with --set min_workers\): max_workers=2"):
        load(folder, GOOD + "max_workers: 2\n", "min_workers=3")
    with pytest.raises(SpecError, match=r"job.yaml: key 'steps'"):
        load(folder, GOOD.replace("steps: 10", "steps: ten"), "min_workers=3")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("gpus", "unknown key 'gpus'; keys are name"),
        ("nodes", "unknown key 'nodes'; did you mean 'max_nodes'"),
        ("batch", "unknown key 'batch'; did you mean 'global_batch'"),
        ("grad_clip_norm", "unknown key 'grad_clip_norm'; did you mean 'clip_grad_norm'"),
    ],
)
def test_a_suggestion_is_alike_or_has_the_word_in_it(folder: Path, word: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        load(folder, GOOD + f"{word}: 3\n")


def test_fit(folder: Path) -> None:
    pools = [
        Pool(name="a", gpus_per_node=2, max_nodes=2),
        Pool(name="b", gpus_per_node=1, max_nodes=1),
    ]
    check_fit(load(folder, GOOD + "layout: dp_shard=5\n"), pools)
    check_fit(load(folder, GOOD + "layout: {2: tp=2, 8: dp_shard=8}\n"), pools)
    with pytest.raises(
        SpecError, match=r"layout 'dp_shard=6' needs 6 workers; the pools give at most 5 \(a 2 x 2"
    ):
        check_fit(load(folder, GOOD + "layout: dp_shard=6\n"), pools)
    with pytest.raises(SpecError, match="min_workers=6; the pools give at most 5"):
        check_fit(load(folder, GOOD + "min_workers: 6\n"), pools)
    with pytest.raises(
        SpecError, match="on_demand_floor=2, but no pool is on-demand \\(a is owned, b is owned\\)"
    ):
        check_fit(load(folder, GOOD + "on_demand_floor: 2\n"), pools)


def test_a_drill_in_short_in_the_job(folder: Path) -> None:
    text = GOOD + 'drill: "kill any at 3, add spot at 5"\n'
    assert [entry.plain() for entry in load(folder, text).drill] == [
        {"at_step": 3, "kill": "any"},
        {"at_step": 5, "add": "spot"},
    ]
    with pytest.raises(SpecError, match="'kill any soon' is not as it must be: "):
        load(folder, GOOD + "drill: kill any soon\n")


def test_drill_file(tmp_path: Path) -> None:
    file = tmp_path / "drill.yaml"
    file.write_text(
        "- {at_step: 9, kill: [rank0, partner]}\n- {at_step: 2, notice: any-spot, deadline_s: 30}\n"
    )
    assert [entry.plain() for entry in load_drill(file)] == [
        {"at_step": 2, "notice": "any-spot", "deadline_s": 30.0},
        {"at_step": 9, "kill": ["rank0", "partner"]},
    ]
    assert drill_entry({"kill": "any"}).at_step is None


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("kill at 60", [{"at_step": 60, "kill": "any"}]),
        ("  notice   at step 40 ", [{"at_step": 40, "notice": "any"}]),
        ("add at 80", [{"at_step": 80, "add": "first"}]),
        ("kill_driver at 5", [{"at_step": 5, "kill_driver": True}]),
        (
            "add spot at 80, kill rank:1 at 60, slow spot-1 at 9 factor=2.5",
            [
                {"at_step": 9, "slow": "spot-1", "factor": 2.5},
                {"at_step": 60, "kill": "rank:1"},
                {"at_step": 80, "add": "spot"},
            ],
        ),
    ],
)
def test_a_drill_in_short(text: str, entries: list[dict[str, Any]]) -> None:
    assert [entry.plain() for entry in load_drill(text, "first")] == entries


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill 60", "entry 1: 'kill 60' is not as it must be: 'kill at 60', 'notice any-spot at"),
        ("notice at 40, kill at soon", "entry 2: 'kill at soon' is not as it must be"),
        ("kil at 60", "drill 'kil at 60', entry 1: unknown key 'kil'; did you mean 'kill'?"),
        ("kill any-spto at 60", "'any-spto' names no node"),
        ("slow at 60", "slow needs a factor, such as 2.0"),
        ("kill at 60 deadline_s=5", "deadline_s belongs to a notice only"),
        ("kill at 60,", "entry 2: '' is not as it must be"),
        ("my drills/first.yaml", "my drills/first.yaml: no such file"),
        ("kill", "kill: no such file; a drill file is a list"),
    ],
)
def test_a_bad_drill_in_short_is_one_line(text: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        load_drill(text, "first")
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill: any\n", "it must be a list"),
        ("- {at_step: 1, kil: any}\n", "entry 1: unknown key 'kil'; did you mean 'kill'?"),
        (
            "- {at_step: 1}\n",
            "entry 1: a drill entry has exactly one of notice, kill, hang, slow, stall, corrupt",
        ),
        ("- {at_step: 1, kill: any, add: spot}\n", "not kill, add"),
        ("- {at_step: 1, kill: any, deadline_s: 3}\n", "deadline_s belongs to a notice only"),
        ("- {at_step: 1, kill: 'rank:x'}\n", "'rank:x' names no node"),
        ("- {at_step: 1, notice: any-spto}\n", "'any-spto' names no node"),
        ("- {at_step: 1, partition: any, for_s: 0}\n", "for_s"),
        ("- {at_step: 1, partition: any, for_s: 4000}\n", "for_s"),
        ("- {at_step: 1, partition: any, from: disk}\n", "from"),
        ("- {at_step: 1, partition: any, from: []}\n", "from"),
        ("- {at_step: 1, kill: any, for_s: 3}\n", "for_s belongs to partition only"),
        ("- {at_step: 1, kill: any, from: driver}\n", "from belongs to partition only"),
        ("- {at_step: 1, partition: any, cut_from: driver}\n", "unknown key 'cut_from'"),
        ("- {kill: any}\n", "entry 1: at_step is missing"),
        ("- kill\n", "entry 1: it must be keys and values"),
    ],
)
def test_bad_drill_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "drill.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as error:
        load_drill(file)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["job.yaml", "program.py"])
def test_a_file_of_a_job_is_told_from_a_script(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("steps: 1")
    with pytest.raises(SpecError, match=f"{name}: a file; its folder is meant, mine; a job is"):
        load_job(tmp_path / "mine" / name)
