"""docs/proven.md is what the README claims and the results say; nothing else can stand there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.places import ROOT

from elastic.certify import proven
from elastic.certify.claims import CLAIMS, Claim, stated
from elastic.certify.proven import cell, page, read_results, read_whole_run
from elastic.certify.result import CertifyReport
from elastic.errors import SpecError
from elastic.scenarios.check import Check

README = (ROOT / "README.md").read_text()
CLAIM = Claim("one", ("layout *", "kill"), ())


def report(*checks: tuple[str, str], kind: str = "cpu-gloo") -> CertifyReport:
    place = {
        "kind": kind, "ranks": 4, "gpus": [], "ray": "2.60.0", "storage": "/s", "torch": "2.13",
        "python": "3.11", "elastic": "0", "cpus": 2, "load_1min": 0.5, "at": "2026-01-01 00:00 UTC",
    }  # fmt: skip
    return CertifyReport(
        place,
        tuple(Check(name, verdict, why="NCCL | says no") for name, verdict in checks),
        300.0,
        99.0,
    )


def test_the_page_is_what_the_results_say() -> None:
    made = page(
        README, read_results(ROOT / "docs" / "certified"), read_whole_run(ROOT / proven.TESTS)
    )
    assert (ROOT / "docs" / "proven.md").read_text() == made, (
        f"docs/proven.md is out of date: {proven.COMMAND}"
    )


def test_every_paragraph_that_says_what_is_shown_has_a_claim() -> None:
    head, _, rest = README.partition("\n## Verification status\n")
    intro = head.partition("# elastic")[2].partition("\n## ")[0]
    paragraphs = [p for p in (intro + rest.partition("\n## ")[0]).split("\n\n") if p.strip()]
    plain = [
        p
        for p in paragraphs
        if "<!-- claim: " not in p
        and not p.strip().startswith(("Not shown yet", "[docs/proven.md]"))
    ]
    # says where, and claims nothing more
    allowed = (
        "**Status.**",
        "```\nmake run",
        "Both start from nothing but",
        "![",
        "Shown by the tests",
        "Measured on",
    )
    assert not [p[:80] for p in plain if not p.strip().startswith(allowed)]


def test_every_way_in_has_a_claim() -> None:
    """A row of the ways: of a program, the sentences above the table are the claims."""
    section = README.partition("\n## Which way is mine\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    without = [row.split(" | ")[0] for row in rows if "<!-- claim: " not in row]
    assert len(rows) >= 6 and without == ["| a model", "| a Hugging Face model"]


def test_every_claim_is_stated_once_and_has_tests_that_are_there() -> None:
    assert len(stated(README)) == len(CLAIMS)
    assert all(len(one.text.split()) >= 5 for one in stated(README))
    missing = [path for claim in CLAIMS for path in claim.tests if not (ROOT / path).is_file()]
    assert not missing
    assert all(claim.tests for claim in CLAIMS)


def test_every_check_that_a_claim_names_is_one() -> None:
    from elastic.certify.checks import ways_in
    from elastic.scenarios.stories import SCENARIOS

    names = {name for scenario in SCENARIOS for name in scenario.checks}
    names |= {ways_in.RESTARTED, ways_in.TORCHRUN, ways_in.RAY_TRAIN, ways_in.OBJECTS}
    names |= {"kill", "growth", "notice", "checkpoint", "reshard", "step time", "groups"}
    names |= {"layout *", "abort *"}
    assert {check for claim in CLAIMS for check in claim.checks} <= names


@pytest.mark.parametrize(
    ("readme", "wrong"),
    [
        ("# x\n\na <!-- claim: two -->text<!-- /claim -->", "line 3: claim 'two' has no row"),
        ("a <!-- claim: one -->text", "claim 'one' is not closed"),
        ("a text<!-- /claim -->", "does not pair"),
        ("a <!-- claim: one -->b <!-- claim: one -->c<!-- /claim -->", "does not pair"),
        ("nothing", "claim 'one' of elastic/certify/claims.py is marked 0 times"),
        (
            "a <!-- claim: one -->b<!-- /claim --> <!-- claim: one -->b<!-- /claim -->",
            "is marked 2 times",
        ),
        ("x\n<!-- claim: one -->text<!-- /claim -->", "must stand alone"),
    ],
)
def test_marks_that_do_not_fit_are_refused(readme: str, wrong: str) -> None:
    with pytest.raises(SpecError, match=wrong):
        stated(readme, (CLAIM,))


def test_the_words_are_those_of_the_readme() -> None:
    (one,) = stated("It <!-- claim: one -->is\nshown<!-- /claim -->.", (CLAIM,))
    assert one.text == "is shown"


@pytest.mark.parametrize(
    ("checks", "text"),
    [
        ([], "not run"),
        ([("kill", "not run"), ("layout tp=2", "not run")], "not run"),
        ([("kill", "pass")], "part (1 check; not run: layout *)"),
        ([("kill", "pass"), ("layout tp=2", "pass")], "pass (2 checks)"),
        (
            [("kill", "pass"), ("layout tp=2", "pass"), ("layout pp=2", "not run")],
            "part (2 checks; not run: layout pp=2)",
        ),
        ([("kill", "fail"), ("layout tp=2", "pass")], "**FAIL**: kill"),
        ([("killing", "pass")], "not run"),
    ],
)
def test_cells(checks: list, text: str) -> None:
    assert cell(CLAIM, [report(*checks)]) == text


def test_a_claim_with_figures_shows_those_that_were_measured() -> None:
    claim = Claim("speed", ("kill",), (), ("pause_s", "ratio"))
    found = report()
    found = CertifyReport(
        found.place, (Check("kill", "pass", {"pause_s": 0.25, "other": 3}),), 300.0, 1.0
    )
    assert cell(claim, [found]) == "ran (1 check); kill: pause_s 0.25"


def test_figures_that_a_claim_names_are_measured_by_its_checks() -> None:
    by_check = {
        check.name: check
        for check in proven.merged(list(read_results(ROOT / "docs" / "certified").values()))
    }
    for claim in CLAIMS:
        ran = [
            c
            for name, c in by_check.items()
            if c.verdict == "pass" and any(proven.matches(name, w) for w in claim.checks)
        ]
        assert all(name in check.figures for check in ran for name in claim.figures), claim.id


def test_a_failure_in_one_result_counts_whatever_the_others_say() -> None:
    fine, bad = (
        report(("kill", "pass"), ("layout tp=2", "pass")),
        report(("kill", "fail"), ("layout tp=2", "not run")),
    )
    for order in ((fine, bad), (bad, fine)):
        assert cell(CLAIM, order) == "**FAIL**: kill"


def test_a_result_stands_in_its_own_column_with_what_nccl_said() -> None:
    made = page(
        README,
        {
            "one-gpu.json": report(
                ("checkpoint", "pass"), ("ranks share one GPU", "not run"), kind="one-gpu"
            )
        },
    )
    row = next(line for line in made.splitlines() if "every byte of a checkpoint" in line)
    assert [part.strip() for part in row.split("|")][2:5] == [
        "not run",
        "pass (1 check)",
        "not run",
    ]
    assert "| ranks share one GPU | not run |  | NCCL \\| says no |" in made


def test_unknown_kinds_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"x\.json: kind 'moon'"):
        page(README, {"x.json": report(kind="moon")})
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(SpecError, match="not JSON"):
        read_results(tmp_path)


def test_the_command_writes_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert proven.main([]) == 2
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "docs").mkdir()
    assert proven.main(["--check"]) == 1
    assert proven.main([]) == 0
    assert proven.main(["--check"]) == 0
    (tmp_path / "docs" / "proven.md").write_text("all is well")
    assert proven.main(["--check"]) == 1
    assert "is not what the results say" in capsys.readouterr().out


def test_the_last_whole_run_of_the_tests_stands_on_the_page() -> None:
    tiers = [{"tier": "unit", "seconds": 100.4, "passed": 7, "failed": 1, "skipped": 2, "why": {}}]
    made = page(
        README, {}, {"at": "2026-01-01 00:00 UTC", "commit": "abc", "cpus": 2, "tiers": tiers}
    )
    assert "(`make test-all`): 2026-01-01 00:00 UTC, commit abc, 2 minutes on 2 cores." in made
    assert "| unit | 100 | 7 | 1 | 2 |" in made and "Skipped:" not in made
    tiers[0]["why"] = {"test_ray_up: not on this machine: sshd": 2}
    at = {"at": "2026-01-01 00:00 UTC", "commit": "abc", "cpus": 2, "tiers": tiers}
    said = page(README, {}, at)
    assert "Skipped:\n\n- unit, 2 of test_ray_up: not on this machine: sshd" in said
    assert "make test-all" not in page(README, {})
