"""How a scenario is played: when an act is over, whom a strike hits, what is done on a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.scenarios import play as play_module
from elastic.scenarios.limit import Failed, Limit
from elastic.scenarios.play import Late, Played, _Play, play
from elastic.scenarios.scenario import Act, Strike, Victim
from elastic.scenarios.stories import MAIN_PATH, WORST_MOMENTS
from elastic.scenarios.watched_run import Stage, WatchedRun

KILL, GROWTH, NOTICE = MAIN_PATH.acts


def plan(number: int, cause: str, *nodes: str, holders: tuple[str, ...] = ()) -> dict[str, Any]:
    worker = lambda node: {"node_id": node, "local_rank": 0}  # noqa: E731
    holdings = [{"worker": worker(node), "rank": rank} for rank, node in enumerate(holders)]
    return {
        "generation": number, "cause": cause, "ranks": [worker(node) for node in nodes],
        "resume": {"holdings": holdings},
    }  # fmt: skip


def step(generation: int) -> tuple[int, int, float, str]:
    return (generation, 1, 1.0, "d")


@pytest.fixture
def one(tmp_path: Path) -> _Play:
    stage = Stage(tmp_path, {}, 3)
    made = _Play(WORST_MOMENTS, stage, WatchedRun(stage, Limit.after(10)))
    made.run.seen.plans[1] = plan(1, "start", "a", "b", "c")
    made.run.seen.pids = {name: (i + 10,) for i, name in enumerate("abcd")}
    made.reached = 1
    return made


def test_an_act_is_over_with_a_step_of_a_generation_of_its_cause(one: _Play) -> None:
    seen = one.run.seen
    assert not one._is_over(KILL)
    seen.plans[2] = plan(2, "loss", "a", "b")
    assert not one._is_over(KILL)
    seen.steps.append(step(2))
    assert one._is_over(KILL) and not one._is_over(NOTICE)
    one.reached = 2
    assert not one._is_over(KILL), "that was the one before"
    seen.plans[3] = plan(3, "growth", "a", "b")
    seen.steps.append(step(3))
    assert not one._is_over(GROWTH), "not all are back"
    seen.plans[4] = plan(4, "growth", "a", "b", "c")
    assert one._is_over(GROWTH)


@pytest.mark.parametrize(("whom", "pid"), [("second", [11]), ("newcomer", [12]), ("sender", [13])])
def test_a_strike_hits_once(
    one: _Play, whom: Victim, pid: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[list[int]] = []
    monkeypatch.setattr(play_module.processes, "send", killed.append)
    ordered = plan(2, "loss", "a", "b", "c", holders=("a", "d", "b"))
    one._strike(ordered)
    assert killed == [], "nothing was to be struck"
    one._act = Act("x", "", "loss", strike=Strike("loss", whom))
    one._strike(plan(2, "growth", "a"))
    one._strike(ordered)
    one._strike(ordered | {"generation": 3})
    assert killed == [pid] and list(one.struck) == [2]


def test_a_strike_that_came_too_late_is_told(one: _Play) -> None:
    act = Act("x", "", "loss", strike=Strike("loss", "second"))
    seen = one.run.seen
    seen.plans |= {2: plan(2, "loss", "a"), 3: plan(3, "loss", "a")}
    seen.steps.append(step(3))
    assert not one._is_over(act), "nothing was struck"
    one.struck[2] = ("a", 0)
    assert one._is_over(act)
    seen.steps.append(step(2))
    with pytest.raises(Late):
        one._is_over(act)


def test_behind_a_struck_newcomer_all_are_awaited(one: _Play) -> None:
    """Its process comes back within the transition or by a growth of its own, which may not come
    between the next notice and its plan."""
    newcomer, seen = WORST_MOMENTS.acts[1], one.run.seen
    seen.plans |= {2: plan(2, "growth", "a", "b", "c"), 3: plan(3, "loss", "a", "b")}
    one.struck[2] = ("c", 0)
    seen.steps.append(step(3))
    assert not one._is_over(newcomer)
    seen.plans[4] = plan(4, "growth", "a", "b", "c")
    assert one._is_over(newcomer)


def test_on_a_cluster_nodes_are_not_started(one: _Play) -> None:
    assert [one._words(act) for act in MAIN_PATH.acts] == [act.drill for act in MAIN_PATH.acts]
    one.stage = replace(one.stage, address="a:1")
    words = [one._words(act) for act in MAIN_PATH.acts]
    assert words == ["kill=any", "", "notice=any deadline_s=12"]


def test_a_run_whose_strike_came_too_late_is_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def late(self: _Play) -> Played:
        names.append(self.stage.name)
        if len(names) < late_until:
            raise Late
        return Played([], [], 0)

    monkeypatch.setattr(_Play, "to_the_end", late)
    stage, late_until = Stage(tmp_path, {}, 3, "r"), 2
    play(WORST_MOMENTS, stage, Limit.after(10))
    assert names == ["r", "r-1"]
    names.clear()
    late_until = 9
    with pytest.raises(Failed, match="3 times a strike came"):
        play(WORST_MOMENTS, stage, Limit.after(10))
