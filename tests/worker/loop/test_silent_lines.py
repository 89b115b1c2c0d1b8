"""Lines of a loop that would change nothing, or another thing than they say, are found in the
driver."""

from __future__ import annotations

import signal
import site
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic.data.collate import collate
from elastic.errors import SpecError
from elastic.worker.equivalence.draw_trial import with_notes
from elastic.worker.loop.script_host import capture
from elastic.worker.program.calls import count_of
from elastic.worker.program.loop_program import LoopProgram
from elastic.worker.program.model_profile import trace

HEAD = """
import torch, elastic
from torch import nn
from torch.nn.utils import clip_grad_norm_
model = nn.Sequential(nn.Linear(4, 4), {layers})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.arange(64.0).view(16, 4)
{before}
with elastic.loop(model=model, optimizer=optimizer, dataset=data, steps=3, global_batch=4) as run:
    for x in run:
        {backward}
        {line}
        run.step()
"""


def captured(folder: Path, **parts: str) -> LoopProgram:
    file = folder / "train.py"
    backward = f"run.backward(run.model({parts.pop('x', 'x')}).square().sum())"
    fill = {"layers": "nn.Linear(4, 4)", "before": "", "line": "", "backward": backward}
    file.write_text(HEAD.format(**fill | parts))
    return capture(file, [], 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine's GPU takes the model")
def test_a_device_that_the_drivers_machine_has_not(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"train.py, line 8: .*leave \.to\('cuda'\) out, or"):
        captured(tmp_path, before="model.to('cuda')")


@pytest.mark.parametrize(
    "clip",
    [
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "clip_grad_norm_([p for p in model.parameters()], 1.0)",
        "nn.utils.clip_grad_value_(model.parameters(), clip_value=0.5)",
    ],
)
def test_clipping_that_clips_nothing_is_refused(tmp_path: Path, clip: str) -> None:
    with pytest.raises(SpecError, match="write run.step.clip_grad_norm=1.0") as caught:
        captured(tmp_path, line=clip)
    assert "train.py, line 12: clip_grad_" in str(caught.value)
    assert torch.nn.utils.clip_grad_norm_.__code__.co_name != "checked", "torch is itself again"


@pytest.mark.parametrize(
    "handler", ["signal.signal(signal.SIGTERM, print)", "from signal import signal as s; s(15, 0)"]
)
def test_a_handler_of_a_signal_is_refused_before_a_node_is_paid(
    tmp_path: Path, handler: str
) -> None:
    """In a worker the script is no main thread; in the driver it would take the place of ours."""
    before = signal.getsignal(signal.SIGTERM), signal.signal
    with pytest.raises(SpecError, match=r"leave the handler out: at a notice, a stop, SIGTERM"):
        captured(tmp_path, before=f"import signal; {handler}")
    assert (signal.getsignal(signal.SIGTERM), signal.signal) == before


def test_a_script_may_catch_that_its_thread_can_set_no_handler(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    own = "import signal\ntry: signal.signal(signal.SIGTERM, print)\nexcept ValueError: pass"
    assert captured(tmp_path, before=own).called is not None
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_of_a_library_that_its_user_has_installed_stays(tmp_path: Path) -> None:
    """By `pip install --user`."""
    before = signal.getsignal(signal.SIGUSR2)
    file = f"{site.getusersitepackages()}/installed/here.py"
    sets = "import signal; signal.signal(signal.SIGUSR2, print)"
    try:
        assert captured(tmp_path, before=f"exec(compile({sets!r}, {file!r}, 'exec'))").called
        assert signal.getsignal(signal.SIGUSR2) is print
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    ("made", "fits"),
    [
        ("torch.amp.GradScaler('cpu')", False),
        ("torch.amp.GradScaler('cuda')", False),  # on this machine it switches itself off
        ("torch.cuda.amp.GradScaler(enabled=dtype == 'float16')", True),
        ("torch.cuda.amp.GradScaler(enabled=dtype != 'float16')", False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*GradScaler:FutureWarning", "ignore:.*GradScaler.*enabled")
def test_a_scale_by_which_nobody_divides_is_refused(tmp_path: Path, made: str, fits: bool) -> None:
    given = {
        "before": f"dtype = 'bfloat16'; scaler = {made}",
        "backward": "run.backward(scaler.scale(run.model(x).square().sum()))",
    }
    if fits:
        assert captured(tmp_path, **given).called is not None
        return
    with pytest.raises(SpecError, match=r"train.py, line 11: GradScaler.scale .*leave it out"):
        captured(tmp_path, **given)


def test_what_a_script_leaves_on_a_gpu_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's process lives as long as the run, beside the worker on that GPU."""
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    assert captured(tmp_path).called is not None and not emptied
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert captured(tmp_path).called is not None and emptied


def test_a_wrong_keyword_of_the_step_is_told_with_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"run.step\(clip_gradnorm=...\).*mean 'clip_grad_norm'"):
        captured(tmp_path, line="run.step(clip_gradnorm=1.0)")


def test_a_mean_times_its_samples_does_not_end_the_trial(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="clips the gradients of this rank alone"):
        captured(
            tmp_path,
            before="last = lambda run, loss: run.backward(loss * 16)",
            line="last(run, run.model(x).mean()); clip_grad_norm_(run.model.parameters(), 1.0)",
        )


@pytest.mark.parametrize("left", ["optimizer.step()", "run.step()", "continue"])
def test_a_backward_of_the_scripts_own_is_named_by_its_line(tmp_path: Path, left: str) -> None:
    with pytest.raises(SpecError, match=r"loss.backward.. at train.py:11 .*write run.backward"):
        captured(tmp_path, backward=f"run.model(x).sum().backward(); {left}")


def test_a_backward_of_the_scripts_own_beside_the_runs_does_not_end_the_trial(
    tmp_path: Path,
) -> None:
    first = "run.model(x).sum().backward(); run.model.zero_grad()"
    both = f"{first}; run.backward(run.model(x).sum())"
    assert captured(tmp_path, backward=both).called is not None


def test_clipping_of_what_has_gradients_is_as_ever(tmp_path: Path) -> None:
    before = (
        "model(data).sum().backward()\nclip_grad_norm_(model.parameters(), 1.0)\nmodel.zero_grad()"
    )
    captured(tmp_path, before=before)


def test_numbers_told_before_the_step_do_not_end_the_trial(tmp_path: Path) -> None:
    assert captured(tmp_path, line="run.log({'l': 1.0})").called is not None


def notes(program: LoopProgram) -> tuple[str, ...]:
    return trace(with_notes(program)).notes


def test_what_a_loops_model_draws_is_named_where_it_cannot_be_keyed(tmp_path: Path) -> None:
    drops = "nn.Dropout(0.1), nn.Linear(4, 4)"
    assert notes(captured(tmp_path, layers="nn.Linear(4, 4)", line="run.model(x)")) == ()
    assert notes(captured(tmp_path, layers=drops)) == ()
    (mine,) = notes(captured(tmp_path, layers=drops, x="torch.cat([x, x])"))
    assert mine.startswith(
        "1 draws for the 4 rows that run.model is called with, where the batch has 2"
    )
    (other,) = notes(
        captured(
            tmp_path,
            layers=drops,
            before="class Own(nn.Sequential):\n"
            "    def forward(self, x): return super().forward(x) * torch.randperm(4, device=x.device)\n"
            "model.__class__ = Own",
        )
    )
    assert "draws (randperm) by an operation that is not known to draw sample by sample" in other
    early = captured(tmp_path, layers=drops, x="x if run.further else x")
    assert early.called is None and notes(early) == ()


def test_what_a_body_draws_beside_its_model_is_named_by_its_line(tmp_path: Path) -> None:
    """Not what the model draws again in the backward pass, nor a generator of the script's own."""
    again = "class Again(nn.Dropout):\n    def forward(self, x):\n        return checkpoint(super().forward, x, use_reentrant=False)\n"
    before = f"from torch.utils.checkpoint import checkpoint\n{again}model.append(Again(0.5))"
    own = "torch.rand(4, 4, generator=torch.Generator())"
    assert captured(tmp_path, before=before, line=own).notes == ()
    attention = "nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 8, 64)] * 3)"
    assert notes(captured(tmp_path, line=attention)) == ()  # without dropout
    (mine,) = notes(captured(tmp_path, x="x + torch.randn_like(x)"))
    assert mine.startswith("train.py:11 draws (randn_like) outside of run.model(...), each rank")


@pytest.mark.parametrize(
    ("sample", "n"),
    [
        ((torch.zeros(5), torch.tensor([1, 2, -100])), 6),  # tokens
        ((torch.zeros(5), torch.tensor(1)), 3),  # classes
        ((torch.zeros(5), torch.zeros(4)), 3),
        ((torch.zeros(5), torch.ones(4).long(), torch.zeros(1)), 3),  # who knows which is what
        (torch.ones(4).long(), 3),
    ],
)
def test_a_pair_counts_as_in_a_program(sample: Any, n: int) -> None:
    """What a loss of a batch of three is divided by."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = elastic.loop(
        model=model, optimizer=optimizer, dataset=[sample] * 9, steps=2, global_batch=3
    )
    made = loop._program()
    batch = collate([made.dataset()[i] for i in range(3)])
    assert count_of(made, batch) == n


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_weight_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    """The tensors that are trained are others: it would never be called."""
    with pytest.raises(SpecError) as refused:
        captured(tmp_path, before=f"model[0].weight.{kind}(lambda g: g * 0)")
    assert str(refused.value).endswith(
        "elastic.loop: the weight 0.weight has a hook, which is lost where the model is cut: scale "
        "the gradient in forward instead, or leave it out"
    )
