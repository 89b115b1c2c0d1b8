"""What a script does before its loop, in a worker: memory that gives out there ends it at once, the
model of a Trainer stays in the memory of the host, and what takes long makes progress."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from support.loop_reference import ScriptAtLoop

from elastic.data.progress import heard_by
from elastic.errors import ProgramError, SpecError
from elastic.worker.loop import script_host
from elastic.worker.loop.script_host import Script, ScriptSource, capture
from elastic.worker.session.worker_errors import kind_of, text_of

HEAD = """
import torch, elastic
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loop = elastic.loop(model=model, optimizer=optimizer, dataset=torch.ones(8, 4), steps=2, global_batch=4)
"""
ENTER = "with loop as run:\n"
BODY = "    for x in run:\n        run.backward(run.model(x).sum())\n        run.step()\n"
SAID = "CUDA out of memory. Tried to allocate 26.00 GiB. GPU 0 has a total capacity of 23.68 GiB."
MORE = " Including non-PyTorch memory, this process has 2.00 MiB memory in use."
FULL = f"raise torch.OutOfMemoryError({SAID + MORE!r})\n"  # as model.to("cuda")
NOT_OF_TORCH = (
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: out of memory",
)


def script(folder: Path, text: str) -> Script:
    file = folder / "train.py"
    file.write_text(text)
    return Script(ScriptSource(str(file)), torch.device("cpu"))


def raised(of: Script) -> BaseException:
    """By its start, in a thread: it may never return."""
    found = list[BaseException]()

    def start() -> None:
        try:
            of.start()
        except Exception as error:  # noqa: BLE001 - it is looked at in the other thread
            found.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(20)
    assert found, "it is started again without end"
    return found[0]


@pytest.mark.parametrize("where", ["before", "inside"])
def test_a_model_that_is_larger_than_a_gpu_is_named_at_the_first_try(
    where: str, tmp_path: Path
) -> None:
    text = f"{HEAD}{FULL}{ENTER}{BODY}" if where == "before" else f"{HEAD}{ENTER}    {FULL}{BODY}"
    error, line = raised(script(tmp_path, text)), 6 if where == "before" else 7
    assert isinstance(error, ProgramError) and "Including" not in str(error)
    assert f"train.py, line {line}: OutOfMemoryError: {SAID}: it is before its first" in str(error)
    assert "the whole model need not fit on one GPU: leave .to(device) out" in str(error)
    if where == "before":
        with pytest.raises(SpecError, match=r"leave .to\(device\) out"):
            capture(tmp_path / "train.py", [], 0)


def test_memory_of_the_host_is_the_nodes_and_tried_again_by_who_asks_again(tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    line = (
        f"if __import__('os').path.exists({str(tmp_path / 'full')!r}): raise MemoryError('400 GiB')"
    )
    host = script(tmp_path, f"{HEAD}{line}\n{ENTER}{BODY}")
    error = raised(host)
    assert kind_of(error) == "infrastructure" and not isinstance(error, ProgramError)
    assert text_of(error) == f"{tmp_path}/train.py, line 6: MemoryError: 400 GiB"
    (tmp_path / "full").unlink()
    assert host._stand().program.settings["steps"] == 2


@pytest.mark.parametrize("said", ["", *NOT_OF_TORCH])
@pytest.mark.parametrize(
    ("others_gb", "kind"), [(1, "program"), (20, "infrastructure"), (None, "infrastructure")]
)
def test_a_gpu_that_others_have_filled_is_no_error_of_the_script(
    others_gb: int | None, kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: of the GPU's memory nothing can be learned."""

    def memory(device: torch.device) -> tuple[int, int]:
        if others_gb is None:
            raise RuntimeError("CUDA error: out of memory")
        return (23 - 3 - others_gb) << 30, 23 << 30

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    full = f"raise RuntimeError({said!r})\n" if said else FULL
    host = script(tmp_path, f"{HEAD}{full}{ENTER}{BODY}")
    host.device = torch.device("cuda")
    error, name = raised(host), "RuntimeError" if said else "OutOfMemoryError"
    assert kind_of(error) == kind and f"train.py, line 6: {name}: " in text_of(error)


@pytest.mark.parametrize("said", NOT_OF_TORCH)
def test_memory_that_gives_out_over_a_batch_is_no_error_of_the_script(
    said: str, tmp_path: Path
) -> None:
    body = BODY.replace("run.backward", f"raise RuntimeError({said!r})\n        run.backward")
    (tmp_path / "train.py").write_text(f"{HEAD}{ENTER}{body}")
    at_loop = ScriptAtLoop.of(tmp_path / "train.py", [], 0, 2)
    at_loop.begin()
    with pytest.raises(RuntimeError) as caught:
        at_loop.script.compute(at_loop.batch(0, 0), 0, 0)
    assert kind_of(caught.value) == "out_of_memory"


def test_a_scale_that_only_the_worker_has_is_refused_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by enabled=torch.cuda.is_available() where the driver's machine has no GPU."""
    made = "scaler = torch.amp.GradScaler('cpu', enabled='SCALES' in __import__('os').environ)\n"
    body = BODY.replace("run.model(x).sum()", "scaler.scale(run.model(x).sum())")
    (tmp_path / "train.py").write_text(f"{HEAD}{made}{ENTER}{body}")
    assert capture(tmp_path / "train.py", [], 0).called is not None
    monkeypatch.setenv("SCALES", "1")
    at_loop = ScriptAtLoop.of(tmp_path / "train.py", [], 0, 2)
    at_loop.begin()
    with pytest.raises(ProgramError, match=r"line 9: GradScaler.scale multiplies the loss by what"):
        at_loop.script.compute(at_loop.batch(0, 0), 0, 0)


def test_the_model_of_a_trainer_is_put_on_no_device(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="it is in the extra 'test'")
    places = "transformers.TrainingArguments.place_model_on_device"
    text = HEAD.replace("elastic\n", "elastic, transformers\n") + f"before = {places}\n"
    text += f"assert before is False\n{ENTER}    assert {places} is not False\n{BODY}"
    for _ in range(2):
        assert script(tmp_path, text).start().settings["steps"] == 2
        assert capture(tmp_path / "train.py", [], 0).settings["steps"] == 2
    assert transformers.TrainingArguments.place_model_on_device is not False


class Clock:
    """Moved by the script, which then waits until it was looked at."""

    now_s, looks = 0.0, 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.now_s


SLOW = """
import clock
from elastic.data.progress import gets_on
from time import monotonic, sleep
for _ in range(60):
    clock.now_s += 100.0
    {}
    looks, began_s = clock.looks, monotonic()
    while clock.looks < looks + 2:
        assert monotonic() < began_s + 20, "nobody looks"
        sleep(0.001)
"""


@pytest.mark.parametrize(("says", "until_s"), [("pass", 3600.0), ("gets_on()", 6000.0)])
def test_what_takes_long_makes_progress_and_what_hangs_for_an_hour_does_not(
    says: str,
    until_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, told_s = Clock(), list[float]()
    monkeypatch.setattr(script_host, "time", clock)
    monkeypatch.setattr(script_host, "LOOK_S", 0.001)
    monkeypatch.setitem(sys.modules, "clock", clock)  # type: ignore[arg-type]
    with heard_by(lambda: told_s.append(clock.now_s)):
        script(tmp_path, f"{HEAD}{SLOW.format(says)}{ENTER}{BODY}").start()
    assert {100.0 * n for n in range(1, int(until_s / 100))} <= {*told_s}
    assert until_s <= max(told_s) <= until_s + 100.0
    assert caplog.text.count("before its loop takes more than 3600 s") == (until_s < 6000)
