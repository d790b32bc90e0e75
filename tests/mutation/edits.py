"""Small wrong edits of a Python source: operators, comparisons, constants, extremes, axes.

What changes no behaviour is left alone: annotations, messages of exceptions and warnings, __all__,
sizes of caches, blocks for type checkers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
NAMES = {
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "minimum": "maximum",
    "maximum": "minimum",
}
SPOKEN = re.compile(r"(warn|print|echo|debug|info|warning|error|write_line|progress)$")
"""Calls whose arguments are read by people only."""


class Edit(NamedTuple):
    """One edit: the line it begins in, that line's text (or lines) before and after it."""

    line: int
    old: str
    new: str


class _Finder:
    def __init__(self, source: str) -> None:
        self.lines = source.encode().splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.data = b"".join(self.lines)

    def start(self, node: ast.expr) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def between(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> Iterator[Span]:
        if type(operator) not in OPERATORS:
            return
        old, new = OPERATORS[type(operator)]
        gap = self.data[self.end(left) : self.start(right)].decode()
        gap = re.sub("#.*", lambda comment: "." * len(comment.group().encode()), gap)
        found = re.search(r"\s+".join(map(re.escape, old.split())), gap)
        if found:
            at = self.end(left) + len(gap[: found.start()].encode())
            yield at, at + len(found.group()), new

    def spans(self, node: ast.AST) -> Iterator[Span]:
        """The edits of this node alone."""
        if isinstance(node, ast.BinOp):
            yield from self.between(node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self.between(left, right, node.op)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, right, operator in zip(sides, sides[1:], node.ops, strict=False):
                yield from self.between(left, right, operator)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self.start(node), self.start(node) + len("not"), ""
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool):
                yield self.start(node), self.end(node), str(not node.value)
            elif isinstance(node.value, int):
                yield self.start(node), self.end(node), str(node.value + 1)
            elif isinstance(node.value, float):
                yield self.start(node), self.end(node), repr(2 * node.value or 1.0)
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield self.start(node), self.end(node), NAMES[node.id]
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield self.end(node) - len(node.attr), self.end(node), NAMES[node.attr]

    def edit(self, span: Span) -> Edit:
        start, end, text = span
        first = self.data.count(b"\n", 0, start)
        last = self.data.count(b"\n", 0, end - 1)
        begin, stop = self.starts[first], self.starts[last + 1]
        old = self.data[begin:stop].decode()
        new = (self.data[begin:start] + text.encode() + self.data[end:stop]).decode()
        if text == "":  # "not" is gone, and so is the space after it
            new = (self.data[begin:start] + self.data[end:stop].lstrip(b" ")).decode()
        return Edit(first + 1, old.rstrip("\n"), new.rstrip("\n"))


Span = tuple[int, int, str]
"""First byte, end, new text."""


def _left_alone(node: ast.AST) -> bool:
    """Whether nothing below it is edited."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    if isinstance(node, ast.keyword):
        return node.arg in ("maxsize", "stacklevel", "strict", "slots", "frozen")
    return isinstance(node, ast.Call) and bool(SPOKEN.search(ast.unparse(node.func)))


def edits(source: str) -> list[Edit]:
    """Every edit of `source`, in the order of the text."""
    finder, found = _Finder(source), []

    def visit(node: ast.AST) -> None:
        if _left_alone(node):
            return
        found.extend(map(finder.edit, finder.spans(node)))
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "type_comment"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child)

    visit(ast.parse(source))
    return sorted(set(found))
