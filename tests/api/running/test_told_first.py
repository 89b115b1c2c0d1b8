"""What is told before anything of the user's is read: a metrics port that is taken, a key that does
not exist, a cluster file that is wrong."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic
from elastic.api.running.entry import run_script
from elastic.errors import SpecError

RAISES = "raise RuntimeError('it was read')\n"
LOOP = f"import elastic\n{RAISES}with elastic.loop() as run:\n    pass\n"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as here:
        here.bind(("127.0.0.1", 0))
        here.listen()
        yield int(here.getsockname()[1])


def refusal(port: int) -> str:
    return f"metrics_port: 127.0.0.1:{port} is not to be had (Address already in use)"


def test_before_the_program(folder: Path, taken: int) -> None:
    (folder / "program.py").write_text(RAISES)
    with pytest.raises(SpecError) as caught:
        elastic.run(folder, options=elastic.Options(metrics_port=taken))
    assert str(caught.value).startswith(refusal(taken))
    with pytest.raises(SpecError) as caught:
        elastic.run(folder, options=elastic.Options(overrides=(f"metrics_port={taken}",)))
    assert str(caught.value).startswith(refusal(taken))


def test_before_a_script(folder: Path, taken: int) -> None:
    script = folder / "train.py"
    script.write_text(LOOP)
    for options in (
        elastic.Options(metrics_port=taken),
        elastic.Options(overrides=(f"metrics_port={taken}",)),
    ):
        with pytest.raises(SpecError) as caught:
            run_script(script, options=options)
        assert str(caught.value).startswith(refusal(taken))


def test_a_cluster_file_that_is_wrong_is_told_before_a_script_is_run(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(LOOP)
    with pytest.raises(SpecError, match=r"nowhere\.yaml: no such file; a cluster file is what"):
        run_script(script, options=elastic.Options(cluster="nowhere.yaml"))


def test_an_unknown_key_is_told_before_a_script_is_run(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(LOOP)
    with pytest.raises(SpecError, match=r"--set: unknown key 'chekpoint_every'.*checkpoint_every"):
        run_script(script, options=elastic.Options(overrides=("chekpoint_every=5",)))
    for known in ("epochs=2", "steps=2", "durable_every=5"):
        with pytest.raises(SpecError, match="it was read"):
            run_script(script, options=elastic.Options(overrides=(known,)))


def test_a_wrong_port_of_the_keys_is_told_with_the_other_keys(folder: Path) -> None:
    with pytest.raises(SpecError) as caught:
        elastic.run(folder, options=elastic.Options(overrides=("metrics_port=ninety",)))
    assert "key 'metrics_port': must be a port" in str(caught.value)
    (folder / "program.py").write_text(RAISES)
    with pytest.raises(SpecError) as caught:
        elastic.run(folder, options=elastic.Options(metrics_port="ninety"))
    assert str(caught.value).startswith("--metrics-port: must be a port")
