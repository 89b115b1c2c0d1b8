"""Whether a script enters elastic.loop is read from its text, under whatever name it imports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.config.script import enters_loop, script_file
from elastic.errors import SpecError


def script(folder: Path, text: str) -> Path:
    file = folder / "train.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "enters"),
    [
        ("import elastic\nwith elastic.loop(model=m) as run: pass", True),
        ("import elastic as el\ndef main():\n    with el.loop(model=m) as run: pass", True),
        ("from elastic import loop\nwith loop(model=m) as run: pass", True),
        ("from elastic import Program, loop as ours\nwith ours(model=m) as run: pass", True),
        ("import torch\nloop(3)", False),
        ("import elastic\nelastic.run('job')  # elastic.loop(", False),
        ("import asyncio as elastic\nelastic.loop()", False),
        ("from other import loop\nloop()", False),
        ("'import elastic; elastic.loop()'", False),
    ],
)
def test_read_from_its_text(tmp_path: Path, text: str, enters: bool) -> None:
    assert enters_loop(script(tmp_path, text)) is enters


def test_what_is_no_script_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"--script .*/none.py: no such file; it must be a Python file"
    ):
        script_file(tmp_path / "none.py")
    with pytest.raises(SpecError, match=r"train.py, line 2: not Python: "):
        script_file(script(tmp_path, "import torch\nwith with\n"))
    assert script_file(script(tmp_path, "x = 1")) == (tmp_path / "train.py").resolve()
