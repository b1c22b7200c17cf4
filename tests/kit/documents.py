"""The pages of the documentation as data: their code, links, headings and revisions.

`python -m kit.documents`, with `tests` on PYTHONPATH, writes what is derived from other files: the
pictures in `docs/pictures/`, and in each Chinese page the revision of the English page.
`tests/test_docs.py` fails if any of this is out of date.
"""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "holdfast"
PICTURES = {"paused-holder.svg": "broken", "paused-holder-with-holdfast.svg": "holdfast"}
"""The file of each side of the hazard that the README shows."""

_FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"")
_HEADING = re.compile(r"^(#{1,6}) +(.+?)\s*$", re.MULTILINE)
_FOLLOWS = re.compile(r"^<!-- follows (\S+) at ([0-9a-f]{12}) -->$", re.MULTILINE)
_PATH = re.compile(r"`([\w./-]+(?:\.py|\.lua|\.md|\.c|/))`")


@dataclass(frozen=True)
class Block:
    """A fenced piece of code."""

    language: str
    text: str
    line: int


class Page:
    """One Markdown file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path.relative_to(ROOT))
        self.text = path.read_text(encoding="utf-8")

    def blocks(self) -> list[Block]:
        """Return the fenced code, in order, without the indentation of a list."""
        return [
            Block(
                found[2],
                "\n".join(line.removeprefix(found[1]) for line in found[3].splitlines()) + "\n",
                self.text.count("\n", 0, found.start()) + 2,
            )
            for found in _FENCE.finditer(self.text)
        ]

    @property
    def prose(self) -> str:
        """The text without fenced code."""
        return _FENCE.sub("", self.text)

    def links(self) -> list[str]:
        """Return the targets of all links and pictures."""
        return [one or other for one, other in _LINK.findall(self.prose)]

    def anchors(self) -> set[str]:
        """Return the anchors of all headings, as GitHub makes them."""
        found: set[str] = set()
        for _, title in _HEADING.findall(self.prose):
            slug = _slug(title)
            number, unique = 0, slug
            while unique in found:
                number += 1
                unique = f"{slug}-{number}"
            found.add(unique)
        return found

    def commands(self, program: str) -> list[str]:
        """Return the lines of fenced shell code that begin with `program`."""
        lines = (
            line.removeprefix("$ ").strip()
            for block in self.blocks()
            if block.language in {"", "sh", "console"}
            for line in block.text.splitlines()
        )
        return [line for line in lines if line.split(" ", 1)[0] == program]

    def paths(self) -> list[str]:
        """Return the files and folders that it names."""
        return _PATH.findall(self.prose)

    def follows(self) -> tuple[str, str] | None:
        """Return the English page that it follows, and that page's revision; None without one."""
        found = _FOLLOWS.search(self.text)
        return (found[1], found[2]) if found else None


def _slug(title: str) -> str:
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def pages() -> dict[str, Page]:
    """Return every page of the documentation, by its path in the repository."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/zh/*.md")]
    return {page.name: page for page in map(Page, sorted(found))}


def chinese_pages() -> dict[str, Page]:
    """Return the Chinese pages."""
    return {name: page for name, page in pages().items() if "zh" in name}


def translations() -> dict[str, str]:
    """Return the English page that each Chinese page follows, by the Chinese page."""
    followed = {name: page.follows() for name, page in chinese_pages().items()}
    return {name: english[0] for name, english in followed.items() if english is not None}


def revision(page: Page) -> str:
    """Return the short hash by which a Chinese page names an English one."""
    return hashlib.sha256(page.text.encode()).hexdigest()[:12]


def message_templates() -> Iterator[str]:
    """Return each string of the library; `…` stands for what an f-string inserts."""
    folders = ("adapters", "api", "core", "embedded", "guards", "wire")
    paths = [path for folder in folders for path in (SOURCES / folder).glob("*.py")]
    for path in [*paths, *SOURCES.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )


def drawn_pictures() -> dict[str, str]:
    """Draw the pictures of the documentation with the simulator."""
    from holdfast.sim.hazards import HAZARDS  # noqa: PLC0415 - for this alone
    from holdfast.sim.pictures.page import draw_svg  # noqa: PLC0415 - the same

    shown = next(hazard for hazard in HAZARDS if hazard.name == "paused_holder").run()
    return {name: draw_svg(getattr(shown, side).timeline) for name, side in PICTURES.items()}


def update() -> None:
    """Write the pictures, and the revisions that the Chinese pages name."""
    for name, drawn in drawn_pictures().items():
        (ROOT / "docs" / "pictures" / name).write_text(drawn, encoding="utf-8")
    english = pages()
    for page in chinese_pages().values():
        followed = page.follows()
        if followed is not None:
            new = f"<!-- follows {followed[0]} at {revision(english[followed[0]])} -->"
            page.path.write_text(_FOLLOWS.sub(new, page.text, count=1), encoding="utf-8")


if __name__ == "__main__":
    update()
