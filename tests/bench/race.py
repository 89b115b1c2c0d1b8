"""The same model, seed and data under elastic, as a script that elastic restarts, under Ray Train's
elastic trainer and under torchrun, one after the other, while the same things happen to their nodes
at the same seconds after the first step.

preemptions: four workers, four preemptions (two kills without a word, two notices of ten seconds),
each node replaced after a while; a fixed number of steps, a checkpoint every so many. events: the
short one, a kill, a growth and a notice.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import race_figures
import report
from race_contenders import JOB, ROOT, Contender, Length, contender
from race_figures import TITLES, Done, Race
from trial import LEFT_OUT, LOOK_S, Clock, Failed, Tree

from elastic.cluster.local.cluster_token import ON_THIS_MACHINE
from elastic.cluster.ray import processes

SCRIPT = Path(__file__).resolve()
SAMPLE_S = 0.1  # a step of four workers sleeps three times so long
SMOKE_SAMPLE_S = 0.01
NOTICE_S = 10.0
BEGIN, END = "<!-- race -->", "<!-- end of race -->"
USD_PER_NODE_H = 3.0  # made up; the same for all nodes
END_S = 20.0


@dataclass(frozen=True)
class Course:
    """`schedule`: seconds after the first step, and what happens then to one node. `most_s`: for
    each contender."""

    steps: int
    save_every: int
    schedule: tuple[tuple[float, str], ...]
    most_s: float
    world: int = 4
    least: int = 2


COURSES = {
    "preemptions": Course(
        500, 20,
        (
            (15, "kill"), (30, "add"), (45, "notice"), (70, "add"), (85, "kill"), (100, "add"),
            (115, "notice"), (140, "add"),
        ),
        480.0,
    ),
    "events": Course(120, 20, ((8, "kill"), (16, "add"), (26, "notice")), 200.0),
}  # fmt: skip
SMOKE = Course(40, 10, ((1, "kill"),), 100.0, world=2, least=1)  # in place of each of them


def run(one: Contender, course: Course, clock: Clock) -> list[tuple[float, str]]:
    """From the start to the last step; returns what happened when. Raises Failed when nothing was
    trained at all."""
    one.start()
    _until(lambda: one.done() >= 1, one, clock, "the first step")
    if one.done() < 1:
        raise Failed(f"it ended before its first step: {one.words()}")
    first_s = time.time()
    left = list(course.schedule)
    gone_s: float | None = None
    events = []
    while one.done() < course.steps and not one.ended() and clock.spent < 1:
        now_s = time.time()
        if gone_s is not None and now_s >= gone_s:
            one.gone()
            gone_s = None
        elif left and now_s >= first_s + left[0][0]:
            what = left.pop(0)[1]
            events.append((now_s, what))
            if what == "notice":
                one.notice(NOTICE_S)
                gone_s = now_s + NOTICE_S
            else:
                getattr(one, what)()
        clock.loads.append(round(os.getloadavg()[0], 2))
        time.sleep(LOOK_S)
    time.sleep(2 * LOOK_S)  # the last lines
    return events


def _until(holds: Any, one: Contender, clock: Clock, what: str) -> None:
    while not holds() and not one.ended():
        if clock.spent > 1:
            raise Failed(f"{what}: not within {clock.most_s:.0f} s: {one.words()}")
        time.sleep(LOOK_S)


def only(name: str, course: Course, out: Path) -> None:
    """One contender, in this process, whose end is the end of everything; writes the Race."""
    sample_s = SMOKE_SAMPLE_S if course is SMOKE else SAMPLE_S
    for variable in LEFT_OUT:
        os.environ.pop(variable, None)
    os.environ |= {
        **ON_THIS_MACHINE,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RACE_SAMPLE_S": str(sample_s),
    }
    paths = (
        str(ROOT),
        str(JOB),
        str(JOB.parent),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    processes.adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="el-race-"))
    # before Ray is imported: other clusters here are not seen
    os.environ["RAY_TMPDIR"] = str(folder)
    clock = Clock(course.most_s)
    one = contender(
        name,
        folder,
        Length(course.steps, course.save_every, course.world, course.least),
        clock,
        USD_PER_NODE_H,
    )
    try:
        launched_s = time.time()
        events = run(one, course, clock)
        steps = [done for done in one.steps() if done.step <= course.steps]
        notes, until_s = clock.plain(), steps[-1].at_s
        if steps[-1].step < course.steps:
            notes["words"], until_s = one.words(), time.time()
        race = Race(name, launched_s, until_s, tuple(steps), tuple(one.nodes), tuple(events), notes)
        out.write_text(json.dumps(asdict(race)))
    finally:
        one.end()
        processes.end_tree(os.getpid(), with_root=False)
        shutil.rmtree(folder, ignore_errors=True)


def read(out: Path) -> Race:
    data: dict[str, Any] = json.loads(out.read_text())
    steps = tuple(Done(**done) for done in data["steps"])
    nodes, events = (
        tuple((float(at_s), value) for at_s, value in data[key]) for key in ("nodes", "events")
    )
    return Race(
        data["name"], data["launched_s"], data["until_s"], steps, nodes, events, data["notes"]
    )


def measured(name: str, course_name: str, course: Course, folder: Path) -> Race:
    """A contender in a process of its own. Raises Failed."""
    out, smoke = folder / f"{course_name}-{name}.json", ["--smoke"] if course is SMOKE else []
    if name == "ray_train" and importlib.util.find_spec("pyarrow") is None:
        raise Failed("Ray Train needs pandas, pyarrow: pip install -c constraints.txt -e .")
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--only", name, "--courses", course_name, "--out",
            str(out), *smoke], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        tree, until_s = Tree(process.pid), time.monotonic() + course.most_s + END_S
        try:
            while process.poll() is None and time.monotonic() < until_s:
                tree.look()
                time.sleep(LOOK_S)
        finally:
            process.kill()
            process.wait()
            left = tree.gone(5.0)
        log.seek(0)
        text = log.read()
    if not out.is_file():
        raise Failed(f"{TITLES[name]}: {text[-1500:].strip()}")
    if left:
        raise Failed(f"{TITLES[name]}: {len(left)} processes did not end by themselves: {left}")
    return read(out)


def figures(races: Sequence[Race], course: Course, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for race in races:
        found |= race_figures.figures(race, USD_PER_NODE_H)
        found[f"{race.name}_load_most"] = race.notes["load"]["most"]
        if race.steps[-1].step < course.steps:
            found[f"{race.name}_not_finished"] = f"step {race.steps[-1].step} of {course.steps}"
            print(
                f"race: {TITLES[race.name]} was not finished: {race.notes.get('words')}",
                file=sys.stderr,
            )
    losses = [
        found[f"{race.name}_final_loss"]
        for race in races
        if f"{race.name}_not_finished" not in found
    ]
    if losses:
        found["final_loss_spread"] = round(max(losses) - min(losses), 5)
    return {f"{prefix}{name}": value for name, value in found.items()}


def main() -> int:
    given = options()
    courses = {name: SMOKE if given.smoke else COURSES[name] for name in given.courses}
    if given.only:
        only(given.only, courses[given.courses[0]], given.out)
        return 0
    found: dict[str, Any] = {
        "sample_s": SMOKE_SAMPLE_S if given.smoke else SAMPLE_S,
        "usd_per_node_h": USD_PER_NODE_H,
    }
    failed: dict[str, str] = {}
    shown: list[str] = []
    with tempfile.TemporaryDirectory(prefix="el-races-") as folder:
        for course_name, course in courses.items():
            races = []
            for name in given.contenders:
                print(f"race: {course_name}: {TITLES[name]}", file=sys.stderr, flush=True)
                try:
                    races.append(measured(name, course_name, course, Path(folder)))
                except Failed as error:
                    failed[f"{course_name}_{name}"] = str(error)
            prefix = "" if course_name == "preemptions" else f"{course_name}_"
            found |= figures(races, course, prefix)
            place = given.readme.parent if given.readme else Path()
            shown += table(course_name, course, races, found, png=given.png, place=place)
    if not given.json:
        print("\n".join(shown))
    if given.readme:
        given.readme.write_text(with_tables(given.readme.read_text(), shown))
    for name, text in failed.items():
        print(f"race: {name}: {text}", file=sys.stderr)
    return max(report.tell("race", given, found | {"failed": failed}), int(bool(failed)))


def table(
    course_name: str, course: Course, races: Sequence[Race], found: Mapping[str, Any], *,
    png: Path | None, place: Path
) -> list[str]:  # fmt: skip
    """In Markdown for a page in `place`, and the picture below it, which is drawn."""
    prefix = "" if course_name == "preemptions" else f"{course_name}_"
    own = {
        name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)
    }
    happened = ", ".join(f"{what} at {at_s:.0f} s" for at_s, what in course.schedule)
    drawn: list[str] = []
    if png is not None and races:
        import race_picture

        target = png if not prefix else png.with_stem(f"{png.stem}-{course_name}")
        race_picture.save(
            races, f"{course_name}: {course.steps} steps on {races[0].nodes[0][1]} workers", target
        )
        link = os.path.relpath(target, place)
        drawn = ["", f"![loss and workers against the wall clock: {course_name}]({link})"]
    head = f"{course_name}: {happened}, counted from the first step"
    return ["", head, "", *race_figures.table(own, [race.name for race in races]), *drawn]


def with_tables(text: str, lines: Sequence[str]) -> str:
    """The text with `lines` between BEGIN and END. Raises ValueError where they are not there."""
    head, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no {BEGIN} or no {END}")
    return "\n".join([head + BEGIN, *lines, "", END + tail])


def options() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the races")
    parser.add_argument(
        "--readme",
        type=Path,
        metavar="FILE",
        help=f"put the tables between its lines {BEGIN} and {END}",
    )
    parser.add_argument(
        "--courses", nargs="+", choices=sorted(COURSES), help="default: all, with --smoke events"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=sorted(TITLES),
        help="default: all, with --smoke elastic script torchrun",
    )
    parser.add_argument("--only", choices=sorted(TITLES), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.courses = given.courses or (["events"] if given.smoke else ["preemptions", "events"])
    given.contenders = given.contenders or (
        ["elastic", "script", "torchrun"] if given.smoke else list(TITLES)
    )
    given.parts = given.courses
    return given


if __name__ == "__main__":
    sys.exit(main())
