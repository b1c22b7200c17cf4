"""The `Mutant` class, all mutants of the tree, and a sample of them."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lupa.lua51  # type: ignore[import-untyped]  # it has no hints

from mutation import lua_operators, python_operators

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mutation.change import Change

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "holdfast"


class Mutant(NamedTuple):
    """One change of one file."""

    file: str
    """Relative to the package."""
    old: str
    """The text of the file."""
    change: Change

    @property
    def new(self) -> str:
        """The text with the change."""
        return self.old[: self.change.start] + self.change.new + self.old[self.change.end :]

    @property
    def line(self) -> int:
        """The line where the change begins."""
        return self.old.count("\n", 0, self.change.start) + 1

    @property
    def lines(self) -> tuple[str, str]:
        """The lines that it changes, before and after, without their indentation."""
        start = self.old.rfind("\n", 0, self.change.start) + 1
        rest = len(self.old) - self.old.find("\n", self.change.end)
        both = self.old[start:-rest], self.new[start:-rest]
        before, after = ("\n".join(map(str.strip, text.split("\n"))) for text in both)
        return before, after

    @property
    def diff(self) -> str:
        """The same, as a diff."""
        before, after = (text.split("\n") for text in self.lines)
        return "\n".join([*(f"- {line}" for line in before), *(f"+ {line}" for line in after)])

    @property
    def name(self) -> tuple[str, str, str, str]:
        """Its file, its function, and its lines before and after."""
        return self.file, self.change.place.function, *self.lines

    @property
    def key(self) -> str:
        """An identity that depends only on the change and its function, not on other lines."""
        first, last = self.change.place.scope
        lines = self.old.splitlines()
        function = "\n".join(lines[first - 1 : last] if first else lines)
        within = self.change.start - sum(len(line) + 1 for line in lines[: max(first - 1, 0)])
        identity = self.file, self.change.place.function, function, within, self.diff
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:24]


def every_mutant() -> list[Mutant]:
    """Return every mutant of the core and the scripts, in a fixed order."""
    found: list[Mutant] = []
    for path in (*sorted(PACKAGE.glob("core/*.py")), *sorted(PACKAGE.glob("scripts/*.lua"))):
        found += mutants_of(str(path.relative_to(PACKAGE)), path.read_text())
    return found


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return every mutant of one file."""
    operators = python_operators if file.endswith(".py") else lua_operators
    found = {(each.start, each.end, each.new): each for each in operators.changes(text)}
    return [Mutant(file, text, change) for change in found.values()]


def is_valid(mutant: Mutant) -> bool:
    """Whether the mutant compiles and differs from the original."""
    if mutant.file.endswith(".lua"):
        try:
            lupa.lua51.LuaRuntime().compile(mutant.new)
        except lupa.lua51.LuaError:
            return False
        return True
    try:
        return ast.dump(ast.parse(mutant.new)) != ast.dump(ast.parse(mutant.old))
    except SyntaxError:
        return False


def draw(mutants: list[Mutant], count: int, seed: int) -> Iterator[Mutant]:
    """Draw `count` valid mutants. The sample within a function depends only on that function."""

    def rank(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()

    for mutant in sorted(mutants, key=rank):
        if not count:
            return
        if is_valid(mutant):
            count -= 1
            yield mutant
