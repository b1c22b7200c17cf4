"""Mutation operators for Python: each yields spans of the source and their replacements.

Not mutated: docstrings, annotations, TYPE_CHECKING blocks and `__slots__`, because nothing could
detect it; text and bytes, although they may matter; definitions, imports and whole statements
outside functions, because every import would fail. Numbers, conditions and the like inside the
values of such statements are mutated.
"""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mutation.change import Change, Position, other_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
}
OPPOSITES = {"max": "min", "min": "max", "any": "all", "all": "any"}
FIXED_ORDER = {"isinstance", "getattr", "setattr", "hasattr", "cast", "zip", "max", "min"}
"""Functions whose arguments are not swapped: it would raise, or change nothing."""


def changes(text: str) -> Iterator[Change]:
    """Every change of a module."""
    yield from _ModuleVisitor(text).body(ast.parse(text).body, Position(binds="*"))


class _ModuleVisitor:
    """Walks a module and applies every operator to every node."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._bound: frozenset[str] = frozenset()
        """Names that stay bound in the function even without one of its assignments."""
        self._operators: dict[type[ast.expr], Callable[[Any, Position], Iterator[Change]]] = {
            ast.Constant: self._constant,
            ast.Compare: self._comparison,
            ast.BoolOp: self._bool_op,
            ast.UnaryOp: self._unary_op,
            ast.BinOp: self._bin_op,
            ast.Call: self._call,
        }

    def body(self, statements: Sequence[ast.stmt], place: Position) -> Iterator[Change]:
        for statement in statements:
            if not (_is_text(statement) or _is_for_types(statement)):
                yield from self._statement(statement, place)

    def _statement(self, node: ast.stmt, place: Position) -> Iterator[Change]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from self._definition(node, place)
            return
        place = place._replace(first=node.lineno, last=_last_of_header(node))
        if place.binds:
            place = place._replace(scope=(place.first, place.last), binds=name_of(node))
        else:
            yield from self._dropped(node, place)
        for part, parent in _expressions(node):
            if part is not getattr(node, "annotation", None):
                yield from self._expression(part, place, parent)
        for handler in getattr(node, "handlers", []):
            yield from self._handler(handler, place)
        for name in ("body", "orelse", "finalbody"):
            yield from self.body(getattr(node, name, []), place)
        if isinstance(node, ast.Try) and len(node.finalbody) > 1:
            yield self._replaced("drop a finally", node.finalbody, "pass", place)

    def _definition(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, place: Position
    ) -> Iterator[Change]:
        name = f"{place.function}.{node.name}".lstrip(".")
        header = Position(node.lineno, node.lineno, name, (node.lineno, node.end_lineno or 0), "*")
        if isinstance(node, ast.ClassDef):
            yield from self.body(node.body, header)
            return
        header = header._replace(last=_last_of_header(node), binds=node.name)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            yield from self._expression(default, header, node)
        scope = place.scope if place.function and not place.binds else header.scope
        outer, self._bound = self._bound, _bound_in(node)
        yield from self.body(node.body, header._replace(binds="", scope=scope))
        self._bound = outer

    # Statements

    def _dropped(self, node: ast.stmt, place: Position) -> Iterator[Change]:
        """Drop a statement, or the value that it returns or assigns."""
        if isinstance(node, (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete, ast.For, ast.Assert)):
            yield self._replaced("drop a statement", [node], "pass", place)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            yield from self._assignment(node, node.value, place)
        elif isinstance(node, ast.Return):
            if node.value is None:
                yield self._replaced("drop a return", [node], "pass", place)
            elif not (isinstance(node.value, ast.Constant) and not node.value.value):
                yield self._replaced("return None", [node.value], "None", place)
        elif isinstance(node, ast.Break):
            yield self._replaced("continue instead of break", [node], "continue", place)
        elif isinstance(node, ast.Continue):
            yield self._replaced("break instead of continue", [node], "break", place)

    def _assignment(
        self, node: ast.Assign | ast.AnnAssign, value: ast.expr, place: Position
    ) -> Iterator[Change]:
        """Drop it if its name is bound without it; otherwise every use of the name would raise.

        Of several values that are assigned at once, one is replaced.
        """
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {each.id for each in targets if isinstance(each, ast.Name)}
        if any(isinstance(each, (ast.Tuple, ast.List)) for each in targets):
            for each in value.elts if isinstance(value, ast.Tuple) else ():
                if not _is_none(each):
                    yield self._replaced("assign None", [each], "None", place)
            return
        if names <= self._bound:
            yield self._replaced("drop a statement", [node], "pass", place)
        elif not _is_none(value):
            yield self._replaced("assign None", [value], "None", place)

    def _handler(self, node: ast.ExceptHandler, place: Position) -> Iterator[Change]:
        place = place._replace(first=node.lineno, last=_last_of_header(node))
        if node.type is not None:
            yield from self._expression(node.type, place, node)
        if len(node.body) > 1:
            inner = place._replace(last=node.body[-1].end_lineno or 0)
            yield self._replaced("drop an except", node.body, "pass", inner)
        yield from self.body(node.body, place)

    # Expressions

    def _expression(self, node: ast.expr, place: Position, parent: ast.AST) -> Iterator[Change]:
        if isinstance(node, ast.JoinedStr):
            return  # a string
        conditions = [getattr(parent, "test", None), *getattr(parent, "ifs", [])]
        if node in conditions and not isinstance(parent, ast.Assert):
            yield from self._condition(node, place)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            yield from self._elements(node, place, parent)
        elif operator := self._operators.get(type(node)):
            yield from operator(node, place)
        for part, around in _expressions(node):
            yield from self._expression(part, place, around)

    def _constant(self, node: ast.Constant, place: Position) -> Iterator[Change]:
        value = node.value
        if isinstance(value, bool):
            yield self._replaced("flip a constant", [node], str(not value), place)
        elif isinstance(value, (int, float)):
            for new in other_numbers(value):
                yield self._replaced("change a number", [node], repr(new), place)

    def _condition(self, node: ast.expr, place: Position) -> Iterator[Change]:
        for value in ("True", "False"):
            if self._source(node) != value:
                yield self._replaced(f"condition is {value}", [node], value, place)
        if not isinstance(node, (ast.UnaryOp, ast.Constant)) and not (
            isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _NEGATED
        ):
            new = f"not ({self._source(node)})"
            yield self._replaced("negate a condition", [node], new, place)

    def _unary_op(self, node: ast.UnaryOp, place: Position) -> Iterator[Change]:
        if isinstance(node.op, (ast.Not, ast.USub)):
            sign = "not" if isinstance(node.op, ast.Not) else "-"
            yield self._replaced(f"drop {sign}", [node], f"({self._source(node.operand)})", place)

    def _bin_op(self, node: ast.BinOp, place: Position) -> Iterator[Change]:
        if type(node.op) in ARITHMETIC and not (_is_text(node.left) or _is_text(node.right)):
            yield from self._between(node.left, node.right, *ARITHMETIC[type(node.op)], place)

    def _comparison(self, node: ast.Compare, place: Position) -> Iterator[Change]:
        operands = [node.left, *node.comparators]
        for operator, (left, right) in zip(node.ops, pairwise(operands), strict=True):
            yield from self._between(left, right, *COMPARISONS[type(operator)], place)

    def _bool_op(self, node: ast.BoolOp, place: Position) -> Iterator[Change]:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            yield from self._between(left, right, rf"\b{old}\b", new, place)
        for dropped in node.values:
            rest = [each for each in node.values if each is not dropped]
            texts = [f"({self._source(each)})" for each in rest]
            yield self._replaced(
                f"drop a part of {old}", [node], f"({f' {old} '.join(texts)})", place
            )

    def _call(self, node: ast.Call, place: Position) -> Iterator[Change]:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in OPPOSITES:
            yield self._replaced("change a call", [node.func], OPPOSITES[name], place)
        plain = not any(isinstance(each, ast.Starred) for each in node.args)
        if plain and len(node.args) > 1 and name not in FIXED_ORDER:
            for left, right in pairwise(node.args):
                new = f"{self._source(right)}, {self._source(left)}"
                yield self._replaced("swap arguments", [left, right], new, place)
        for keyword in node.keywords:
            if keyword.arg is not None:
                start, end = self._span([keyword])
                end += len(re.match(r"\s*,?\s*", self.text[end:])[0])  # type: ignore[index]
                yield self._change("drop a keyword", start, end, "", place)

    def _elements(
        self, node: ast.Tuple | ast.List | ast.Set, place: Position, parent: ast.AST
    ) -> Iterator[Change]:
        unpacked = isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Tuple)
        fixed = unpacked or isinstance(parent, ast.Subscript)
        plain = all(isinstance(each, (ast.Constant, ast.Name, ast.Attribute)) for each in node.elts)
        loaded = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if plain and loaded and not fixed and len(node.elts) > 1:
            for dropped in node.elts:
                rest = [self._source(each) for each in node.elts if each is not dropped]
                start, end = ("{", "}") if isinstance(node, ast.Set) else ("(", ",)")
                new = f"{start}{', '.join(rest)}{end}"
                new = f"[{', '.join(rest)}]" if isinstance(node, ast.List) else new
                yield self._replaced("drop an element", [node], new, place)

    # Text

    def _between(
        self, left: ast.expr, right: ast.expr, old: str, new: str, place: Position
    ) -> Iterator[Change]:
        """Change the operator between two operands."""
        start, end = self._span([left])[1], self._span([right])[0]
        if found := re.search(old, self.text[start:end]):
            operator = f"{new} instead of {found[0]}"
            yield self._change(operator, start + found.start(), start + found.end(), new, place)

    def _replaced(
        self, operator: str, nodes: Sequence[ast.expr | ast.stmt], new: str, place: Position
    ) -> Change:
        return self._change(operator, *self._span(nodes), new, place)

    def _change(self, operator: str, start: int, end: int, new: str, place: Position) -> Change:
        return Change(operator, start, end, new, place)

    def _source(self, node: ast.expr) -> str:
        start, end = self._span([node])
        return self.text[start:end]

    def _span(self, nodes: Sequence[ast.expr | ast.stmt | ast.keyword]) -> tuple[int, int]:
        first, last = nodes[0], nodes[-1]
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        start = self._offset(first.lineno, first.col_offset)
        return start, self._offset(last.end_lineno, last.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        before = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(before)


_NEGATED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
"""Comparisons that another operator negates."""


def _expressions(node: ast.AST) -> Iterator[tuple[ast.expr, ast.AST]]:
    """The expressions directly in a node, each with its parent."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr):
            yield part, node
        elif isinstance(part, (ast.keyword, ast.comprehension, ast.withitem)):
            yield from _expressions(part)


def _is_text(node: ast.AST) -> bool:
    """Whether a node is a docstring, `...`, or a string in an expression."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return text or isinstance(node, ast.JoinedStr)


def _is_for_types(node: ast.stmt) -> bool:
    """Whether a statement is only for type checkers."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return name_of(node) == "__slots__" or "overload" in map(
        ast.unparse, getattr(node, "decorator_list", [])
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def name_of(node: ast.stmt) -> str:
    """The name that a statement outside functions defines."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else "*"


def _last_of_header(node: ast.stmt | ast.ExceptHandler) -> int:
    """The last line of a statement, without the statements inside it."""
    inside = getattr(node, "body", None)
    return max(node.lineno, inside[0].lineno - 1) if inside else node.end_lineno or node.lineno


def _bound_in(node: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """The parameters, and the names that are assigned to more than once."""
    args = node.args
    named = {each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
    stored = [
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]
    return frozenset(named | {name for name in stored if stored.count(name) > 1})
