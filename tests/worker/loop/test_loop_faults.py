"""Collectives that abort inside the body of a script's loop: the `for` continues in the same
processes, the losses stay."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.worker.faults import Fault
from support.worker.faulty_pool import FaultyPool
from support.worker.loop_case import loop_job
from support.worker.policy_driver import AT, PEER_EVERY, REPLICAS, SHARDS, STEPS, TENSOR, Driver

from elastic.program import load_program
from elastic.types import Box, EnterPlan, Layout, ModelProfile, Plan, RollForward
from elastic.worker.checkpoint import checkpoint_index
from elastic.worker.loop.script_host import capture
from elastic.worker.program.extra_state import decode
from elastic.worker.program.model_profile import trace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[FaultyPool]:
    pool = FaultyPool(4)
    yield pool
    pool.close()


class LoopDriver(Driver):
    """The same policy over workers whose job is a script. `first`: a fault that is there before the
    first generation."""

    first_fault: tuple[int, Fault] | None = None

    def profile(self) -> ModelProfile:
        if self.first_fault is not None:
            self.pool.call(self.workers[self.first_fault[0]], "arm_loop", self.first_fault[1])
        return trace(capture(Path(self.job["script"]), self.job["args"], self.job["seed"]))

    def last_extra(self, name: str) -> Any:
        """An object's state in the copy of the last step."""
        checkpoint = checkpoint_index.open_checkpoint(self.state.durable[0].uri)
        shape, dtype = checkpoint.tensors[f"extra.{name}"]
        return decode(name, checkpoint.read(Box(f"extra.{name}", (0,), shape, dtype)))


def loop_driver(
    pool: FaultyPool, run: Path, layout: Layout, peer_every: int = PEER_EVERY, *args: str
) -> LoopDriver:
    run.mkdir(parents=True, exist_ok=True)
    job = loop_job(steps=STEPS) | {"args": ["--starts", str(run / "starts"), *args]}
    return LoopDriver(pool, job, run, layout, peer_every)


def starts(run: Path) -> Counter[int]:
    """How often each worker process has started the script (the test's own process, which reads it,
    left out)."""
    found = Counter(map(int, (run / "starts").read_text().split()))
    del found[os.getpid()]
    return found


def finished(driver: LoopDriver) -> Plan:
    """Runs to the end; all is as in one process, the schedule too; gives the plan that it continued
    with."""
    driver.run()
    driver.check_end()
    assert driver.last_extra("scheduler")["last_epoch"] == STEPS
    (entered,) = [order.plan for order in driver.orders(EnterPlan)]
    return entered


def collectives(pool: FaultyPool, run: Path, layout: Layout, rank: int, *args: str) -> list[str]:
    """Names of the collectives in the loop's body on that rank."""
    driver = loop_driver(pool, run / "list", layout, PEER_EVERY, *args)
    path = run / f"names-{rank}.json"
    pool.call(driver.workers[rank], "arm_loop", Fault("list", AT, -1, path=str(path)))
    driver.run()
    return list(json.loads(path.read_text()))


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "victim", "share"),
    [(SHARDS, 2, 0.0), (SHARDS, 0, 0.9), (TENSOR, 3, 0.5), (REPLICAS, 1, 0.7)],
    ids=str,
)
def test_a_kill_inside_the_body(
    pool: FaultyPool, tmp_path: Path, layout: Layout, victim: int, share: float
) -> None:
    names = collectives(pool, tmp_path, layout, victim)
    assert len(names) >= 5 and "commit" not in names
    driver = loop_driver(pool, tmp_path / "run", layout)
    pool.call(driver.workers[victim], "arm_loop", Fault("before", AT, int(share * len(names))))
    entered = finished(driver)
    assert AT - PEER_EVERY <= entered.resume.step <= AT and entered.resume.source == "peer"
    assert len(driver.lost) == 1
    counted = starts(tmp_path / "run")
    assert len(counted) == layout.world_size and set(counted.values()) == {1}, (
        "the error came up in the loop's body"
    )


@pytest.mark.e2e
def test_a_kill_in_the_first_step_of_all(
    pool: FaultyPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call of the model has come back yet: what a call gives is worked out without memory."""
    monkeypatch.setattr(LoopDriver, "first_fault", (1, Fault("before", 0, 1)))
    driver = loop_driver(pool, tmp_path, SHARDS)
    entered = finished(driver)
    assert entered.resume.step == 0
    assert set(starts(tmp_path).values()) == {1}


@pytest.mark.e2e
def test_a_step_that_others_have_is_rolled_forward_with_its_schedule(
    pool: FaultyPool, tmp_path: Path
) -> None:
    """The script's own part of the step (scheduler.step) is done then too, once."""
    driver = loop_driver(pool, tmp_path, REPLICAS, 0)
    for rank, kind in ((1, "deaf"), (2, "deaf"), (0, "after")):
        pool.arm(driver.workers[rank], Fault(kind, AT, "commit"))  # type: ignore[arg-type]
    entered = finished(driver)
    assert [order.step for order in driver.orders(RollForward)] == [AT + 1]
    assert entered.resume.step == AT + 1
    assert set(starts(tmp_path).values()) == {1}


@pytest.mark.e2e
def test_a_collective_of_the_scripts_own_starts_the_script_again(
    pool: FaultyPool, tmp_path: Path
) -> None:
    """What aborts outside of run.model ends the loop's body: the script runs again from its top, in
    the same process."""
    names = collectives(pool, tmp_path, SHARDS, 2, "--own-collective")
    driver = loop_driver(pool, tmp_path / "run", SHARDS, PEER_EVERY, "--own-collective")
    pool.call(driver.workers[2], "arm_loop", Fault("before", AT, len(names) - 1))
    finished(driver)
    assert sorted(starts(tmp_path / "run").values()) == [1, 2, 2]


@pytest.mark.e2e
def test_the_programs_are_the_same(tmp_path: Path) -> None:
    job = loop_job(steps=STEPS)
    script, plain = capture(Path(job["script"]), [], job["seed"]), load_program(job["program"])
    one, two = trace(script), trace(plain)
    assert (
        one.specs == two.specs and one.optimizers == two.optimizers and one.tp_limit == two.tp_limit
    )
    assert [spec.fqn for spec in one.extra] == [
        "extra.scheduler",
        "extra.param_groups",
    ] and two.extra == ()
    assert two.pipeline and not one.pipeline
