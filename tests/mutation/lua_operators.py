"""Mutation operators for Lua. A tokenizer finds the spans; invalid results are discarded later."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from mutation.change import Change, Position, other_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = re.compile(
    r"(?P<comment>--[^\n]*)|(?P<string>'[^'\n]*')"
    r"|(?P<number>\d+(?:\.\d+)?(?:e\d+)?)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>\.\.\.|\.\.|==|~=|<=|>=|[-+*/%^#<>=(){}\[\],;:.])"
)
SWAPPED = {
    "==": "~=",
    "~=": "==",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "and": "or",
    "or": "and",
    "max": "min",
    "min": "max",
    "true": "false",
    "false": "true",
}
KEYWORDS = {"local", "if", "elseif", "else", "end", "for", "while", "do", "repeat", "until"}
FLAGS = {"'NX'", "'XX'", "'GET'", "'REV'"}
"""Options of a command; one is dropped together with the comma before it."""


class Token(NamedTuple):
    """A token and where it is."""

    kind: str
    text: str
    start: int
    end: int
    line: int


class Statement(NamedTuple):
    """A simple statement, or the header of a compound one, on one or more lines."""

    tokens: list[Token]

    @property
    def first(self) -> Token:
        return self.tokens[0]

    @property
    def is_simple(self) -> bool:
        return self.first.kind == "name" and self.first.text not in {
            *KEYWORDS,
            "return",
            "function",
        }

    @property
    def span(self) -> tuple[int, int]:
        return self.tokens[0].start, self.tokens[-1].end


def changes(text: str) -> Iterator[Change]:
    """Every change of a script."""
    statements = list(_statements(text))
    for statement in statements:
        found = [*_dropped(statement), *_condition(text, statement), *_tokens(statement)]
        for operator, start, end, new in found:
            yield _change(operator, (start, end), new, statement, statement)
    for one, other in pairwise(statements):
        if one.is_simple and other.is_simple and _indent(text, one) == _indent(text, other):
            (start, middle), (begin, end) = one.span, other.span
            new = text[begin:end] + text[middle:begin] + text[start:middle]
            yield _change("swap two statements", (start, end), new, one, other)


def _statements(text: str) -> Iterator[Statement]:
    """Lines of code, joined while a bracket is open or an operator continues the line."""
    statement: list[Token] = []
    depth = 0
    for token in _tokenized(text):
        continues = depth > 0 or token.text in {"and", "or", "..", "then"}
        if statement and token.line > statement[-1].line and not continues:
            yield Statement(statement)
            statement = []
        statement.append(token)
        depth += (token.text in {"(", "{", "["}) - (token.text in {")", "}", "]"})
    if statement:
        yield Statement(statement)


def _tokenized(text: str) -> Iterator[Token]:
    for found in TOKEN.finditer(text):
        if found.lastgroup != "comment" and found.lastgroup is not None:
            line = text.count("\n", 0, found.start()) + 1
            yield Token(found.lastgroup, found[0], found.start(), found.end(), line)


_Found = tuple[str, int, int, str]


def _dropped(statement: Statement) -> Iterator[_Found]:
    first, (start, end) = statement.first, statement.span
    if statement.is_simple or first.text == "return":
        yield f"drop a {'return' if first.text == 'return' else 'statement'}", start, end, ""
    equals = next((each for each in statement.tokens if each.text == "="), None)
    if first.text == "local" and equals is not None:
        yield "assign nil", equals.start, end, "= nil"


def _condition(text: str, statement: Statement) -> Iterator[_Found]:
    """Change the condition of an if or an elseif."""
    then = next((each for each in statement.tokens if each.text == "then"), None)
    if then is not None and statement.first.text in {"if", "elseif"}:
        start, end = statement.first.end + 1, then.start - 1
        yield "negate a condition", start, end, f"not ({text[start:end]})"
        yield "condition is true", start, end, "true"
        yield "condition is false", start, end, "false"


def _tokens(statement: Statement) -> Iterator[_Found]:
    """Change single tokens."""
    nothing = Token("", "", 0, 0, 0)
    before, second = nothing, nothing
    for token in statement.tokens:
        kind, text, start, end, _ = token
        table = second.text if before.text == "[" else ""
        if text in SWAPPED and before.text != "while":
            yield f"{SWAPPED[text]} instead of {text}", start, end, SWAPPED[text]
        elif text == "not":
            yield "drop not", start, end, ""
        elif kind == "number" and table in {"KEYS", "ARGV"}:
            for index in (int(text) - 1, int(text) + 1):
                if index:
                    yield f"{table}[{index}] instead of {text}", start, end, str(index)
        elif kind == "number" or (kind == "string" and text[1:-1].isdigit()):
            quote = "'" if kind == "string" else ""
            for number in other_numbers(float(text.strip("'"))):
                yield "change a number", start, end, f"{quote}{number:.15g}{quote}"
        elif text in FLAGS and before.text == ",":
            yield "drop an option", before.start, end, ""
        before, second = token, before


def _change(
    operator: str, span: tuple[int, int], new: str, one: Statement, other: Statement
) -> Change:
    return Change(operator, *span, new, Position(one.first.line, other.tokens[-1].line))


def _indent(text: str, statement: Statement) -> int:
    start = statement.first.start
    return start - text.rfind("\n", 0, start)
