"""Checkpoints that the journal knows and storage has lost are told, and none is passed over in
silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.worker.saved import CUTS, save

from elastic.errors import StateLost
from elastic.storage import Storage, open_storage
from elastic.types import CopyDamaged
from elastic.worker.checkpoint import checkpoint_verbs
from elastic.worker.checkpoint.checkpoint_format import MARKER
from elastic.worker.hosting.checkpoint_orders import CheckpointCommitter
from elastic.worker.hosting.resume_checks import found_copies


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


@pytest.fixture
def uris(storage: Storage) -> list[str]:
    """Of steps 1, 2 and 3."""
    return [save(storage, CUTS[0], step) for step in (1, 2, 3)]


def unmarked(uri: str) -> None:
    (Path(uri) / MARKER).unlink()


def test_the_newest_ones_that_are_missing_are_told_and_the_one_before_is_taken(
    storage: Storage, uris: list[str]
) -> None:
    for uri in uris[1:]:
        unmarked(uri)
    found = found_copies(storage, uris)
    assert [copy.step for copy in found.copies] == [1]
    assert found.damaged == tuple(
        CopyDamaged(
            uris[step - 1],
            f"{uris[step - 1]}/{MARKER}: missing; the journal says that step {step} was stored "
            "there",
        )
        for step in (3, 2)
    )
    assert found.known == {*uris}
    assert found_copies(storage).damaged == ()  # a folder that nobody knows is an interrupted save


def test_an_older_one_that_is_missing_matters_to_nobody(storage: Storage, uris: list[str]) -> None:
    unmarked(uris[1])
    assert found_copies(storage, uris).damaged == ()


def test_where_none_is_left_the_run_does_not_begin_anew(storage: Storage, uris: list[str]) -> None:
    storage.delete_folder("checkpoints")
    with pytest.raises(
        StateLost, match=rf"{uris[2]}/{MARKER}: missing; .*: bring it back, or start over with an"
    ):
        found_copies(storage, uris)
    attached = found_copies(storage, uris, attached=True)  # its workers hold the state
    assert [one.uri for one in attached.damaged] == uris[::-1] and attached.copies == ()


def test_what_a_person_has_removed_is_not_missed(storage: Storage, uris: list[str]) -> None:
    for step in (1, 2, 3):
        checkpoint_verbs.remove(storage, step, force=True)
    found = found_copies(storage, uris)
    assert (found.copies, found.damaged) == ((), ())


def test_a_run_that_was_moved_has_the_checkpoints_that_were_moved_with_it(
    storage: Storage, uris: list[str], tmp_path: Path
) -> None:
    Path(uris[2]).rename(tmp_path / "left behind")
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = open_storage(tmp_path / "moved")
    found = found_copies(moved, uris)
    assert [copy.step for copy in found.copies] == [2, 1]
    assert [one.uri for one in found.damaged] == [uris[2].replace("/run/", "/moved/")]


def test_the_folder_of_a_committed_checkpoint_without_its_marker_is_not_cleaned_up(
    storage: Storage, uris: list[str]
) -> None:
    """Only the rest of an interrupted save is."""
    for uri in uris:
        unmarked(uri)
    copies = CheckpointCommitter(storage, 1, {}, known=uris[1:])
    copies.remove(uris[1])  # what is to go is no rest to be kept
    copies.clean()
    copies.close()
    assert [Path(uri).exists() for uri in uris] == [False, False, True]
