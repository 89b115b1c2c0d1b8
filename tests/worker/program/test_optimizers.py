"""Optimizers by import path, which of them can be cut over ranks, and that a cut one does what a
whole one does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.places import PROGRAMS
from support.reference import train
from support.worker.chain import job_of
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool

from elastic.config.fingerprint import batch_changed
from elastic.config.job import load_job
from elastic.errors import SpecError
from elastic.program import Program, load_program
from elastic.storage import open_storage
from elastic.types import Box, Job, Layout, OptimizerSpec, OwnedEntry, ShardStored, StepDone
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.program.element_wise import what_they_keep
from elastic.worker.program.job_program import with_job
from elastic.worker.program.model_profile import trace
from elastic.worker.program.optimizers import JobOptimizer
from elastic.worker.program.owned import shape_trial

BARE = load_program(PROGRAMS / "tiny_bare.py")
SPECS = trace(BARE).specs
RATES = {"steps": 20, "global_batch": 12}


def kept(path: str, **keywords: Any) -> OptimizerSpec:
    return what_they_keep(
        replace(BARE, optimizer=JobOptimizer({"path": path, **keywords})), SPECS
    ).optimizers[0]


# --------------------------------------------------------------------------------- which can be cut


@pytest.mark.parametrize(
    ("name", "keywords", "found"),
    [
        ("AdamW", {"betas": [0.9, 0.95]}, OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",))),
        ("SGD", {}, OptimizerSpec()),
        ("SGD", {"momentum": 0.9, "nesterov": True}, OptimizerSpec(("momentum_buffer",))),
        (
            "NAdam",
            {},
            OptimizerSpec(
                ("exp_avg", "exp_avg_sq"), ("step", "mu_product"), (("mu_product", 1.0),)
            ),
        ),
        (
            "Adagrad",
            {"initial_accumulator_value": 0.5},
            OptimizerSpec(("sum",), ("step",), (("sum", 0.5),)),
        ),
        ("RMSprop", {"centered": True}, OptimizerSpec(("square_avg", "grad_avg"), ("step",))),
    ],
)
def test_what_an_optimizer_keeps_and_begins_with(
    name: str, keywords: dict[str, Any], found: OptimizerSpec
) -> None:
    assert kept(f"torch.optim.{name}", **keywords) == found


@pytest.mark.parametrize(
    ("path", "keywords", "said"),
    [
        (
            "torch.optim.LBFGS",
            {},
            r"optimizer LBFGS: a plain step\(\) fails \(TypeError: .*closure",
        ),
        (
            "torch.optim.Muon",
            {},
            r"optimizer Muon: Muon only supports 2D parameters.*; `muon\+adamw` gives it the "
            "matrices alone$",
        ),
        (
            "whole_optimizers.Together",
            {"lr": 0.1},
            r"optimizer Together: the step of [\w.]+ depends on other parameters, or on random "
            "numbers; an optimizer must step each tensor by itself",
        ),
        (
            "whole_optimizers.Growing",
            {"lr": 0.1},
            r"optimizer Growing: its state 'seen' is of one kind after one step",
        ),
        (
            "odd_optimizers.Talking",
            {"lr": 0.1},
            r"optimizer Talking: it communicates \(ValueError: Default process group",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    path: str, keywords: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    with pytest.raises(SpecError, match=f"^job.yaml: {said}") as error:
        kept(path, **keywords)
    assert "\n" not in str(error.value)


def test_a_step_that_draws_random_numbers_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the types for which it does: it is asked as what the model's parameters are."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    assert kept("odd_optimizers.Noisy", lr=0.1) == OptimizerSpec()
    half = tuple(replace(s, dtype="bfloat16" if "head" in s.fqn else s.dtype) for s in SPECS)
    noisy = replace(BARE, optimizer=JobOptimizer({"path": "odd_optimizers.Noisy", "lr": 0.1}))
    with pytest.raises(SpecError, match="a step of head.weight .bfloat16. draws random numbers"):
        what_they_keep(noisy, half)


@pytest.mark.slow  # imports torchao
def test_rounding_by_random_numbers_is_refused_where_it_rounds() -> None:
    pytest.importorskip("torchao", reason="it is in the extra 'test'")
    adam = {"path": "torchao.optim.AdamW8bit", "lr": 0.1, "bf16_stochastic_round": True}
    program = replace(BARE, optimizer=JobOptimizer(adam))
    what_they_keep(program, SPECS)  # float32 is not rounded
    half = tuple(replace(s, dtype="bfloat16") for s in SPECS)
    with pytest.raises(SpecError, match="draws random numbers, .*bf16_stochastic_round=False"):
        what_they_keep(program, half)


def test_muon_steps_whole_matrices() -> None:
    """Its momentum has the parameter's shape: only the dry step on a part tells."""
    program = replace(BARE, optimizer=lambda named: torch.optim.Muon([p for _, p in named]))
    specs = [spec for spec in SPECS if len(spec.shape) == 2]
    found = what_they_keep(program, specs)
    assert {s.fqn: found.optimizers[found.of[s.fqn]].owned for s in specs} == {
        s.fqn: (
            OwnedEntry("begun", (2,), "uint8", on_host=True),
            OwnedEntry("momentum_buffer", s.shape, "float32"),
        )
        for s in specs
    }
    flop = {s.fqn: found.optimizers[found.of[s.fqn]].flop for s in specs}
    small, wide = flop["layers.0.attn.wk.weight"], flop["layers.0.mlp.w1.weight"]
    # 5 rounds of Newton-Schulz of [n, m], n <= m: 2 n n m + 2 n n n + 2 n n m
    assert (small, wide) == (5 * (4 * 16 * 16 * 32 + 2 * 16**3), 5 * (4 * 32 * 32 * 64 + 2 * 32**3))


@pytest.mark.parametrize(
    ("path", "keywords", "names"),
    [
        ("torch.optim.Adafactor", {}, ("begun", "step", "row_var", "col_var")),
        ("torch.optim.SGD", {"momentum": 0.9, "dampening": 0.5}, ("begun", "momentum_buffer")),
        ("odd_optimizers.NormPerTensor", {"lr": 0.1}, ("begun",)),
        ("whole_optimizers.Lamb", {}, ("begun", "step", "exp_avg", "exp_avg_sq")),
        ("whole_optimizers.Shampoo", {}, ("begun", "step", "roots/1", "factors/1")),
    ],
)
def test_what_is_not_element_wise_steps_whole_tensors(
    path: str, keywords: dict[str, Any], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    program = replace(BARE, optimizer=JobOptimizer({"path": path, **keywords}))
    found = what_they_keep(program, SPECS)
    wide = found.optimizers[found.of["embed.weight"]]  # [64, 32], and Shampoo's `most` is 48
    assert tuple(one.name for one in wide.owned) == names and wide.form and not wide.entries


def test_what_cannot_be_known_without_values_is_found_on_small_tensors_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    program = replace(BARE, optimizer=JobOptimizer({"path": "whole_optimizers.Numpy", "lr": 0.1}))
    found = what_they_keep(program, SPECS)
    assert found.optimizers[0].owned[1] == OwnedEntry("norms", (64,), "float64")
    monkeypatch.setattr(shape_trial, "REAL_MOST", 100)
    with pytest.raises(SpecError, match=r"Numpy: what it keeps for embed.weight \[64, 32\] cannot"):
        what_they_keep(program, SPECS)


@pytest.mark.parametrize(
    ("given", "muon", "adamw"),
    [
        ({}, {"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-3, "weight_decay": 0.01}),
        (
            {"lr": 2e-3, "weight_decay": 0.3, "momentum": 0.5, "betas": [0.8, 0.9]},
            {"lr": 2e-3, "weight_decay": 0.3, "momentum": 0.5},
            {"lr": 2e-3, "weight_decay": 0.3, "betas": (0.8, 0.9)},
        ),
    ],
)
def test_muon_for_matrices_and_adamw_for_the_rest_in_one_line(
    given: dict[str, Any], muon: dict[str, Any], adamw: dict[str, Any]
) -> None:
    named = [(s.fqn, torch.nn.Parameter(torch.ones(s.shape, device="meta"))) for s in SPECS]
    made = JobOptimizer({"path": "muon+adamw", "no_decay": ["*norm*"], **given}, BARE.blocks)(named)
    assert isinstance(made, dict) and list(made) == ["muon", "adamw"]
    (matrices,) = made["muon"].param_groups
    of = {id(p): name for name, p in named}
    assert [of[id(p)] for p in matrices["params"]] == [
        name for name, p in named if name.startswith("layers.") and p.ndim == 2
    ]
    rest, norms = made["adamw"].param_groups
    assert {of[id(p)] for p in rest["params"]} == {"embed.weight", "head.weight"}
    assert norms["weight_decay"] == 0.0 and len(norms["params"]) == 9
    assert matrices["adjust_lr_fn"] == "match_rms_adamw"
    assert muon.items() <= matrices.items() and adamw.items() <= rest.items()


# ---------------------------------------------------------------------------- what job.yaml may say


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"path": "torch.optim.AdamV"},
            "torch.optim has no 'AdamV'; did you mean 'torch.optim.Adam",
        ),
        (
            {"path": "torch.optimm.AdamW"},
            "'torch.optimm.AdamW' cannot be imported: No module named",
        ),
        (
            {"path": "muon+adamw", "beta": [0.9]},
            "unknown key 'optimizer.beta': neither Muon nor AdamW takes it; did you mean 'betas'?",
        ),
        ({"path": "torch.nn.Linear"}, "'torch.nn.Linear' is no torch.optim.Optimizer"),
        (
            {"path": "torch.optim.AdamW", "beta": [0.9]},
            "unknown key 'optimizer.beta' of AdamW; did you mean 'betas'?",
        ),
        ({"path": "torch.optim.AdamW", "lr": -1.0}, "optimizer AdamW: Invalid learning rate: -1.0"),
        (
            {"path": "torch.optim.Rprop", "no_decay": ["*"]},
            "key 'optimizer.no_decay': Rprop has no weight_decay",
        ),
        (
            {"path": "torch.optim.AdamW", "no_decay": ["*.bias"]},
            "no parameter is named like '*.bias'; near it: ",
        ),
    ],
)
def test_what_job_yaml_refuses(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        what_they_keep(replace(BARE, optimizer=JobOptimizer(given)), SPECS)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_one_optimizer_and_one_schedule() -> None:
    own = load_program(PROGRAMS / "tiny.py")
    adamw, cosine = (
        {"path": "torch.optim.AdamW"},
        {"kind": "cosine", "warmup_steps": 2, "decay_steps": None, "min_factor": 0.0},
    )
    with pytest.raises(
        SpecError, match=r"gives an optimizer, and Program\.optimizer is another; give one"
    ):
        with_job(own, Job.from_plain({**RATES, "optimizer": adamw}))
    with pytest.raises(
        SpecError, match=r"gives a schedule, and Program\.lr_factor is another; give one"
    ):
        with_job(own, Job.from_plain({**RATES, "lr_schedule": cosine}))
    with pytest.raises(SpecError, match="no optimizer: give Program.optimizer, or `optimizer:"):
        with_job(BARE, Job.from_plain(RATES))
    with pytest.raises(SpecError, match="sets its own learning rates"):
        with_job(own, Job.from_plain({**RATES, "lr_schedule": cosine, "script": "train.py"}))
    with pytest.raises(SpecError, match="Program.loss is missing"):
        Program(model=lambda: None)
    made = with_job(BARE, Job.from_plain({**RATES, "optimizer": adamw, "lr_schedule": cosine}))
    assert (
        with_job(made, Job.from_plain({**RATES, "optimizer": adamw, "lr_schedule": cosine})) is made
    )
    assert made.lr_factor is not None and made.lr_factor(0) == 0.5
    scaled = with_job(own, Job.from_plain({**RATES, "lr_scaling": "sqrt", "base_global_batch": 3}))
    assert scaled.lr_factor is not None and own.lr_factor is not None
    assert [scaled.lr_factor(s) for s in range(8)] == [2 * own.lr_factor(s) for s in range(8)]


def test_groups_and_kernels() -> None:
    named = [
        ("a.weight", torch.nn.Parameter(torch.ones(2, 2))),
        ("norm.weight", torch.nn.Parameter(torch.ones(2))),
    ]
    optimizer = JobOptimizer(
        {"path": "torch.optim.AdamW", "lr": 0.5, "weight_decay": 0.1, "no_decay": ["norm.*"]}
    )(named)
    assert [(g["weight_decay"], g["lr"], len(g["params"])) for g in optimizer.param_groups] == [
        (0.1, 0.5, 1),
        (0.0, 0.5, 1),
    ]
    assert (
        optimizer.param_groups[1]["params"][0] is named[1][1]
        and not optimizer.param_groups[0]["fused"]
    )
    asked = JobOptimizer({"path": "torch.optim.AdamW", "fused": True})(named)
    assert asked.param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer: {lr: 1.0}", "key 'optimizer.path' is missing"), ("optimizer: {path: AdamW}",
        "key 'optimizer.path': string should match pattern"), ("optimizer: adamw",
        "key 'optimizer.path': string should match pattern"), ("lr_schedule: {kind: cosin}",
        "key 'lr_schedule.kind': input should be 'constant', 'linear', 'cosine' or 'wsd'"),
        ("lr_schedule: {kind: cosine, warmup: 3}",
        "unknown key 'lr_schedule.warmup'; did you mean 'warmup_steps'?"),
        ("lr_schedule: {kind: wsd, warmup_steps: 8, decay_steps: 4}",
        "warmup_steps=8 and decay_steps=4 are more than the job"),
        ("lr_schedule: {kind: constant, min_factor: 0.1}", "kind 'constant' does not decay"),
        ("lr_scaling: linear", "lr_scaling (linear or sqrt) and base_global_batch"),
        ("base_global_batch: 32", "belong together"),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "program.py").write_text("")
    (tmp_path / "job.yaml").write_text(f"steps: 10\nglobal_batch: 2\n{text}\n")
    with pytest.raises(SpecError) as error:
        load_job(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_numbers_that_are_texts_to_yaml(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    given = (
        "optimizer: {path: torch.optim.AdamW, lr: 3e-4, betas: [0.9, 1E-1], eps: 1.0e-8, "
        "no_decay: [1e5]}"
    )
    (tmp_path / "job.yaml").write_text(
        f"steps: 10\nglobal_batch: 2\n{given.replace('1e5', repr('1e5'))}\n"
    )
    found = load_job(tmp_path).plain()["optimizer"]
    assert found == {
        "path": "torch.optim.AdamW",
        "lr": 3e-4,
        "betas": [0.9, 0.1],
        "eps": 1e-8,
        "no_decay": ["1e5"],
    }


def test_another_batch_is_another_run() -> None:
    assert (
        batch_changed("r", {"global_batch": 8}, {"global_batch": 8})
        == ""
        == batch_changed("r", {}, {"global_batch": 8})
    )
    text = batch_changed("r", {"global_batch": 8}, {"global_batch": 16})
    assert (
        "global_batch=8, the job says 16" in text
        and "elastic checkpoint import URI --into NAME" in text
    )


# ------------------------------------------------------------------------- the same in every layout

STEPS = 12
JOB = {
    "optimizer": {"path": "torch.optim.NAdam", "lr": 2e-3, "betas": [0.9, 0.95],
    "weight_decay": 0.1, "no_decay": ["*norm*"]}, "lr_schedule": {"kind": "cosine",
    "warmup_steps": 3, "decay_steps": None, "min_factor": 0.1}, "lr_scaling": "sqrt",
    "base_global_batch": 3,
}  # fmt: skip


def by_hand() -> Program:
    """The same optimizer and schedule as anybody would write them."""

    def optimizer(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        groups = [
            {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
        ]
        return torch.optim.NAdam(groups, lr=4e-3, betas=(0.9, 0.95))

    def factor(step: int) -> float:
        cosine = torch.cos(torch.tensor(torch.pi * (step - 3) / (STEPS - 3), dtype=torch.float64))
        return (step + 1) / 3 if step < 3 else float(0.1 + 0.9 * 0.5 * (1 + cosine))

    return replace(BARE, optimizer=optimizer, lr_factor=factor)


@pytest.mark.e2e
def test_an_optimizer_by_path_and_its_schedule_in_three_layouts(pool: Pool, tmp_path: Path) -> None:
    """NAdam keeps a product that begins as 1; with it a schedule, a scaled rate, and two live
    changes of the layout."""
    job = job_of("tiny_bare.py", STEPS) | JOB
    workers = pool.open(job, tmp_path)
    plans = []
    for number, layout in enumerate(
        (Layout(dp_shard=3), Layout(pp=2, tp=2), Layout(dp_replicate=2, dp_shard=2)), 1
    ):
        resume = {"resume": live(plans[-1])} if plans else {}
        plans.append(plan(number, layout, workers, 12, **resume))
        pool.enter(plans[-1])
        pool.entered(number)
        pool.wait(
            lambda: any(e.step >= 3 * number for e in pool.events(StepDone)),  # noqa: B023
            f"step {3 * number}",
        )
    pool.quiesced(3, 4)
    pool.wait(lambda: len(pool.events(ShardStored)) == 4, "the last checkpoint")
    checkpoint_writer.commit(open_storage(str(tmp_path)), STEPS, 3, world_size=4, epoch=1, meta={})
    done = pool.events(StepDone)
    assert [e.step for e in done] == list(range(1, STEPS + 1))
    alone = train(by_hand(), job, STEPS)
    assert [e.train_loss for e in done] == pytest.approx(alone.losses, abs=1e-4)
    checkpoint = checkpoint_index.open_checkpoint(
        checkpoint_index.find(open_storage(str(tmp_path)))[0].uri
    )
    for name, parameter in alone.model.named_parameters():
        state = alone.state_of(parameter)
        wanted = {f"optim.{entry}.{name}": state[entry] for entry in ("mu_product", "exp_avg")} | {
            f"model.{name}": parameter
        }
        for fqn, tensor in wanted.items():
            shape = tuple(tensor.shape)
            got = checkpoint.read(Box(fqn, (0,) * len(shape), shape, "float32"))
            torch.testing.assert_close(
                got, tensor.detach(), atol=2e-4, rtol=1e-3, msg=lambda m, fqn=fqn: f"{fqn}: {m}"
            )
