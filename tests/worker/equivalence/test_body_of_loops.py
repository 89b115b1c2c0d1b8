"""Does the body of a script's loop train on samples together as on each alone? What does not is
refused by its line before the first step; what is right stays accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.places import PROGRAMS

from elastic.errors import SpecError
from elastic.types import Job
from elastic.worker.equivalence.layout_check import CheckRequest, Verdict, check

SCRIPT = """
import copy, random
import numpy as np
import torch, elastic
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.{act}, nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
x = torch.randn(64, 6)
data = [{{"x": a, "y": i % 4, "v": a.flip(0)}} for i, a in enumerate(x)]
extra, keys = {{"scheduler": scheduler}}, {{}}
{before}
with elastic.loop(model=model, optimizer=optimizer, dataset=data, steps=3, global_batch=8,
                  extra_state=extra, **keys) as run:
    for b in run:
        x, y, n = b["x"], b["y"], len(b["x"])
        {body}
        run.step()
        {after}
"""
CE = "F.cross_entropy(run.model(x), y, reduction='sum')"
EACH = "l = F.cross_entropy(run.model(x), y, reduction='none')"
PAIR = "p, q = F.normalize(run.model(x), dim=-1), F.normalize(run.model(b['v']), dim=-1)"
AVERAGE = """
class Average:
    def __init__(self): self.model = copy.deepcopy(model)
    def update(self):
        with torch.no_grad():
            for p, q in zip(self.model.parameters(), run.model.parameters()):
                p.lerp_(q, 0.5)
    def state_dict(self): return self.model.state_dict()
    def load_state_dict(self, state): self.model.load_state_dict(state)
average = Average(); extra["average"] = average
"""
COSINE = "extra.clear(); scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)"
QUEUE = """
class Queue:
    def __init__(self): self.keys = torch.randn(8, 4)
    def add(self, x): self.keys = torch.cat([self.keys, x.detach()])[-8:]
    def state_dict(self): return {"keys": self.keys}
    def load_state_dict(self, state): self.keys = state["keys"]
queue = Queue(); QUEUE
"""


def found(
    folder: Path, body: str, *, before: str = "", after: str = "", act: str = "GELU()"
) -> Verdict:
    lines = {"body": body, "after": after or "scheduler.step()"}
    lines = {name: text.replace("\n", "\n        ") for name, text in lines.items()}
    file = folder / "train.py"
    file.write_text(SCRIPT.format(before=before, act=act, **lines))
    return verdict(file)


def verdict(file: Path, *args: str) -> Verdict:
    job = {"steps": 3, "global_batch": 8, "seed": 1, "n_samples": 64, "program": str(file)}
    asked = Job.from_plain(job | {"script": str(file), "args": list(args)})
    return check(CheckRequest(asked, axes=["dp"]))


def is_accepted(one: Verdict) -> bool:
    assert not one.structure.no_dp and not one.structure.notes and not one.skipped, one
    return set(one.equal or ()) == {"dp"}


PAIRS = (  # of samples of one class, as far as there are any
    "h = F.normalize(run.model(x), dim=-1)\n"
    "near = (y[:, None] == y) & ~torch.eye(n, dtype=torch.bool)\n"
    "l = (torch.cdist(h, h).square() + 0.1)[near].sum() + h.sum() * 0\nrun.backward(l)"
)
IN_ORDER = "[{**row, 'y': i // 16} for i, row in enumerate(data)]"  # four classes
BESIDE = ": a result depends on which samples stand beside it; compute each by itself, or say "
KEEPS = "the body of the loop keeps something from step to step that no new worker gets"
WRONG = {
    "negatives of the batch": (
        f"{PAIR}\nrun.backward(F.cross_entropy(p @ q.T / 0.1, torch.arange(n), reduction='sum'))",
        "train.py:20: in run.backward the loss of 4 samples is ",
        BESIDE,
    ),
    "the hardest of the batch": (
        f"{EACH}\nrun.backward(l.topk(max(1, n // 2)).values.sum())", "train.py:20: ", BESIDE,
    ),
    "weighed by the loss of the batch": (
        f"{EACH}\nrun.backward((l * (l.detach() / l.detach().mean())).sum())",
        "train.py:20: ", BESIDE,
    ),
    "normalized over the batch": (
        "h = run.model(x)\nh = (h - h.mean(0)) / (h.std(0, unbiased=False) + 1e-5)\n"
        "run.backward(F.cross_entropy(h, y, reduction='sum'))",
        "train.py:21: ", BESIDE,
    ),
    "a deviation over the batch": (  # none of one sample
        "h = run.model(x)\nrun.backward(n * (h.std(0) - 1).square().sum())",
        "train.py:20: in run.backward the loss of 4 samples is ", "that of the same in 2 parts ",
    ),
    "balanced over the batch": (
        f"g = run.model(x).softmax(-1)\nrun.backward({CE} + n * (g.mean(0) ** 2).sum())",
        "train.py:20: ", BESIDE,
    ),
    "a penalty on weights": (
        f"run.backward({CE} + 0.1 * next(run.model.parameters()).square().sum())",
        "train.py:19: ", "what is added once for all samples (a penalty on weights): times their",
    ),
    "by the number of ranks": (
        f"run.backward({CE} / run.world_size)", "train.py:19: ", BESIDE,
    ),
    "a mean that is not seen": (
        f"{EACH}\nw = torch.ones(n)\nrun.backward((l * w / w.sum()).sum())",
        "train.py:21: ", "a mean, it seems",
    ),
    "gradients of unit length": (
        "h = run.model(x)\nh.register_hook(lambda g: g / g.norm())\n"
        "run.backward(F.cross_entropy(h, y, reduction='sum'))",
        "train.py:21: the gradients that run.backward gives for 4 samples are not", "trusted_axes",
    ),
    "negatives in 16 bits": (
        f"with torch.autocast('cpu', torch.bfloat16):\n    {PAIR}\n"
        "    l = F.cross_entropy(p @ q.T / 0.1, torch.arange(n), reduction='sum')\nrun.backward(l)",
        "train.py:22: ", BESIDE,
    ),
    "negatives beside noise": (
        f"x = x + torch.randn_like(x)\n{PAIR}\n"
        "run.backward(F.cross_entropy(p @ q.T / 0.1, torch.arange(n), reduction='sum'))",
        "train.py:21: ", BESIDE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_sees_other_samples_is_refused_by_its_line(name: str, tmp_path: Path) -> None:
    body, begins, says = WRONG[name]
    said = found(tmp_path, body).structure.no_dp
    assert said.startswith(begins) and says in said, said


def test_dp_may_be_taken_as_right(tmp_path: Path) -> None:
    found(tmp_path, WRONG["negatives of the batch"][0])
    file = str(tmp_path / "train.py")
    job = {"steps": 3, "global_batch": 8, "program": file, "script": file}
    one = check(CheckRequest(Job.from_plain(job), axes=["dp"], trusted=["dp"])).structure
    assert not one.no_dp and one.notes[0].startswith("dp is trusted, though: train.py:20: "), one


@pytest.mark.parametrize(
    ("before", "body", "after"),
    [
        (
            QUEUE.replace("QUEUE", ""),
            "h = run.model(x)\nrun.backward((h @ queue.keys.T).logsumexp(-1).sum())\nqueue.add(h)",
            "",
        ),
        ("", f"l = {CE}\nw = globals().get('w', 1.0)\nrun.backward(l * w)", "w = 0.9 * w"),
        ("last = [1.0]", f"l = {CE}\nrun.backward(l / last[0])", "last[0] = float(l) / n"),
    ],
)
def test_what_is_kept_between_steps_is_refused(
    before: str, body: str, after: str, tmp_path: Path
) -> None:
    said = found(tmp_path, body, before=before, after=after).structure
    assert KEEPS in said.no_dp and said.no_tp == said.no_dp, said


def test_extra_state_that_follows_from_samples_is_refused(tmp_path: Path) -> None:
    before = QUEUE.replace("QUEUE", "extra['queue'] = queue")
    body = "h = run.model(x)\nrun.backward((h @ queue.keys.T).logsumexp(-1).sum())\nqueue.add(h)"
    said = found(tmp_path, body, before=before).structure
    assert said.no_dp.startswith("extra_state['queue'] is another one after a step with one sample")
    assert not said.no_tp


def test_a_buffer_that_follows_from_samples_is_refused(tmp_path: Path) -> None:
    before = "model.register_buffer('seen', torch.zeros(6))"
    body = f"run.model.seen.copy_(x.sum(0))\nrun.backward({CE})"
    said = found(tmp_path, body, before=before).structure.no_dp
    assert said.startswith("seen of run.model is another one after a step with one sample"), said


def test_a_count_that_is_no_sum_is_refused(tmp_path: Path) -> None:
    said = found(tmp_path, f"run.backward({CE})", before="keys['count'] = lambda b: 8").structure
    assert said.no_dp.startswith("elastic.loop: count of 4 samples is 8, that of the same one by")


RIGHT = {
    "sum": f"run.backward({CE})",
    "mean times samples": "run.backward(F.cross_entropy(run.model(x), y) * n)",
    "parts": f"for x, y in zip(x.split(2), y.split(2)):\n    run.backward({CE})",
    "parts of equal number": (
        f"for x, y in zip(x.tensor_split(2), y.tensor_split(2)):\n    run.backward({CE})"
    ),
    "two losses": f"run.backward({CE})\nrun.backward(run.model(x).square().sum())",
    "penalty by the sample": f"run.backward({CE} + 0.1 * n * next(run.model.parameters()).square().sum())",
    "device, logs and every n steps": (
        f"x = x.to('cpu')\nif run.step_index % 2 == 0:\n    raise KeyError('not in this step')\n"
        f"loss = {CE}\nrun.log({{'l': loss}})\nprint(loss.item())\n"
        "if run.rank == 0:\n    raise KeyError('by rank 0 alone')\nrun.backward(loss)"
    ),
    "gradient penalty": (
        "x.requires_grad_()\nout = run.model(x)\n"
        "(g,) = torch.autograd.grad(out.sum(), x, create_graph=True)\n"
        "run.backward(F.cross_entropy(out, y, reduction='sum') + (g.norm(dim=1) - 1).square().sum())"
    ),
    "numbers of its own": (
        f"x = x + torch.randn_like(x)\nt = torch.randint(0, 9, (n,))\nrun.backward({CE} * 1.0)"
    ),
    "half": f"with torch.autocast('cpu', torch.bfloat16):\n    l = {CE}\nrun.backward(l)",
    "by the last loss": f"run.backward({CE} * (1.0 if run.train_loss is None else 0.5))",
    "flattened": "run.backward((run.model(x).squeeze().flatten() ** 2).sum())",
    "distance that is nothing": (
        "with torch.no_grad():\n    old = run.model(x)\n"
        "run.backward(F.kl_div(run.model(x).log_softmax(-1), old.softmax(-1), reduction='sum'))"
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_ordinary_bodies_are_accepted(name: str, tmp_path: Path) -> None:
    assert is_accepted(found(tmp_path, RIGHT[name]))


@pytest.mark.parametrize("act", ["Dropout(0.5)", "BatchNorm1d(16)"])
def test_what_the_model_draws_and_its_batch_norm_are_no_matter_of_the_body(
    act: str, tmp_path: Path
) -> None:
    assert is_accepted(found(tmp_path, f"run.model.train()\nrun.backward({CE})", act=act))
    said = found(tmp_path, WRONG["negatives of the batch"][0], act=act).structure.no_dp
    assert BESIDE in said, said


def test_a_loss_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not depend on run.model: call run.model"):
        found(
            tmp_path,
            "run.backward(F.cross_entropy(other(x), y, reduction='sum'))",
            before="import copy\nother = copy.deepcopy(model)",
        )


def test_a_schedule_that_is_not_in_extra_state_follows_from_no_samples(tmp_path: Path) -> None:
    """What it does to the optimizer's settings, which travel by themselves."""
    assert is_accepted(found(tmp_path, f"run.backward({CE})", before=COSINE))


def test_an_average_of_the_weights_that_teaches_is_accepted(tmp_path: Path) -> None:
    body = "run.backward((run.model(x) - average.model(x).detach() - 1).square().sum())"
    assert is_accepted(found(tmp_path, body, before=AVERAGE, after="average.update()"))
    other = AVERAGE + "[p.data.mul_(0.5) for p in average.model.parameters()]"
    assert is_accepted(found(tmp_path, body, before=other, after="average.update()"))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (f"run.further\nrun.backward({CE})", "it asks for run.further before; compare its first"),
        (
            f"run.backward({CE} if n > 1 else run.model(x)[9].sum())",
            "train.py, line 19: IndexError",
        ),
        (f"if n > 1:\n    run.backward({CE})", "it comes to run.step() without run.backward(loss)"),
        (f"run.backward({CE} * (n - 1) / (n - 1))", "train.py:19: the loss of a sample alone is"),
        (
            f"run.backward({CE} * torch.tensor(np.random.randn(n)).sum())",
            "it draws by numpy's random, each rank its own;",
        ),
    ],
)
def test_what_cannot_be_known_is_noted(body: str, why: str, tmp_path: Path) -> None:
    one = found(tmp_path, body)
    (note,) = one.structure.notes
    head = "whether the body of its loop trains on samples together as on each alone is not known: "
    assert note.startswith(head) and why in note and "--layout dp_shard=1" in note, note
    assert not one.structure.no_dp and not one.equal and one.steady


@pytest.mark.parametrize("data", ["data", IN_ORDER])
def test_a_loss_of_pairs_is_seen_where_two_samples_are_of_one_class(
    data: str, tmp_path: Path
) -> None:
    said = found(tmp_path, PAIRS, before=f"data = {data}").structure.no_dp
    assert said.startswith("train.py:22: ") and BESIDE in said, said


def test_of_a_loss_that_is_0_nothing_is_known(tmp_path: Path) -> None:
    """As no two samples are of one class."""
    before = "data = [{**row, 'y': i} for i, row in enumerate(data)]"
    one = found(tmp_path, PAIRS, before=before)
    (note,) = one.structure.notes
    assert "train.py:22: the loss of 4 samples is 0, with gradients of 0, and so is" in note
    assert not one.structure.no_dp and not one.equal


@pytest.mark.parametrize(
    "name",
    ["tiny", "logging", "epochs", "sharpness", "two", "resnet", "drops", "drops parts",
     "drops views", "drops whole --double"],
)  # fmt: skip
def test_the_scripts_of_other_tests_are_accepted(name: str) -> None:
    name, *calls = name.split()
    assert is_accepted(
        verdict(PROGRAMS / f"loop_{name}.py", *(["--calls"] if calls else []), *calls)
    )


def test_a_model_that_is_large_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "train.py"  # is not there: it is not run
    job = Job.from_plain({"steps": 3, "global_batch": 8, "program": str(file), "script": str(file)})
    one = check(CheckRequest(job, axes=["dp"], model_bytes=200_000_000))
    (note,) = one.structure.notes
    assert "is not known: its model has 200 MB, 120 at most" in note and one.steady


OWN = """
class Rows:
    def __init__(self): self.rng = np.random.default_rng(0)
    def __len__(self): return 64
    def __getitem__(self, i):
        draw = DRAW
        return {"x": x[i] * draw, "y": i % 4, "v": x[i]}
data = Rows()
"""


def test_a_loops_dataset_may_draw_but_not_by_a_generator_of_its_own(tmp_path: Path) -> None:
    body = f"run.backward({CE})"
    assert is_accepted(found(tmp_path, body, before=OWN.replace("DRAW", "random.uniform(0.5, 1)")))
    with pytest.raises(SpecError, match=r"train.py: sample 0 of the dataset .* of its own"):
        found(tmp_path, body, before=OWN.replace("DRAW", "self.rng.uniform(0.5, 1)"))
