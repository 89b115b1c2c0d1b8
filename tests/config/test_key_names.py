"""Keys with two names: either is taken, both are an error, what is stored has one name."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.config.job import JobSpec, job_data, job_of, load_job
from elastic.config.key_names import DOCUMENTED, STORED
from elastic.errors import SpecError

KEYS = [*STORED.items()]


def folder(tmp_path: Path, text: str) -> Path:
    (tmp_path / "job.yaml").write_text("steps: 10\nglobal_batch: 4\n" + text)
    (tmp_path / "program.py").write_text("program = None\n")
    return tmp_path


@pytest.mark.parametrize(("documented", "stored"), KEYS)
def test_either_name_is_taken_and_stored_under_one(
    tmp_path: Path, documented: str, stored: str
) -> None:
    for name in (documented, stored):
        job = load_job(folder(tmp_path, f"{name}: 3\n"))
        assert job.plain()[stored] == 3 and documented not in job.plain()


@pytest.mark.parametrize(("documented", "stored"), KEYS)
def test_an_override_takes_either_name_over_either_name_of_the_file(
    tmp_path: Path, documented: str, stored: str
) -> None:
    for written in (documented, stored):
        place = folder(tmp_path, f"{written}: 3\n")
        for given in (documented, stored):
            assert load_job(place, [f"{given}=5"]).plain()[stored] == 5


@pytest.mark.parametrize(("documented", "stored"), KEYS)
def test_both_names_at_once_are_one_clear_error(
    tmp_path: Path, documented: str, stored: str
) -> None:
    right = f"'{documented}' and '{stored}' are two names of one key; keep '{documented}'"
    with pytest.raises(SpecError, match=rf"job.yaml: {right}$"):
        job_data(folder(tmp_path, f"{documented}: 3\n{stored}: 3\n"))
    with pytest.raises(SpecError, match=rf"^--set: {right}$"):
        job_data(folder(tmp_path, ""), [f"{documented}=3", f"{stored}=4"])
    with pytest.raises(SpecError, match=rf"^job: {right}$"):
        job_of({"steps": 1, "global_batch": 1, documented: 3, stored: 3}, tmp_path / "program.py")


def test_a_wrong_value_is_shown_under_both_names_and_a_misspelled_key_gets_the_documented_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        SpecError,
        match=r"key 'checkpoint_every' \(also 'durable_every'\): must be 'auto' or a number of steps",
    ):
        load_job(folder(tmp_path, "checkpoint_every: -1\n"))
    with pytest.raises(
        SpecError, match="unknown key 'checkpoint_evry'; did you mean 'checkpoint_every'"
    ):
        load_job(folder(tmp_path, "checkpoint_evry: 1\n"))


def test_the_table_names_keys_of_a_job() -> None:
    assert set(DOCUMENTED) <= set(JobSpec.model_fields) and not set(STORED) & set(
        JobSpec.model_fields
    )
