"""Draws faults for the pure packages with cosmic-ray's operators, evenly over operators and files,
and writes drawn.yaml.

    python tests/mutants/draw.py            # needs the extra: pip install 'elastic-ray[mutants]'

The same code and seed give the same faults. What a fault of the list before says of itself
(`tests`, `equivalent`) is kept where the same fault is drawn again. Left out: operators that need
arguments; decorators (a dataclass that is none is noticed by any import; a cache that is none, or a
dataclass that is not frozen, by nobody); edits of annotations and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import difflib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random

import yaml
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SEED = 20
LEAST_TEXT = 24  # characters of a fault's old text: shorter ones would soon stand twice
PARTS = {  # part -> its files, and how many faults are drawn
    "policy": ("elastic/policy/*.py", 20),
    "reshard": ("elastic/reshard/*.py", 14),
    "ledger": ("elastic/ledger/*.py", 9),
    "accounting": ("elastic/observe/accounting/*.py", 5),
    "order": ("elastic/data/order.py", 12),
    "planner": ("elastic/planner/*.py", 12),
}
# what an operator's name begins with -> those that count as one when faults are dealt out
FAMILIES = {
    "ReplaceBinaryOperator": "arithmetic",
    "ReplaceComparisonOperator": "comparison",
    "ReplaceUnaryOperator": "sign",
    "NumberReplacer": "number",
    "ReplaceTrueWithFalse": "truth",
    "ReplaceFalseWithTrue": "truth",
    "AddNot": "not",
    "ReplaceAndWithOr": "and-or",
    "ReplaceOrWithAnd": "and-or",
    "ReplaceBreakWithContinue": "jump",
    "ReplaceContinueWithBreak": "jump",
    "ZeroIterationForLoop": "loop",
    "ExceptionReplacer": "except",
}


@dataclass(frozen=True)
class Drawn:
    file: str
    operator: str
    old: str
    new: str


class _Bare(ast.NodeTransformer):
    """Takes off what is not drawn: annotations, docstrings and the words of a class's
    decorators."""

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.ClassDef):
            node.decorator_list = []
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("any", ast.Load())
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
        return self.generic_visit(node)


def bare(text: str) -> str | None:
    """A text of what the code does, None where it is no code."""
    try:
        return ast.dump(_Bare().visit(ast.parse(text)))
    except SyntaxError:
        return None


def family(operator: str) -> str | None:
    name = operator.partition("/")[2]
    return next((found for start, found in FAMILIES.items() if name.startswith(start)), None)


def replacement(before: str, after: str) -> tuple[str, str]:
    """The lines that differ, old and new, with as many lines around them as make the old ones
    unique."""
    old, new = before.splitlines(), after.splitlines()
    steps = [
        step
        for step in difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes()
        if step[0] != "equal"
    ]
    first, last, new_first, new_last = steps[0][1], steps[-1][2], steps[0][3], steps[-1][4]
    more = 0
    while True:
        start, end = max(0, first - more), last + more // 2
        found = "\n".join(old[start:end]).strip()
        if before.count(found) == 1 and len(found) >= LEAST_TEXT:
            break
        more += 1
    changed = [*old[start:first], *new[new_first:new_last], *old[last:end]]
    return found, "\n".join(changed).strip()


@dataclass(frozen=True)
class Candidate:
    """An edit that has not been made yet: the operator's `place`-th in the file."""

    path: Path
    operator: str
    place: int

    def made(self) -> Drawn | None:
        """None where it does not change what the code does, or leaves no code."""
        text = self.path.read_text()
        changed = mutate_code(text, get_operator(self.operator)(), self.place)
        if not changed or bare(changed) in (None, bare(text)):
            return None
        return Drawn(
            str(self.path.relative_to(ROOT)),
            self.operator.partition("/")[2],
            *replacement(text, changed),
        )


def candidates(pattern: str) -> dict[str, list[Candidate]]:
    """Family of operators -> all edits of the files."""
    found: dict[str, list[Candidate]] = defaultdict(list)
    for path in sorted(ROOT.glob(pattern)):
        nodes = list(ast_nodes(get_ast(path.read_text())))
        for operator in sorted(operator_names()):
            kind = family(operator)
            if kind is not None:
                made = get_operator(operator)()
                n = sum(len(list(made.mutation_positions(node))) for node in nodes)
                found[kind] += [Candidate(path, operator, place) for place in range(n)]
    return found


def drawn(part: str, seed: int) -> list[Drawn]:
    """Faults of a part: one of each family in turn, of the file that has fewest so far."""
    pattern, wanted = PARTS[part]
    left = candidates(pattern)
    for kind, some in left.items():
        Random(f"{seed} {part} {kind}").shuffle(some)
    taken: list[Drawn] = []
    in_file: Counter[Path] = Counter()
    while len(taken) < wanted and any(left.values()):
        for kind in sorted(left):
            some = left[kind] = sorted(left[kind], key=lambda one: in_file[one.path])
            one = None
            while one is None and some and len(taken) < wanted:
                candidate = some.pop(0)
                one = candidate.made()
                if one is not None and one.old in [other.old for other in taken]:
                    one = None
                if one is not None:
                    taken.append(one)
                    in_file[candidate.path] += 1
    return sorted(taken, key=lambda one: (one.file, one.old, one.new))


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
    )


_Dumper.add_representer(str, _text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=SEED)
    seed = parser.parse_args().seed
    path = HERE / "drawn.yaml"
    before = (
        {(row["file"], row["old"], row["new"]): row for row in yaml.safe_load(path.read_text())}
        if path.exists()
        else {}
    )
    rows = []
    for part in PARTS:
        for n, one in enumerate(drawn(part, seed), 1):
            row = {
                "id": f"{part}-{n:02}",
                "file": one.file,
                "old": one.old,
                "new": one.new,
                "origin": "drawn",
            }
            row |= {"why": one.operator, "tests": _nearest(one.file)}
            kept = before.get((one.file, one.old, one.new), {})
            rows.append(row | {key: kept[key] for key in ("tests", "equivalent") if key in kept})
    head = (
        f"# Drawn by tests/mutants/draw.py with seed {seed}; `tests` and `equivalent` are added "
        "by hand and kept.\n"
    )
    path.write_text(
        head + yaml.dump(rows, Dumper=_Dumper, sort_keys=False, width=128, allow_unicode=True)
    )


def _nearest(file: str) -> list[str]:
    """Tests that are named like the file, else none."""
    test = Path("tests", *Path(file).parts[1:-1], f"test_{Path(file).name}")
    return [str(test)] if (ROOT / test).exists() else []


if __name__ == "__main__":
    main()
