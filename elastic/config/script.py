"""A training script of a user's own: where it stands, and, without running it, whether it enters
`elastic.loop`."""

from __future__ import annotations

import ast
from pathlib import Path

from elastic.errors import SpecError


def script_file(path: str | Path) -> Path:
    """The absolute path of a script. Raises SpecError where there is no such file, or it is no
    Python."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise SpecError(
            f"--script {path}: no such file; it must be a Python file, as in --script train.py"
        )
    _parsed(file)
    return file


def enters_loop(file: Path) -> bool:
    """Does the script call `elastic.loop` (under whatever name it imports it)? Read from its
    text."""
    tree = _parsed(file)
    modules, names = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {
                alias.asname or alias.name for alias in node.names if alias.name == "elastic"
            }
        elif isinstance(node, ast.ImportFrom) and node.module == "elastic" and not node.level:
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "loop"}
    return any(
        _is_loop(node.func, modules, names) for node in ast.walk(tree) if isinstance(node, ast.Call)
    )


def _is_loop(called: ast.expr, modules: set[str], names: set[str]) -> bool:
    if isinstance(called, ast.Attribute):
        return (
            called.attr == "loop"
            and isinstance(called.value, ast.Name)
            and called.value.id in modules
        )
    return isinstance(called, ast.Name) and called.id in names


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise SpecError(f"{file}, line {error.lineno}: not Python: {error.msg}") from error
    except (OSError, ValueError) as error:
        raise SpecError(f"{file}: cannot be read: {error}") from error
