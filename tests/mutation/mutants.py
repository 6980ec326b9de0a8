"""Small changes of the source that a test ought to notice, found in its syntax tree.

Left out are places where a change could not matter or could not be noticed here: annotations,
decorators, words (messages, f-strings, docstrings), ``__all__``, blocks and overloads for type
checkers, Triton kernels, and arguments such as ``device=`` that only another machine would miss.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
UNNOTICED = {"device", "non_blocking", "pin_memory", "encoding", "strict", "stacklevel"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the bytes from ``start`` to ``end`` become ``after``."""

    path: str
    line: int
    operator: str
    start: int
    end: int
    before: str
    after: str
    source: str  # a digest of the file it was found in

    @property
    def key(self) -> str:
        """The same for the same change of the same file."""
        words = f"{self.path} {self.source} {self.start} {self.operator} {self.after}"
        return hashlib.sha256(words.encode()).hexdigest()[:12]

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.digest = hashlib.sha256(source).hexdigest()[:12]
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []

    def add(self, node: ast.expr | ast.stmt, operator: str, after: str) -> None:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        before = self.source[start:end].decode()
        where = (self.path, node.lineno, operator, start, end)
        self.found.append(Mutant(*where, before, after, self.digest))

    def change(self, node: ast.expr, operator: str, **fields: object) -> None:
        """The same expression with other fields, in parentheses."""
        changed = copy.copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        self.add(node, operator, f"({ast.unparse(changed)})")

    def visit_all(self, nodes: Sequence[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    # What is not looked into.

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        words = [ast.unparse(decorator) for decorator in node.decorator_list]
        if not any("jit" in word or "overload" in word for word in words):
            self.visit_all([*node.args.defaults, *node.args.kw_defaults, *node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_all(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit_all([node.value])

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    # What is changed.

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "raise", "pass")

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.condition(node)

    def visit_While(self, node: ast.While) -> None:
        self.condition(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node)

    def condition(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if not isinstance(node.test, (ast.Compare, ast.Constant)):
            self.add(node.test, "not", f"(not ({ast.unparse(node.test)}))")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(x, ast.Name) and x.id.startswith("__") for x in node.targets):
            return
        if not any(isinstance(target, (ast.Name, ast.Tuple)) for target in node.targets):
            self.add(node, "statement", "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "statement", "pass")
        if type(node.op) in ARITHMETIC:
            changed = copy.copy(node)
            changed.op = ARITHMETIC[type(node.op)]()
            self.add(node, "arithmetic", ast.unparse(changed))
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add(node, "statement", "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not _is_none(node.value):
            self.add(node, "return", "return None")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                others = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                self.change(node, "comparison", ops=others)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC:
            self.change(node, "arithmetic", op=ARITHMETIC[type(node.op)]())
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.change(node, "and/or", op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        operator = "not" if isinstance(node.op, ast.Not) else "sign"
        self.add(node, operator, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for place, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg not in UNNOTICED:
                fewer = [*node.keywords[:place], *node.keywords[place + 1 :]]
                self.change(node, "argument", keywords=fewer)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in UNNOTICED:
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(node, "boolean", str(not value))
        elif isinstance(value, int):
            self.add(node, "integer", str(value + 1))
            if value > 0:
                self.add(node, "integer", str(value - 1))
        elif isinstance(value, float):
            self.add(node, "float", repr(2 * value if value else 1.0))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def mutants_of(root: Path, path: Path) -> list[Mutant]:
    """All that can be changed in one file, in the order of the file."""
    source = path.read_bytes()
    finder = _Finder(path.relative_to(root).as_posix(), source)
    finder.visit(ast.parse(source))
    return finder.found


def draw(mutants: Sequence[Mutant], seed: int) -> Iterator[Mutant]:
    """All of them in an order in which every operator comes equally often as long as it lasts."""
    chance = random.Random(seed)
    by_operator: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_operator.setdefault(mutant.operator, []).append(mutant)
    for own in by_operator.values():
        chance.shuffle(own)
    while by_operator:
        for operator in sorted(by_operator):
            yield by_operator[operator].pop()
            if not by_operator[operator]:
                del by_operator[operator]
