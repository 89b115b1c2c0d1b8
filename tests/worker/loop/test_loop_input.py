"""Scripts that are wrong: one line each, with the file and the line, in the driver before anything
starts, or in the worker."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.loop_reference import train_script_alone
from torch.distributed import DistNetworkError
from torch.nn import functional

import elastic
from elastic import api
from elastic.config.job import job_of, load_job
from elastic.errors import ElasticError, InfeasiblePlan, ProgramError, SpecError
from elastic.planner.layout_choice import plan_layout
from elastic.program import load_program
from elastic.types import Box, Job, Node
from elastic.worker.checkpoint import checkpoint_index
from elastic.worker.hosting.resume_checks import check_layouts
from elastic.worker.loop import trial
from elastic.worker.loop.loop_model import LoopModel
from elastic.worker.loop.loss_reduction import is_mean
from elastic.worker.loop.script_host import capture
from elastic.worker.process.call_log import CallLog
from elastic.worker.program.extra_state import decode
from elastic.worker.program.loop_program import evaluated
from elastic.worker.program.model_profile import build_meta, trace

HEAD = """
import torch, elastic
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.arange(64.0).view(16, 4)
"""
ENTER = (
    "with elastic.loop(model=model, optimizer=optimizer, dataset=data, steps=3, global_batch=4) "
    "as run:\n    for x in run:\n"
)
GOOD = HEAD + ENTER + "        run.backward(run.model(x).square().sum())\n        run.step()\n"


def script(folder: Path, text: str) -> Path:
    file = folder / "train.py"
    file.write_text(text)
    return file


def body(text: str) -> str:
    return HEAD + ENTER + "".join(f"        {line}\n" for line in text.splitlines())


def refused(folder: Path, text: str) -> str:
    """What the driver says of it."""
    with pytest.raises(SpecError) as caught:
        capture(script(folder, text), [], 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_good_script_runs(tmp_path: Path) -> None:
    losses = train_script_alone(script(tmp_path, GOOD), [], 0, 3)
    assert len(losses) == 3 and losses[2] < losses[0]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("out.square().mean()", "elastic.loop(evaluate=...) is a mean over the batch; it must be"),
        (
            "{'loss': out.sum(), 'near': (out < 1).float().mean()}",
            "elastic.loop(evaluate=...)['near'] is a mean over the batch",
        ),
        ("nn.functional.mse_loss(out, batch) / 2", "elastic.loop(evaluate=...) is a mean"),
        ("{'count': len(batch)}", "elastic.loop(evaluate=...) returned a dict without 'loss'"),
        ("out", "elastic.loop(evaluate=...) returned a tensor of shape [2, 4]; it must return"),
        ("missing", "NameError: name 'missing' is not defined"),
        ("out.square().sum()", ""),
        ("{'loss': out.sum(), 'near': (out < 1).sum()}", ""),
        ("out.square().mean().item()", "elastic.loop(evaluate=...) is a mean"),
        ("{'loss': 0.0 + nn.functional.mse_loss(out, batch).item()}", "(evaluate=...) is a mean"),
        ("out.sum().item()", ""),
        ("out.mean().item() * batch.numel()", ""),
        ("max(out.tolist())", ""),  # has no value on shapes: not judged
    ],
)
@pytest.mark.parametrize("graph", ["", "    @torch.no_grad()\n"])
def test_what_a_loop_gives_for_its_validation_set(
    tmp_path: Path, graph: str, returned: str, said: str
) -> None:
    own = f"{graph}def evaluate(model, batch):\n    out = model(batch)\n    return {returned}\n"
    text = HEAD + own.lstrip(" ") + GOOD.removeprefix(HEAD)
    text = text.replace("steps=3", "steps=3, validation=data, evaluate=evaluate")
    if said:
        assert said in refused(tmp_path, text)
    else:
        assert capture(script(tmp_path, text), [], 0).evaluation is not None


def test_a_model_that_is_a_list_of_its_blocks(tmp_path: Path) -> None:
    text = GOOD.replace(", nn.BatchNorm1d(4))", ")")
    program = capture(script(tmp_path, text), [], 0)
    assert program.blocks == "*" and trace(program).n_blocks == 2


def test_a_dict_of_sums_is_a_loss_and_what_is_told_beside_it() -> None:
    assert evaluated({"loss": 2.0, "right": 3}) == (2.0, {"right": 3})
    assert evaluated(torch.tensor(2.0)) == (2.0, {})


def test_a_script_that_never_comes_to_its_loop(tmp_path: Path) -> None:
    assert "it ended before it entered elastic.loop" in refused(tmp_path, HEAD)
    assert "train.py, line 7: ZeroDivisionError: division by zero" in refused(
        tmp_path, HEAD + "1 / 0\n"
    )
    assert "it ended before it entered elastic.loop (exit code 3, with no arguments)" in refused(
        tmp_path, "raise SystemExit(3)"
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "model=model",
            "model=model.parameters()",
            "model is a generator; give the plain nn.Module",
        ),
        (
            "optimizer=optimizer",
            "optimizer=None",
            "must give a torch.optim.Optimizer, or a dict of them by name, not NoneType",
        ),
        (
            "dataset=data",
            "dataset=iter(data)",
            "dataset is a tuple_iterator without __len__; it must be map-style",
        ),
        (
            "dataset=data",
            "dataset=['text']",
            "a sample is a str; it must be a dict or tuple of tensors, or a tensor",
        ),
        (
            "steps=3",
            "validation=data",
            "validation (a dataset) and evaluate ((model, batch) -> summed loss) belong together",
        ),
        (
            "steps=3",
            "validation=iter(data), evaluate=len",
            "validation is a tuple_iterator without __len__; it must be map-style",
        ),
        (
            "steps=3",
            "extra_state={'param_groups': 1}",
            "extra_state['param_groups'] is the optimizer's; choose another name",
        ),
        (
            "steps=3",
            "extra_state={'me': 1}",
            "extra_state['me'] is a int; it must be an object with state_dict()",
        ),
        (
            "optimizer=optimizer",
            "optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(7))])",
            "a parameter of shape [7] that the",
        ),
    ],
)
def test_arguments_that_are_wrong(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = (
        GOOD.replace(old, new, 1)
        if old != "model=model"
        else GOOD.replace("loop(model=model", "loop(" + new, 1)
    )
    if "extra_state={'me'" in new:
        with pytest.raises(SpecError, match="extra_state"):
            trace(capture(script(tmp_path, text), [], 0))
        return
    assert said in refused(tmp_path, text)


def test_an_optimizer_with_state_is_refused(tmp_path: Path) -> None:
    used = (
        "optimizer = "
        "torch.optim.AdamW(model.parameters())\nmodel(data).sum().backward()\noptimizer.step()\n"
    )
    assert "has state already; give a fresh one" in refused(
        tmp_path, HEAD + used + ENTER + "        pass\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "run.backward(run.model(x).sum())",
            "line 8: the batch of step 1 was left without run.step(); call it once for each",
        ),
        ("run.step()", "line 9: run.step() of step 1 without run.backward(loss) before it"),
        (
            "run.backward(run.model(x))",
            "line 9: run.backward was given a tensor of shape [4, 4]; it must be the loss summed",
        ),
        (
            "run.backward(3.0)",
            "line 9: run.backward was given a float; it must be the loss summed over the batch",
        ),
        (
            "run.backward(run.model(x).sum()); run.step(); run.step()",
            "line 9: run.step() was called without a batch in hand",
        ),
        (
            "run.backward(run.model(x).sum()); run.step(); break",
            "it left its loop at step 1 of 3; a loop ends by itself",
        ),
        (
            "run.model.weight = 3",
            "line 9: run.model.weight cannot be set: the model may be rebuilt at any step",
        ),
        (
            "run.backward(run.model(x).mean()); run.step()",
            "line 9: run.backward was given a mean over the batch; it must be the sum",
        ),
        ("for p in x.chunk(2): run.backward(run.model(p).mean())\nrun.step()", "given a mean"),
        ("raise KeyError('mine')", "line 9: KeyError: 'mine'"),
    ],
)
def test_bodies_that_are_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ProgramError) as caught:
        train_script_alone(script(tmp_path, body(text)), [], 0, 3)
    assert said in str(caught.value) and "train.py" in str(caught.value)


LOSSES = {  # what is a mean, of outputs [6, 3] and their classes
    "cross_entropy(o, y)": True, "cross_entropy(o.bfloat16(), y).float()": True,
    "mse_loss(o, z)": True, "cross_entropy(o, y) + o.mean()": True, "-o.mean()": True,
    "cross_entropy(o, y, reduction='none').mean()": True, "o.sum() / 6": True,
    "o.sum() / torch.tensor(6)": True, "cross_entropy(o, y, reduction='sum')": False,
    "mse_loss(o, z, reduction='sum')": False, "cross_entropy(o, y) * 6": False,
    "o.mean(1).sum()": False, "cross_entropy(o, y, reduction='sum') + o.mean()": False,
    "o.sum() / 4": False, "o.detach().mean()": False,
    "mse_loss(o, z) / 2 * 0.5": True, "mse_loss(o, z) * 6 / 2": False, "mse_loss(o, z) * 1": False,
}  # fmt: skip


@pytest.mark.parametrize("text", LOSSES)
def test_a_mean_is_told_from_a_sum(text: str) -> None:
    o, y = torch.randn(6, 3, requires_grad=True) * 2, torch.tensor([0, 1, 2, 0, 1, 2])
    names = {
        "torch": torch,
        "o": o,
        "y": y,
        "z": torch.zeros(6, 3),
        **{f: getattr(functional, f) for f in dir(functional)},
    }
    loss = eval(text, names)
    assert is_mean(loss, 6) is LOSSES[text]
    assert not is_mean(loss, 1), "the mean of one is its sum"


def test_means_of_single_samples_are_parts_of_a_sum(tmp_path: Path) -> None:
    text = body("for row in x:\n    run.backward(run.model(row[None]).square().mean())\nrun.step()")
    text = text.replace(", nn.BatchNorm1d(4)", "")
    assert len(train_script_alone(script(tmp_path, text), [], 0, 3)) == 3


@pytest.mark.parametrize("name", ["rank", "world_size", "step_index", "epoch", "steps"])
def test_what_comes_with_a_batch_is_refused_before_it(tmp_path: Path, name: str) -> None:
    """Every worker would take itself for rank 0."""
    text = GOOD.replace(
        "    for x in run:", f"    if run.{name} == 0:\n        pass\n    for x in run:"
    )
    assert f"line 8: run.{name} was asked for before the first" in refused(tmp_path, text)
    with pytest.raises(ProgramError, match=rf"line 8: run\.{name} was asked for before the first"):
        train_script_alone(script(tmp_path, text), [], 0, 3)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            "report({})",
            "ray.train's report has no meaning in elastic.loop, leave it out: each step's loss "
            "and gradient norm are",
        ),
        (
            "get_context().get_world_rank()",
            "ray.train's get_context has no meaning in elastic.loop, leave it out: run.rank and "
            "run.world_size say where this is, inside of the loop; a batch_size that is divided by",
        ),
        (
            "torch.prepare_model(model)",
            "ray.train's prepare_model has no meaning in elastic.loop, leave it out: run.model "
            "and the",
        ),
    ],
)
def test_a_script_that_asks_ray_train_is_told_what_there_is_instead(
    tmp_path: Path, call: str, said: str
) -> None:
    text = f"import ray.train, ray.train.torch\nray.train.{call}\n"
    assert f"train.py, line 8: {said}" in refused(tmp_path, HEAD + text)
    with pytest.raises(ProgramError, match=f"line 9: {said}"):
        train_script_alone(
            script(tmp_path, "import ray.train, ray.train.torch" + body(f"ray.train.{call}")),
            [],
            0,
            3,
        )


def test_what_comes_after_the_loop_runs_and_does_not_fail_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = tmp_path / "done"
    writes = f"import pathlib\npathlib.Path({str(done)!r}).write_text(str(run.step_index))\n"
    train_script_alone(script(tmp_path, f"{GOOD}{writes}1 / 0\n"), [], 0, 3)
    assert done.read_text() == "2"
    assert "after its loop" in caplog.text and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("where", ["in", "after"])
def test_what_an_error_of_a_script_says_is_written_without_its_secrets(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fails = 'raise ValueError("no login with --hf-token zq7-" + "planted")'
    text = body(fails) if where == "in" else f"{GOOD}{fails}\n"
    with pytest.raises(ProgramError) if where == "in" else nullcontext():
        train_script_alone(script(tmp_path, text), [], 0, 3)
    said = capsys.readouterr().err if where == "in" else caplog.text
    assert "ValueError: no login with --hf-token ***" in said and "zq7-planted" not in said


def test_a_loop_outside_of_a_script_job(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(GOOD)
    with pytest.raises(
        SpecError, match=r"outside of `elastic run --script FILE`.*a program.py has no loop"
    ):
        load_program(tmp_path / "program.py")


def told(err: str) -> bool:
    line = (
        "elastic: train.py enters elastic.loop" in err
        and "`elastic run --script train.py -- ARGS` does" in err
    )
    return line and err.count("\n") == 1


@pytest.mark.e2e
def test_a_plain_start_is_one_line(tmp_path: Path) -> None:
    """`python train.py`."""
    file = script(tmp_path, GOOD)
    environment = {k: v for k, v in os.environ.items() if k != "RANK"}
    done = subprocess.run(
        [sys.executable, file.name], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, told(done.stderr)) == (2, "", True), done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_the_ranks_of_torchrun_one_says_it(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = script(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert told(err) if rank == "0" else err == ""
    # the last line of torchrun's block
    shown = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]
    assert told(shown["py_callstack"].strip() + "\n")


def test_a_job_with_a_script_is_for_elastic_run_alone(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("script: train.py\nsteps: 3\nglobal_batch: 4\n")
    with pytest.raises(
        SpecError, match=r"job.yaml: its 'script' is started by `elastic run .*` alone"
    ):
        load_job(tmp_path)


def test_two_ways_at_once(tmp_path: Path) -> None:
    file = script(tmp_path, GOOD)
    job = tmp_path / "job"
    job.mkdir()
    (job / "job.yaml").write_text("steps: 3\nglobal_batch: 4\nprogram: other.py\n")
    with pytest.raises(SpecError, match=r"its key 'program' and --script .* are two ways at once"):
        api.run_script(file, job=job)
    (job / "job.yaml").write_text("steps: 3\nglobal_batch: 4\n")
    (job / "program.py").write_text("")
    with pytest.raises(SpecError, match=r"program.py and --script .* are two ways at once"):
        api.run_script(file, job=job)
    (job / "job.yaml").write_text("script: train.py\nprogram: program.py\n")
    with pytest.raises(SpecError, match="'program' and 'script' are two ways at once"):
        api.run(job)
    (job / "job.yaml").write_text("steps: 3\nglobal_batch: 4\nargs: [1]\n")
    with pytest.raises(SpecError, match="'args' are those of a 'script'"):
        api.run(job)


def test_a_loop_is_never_cut_into_pipeline_stages(tmp_path: Path) -> None:
    program = capture(script(tmp_path, GOOD), [], 0)
    profile = trace(program)
    job = job_of(
        {"steps": 3, "global_batch": 2, "script": "train.py", "layout": "pp=2"},
        tmp_path / "train.py",
    )
    with pytest.raises(SpecError, match=r"layout 'pp=2': no pp: its script calls the whole model"):
        check_layouts(job, profile)
    choice = plan_layout(profile, Job(global_batch=2), [Node("a", "p", 4)])
    assert choice.layout.pp == 1 and choice.layout.world_size == 2
    with pytest.raises(InfeasiblePlan, match="its script calls the whole model|cannot be spread"):
        plan_layout(profile, Job(global_batch=8, layout="pp=2"), [Node("a", "p", 4)])


def test_the_program_of_a_script(tmp_path: Path) -> None:
    """The module as it is, buffers too; on the meta device without memory; the optimizer's own
    settings."""
    program = capture(script(tmp_path, GOOD + "\nprint(model)"), [], 7)
    assert dict(program.settings) == {"steps": 3, "global_batch": 4}
    one, two = program.model(), program.model()
    assert all(
        torch.equal(a, b) and a is not b
        for a, b in zip(one.parameters(), two.parameters(), strict=True)
    )
    assert all(
        tensor.is_meta
        for tensor in (*build_meta(program).parameters(), *build_meta(program).buffers())
    )
    made = program.optimizer(list(one.named_parameters()))
    assert isinstance(made, torch.optim.SGD) and made.param_groups[0]["lr"] == 0.1
    assert made.param_groups[0]["params"][0] is next(one.parameters())


def test_weights_are_imported_for_a_script_too(tmp_path: Path) -> None:
    """Into a checkpoint that has all that the loop's state has: the optimizer's settings from a
    fresh start."""
    from safetensors.torch import save_file

    script(tmp_path, GOOD)
    (tmp_path / "job.yaml").write_text("script: train.py\n")
    weights = {
        f"{i}.{name}": torch.full(shape, 0.5)
        for i in (0, 1)
        for name, shape in (("weight", (4, 4)), ("bias", (4,)))
    }
    save_file(
        weights | {"2.weight": torch.ones(4), "2.bias": torch.zeros(4)},
        tmp_path / "weights.safetensors",
    )
    order = api.Import(
        str(tmp_path / "weights.safetensors"), "new", str(tmp_path), str(tmp_path / "runs")
    )
    checkpoint = checkpoint_index.open_checkpoint(api.import_state(order)["uri"])
    shape, dtype = checkpoint.tensors["extra.param_groups"]
    settings = decode(
        "param_groups", checkpoint.read(Box("extra.param_groups", (0,), shape, dtype))
    )
    assert settings["groups"][0]["lr"] == 0.1
    assert checkpoint.read(Box("model.0.weight", (0, 0), (4, 4), "float32")).eq(0.5).all()


def test_a_call_that_broke_off_gives_zeros_of_the_true_shape() -> None:
    class Breaks(torch.nn.Linear):
        broken = False

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # type: ignore[override]
            if Breaks.broken and not x.is_meta:
                raise DistNetworkError("[/x/gloo/transport.cc:12] Connection closed by peer")
            return super().forward(x), {"n": x.sum(-1).long()}

    def on_meta() -> torch.nn.Module:
        with torch.device("meta"):
            return Breaks(4, 2)

    model = LoopModel(on_meta, CallLog())
    with pytest.raises(ProgramError, match="before the first batch"):
        model(torch.zeros(3, 4))
    model.attach(Breaks(4, 2))
    model(torch.zeros(3, 4))
    Breaks.broken = True
    for rows in (3, 5):  # known from before, and worked out without memory
        output, more = model(torch.ones(rows, 4))
        assert output.shape == (rows, 2) and output.requires_grad and not output.any()
        assert more["n"].shape == (rows,) and more["n"].dtype == torch.int64
        output.sum().backward()
    assert model.broken and "Connection closed" in str(model.take_error()) and not model.broken
    with pytest.raises(ElasticError):
        model.weight = 3


def test_an_error_of_the_users_own_comes_up_in_the_body() -> None:
    model = LoopModel(lambda: torch.nn.Linear(4, 2), CallLog())
    model.attach(torch.nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(3, 5))
    assert not model.broken and elastic.loop.__name__ == "loop"


def tried(folder: Path, text: str) -> str:
    """What the driver says of a loop's body; '' = it found nothing."""
    try:
        capture(script(folder, body(text)), [], 0)
    except SpecError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run.backward(run.model(x).mean())\nrun.step()", "line 10: run.backward was given a mean"),
        ("loss = functional.mse_loss(run.model(x), x)\nrun.backward(loss)\nrun.step()",
         "line 11: run.backward was given a mean over the batch; it must be the sum (reduction="),
        ("run.backward(run.model(x))\nrun.step()", "line 9: run.backward was given a tensor of"),
        ("run.step()", ""),  # its message has the step, which is not known here
        ("run.backward(run.model(x[:, :3]).sum())\nrun.step()",
         "line 9: RuntimeError: a and b must have same reduction dim, but got [2, 3] X [4, 4]"),
        ("run.backward(run.modl(x).sum())", ""),  # a name that Run has not is told by a worker
        ("run.backward(run.model(y).sum())", "line 9: NameError: name 'y' is not defined"),
        ("run.backward(run.model(x).sum())\nrun.step()\n1 / 0", ""),
        # as ordinary loops have it
        ("lr = 0.1 * (run.step_index + 1) if run.rank == 0 else 0.2 / run.steps\n"
         "run.backward(run.model(x.to('cpu', non_blocking=True)).mean())\nrun.step()",
         "line 11: run.backward was given a mean"),
        ("run.backward(run.model(x).sum())\nnn.utils.clip_grad_norm_(run.model.parameters(), 1.0)",
         "line 10: clip_grad_norm_ clips the gradients of this rank alone"),
        ("print(x.sum().item())\nrun.backward(run.model(x).mean())\nrun.step()", ""),
        ("run.backward(run.model(x.cuda()).mean())\nrun.step()", ""),
        ("raise SystemExit(3)", ""),
        ("break", ""),
    ],
)  # fmt: skip
def test_the_first_pass_through_the_body_is_tried_in_the_driver(
    tmp_path: Path, text: str, said: str
) -> None:
    """Without values: what wants them is left to the workers."""
    found = tried(tmp_path, text.replace("functional", "nn.functional"))
    assert (said in found and "train.py" in found) if said else not found, found


def test_the_trial_does_nothing_that_is_to_be_done_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing for one rank or one step, nothing that hangs, nothing that is shown."""
    for asked in ("run.rank == 0", "run.step_index % 9 == 0", "run.epoch", "run.world_size > 1"):
        assert not tried(tmp_path, f"if {asked}:\n    1 / 0\n    run.backward(x.mean())")
    monkeypatch.setattr(trial, "MOST_S", 0.2)
    before_s = signal.getitimer(signal.ITIMER_REAL)[0]
    gone = "import time\nclass Gone:\n    def __del__(self): time.sleep(0.6)\nGone()\n"
    assert not tried(tmp_path, f"{gone}time.sleep(60)"), "what is raised in there is lost"
    assert not tried(tmp_path, "print('seen')\nrun.backward(run.model(x).sum())\nrun.step()")
    assert "seen" not in capsys.readouterr().out
    left_s = signal.getitimer(signal.ITIMER_REAL)[0]
    assert 0 <= before_s - left_s < 60 and (left_s > 0) == (before_s > 0)
