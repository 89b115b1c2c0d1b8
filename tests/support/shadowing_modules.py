"""A folder to stand in, with modules named as those of Python and of this package."""

from __future__ import annotations

from pathlib import Path

NAMES = ("elastic/__init__.py", "select.py", "queue.py", "ray/__init__.py", "torch/__init__.py")


def make_modules(folder: Path) -> Path:
    """The file that is there once one of them was imported."""
    mark = folder / "imported"
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"open({str(mark)!r}, 'a').write(__name__ + ' ')\n")
    return mark
