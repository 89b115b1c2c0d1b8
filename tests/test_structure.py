"""The rules of the house that a tool does not check: sizes, words, purity, and what an import may
bring along."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from support.places import ROOT, TESTS

SOURCES = sorted((ROOT / "elastic").rglob("*.py"))
ALL = SOURCES + sorted(
    p
    for top in ("tests", "jobs")
    for p in (ROOT / top).rglob("*.py")
    if "elastic_runs" not in p.parts
)

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
MAX_PARAMETERS = 8
MAX_POSITIONAL = 3
MAY_TAKE_MORE_BY_POSITION = {
    "torch or transformers calls it": {
        "forward", "__torch_dispatch__", "__torch_function__", "hook", "attend", "_note"
    },
    "is given to a thread or a process with its arguments": {"_run", "_round", "_hear"},
    "is called with a layout and its stages spread, or one like the other two": {
        "boxes", "owned_boxes", "plan_transfers", "permuted", "lane", "tp_s", "cp_s", "ep_s"
    },
}  # fmt: skip
MAX_ROOM_FILES = 12  # of a folder, __init__.py and __main__.py left out
FORBIDDEN_WORDS = ("manager", "engine", "helper", "utils", "context", "common")
PURE = (
    "types", "reshard", "planner", "policy", "observe.accounting.accounts", "observe.accounting.launch_times",
    "observe.accounting.loss_checks", "observe.accounting.model_flops",
    "observe.accounting.transitions", "data.order",
)  # fmt: skip
IMPURE = {
    "time", "datetime", "random", "secrets", "os", "threading", "concurrent", "multiprocessing",
    "asyncio", "logging", "socket", "subprocess",
}  # fmt: skip
OBJECT_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
UNPICKLERS = {
    f"{module}.{name}"
    for module in ("pickle", "_pickle", "cloudpickle", "dill", "marshal", "ray.cloudpickle")
    for name in ("load", "loads", "Unpickler", "_Unpickler")
} | {"shelve.open", "torch.serialization.load", "yaml.unsafe_load", "yaml.full_load"}  # fmt: skip
MAY_UNPICKLE = {  # file -> what it calls, and why that runs no code of a stranger
    "elastic/cluster/workers/train_function.py": (
        {"pickle.loads"},
        "the user's function, among what Ray gives an actor of this driver, behind Ray's token",
    ),
    "elastic/data/loader_processes.py": (
        {"pickle.loads"},
        "words between a process and the child that it started, over a pipe",
    ),
    "elastic/worker/checkpoint/foreign_dcp.py": (
        {"pickle._Unpickler"},
        "knows a few plain classes and refuses every other name",
    ),
}
BLOCKED = """
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "ray"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not {"torch", "ray"} & set(sys.modules)
"""


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    """`elastic/policy/state/fold.py` -> `policy.state.fold`."""
    parts = path.relative_to(ROOT / "elastic").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.fixture(autouse=True, scope="module")
def trees_are_kept() -> Iterator[None]:
    """Looking for garbage among them took longer than making them."""
    gc.disable()
    yield
    text_of.cache_clear()
    nodes_of.cache_clear()
    gc.enable()


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(text_of(path))))


def tree_of(path: Path) -> ast.Module:
    module = nodes_of(path)[0]
    assert isinstance(module, ast.Module)
    return module


def nodes_in(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(text)))


def functions(nodes: Iterable[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    arguments = function.args
    return [
        a
        for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if a.arg not in ("self", "cls")
    ]


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Top-level names of all modules that a file imports, also inside functions."""
    return {name.split(".")[0] for name in modules(nodes)}


def modules(nodes: Iterable[ast.AST]) -> list[str]:
    """Whole names of the modules that a file imports, from where it stands alone."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return found


# Each rule is one test that names all files that break it: a test for each file and rule took
# longer than what it looked at.


def none_of(found: Iterable[str]) -> None:
    wrong = list(found)
    assert not wrong, "\n".join(wrong)


def too_large(path: Path) -> Iterator[str]:
    n_lines = sum(1 for line in text_of(path).splitlines() if line.strip())
    if n_lines > MAX_FILE_LINES:
        yield f"{label(path)} has {n_lines} lines that are not blank"
    for function in functions(nodes_of(path)):
        where = f"{label(path)}:{function.lineno} {function.name}"
        if (function.end_lineno or 0) - function.lineno >= MAX_FUNCTION_LINES:
            yield f"{where} is too long"
        if len(parameters(function)) > MAX_PARAMETERS:
            yield f"{where} takes {len(parameters(function))} parameters"


def by_position(nodes: Iterable[ast.AST]) -> list[str]:
    """Functions of which more than MAX_POSITIONAL arguments may be given without their names."""
    allowed = set().union(*MAY_TAKE_MORE_BY_POSITION.values())
    return [
        f"{f.lineno} {f.name}"
        for f in functions(nodes)
        if f.name not in allowed and len(parameters(f)) - len(f.args.kwonlyargs) > MAX_POSITIONAL
    ]


def test_the_fourth_parameter_is_given_by_name() -> None:
    none_of(
        f"{label(path)}:{found} takes more than {MAX_POSITIONAL} by position: put * before the rest"
        for path in SOURCES
        for found in by_position(nodes_of(path))
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(a, b, c, d): ...", ["1 f"]),
        ("def f(a, b, c, *, d, e): ...", []),
        ("class A:\n    def f(self, a, b, c): ...", []),
        ("class A:\n    async def f(self, a, /, b, c, d=0): ...", ["2 f"]),
        ("def forward(a, b, c, d): ...", []),
    ],
)
def test_the_rule_about_positions_sees(text: str, found: list[str]) -> None:
    assert by_position(nodes_in(text)) == found


@pytest.mark.slow
def test_sizes() -> None:
    none_of(line for path in ALL for line in too_large(path))


def test_the_rule_about_sizes_sees(tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    lines = ["def f(a, b, c, d, e, f, g, h, i):", *["    a = 1"] * 80, *["x = 1"] * 430]
    path.write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "ROOT", tmp_path)
        found = list(too_large(path))
    assert found == [
        "large.py has 511 lines that are not blank", "large.py:1 f is too long",
        "large.py:1 f takes 9 parameters"
    ]  # fmt: skip


def of_unlike_things(annotation: ast.expr | None) -> bool:
    """`tuple[int, str]`, also where it may be None; `tuple[int, ...]` and `tuple[int, int]` are of
    like ones."""
    match annotation:
        case ast.Constant(str(text)):
            return of_unlike_things(ast.parse(text, mode="eval").body)
        case ast.BinOp(left, ast.BitOr(), right):
            return of_unlike_things(left) or of_unlike_things(right)
        case ast.Subscript(ast.Name("tuple"), ast.Tuple(parts)):
            return len({ast.unparse(part) for part in parts} - {"..."}) > 1
    return False


def packed(nodes: Iterable[ast.AST]) -> list[str]:
    return [
        f"{f.lineno} {f.name}({a.arg})"
        for f in functions(nodes)
        for a in parameters(f)
        if of_unlike_things(a.annotation)
    ]


def test_no_parameter_is_a_tuple_of_unlike_things() -> None:
    none_of(
        (
            f"{label(path)}:{found} takes unlike things in one tuple: give each a parameter, or "
            "all a class"
        )
        for path in SOURCES
        for found in packed(nodes_of(path))
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(a: tuple[int, str]): ...", ["1 f(a)"]),
        (
            "class A:\n    async def f(self, a: int, *, b: tuple[tuple[int, ...], int]): ...",
            ["2 f(b)"],
        ),
        (
            "def f(a: tuple[int, str] | None, b: 'tuple[int, str]' = (1, ''), /): ...",
            ["1 f(a)", "1 f(b)"],
        ),
        (
            "def f(a: tuple[int, ...], b: tuple[int, int], c: tuple[()], d: tuple, e: int, f): ...",
            [],
        ),
        ("def f(a: Sequence[tuple[int, str]]) -> tuple[int, str]: ...", []),
    ],
)
def test_the_rule_against_packed_parameters_sees(text: str, found: list[str]) -> None:
    assert packed(nodes_in(text)) == found


def test_words() -> None:
    named = [
        (path, name) for path in SOURCES for name in [path.stem, *(n.name for n in classes(path))]
    ]
    none_of(
        f"{label(path)}: the name {name} says nothing ({word})"
        for path, name in named
        for word in FORBIDDEN_WORDS
        # torch's word
        if word in name.lower().replace("context_parallel", "").replace("contextparallel", "")
    )


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in nodes_of(path) if isinstance(node, ast.ClassDef))


def pure(path: Path) -> bool:
    return any(
        module_name(path) == name or module_name(path).startswith(name + ".") for name in PURE
    )


def test_each_pure_name_is_that_of_a_package_or_a_module() -> None:
    found = {module_name(path) for path in SOURCES}
    assert set(PURE) <= found


def test_purity() -> None:
    found = {path: imported(nodes_of(path)) & IMPURE for path in SOURCES if pure(path)}
    none_of(
        f"{label(path)} is pure and must not import {', '.join(sorted(names))}"
        for path, names in found.items()
        if names
    )


def rooms(root: Path) -> dict[Path, list[Path]]:
    """The folders of a package: their modules, without __init__ and __main__."""
    found: dict[Path, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        found.setdefault(path.parent, [])
        if path.stem not in ("__init__", "__main__"):
            found[path.parent].append(path)
    return found


def crowded(root: Path) -> Iterator[str]:
    for room, files in rooms(root).items():
        if len(files) > MAX_ROOM_FILES:
            yield f"{room.relative_to(root)} holds {len(files)} files"
        init = room / "__init__.py"
        if not (init.exists() and ast.get_docstring(tree_of(init))):
            yield f"{room.relative_to(root)}/__init__.py does not say what the room is for"
    names = [path.name for files in rooms(root).values() for path in files]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{name} stands in more than one room"
    places: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(root)))
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"{name} is the name of more than one class: {', '.join(found)}"


def test_rooms() -> None:
    none_of(crowded(ROOT / "elastic"))


def test_the_rule_about_rooms_sees(tmp_path: Path) -> None:
    for room, n in (("a", 13), ("a/b", 1), ("c", 12)):
        (tmp_path / room).mkdir()
        for i in range(n):
            (tmp_path / room / f"{room[0]}{i}.py").touch()
    for room in ("", "c", "a"):
        (tmp_path / room / "__init__.py").write_text('"""What it is for."""')
    for file in ("a/a1.py", "c/c1.py"):
        (tmp_path / file).write_text("class Found: ...\nclass _Own: ...\n")
    assert list(crowded(tmp_path)) == [
        "a holds 13 files", "a/b/__init__.py does not say what the room is for",
        "a0.py stands in more than one room",
        "Found is the name of more than one class: a/a1.py, c/c1.py",
    ]  # fmt: skip


def imports_of(path: Path, names: set[str]) -> set[str]:
    """The modules of ours that a file imports, also in functions and for types alone."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wholes = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= wholes & names or {node.module}
    return found & names


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring; nothing where there is none."""
    left = {name: set(others) for name, others in imports.items()}
    while ends := [name for name, others in left.items() if not others & left.keys()]:
        for name in ends:
            del left[name]
    ring: list[str] = []
    at = min(left, default="")
    while at and at not in ring:
        ring.append(at)
        at = min(left[at] & left.keys())
    return ring[ring.index(at) :] if at else []


@pytest.mark.slow
def test_no_modules_import_each_other() -> None:
    files = {f"elastic.{module_name(path)}".rstrip("."): path for path in SOURCES}
    names = set(files)
    found = circle({name: imports_of(path, names) - {name} for name, path in files.items()})
    assert not found, " -> ".join([*found, found[0]])


def test_the_rule_about_circles_sees(tmp_path: Path) -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}}) == ["b", "c", "d"]
    path = tmp_path / "x.py"
    path.write_text(
        "if TYPE_CHECKING:\n    from p import q\ndef f():\n    import r.s\n    from t import u\n"
    )
    assert imports_of(path, {"p", "p.q", "r.s", "t"}) == {"p.q", "r.s", "t"}


def test_nothing_catches_everything() -> None:
    lines = [
        (path, i, line) for path in SOURCES for i, line in enumerate(text_of(path).splitlines(), 1)
    ]
    none_of(
        f"{label(path)}:{i} catches everything"
        for path, i, line in lines
        if line.strip().startswith("except:")
    )


def full_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """What the names that a file imports stand for: `import pickle as p` -> p: pickle."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return names


def unpicklers(nodes: Sequence[ast.AST]) -> set[str]:
    """Names in a file by which bytes become objects, and so may run code."""
    names, found = full_names(nodes), set()
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name):
            text = ast.unparse(node)
            first, dot, rest = text.partition(".")
            name = names.get(first, first) + dot + rest
            if name in UNPICKLERS or name.rpartition(".")[2] in OBJECT_COLLECTIVES:
                found.add(name)
        elif isinstance(node, ast.Call):
            said = {word.arg: ast.unparse(word.value) for word in node.keywords}
            first, dot, rest = ast.unparse(node.func).partition(".")
            if (
                names.get(first, first) + dot + rest == "torch.load"
                and said.get("weights_only") != "True"
            ):
                found.add("torch.load")
            if said.get("allow_pickle", "False") != "False":
                found.add("allow_pickle")
    return found


@pytest.mark.slow
def test_nothing_is_unpickled() -> None:
    odd = {
        path: unpicklers(nodes_of(path)) ^ MAY_UNPICKLE.get(label(path), (set(), ""))[0]
        for path in SOURCES
    }
    none_of(
        (
            f"{label(path)}: {', '.join(sorted(found))}; elastic/worker/process_groups/wire.py "
            "sends without pickle"
        )
        for path, found in odd.items()
        if found
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pickle\npickle.loads(b'')", {"pickle.loads"}),
        ("import pickle as p\nx = p.load", {"pickle.load"}),
        ("from pickle import loads as read\nread(b'')", {"pickle.loads"}),
        (
            "from torch.distributed import all_gather_object\nall_gather_object([], 1)",
            {"torch.distributed.all_gather_object"},
        ),
        (
            "import torch.distributed as dist\ndist.send_object_list([])",
            {"torch.distributed.send_object_list"},
        ),
        ("import torch\ntorch.load('a')", {"torch.load"}),
        ("import torch\ntorch.load('a', weights_only=False)", {"torch.load"}),
        ("import torch\ntorch.load('a', weights_only=True)", set()),
        ("import numpy\nnumpy.load('a', allow_pickle=True)", {"allow_pickle"}),
        ("import pickle, json\npickle.dumps(1)\njson.loads('1')", set()),
    ],
)
def test_the_rule_against_pickle_sees(text: str, found: set[str]) -> None:
    assert unpicklers(nodes_in(text)) == found


def test_imports_bring_neither_torch_nor_ray() -> None:
    names = [
        "elastic",
        "elastic.sim",
        "elastic.sim.sim_backend",
        "elastic.sim.replay",
        "elastic.cli.command_line",
    ]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *names], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_the_block_blocks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, "torch"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode != 0
    assert "blocked: torch" in done.stderr


# ----------------------------------------------------------------------------- the tests themselves


ELSEWHERE = ("programs", "bench")  # folders of what other processes run, and of what measures time
OWN = [p for p in ALL if p.is_relative_to(TESTS)]
WAIT_HERE = [
    p for p in OWN if p.name.startswith("test_") or not {*ELSEWHERE} & {*p.relative_to(TESTS).parts}
]
SLEEPERS = ("time.sleep", "asyncio.sleep", "threading.Event().wait")
REASON = re.compile(r"# sleeps: \w")


def sleeps(text: str) -> list[int]:
    """Lines that wait for time to pass, and do not say why."""
    if not re.search(r"sleep|\bEvent\b", text):
        return []
    nodes, lines, found = nodes_in(text), text.splitlines(), []
    names = full_names(nodes)
    for node in nodes:
        if (
            isinstance(node, ast.Name)
            or isinstance(node, ast.Attribute)
            and node.attr in ("sleep", "wait")
        ):
            first, dot, rest = ast.unparse(node).partition(".")
            called, bracket, more = first.partition("(")
            name = names.get(called, called) + bracket + more + dot + rest
            if name in SLEEPERS and not REASON.search(lines[(node.end_lineno or node.lineno) - 1]):
                found.append(node.end_lineno or node.lineno)
    return found


@pytest.mark.slow
def test_no_test_waits_for_time_to_pass() -> None:
    """It waits for an event, by `until` of tests/support/waiting.py; where sleeping is what is
    tested, a comment says so."""
    found = {path: sleeps(text_of(path)) for path in WAIT_HERE}
    none_of(
        f"{label(path)}:{at} sleeps; wait for an event, or say why in '# sleeps: ...'"
        for path, at in found.items()
        if at
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import time\ntime.sleep(1)", [2]),
        ("import time as t\n\nt.sleep(1)", [3]),
        ("from time import sleep\nsleep(1)", [2]),
        ("from time import sleep as nap\nthen = nap", [2]),
        ("import asyncio\nasyncio.sleep(1)", [2]),
        ("import threading\nthreading.Event().wait(1)", [2]),
        ("from threading import Event\nEvent().wait(1)", [2]),
        ("import time\ntime.sleep(1)  # sleeps:", [2]),
        ("import time\ntime.sleep(1)  # sleeps: a slow read is the subject", []),
        ("code = 'import time; time.sleep(1)'", []),
        ("done.wait(60)", []),
    ],
)
def test_the_rule_against_sleep_sees(text: str, found: list[int]) -> None:
    assert sleeps(text) == found


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names)), (
        f"twice: {sorted({name for name in names if names.count(name) > 1})}"
    )


def test_no_test_file_is_imported() -> None:
    """What several tests need stands in tests/support."""
    none_of(
        f"{label(path)} imports {name}"
        for path in OWN
        for name in modules(nodes_of(path))
        if re.fullmatch(r"(.*\.)?(test_\w+|conftest)", name)
    )
