"""A training script of a user's own: where it stands, and, without running it, whether it enters
`elastic.loop`, by itself or by a Trainer that `elastic.prepare_trainer` was given."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from elastic.errors import SpecError

RAY_STARTS = ("Trainer", ".Tuner")  # what Ray's classes are called that start workers
ENTER = ("loop", "prepare_trainer")
STARTS_A_RUN = ("elastic.ElasticTrainer", "elastic.run", "elastic.api.run")


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


def check_starts_nothing(file: Path) -> None:
    """Raises SpecError for a script that starts workers of its own, by a trainer of Ray Train or
    one of ours: as a rank it would start them once for every rank."""
    found = _trainer_in(_parsed(file))
    if found is None:
        return
    name, line, ours = found
    what = (
        f"{file}, line {line}: {name}(...) starts workers of its own, and --script starts a file's "
        "processes itself, one for each worker"
    )
    if ours:
        raise SpecError(f"{what}; run it as it is: python {file.name}")
    raise SpecError(
        f"{what}; write elastic.ElasticTrainer in its place, let the train function enter "
        f"elastic.loop (docs/ray-train.md shows the lines), and run it: python {file.name}"
    )


def _trainer_in(tree: ast.Module) -> tuple[str, int, bool] | None:
    """Name and line of the first trainer that is made, and whether it is ours."""
    of: dict[str, str] = {}  # what a name in the file stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                of[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            of |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: call.lineno):
        first, _, rest = ast.unparse(call.func).partition(".")
        whole = of.get(first, first) + (f".{rest}" if rest else "")
        ours = whole in STARTS_A_RUN
        if ours or (whole.startswith("ray.") and whole.endswith(RAY_STARTS)):
            return whole.rpartition(".")[2] if not ours else whole, call.lineno, ours
    return None


def enters_loop(file: Path) -> bool:
    """Does the script call one of `ENTER` (under whatever name it imports it)? Read from its
    text."""
    return bool(_loops(_parsed(file)))


def leaves_out(file: Path, key: str) -> bool:
    """Is it certain, from the text of a script, that it gives elastic.loop no such key of a job? It
    is not where the key is named anywhere, or the keywords come out of something else than a dict
    that stands in the script."""
    tree = _parsed(file)
    nodes = list(ast.walk(tree))
    if any(isinstance(node, ast.Constant) and node.value == key for node in nodes):
        return False
    for call in _loops(tree):
        for keyword in call.keywords:
            if keyword.arg == key or (keyword.arg is None and not _is_dict(keyword.value, nodes)):
                return False
    return True


def _is_dict(value: ast.expr, nodes: Sequence[ast.AST]) -> bool:
    """Of a `**value`: a dict as it stands there, or a name that is only ever such a one."""
    if isinstance(value, ast.Dict):
        return None not in value.keys
    if not isinstance(value, ast.Name):
        return False
    known = [
        node.targets[0]
        for node in nodes
        if isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.value, ast.Dict)
        and None not in node.value.keys
    ]
    passed = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg is None]
    here = [node for node in nodes if isinstance(node, ast.Name) and node.id == value.id]
    return any(node in known for node in here) and all(node in [*known, *passed] for node in here)


def _loops(tree: ast.Module) -> list[ast.Call]:
    modules, names = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {
                alias.asname or alias.name for alias in node.names if alias.name == "elastic"
            }
        elif isinstance(node, ast.ImportFrom) and node.module == "elastic" and not node.level:
            names |= {alias.asname or alias.name for alias in node.names if alias.name in ENTER}
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _is_loop(node.func, modules, names)
    ]


def _is_loop(called: ast.expr, modules: set[str], names: set[str]) -> bool:
    if isinstance(called, ast.Attribute):
        return (
            called.attr in ENTER
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
