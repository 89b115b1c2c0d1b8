"""The arithmetic of the race: from finished steps and nodes to figures, the table, the picture."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import race
import race_figures
import race_picture
from race_contenders import contender
from race_figures import (
    Done,
    Race,
    counted,
    figures,
    finished,
    groups,
    idle_s,
    node_seconds,
    pace,
    table,
)
from support.child import child
from trial import Clock, Failed

from elastic.cluster.ray import processes


def steps(group: int, world: int, which: range, first_s: float, step_s: float) -> list[Done]:
    return [
        Done(group, world, step, first_s + k * step_s, 5.0 - step / 10)
        for k, step in enumerate(which)
    ]


def story(name: str = "torchrun") -> Race:
    """Launched at 0; four workers do steps 1 to 10 in a second each from 11 on; one is killed at
    21, three continue at 51 behind the checkpoint of step 8, two seconds a step, up to step 14."""
    done = [*steps(1, 4, range(1, 11), 11.0, 1.0), *steps(2, 3, range(9, 15), 51.0, 2.0)]
    return Race(name, 0.0, 61.0, tuple(done), ((0.0, 4), (21.0, 3)), ((21.0, "kill"),))


def test_a_step_ends_with_its_last_worker_and_only_when_all_have_done_it() -> None:
    lines = [
        json.dumps({"group": 1, "rank": rank, "world": 2, "step": step, "at_s": step + 0.1 * rank,
        "loss": 1.0, "pid": 1})
        for step in (1, 2) for rank in (0, 1) if (step, rank) != (2, 1)
    ]  # fmt: skip
    assert finished(lines) == (Done(1, 2, 1, 1.1, 1.0),)


def test_of_a_step_that_was_trained_again_the_last_time_counts() -> None:
    kept = counted(story().steps)
    assert [done.step for done in kept] == list(range(1, 15))
    assert [done.group for done in kept] == [1] * 8 + [2] * 6


def test_the_pace_is_each_groups_own_without_its_first_steps() -> None:
    slow = [Done(1, 4, 1, 1.0, 1.0), Done(1, 4, 2, 31.0, 1.0), *steps(1, 4, range(3, 9), 32.0, 1.0)]
    assert pace(slow) == {4: 1.0}
    assert pace([*slow, Done(2, 2, 9, 60.0, 1.0)]) == {
        4: 1.0,
        2: 2.0,
    }  # one step tells no pace: as many samples, half the workers
    with pytest.raises(ValueError, match="no group"):
        pace(slow[:2])


def test_useful_wall_is_what_the_steps_that_count_would_have_cost() -> None:
    found = figures(story(), usd_per_node_h=3600.0)
    useful_s = 8 * 1.0 + 6 * 2.0
    assert found["torchrun_useful_wall"] == pytest.approx(useful_s / 61, abs=1e-4)
    assert found["torchrun_useful_wall_without_first_start"] == pytest.approx(
        (useful_s - 1) / 50, abs=1e-4
    )
    assert found["torchrun_idle_s"] == pytest.approx(31 - 2)
    assert found["torchrun_steps_redone"] == 2
    assert found["torchrun_first_start_s"] == 11
    assert found["torchrun_usd"] == pytest.approx(4 * 21 + 3 * 40)
    assert found["torchrun_useful_of_paid"] == pytest.approx((8 * 4 + 6 * 2 * 3) / 204, abs=1e-4)
    assert found["torchrun_step_s"] == {3: 2.0, 4: 1.0}


def test_an_undisturbed_run_is_useful_but_for_its_start() -> None:
    found = figures(
        Race("elastic", 0.0, 110.0, tuple(steps(1, 4, range(1, 101), 11.0, 1.0)), ((0.0, 4),)), 1.0
    )
    assert found["elastic_useful_wall"] == pytest.approx(100 / 110, abs=1e-4)
    assert found["elastic_useful_wall_without_first_start"] == 1.0
    assert (found["elastic_idle_s"], found["elastic_steps_redone"]) == (0, 0)


def test_of_one_that_did_not_finish_all_the_time_counts() -> None:
    found = figures(replace(story(), until_s=161.0), 3600.0)
    assert found["torchrun_wall_s"] == 161
    assert found["torchrun_idle_s"] == pytest.approx(129)
    assert found["torchrun_useful_wall"] == pytest.approx(20 / 161, abs=1e-4)


def test_idle_time_begins_where_an_ordinary_step_would_have_ended() -> None:
    assert idle_s(steps(1, 4, range(1, 4), 0.0, 2.9), {4: 1.0}) == 0  # slow, but at work
    change = [Done(1, 4, 1, 0.0, 1.0), Done(2, 3, 2, 1.7, 1.0)]
    # from one group to another all above a step counts
    assert idle_s(change, {4: 1.0, 3: 1.5}) == pytest.approx(0.2)
    assert idle_s(steps(1, 4, range(1, 3), 0.0, 5.0), {4: 1.0}) == 4.0


def test_nodes_are_paid_until_the_last_step() -> None:
    assert node_seconds(((0.0, 4), (10.0, 3), (20.0, 4)), 15.0) == 55.0


def test_nobody_trains_between_two_groups() -> None:
    assert groups(story()) == [(0.0, 0), (10.0, 4), (20.0, 0), (49.0, 3), (61.0, 0)]


def test_the_table_has_a_row_per_figure_and_dashes_for_what_is_missing() -> None:
    lines = table(figures(story(), 1.0), ["torchrun", "elastic"])
    assert lines[0] == "| | torchrun | elastic |"
    assert "| steps trained again | 2 | - |" in lines
    assert len(lines) == 2 + len(race_figures.ROWS)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    target = race_picture.save([story(), story("elastic")], "a race", tmp_path / "race.png")
    assert target.read_bytes().startswith(b"\x89PNG")


def test_a_race_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(asdict(story())))
    assert race.read(tmp_path / "r.json") == story()


def test_the_courses_can_be_run() -> None:
    for course in race.COURSES.values():
        standing, last_s = 4, 0.0
        for at_s, what in course.schedule:
            assert at_s >= last_s + (race.NOTICE_S if what == "add" and standing == 4 else 0)
            standing += {"add": 1, "kill": -1, "notice": -1}[what]
            last_s = at_s
            assert 3 <= standing <= 4
    preempted = [what for _, what in race.COURSES["preemptions"].schedule if what != "add"]
    assert len(preempted) == 4
    with pytest.raises(Failed, match="'nobody' does not take part"):
        contender("nobody", Path("."), race.Length(1, 1), Clock(1.0), 1.0)


def test_the_report_has_a_table_and_its_picture(tmp_path: Path) -> None:
    found = race.figures(
        [replace(story(), notes={"load": {"most": 1.0}, "words": ""})],
        race.COURSES["events"],
        "events_",
    )
    assert found["events_torchrun_not_finished"] == "step 14 of 120"
    lines = race.table(
        "events",
        race.COURSES["events"],
        [story()],
        found,
        png=tmp_path / "race.png",
        place=tmp_path,
    )
    assert lines[-1].endswith("(race-events.png)"), "as the page names it"
    assert (tmp_path / "race-events.png").is_file()
    assert "| steps trained again | 2 |" in lines


def test_the_tables_go_between_the_marks() -> None:
    text = f"before\n{race.BEGIN}\nold\n{race.END}\nafter\n"
    again = race.with_tables(text, ["| new |"])
    assert again == f"before\n{race.BEGIN}\n| new |\n\n{race.END}\nafter\n"
    assert race.with_tables(again, ["| new |"]) == again
    with pytest.raises(ValueError, match="there is no"):
        race.with_tables("nothing", [])
    assert race.BEGIN in (race.ROOT / "docs" / "benchmarks.md").read_text()


@pytest.mark.whole
def test_a_short_race() -> None:
    words = [
        sys.executable,
        str(Path(race.__file__)),
        "--courses",
        "events",
        "--contenders",
        "elastic",
        "torchrun",
        "--json",
    ]
    with child(words, text=True, stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=480)
        assert process.returncode == 0
        assert not processes.descendants(process.pid)
    found = json.loads(out.strip().splitlines()[-1])["figures"]
    assert found["events_elastic_steps"] == found["events_torchrun_steps"] == 120
    assert found["events_elastic_idle_s"] < found["events_torchrun_idle_s"]
    assert found["events_final_loss_spread"] < 0.01
