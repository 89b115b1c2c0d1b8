"""Several optimizers of one program: each over its own parameters, through every change of the
layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.whole_optimizers import Together
from support.loop_reference import train_script_alone
from support.places import PROGRAMS
from support.reference import train, train_alone
from support.worker.chain import job_of
from support.worker.plans import from_copies, live, plan
from support.worker.worker_pool import Pool
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from elastic.config.fingerprint import differences, fingerprint
from elastic.config.job import load_job
from elastic.config.optimization import Guards
from elastic.data.order import sample_ids
from elastic.errors import ProgramError, SpecError
from elastic.policy.copies.recovery import covered
from elastic.program import Program, load_program
from elastic.reshard.rank_boxes import first_values, state_specs
from elastic.storage import open_storage
from elastic.types import Abort, Box, Job, Layout, Plan, Quiesced, Resume, ShardStored, StepDone
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.checkpoint.checkpoint_verbs import ImportRequest, import_state
from elastic.worker.loop.script_host import capture
from elastic.worker.program.job_program import with_job
from elastic.worker.program.model_profile import trace
from elastic.worker.program.optimizers import JobOptimizer, Optimizers

TWO = load_program(PROGRAMS / "tiny_two.py")

# ------------------------------------------------------------------------- the same in every layout

STEPS, NAN_AT = 20, 9
CHAIN = [Layout(dp_shard=3), Layout(pp=2, tp=2), Layout(pp=4), Layout(dp_replicate=2, dp_shard=2)]


def bad_seed() -> int:
    """Sample 77, whose loss is no number, comes in step NAN_AT alone, 78 (a spike) in none."""
    for seed in range(100_000):
        ids = [sample_ids(512, 12, seed, step=step) for step in range(STEPS)]
        if 77 in ids[NAN_AT - 1] and not any(78 in one for one in ids):
            return seed
    raise AssertionError("no such seed")


def broken_off(pool: Pool, old: Plan) -> Resume:
    """Back to a step that was copied to peers."""
    for worker in old.ranks:
        pool.order(worker, Abort(old.generation))
    pool.quiesced(old.generation, len(old.ranks))
    peers = [
        h for e in pool.events(Quiesced, old.generation) for h in e.holdings if h.kind == "peer"
    ]
    step = max(
        step
        for step in {h.step for h in peers}
        if covered(old, [h for h in peers if h.step == step])
    )
    return from_copies(old, step, tuple(h for h in peers if h.step == step))


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_two_optimizers_through_four_layouts_a_skipped_step_and_a_roll_back(
    pool: Pool, tmp_path: Path
) -> None:
    """SGD with momentum and AdamW, a warm-up of the rates, clipping over both; on two of four
    stages AdamW has nothing."""
    given = Guards.model_validate({"not_finite": "skip"}).model_dump()
    job = job_of("tiny_two.py", STEPS) | {
        "seed": bad_seed(),
        "guards": given,
        "lr_scaling": "sqrt",
        "base_global_batch": 3,
    }
    workers = pool.open(job, tmp_path)
    plans = [plan(1, CHAIN[0], workers, 12, peer_every=1)]
    pool.enter(plans[0])
    for number, layout in enumerate(CHAIN[1:], 2):
        pool.wait(
            lambda: any(e.step >= 5 * (number - 1) for e in pool.events(StepDone)),  # noqa: B023
            "some steps",
        )
        resume = live(plans[-1]) if number > 2 else broken_off(pool, plans[0])
        plans.append(plan(number, layout, workers, 12, resume=resume))
        pool.enter(plans[-1])
        pool.entered(number)
    pool.quiesced(len(CHAIN), 4)
    pool.wait(lambda: len(pool.events(ShardStored)) == 4, "the last checkpoint")
    digest = sum(int(e.digest) for e in pool.events(ShardStored)) % (1 << 64)
    uri = checkpoint_writer.commit(
        open_storage(str(tmp_path)),
        STEPS,
        len(CHAIN),
        world_size=4,
        epoch=1,
        meta={"digest": digest},
    )
    last = {e.step: e for e in sorted(pool.events(StepDone), key=lambda e: e.generation)}
    done = [last[step] for step in range(1, STEPS + 1)]
    assert [e.step for e in done if e.skipped] == [NAN_AT]
    for generation in range(2, len(CHAIN) + 1):
        parts = pool.digests(generation)
        assert (
            sum(p.before for p in parts if p.before is not None) % 2**64
            == sum(p.after for p in parts if p.after) % 2**64
        )
    factor = TWO.lr_factor
    assert factor is not None
    alone = train(
        replace(TWO, lr_factor=lambda step: 2 * factor(step)), job, STEPS, skipped=(NAN_AT,)
    )
    assert [e.train_loss for e in done] == pytest.approx(alone.losses, rel=1e-4, nan_ok=True)
    assert [e.grad_norm for e in done] == pytest.approx(alone.grad_norms, rel=1e-3, nan_ok=True)
    checkpoint = checkpoint_index.open_checkpoint(uri)
    for name, parameter in alone.model.named_parameters():
        state = alone.state_of(parameter)
        assert set(state) == (
            {"momentum_buffer"} if name.startswith("layers.") else {"step", "exp_avg", "exp_avg_sq"}
        )
        for fqn, tensor in {
            f"optim.{entry}.{name}": value for entry, value in state.items()
        }.items():
            shape = tuple(tensor.shape)
            got = checkpoint.read(Box(fqn, (0,) * len(shape), shape, "float32"))
            torch.testing.assert_close(
                got, tensor.detach(), atol=2e-4, rtol=1e-3, msg=lambda m, fqn=fqn: f"{fqn}: {m}"
            )


# --------------------------------------------------------------------------- in a script's own loop

SCRIPT = PROGRAMS / "loop_two.py"
GOOD = replace(load_program(PROGRAMS / "tiny.py"), optimizer=TWO.optimizer)


def test_a_script_gives_a_dict_and_keeps_its_own() -> None:
    alone = train_alone(GOOD, job_of("tiny.py", 8) | {"seed": 3, "clip_grad_norm": None}, 8)
    assert train_script_alone(SCRIPT, [], 3, 8) == pytest.approx(alone, abs=1e-5)
    profile = trace(capture(SCRIPT, [], 3))
    assert [kept.entries for kept in profile.optimizers] == [
        ("momentum_buffer",),
        ("exp_avg", "exp_avg_sq"),
    ]


@pytest.mark.whole
@pytest.mark.timeout(240)
def test_a_script_with_two_optimizers_in_two_layouts(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", 8) | {"script": str(SCRIPT), "args": []}
    workers = pool.open(job, tmp_path)
    first = plan(1, Layout(dp_shard=3), workers, 12)
    pool.enter(first)
    pool.wait(lambda: any(e.step >= 3 for e in pool.events(StepDone)), "step 3")
    pool.enter(plan(2, Layout(dp_replicate=2, dp_shard=2), workers, 12, resume=live(first)))
    pool.quiesced(2, 4)
    assert [e.train_loss for e in pool.events(StepDone)] == pytest.approx(
        train_alone(GOOD, job, 8), abs=1e-4
    )


# ----------------------------------------------------------------------- what plain torch has saved


def plain(program: Program) -> tuple[torch.nn.Module, dict[str, torch.optim.Optimizer]]:
    """Trained for a step by somebody else."""
    torch.manual_seed(1)
    model = program.model()
    optimizers: Any = program.optimizer and program.optimizer(list(model.named_parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in optimizers.values():
        optimizer.step()
    return model, optimizers


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("apart", [False, True], ids=["together", "each under its own name"])
def test_checkpoints_of_plain_torch_come_in_and_ours_go_out(tmp_path: Path, apart: bool) -> None:
    model, optimizers = plain(TWO)
    saved: dict[str, Any] = {"model": get_model_state_dict(model)}
    if apart:
        saved |= {name: get_optimizer_state_dict(model, one) for name, one in optimizers.items()}
    else:
        saved["optim"] = get_optimizer_state_dict(model, tuple(optimizers.values()))
    dcp.save(saved, checkpoint_id=tmp_path / "plain", no_dist=True)
    done = import_state(
        str(tmp_path / "plain"),
        open_storage(tmp_path / "run"),
        ImportRequest(trace(TWO), 3, at_step=None),
    )
    n_blocks = sum(name.startswith("layers.") for name, _ in model.named_parameters())
    n_others = done["weights"] - n_blocks
    assert (done["step"], done["moments"]) == (1, n_blocks + 3 * n_others)

    fresh = TWO.model()
    again: Any = TWO.optimizer and TWO.optimizer(list(fresh.named_parameters()))
    moments = get_optimizer_state_dict(fresh, tuple(again.values()))
    loaded = {"model": get_model_state_dict(fresh), "optim": moments}
    dcp.load(
        loaded,
        checkpoint_id=done["uri"],
        planner=DefaultLoadPlanner(allow_partial_load=True),
        no_dist=True,
    )
    set_optimizer_state_dict(fresh, tuple(again.values()), loaded["optim"])
    for (name, parameter), (_, other) in zip(
        model.named_parameters(), fresh.named_parameters(), strict=True
    ):
        owner = "blocks" if name.startswith("layers.") else "others"
        mine, theirs = optimizers[owner].state[parameter], again[owner].state[other]
        assert mine.keys() == theirs.keys() and all(
            torch.equal(mine[key], theirs[key]) for key in mine
        )


# ------------------------------------------------------------------------------------- what is kept


def with_optimizers(make: Any) -> Program:
    return replace(TWO, optimizer=lambda named: make(list(named)))


def adamw_and(name: str, own: Any, **settings: Any) -> Program:
    """`own`: is it AdamW's? All else has another AdamW."""
    return with_optimizers(
        lambda named: {
            "first": torch.optim.AdamW([p for n, p in named if own(n)], lr=1e-3),
            name: torch.optim.AdamW([p for n, p in named if not own(n)], lr=2e-3, **settings),
        }
    )


def test_each_parameter_has_what_its_own_optimizer_keeps() -> None:
    profile = trace(TWO)
    assert [(kept.name, kept.entries, kept.scalars) for kept in profile.optimizers] == [
        ("blocks", ("momentum_buffer",), ()), ("others", ("exp_avg", "exp_avg_sq"), ("step",)),
    ]  # fmt: skip
    names = {spec.fqn for spec in state_specs(profile)}
    assert {n for n in names if n.endswith((".norm.weight", "attn.wo.weight"))} >= {
        "optim.step.norm.weight", "optim.exp_avg.norm.weight",
        "optim.momentum_buffer.layers.0.attn.wo.weight",
    }  # fmt: skip
    assert not any(n.startswith("optim.exp_avg") and "layers." in n for n in names)


def test_layers_of_one_kind_may_have_different_optimizers_that_begin_differently() -> None:
    def make(named: list[Any]) -> dict[str, torch.optim.Optimizer]:
        even = [p for n, p in named if n.startswith(("layers.0", "layers.2"))]
        rest = [p for n, p in named if not n.startswith(("layers.0", "layers.2"))]
        begins = [
            torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=v)
            for p, v in ((even, 0.5), (rest, 0.25))
        ]
        return {"even": begins[0], "rest": begins[1]}

    profile = trace(with_optimizers(make))
    first = first_values(profile)
    assert {
        value
        for name, value in first.items()
        if name.startswith(("optim.sum.layers.0", "optim.sum.layers.2"))
    } == {0.5}
    assert {
        value
        for name, value in first.items()
        if name.startswith(("optim.sum.layers.1", "optim.sum.embed"))
    } == {0.25}


def test_groups_by_the_whole_shape_are_the_same_in_every_layout() -> None:
    """A rate for each width: a rank's own part has another."""

    def make(named: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 1.0 / p.shape[-1]} for _, p in named], lr=1.0)

    program = with_optimizers(make)
    profile = trace(program)
    local = {"layers.1.attn.wo.weight": torch.nn.Parameter(torch.zeros(3, 5))}
    made = Optimizers(program, profile.specs, local)
    here = [group for group in made.groups if group["params"]]
    assert [
        (group["lr"], group["params"][0] is local["layers.1.attn.wo.weight"]) for group in here
    ] == [(1 / 32, True)]
    made.step()


@pytest.mark.parametrize(
    "name", ["AdamW", "SGD", "NAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)
def test_one_without_any_parameter_here_does_nothing(name: str) -> None:
    made = Optimizers(
        with_optimizers(lambda named: getattr(torch.optim, name)([p for _, p in named])),
        trace(TWO).specs,
        {},
    )
    made.set_factor(0.5)
    made.step()
    assert not made.groups[0]["params"]


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda named: {
                "a": torch.optim.SGD([p for n, p in named if "norm" not in n]),
                "b": torch.optim.SGD([named[0][1]]),
            },
            "parameter embed.weight is in two optimizers, 'a' and 'b'; each trainable parameter "
            "must be in exactly one",
        ),
        (
            lambda named: {
                "a": torch.optim.SGD([p for n, p in named if n.startswith("layers")]),
                "b": torch.optim.SGD([p for n, p in named if n.startswith("embed")]),
            },
            "parameter norm.weight (and 1 more) is not in any optimizer",
        ),
        (
            lambda named: torch.optim.SGD([p for _, p in named[1:]]),
            "parameter embed.weight is not in the optimizer (SGD)",
        ),
        (
            lambda named: torch.optim.SGD([torch.nn.Parameter(torch.ones(7))]),
            "optimizer SGD has a tensor of shape [7]",
        ),
        (
            lambda named: {},
            "Program.optimizer must give a torch.optim.Optimizer, or a dict of them by name, not "
            "an empty dict",
        ),
        (lambda named: [1], "or a dict of them by name, not list"),
        (
            lambda named: {"a": torch.optim.SGD([p for _, p in named]), "b": torch.optim.SGD([])},
            "Program.optimizer raised ValueError: optimizer got an empty parameter list",
        ),
        (
            lambda named: {"a": None},
            "Program.optimizer gives 'a': NoneType; a dict of optimizers has",
        ),
    ],
)
def test_a_parameter_belongs_to_exactly_one_optimizer(make: Any, said: str) -> None:
    with pytest.raises(SpecError) as error:
        trace(with_optimizers(make))
    assert said in str(error.value) and "\n" not in str(error.value) and error.value.exit_code == 2


class OwnList(torch.optim.SGD):
    """Steps tensors that it has noted when it was made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.noted = [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:
        for parameter in self.noted:
            if parameter.grad is not None:
                parameter.data -= parameter.grad


class Idle(torch.optim.SGD):
    """Steps nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            lambda p: Together(p, lr=0.1),
            r"optimizer 'other' \(Together\): the step of \S+ depends on other parameters",
        ),
        (OwnList, r"optimizer 'other' \(OwnList\): its step uses a tensor that it was made with"),
        (Idle, r"optimizer 'other' \(Idle\): 3 steps leave its parameters as they are"),
    ],
)
def test_each_must_step_each_tensor_by_itself_and_the_bad_one_is_named(
    other: Any, said: str
) -> None:
    program = with_optimizers(
        lambda named: {
            "good": torch.optim.AdamW([p for n, p in named if n.startswith("layers")]),
            "other": other([p for n, p in named if not n.startswith("layers")]),
        }
    )
    with pytest.raises(ProgramError, match=said):
        trace(program)


def test_different_settings_may_keep_different_entries_at_owners() -> None:
    def other(p: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}], lr=0.1)

    profile = trace(
        with_optimizers(
            lambda named: {
                "good": torch.optim.AdamW([p for n, p in named if n.startswith("layers")]),
                "other": other([p for n, p in named if not n.startswith("layers")]),
            }
        )
    )
    kept = {spec.fqn: profile.kept_of(spec) for spec in profile.specs}
    assert kept["layers.0.attn.wo.weight"].entries == ("exp_avg", "exp_avg_sq")
    assert [one.name for one in kept["embed.weight"].owned] == ["begun", "momentum_buffer"]
    assert [one.name for one in kept["head.weight"].owned] == ["begun"]


def test_another_split_is_another_run(tmp_path: Path) -> None:
    """Same entries for every parameter, other owners: nothing but the fingerprint tells."""
    (tmp_path / "program.py").write_text("")

    def mark(program: Program) -> dict[str, Any]:
        return fingerprint(tmp_path / "program.py", Job(), trace(program), n_samples=9)

    norms, embed = (
        adamw_and("second", lambda n: "norm" in n),
        adamw_and("second", lambda n: "embed" in n),
    )
    one = with_optimizers(lambda named: torch.optim.AdamW([p for _, p in named]))
    split = "which optimizer has which parameters"
    assert (
        differences(mark(norms), mark(adamw_and("another", lambda n: "norm" in n, amsgrad=False)))
        == ""
    )
    assert differences(mark(norms), mark(embed)) == split == differences(mark(one), mark(norms))
    assert differences(mark(norms), mark(TWO)) == f"what its optimizer keeps, {split}"


# -------------------------------------------------------------------------------------- in job.yaml

MATRICES = {"path": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "parameters": ["layers.*"]}
REST = {"path": "torch.optim.AdamW", "lr": 1e-3, "no_decay": ["*norm*"]}
BARE = load_program(PROGRAMS / "tiny_bare.py")


def traced(**given: Any) -> Any:
    return trace(with_job(BARE, Job(steps=4, global_batch=2, optimizer=given)))


def test_several_in_job_yaml_by_patterns_of_names() -> None:
    profile = traced(matrices=MATRICES, rest=REST)
    assert [(kept.name, kept.entries) for kept in profile.optimizers] == [
        ("matrices", ("momentum_buffer",)), ("rest", ("exp_avg", "exp_avg_sq")),
    ]  # fmt: skip
    assert {spec.fqn.startswith("layers.") for spec in profile.specs if spec.optimizer == 0} == {
        True
    }
    made = JobOptimizer({"matrices": MATRICES, "rest": REST})(
        [(s.fqn, torch.nn.Parameter(torch.ones(1))) for s in profile.specs]
    )
    assert isinstance(made, dict) and [
        group["weight_decay"] for group in made["rest"].param_groups
    ] == [0.01, 0.0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"matrices": MATRICES}, " more) is not in the optimizer (SGD); each trainable"),
        ({"matrices": MATRICES, "rest": {**REST, "parameters": ["*"]}},
        "is in two optimizers, 'matrices' and 'rest'"), ({"matrices": {**MATRICES,
        "parameters": ["*"]}, "rest": REST}, "optimizer.rest': no parameter is left"),
        ({"matrices": {**MATRICES, "parameters": ["layer.*"]}, "rest": REST},
        "matrices.parameters': no parameter is"), ({"matrices": MATRICES, "rest": {**REST,
        "beta": 1}}, "unknown key 'optimizer.rest.beta' of AdamW; did you"),
    ],
)  # fmt: skip
def test_what_several_in_job_yaml_must_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        traced(**given)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{a: {lr: 1.0}}", "key 'optimizer.a.path' is missing"),
        (
            "{a: {path: x.Y}, b: {path: x.Y}}",
            "key 'optimizer': a and b have no `parameters`; one of them can have the rest",
        ),
        (
            "{a: {path: x.Y, parameters: w}}",
            "key 'optimizer.a.parameters': input should be a valid list",
        ),
    ],
)
def test_forms_of_the_key(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "program.py").write_text("")
    (tmp_path / "job.yaml").write_text(f"steps: 10\nglobal_batch: 2\noptimizer: {text}\n")
    with pytest.raises(SpecError) as error:
        load_job(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)
