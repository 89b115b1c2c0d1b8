"""run.log, run.stop: what a script tells of its step, and what it is told where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.places import PROGRAMS
from support.worker.loop_case import loop_job
from support.worker.plans import plan
from support.worker.worker_pool import Pool

from elastic.errors import ProgramError
from elastic.types import Layout, StepDone, StopAsked
from elastic.worker.loop.handoff import Handoff
from elastic.worker.loop.logged_numbers import LoggedNumbers
from elastic.worker.loop.loop import OfferedBatch, Run
from elastic.worker.loop.script_host import ScriptSource


class _Answers(Handoff):
    """Hands over at once: a batch, then the end."""

    def __init__(self) -> None:
        super().__init__()
        batch = {"x": torch.ones(1)}
        self.next = [OfferedBatch(batch, 0, 0), OfferedBatch(batch, 0, 0), None]

    def say(self, word: object) -> object:
        return self.next.pop(0)


def run() -> Run:
    program = type("P", (), {"given": staticmethod(dict), "model": torch.nn.Identity})()
    made = Run(program, None)  # type: ignore[arg-type]
    made.handoff = _Answers()
    return made


def test_outside_of_a_step_there_is_nothing_to_tell_it_of() -> None:
    here = run()
    with pytest.raises(ProgramError, match="without a step to tell it of"):
        here.log({"a": 1})
    next(here)
    here.log({"a": 1})
    here.log({"b": torch.tensor(2.0), "a": 3})
    assert here.logged.taken() == {"a": 3.0, "b": 2.0}
    assert here.logged.taken() == {}
    here.log({"of_a_step_that_was_not_committed": 1})
    here._batch = None
    next(here)
    assert here.logged.taken() == {}
    here._batch = None
    with pytest.raises(StopIteration):
        next(here)
    with pytest.raises(ProgramError, match="without a step to tell it of"):
        here.log({"a": 1})


def test_nothing_is_told_of_a_step_that_is_lost() -> None:
    here = run()
    next(here)
    here._lost = True  # as after a step() that was not committed
    here.log({"loss": None})
    assert here.logged.taken() == {}


def test_a_stop_is_said_in_a_step_and_not_of_one_that_is_lost() -> None:
    here = run()
    with pytest.raises(ProgramError, match=r"run.stop\(\) was called without a step; it belongs"):
        here.stop()
    next(here)
    here._lost = True
    here.stop()
    assert not here.stops
    here._batch = None
    next(here)
    here.stop()
    assert here.stops


@pytest.mark.e2e
def test_rank_0_asks_once_for_a_stop_and_trains_on_until_it_comes(
    pool: Pool, tmp_path: Path
) -> None:
    job = loop_job(steps=8)
    text = Path(job["script"]).read_text().replace("Path(__file__).parent", repr(str(PROGRAMS)))
    file = tmp_path / "train.py"
    file.write_text(f"{text}        run.step_index < 4 or run.stop()\n")
    workers = pool.open(job | {"script": str(file)}, tmp_path)
    pool.enter(plan(1, Layout(dp_replicate=2), workers, 12))
    pool.quiesced(1, 2)
    (asked,) = pool.events(StopAsked)
    assert asked == StopAsked("run.stop() of the script at step 5", done=True)
    assert len(pool.events(StepDone)) == 8


def test_what_was_told_of_a_step_that_was_not_committed_is_gone_with_it() -> None:
    told = LoggedNumbers()
    told.add({"a": 1})
    told.begin()
    told.add({"b": 2})
    assert told.taken() == {"b": 2.0}


def test_a_tensor_is_what_it_was_when_it_was_told() -> None:
    told, total = LoggedNumbers(), torch.tensor(1.0)
    told.add({"total": total})
    total.zero_()
    assert told.taken() == {"total": 1.0}


def test_the_error_names_file_and_line(tmp_path: object) -> None:
    file = f"{tmp_path}/train.py"
    with open(file, "w") as out:
        out.write("from elastic.worker.loop.logged_numbers import LoggedNumbers\n")
        out.write("LoggedNumbers().add({'lr': 'high'})\n")
    source = ScriptSource(file)
    with pytest.raises(ProgramError) as caught:
        source.run()
    assert source.told(caught.value) == (
        f"{file}, line 2: run.log['lr'] is a str; it must be one number"
    )
