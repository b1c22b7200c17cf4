"""Find phrases and names that this project does not use: `make lint` runs it.

    PYTHONPATH=tests python -m wording [--summary] [PATH ...]

It reads every tracked or new file of the repository, or those in the given paths, and their names.
In Python it reads comments, strings, bytes and identifiers, in Lua comments and identifiers, and in
saved runs of the simulator the text of the broken promise. Other text files are read as they are.
An identifier is read as its words: `asked_again` and `AskedAgain` are "asked again". So is a string
that could be an identifier, and a bytes literal. Each finding is printed with what to write
instead; the exit status is 1 if there is one. `ALLOWED` lists the exceptions.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]

PHRASES: dict[str, str] = {
    r"(?:^|[.;:(] )who (?!is\b|are\b|must\b|has\b)\w+s\b(?![^.;:]{0,80}\?)": "the actor",
    r"\b(?:all|those|these|the one|everyone|one) who\b": "the actor, and that",
    r"\bwhoever\b": 'the actor: "the caller", "any client"',
    r"\b(?:nobody|somebody|everybody|anybody)\b": '"no client", "another client", "each client"',
    r"\b(?:PING|connection|thread|token|task|poll|command|line|key|name) a "
    r"(?:second|client|thread|task|loop|node|server|lock|round)\b": '"one … per …"',
    r"\ba second a\b": '"per second per …"',
    r"\bonce a (?:lock|client|thread|node|loop|server)(?= and\b|[.,;:)]|$)": '"once per"',
    r"\bask(?:s|ed|ing)? (?:again|once more)\b": '"requests again", "retries"',
    r"\b(?:says|said)\b": '"reports", "names", "shows"',
    r"\btells\b": '"shows", "determines"',
    r"\bas (?:told|asked for)\b": '"as documented"',
    r"\b(?:is|are|was|were|be|been|being|not|gets?) told\b": '"is notified", "receives"',
    r"\btold (?:by|of|to|that|it|them|as|in|crosswise)\b": '"notified", "reported"',
    r"\b(?:hear|hears|heard|deaf|unheard)\b": '"receive", "is notified"',
    r"\blearn(?:s|t|ed)?\b": '"detects", "receives"',
    r"\b(?:for )?so long\b(?! as)": '"that long", "for that time"',
    r"\bso (?:many|much) (?!as\b|that\b)": '"N", "that many"',
    r"\balso (?:if|when|while|before|after|on|with)\b": '"even if", "even before", "both … and"',
    r"\banew\b": '"again"',
    r"\bagain and again\b": '"repeatedly", "polls"',
    r"\bmend(?:s|ed|ing)?\b": '"fix"',
    r"\b(?:see|sees|saw|seen|seeing) to (?:it|them|this|that|what|by|until|its)\b": '"clean up"',
    r"\bg(?:ive|ives|ave|iven|iving) (?:it |them |the lock |this )?back\b": '"release"',
    r"\b(?:an|the|its|first|second|each|next|last|every|one) (?:asking|sending)\b": '"request"',
    r"\bbeliev(?:e|es|ed|ing|er|ers)\b": '"considers itself the holder", "is valid"',
    r"\bof (?:its|their|our|my|his|her|one's|your)(?: very)? own\b": '"dedicated", or nothing',
    r"\bof (?:ours|theirs|hers)\b": "nothing",
    r"\b(?:story|stories|crosswise)\b": '"test", "scenario"',
    r"\b(?:simulated|small|whole|a|the|of|such|saved|many|one) worlds?\b": '"run", "simulation"',
    r"\bmachine's own\b": '"the embedded server"',
    r"\b(?:ears?|crowds?|rouse[sd]?)\b": "the term of the field",
    r"\b(?:stand|stands|stood|standing|next|wait|waits|waiting|place|places|first|all|are|is|was) "
    r"in (?:the |a )?line\b": '"in the queue"',
    r"\b(?:leave|leaves|left|leaving|join|joins) the line\b": '"the queue"',
    r"\b(?:both|two|either|each|one|the|same) faces?\b": '"API"',
    r"\b(?:settle|settles|settled|settling) in\b": '"mark the restart as seen"',
    r"\b(?:waiters?|clients?|callers?|they|threads?|tasks?|nodes?) asks?\b": '"request"',
    r"\basks? the (?:server|node|nodes|servers|waiter)\b": '"sends a request to"',
    r"\basking the (?:server|node|nodes|servers|waiter)\b": '"sending a request to"',
    r"\b(?:is|are|was|were|be|goes|go|going|went) away\b": '"is unreachable", "is deleted"',
    r"\b(?:go|goes|going|went) on\b": '"continues"',
    r"\bfor good\b": '"permanently", "finally"',
    r"\b(?:given|hand(?:s|ed|ing)?) again\b": '"granted again", "restored"',
    r"\bhand(?:s|ed|ing)? (?:it |them |the lock |this )?back\b": '"release", "return"',
    r"\bover and over\b": '"repeatedly"',
    r"\bnotic(?:e|es|ed|ing)\b": '"detects"',
    r"\bhand(?:s|ed|ing)?[- ]off\b": '"export", "adopt"; between waiters "hand over"',
    r"\bhandovers?\b": '"hand-over"',
    r"\bclean-ups?\b": '"cleanup"; the verb is "clean up"',
    r"\bback-offs?\b": '"backoff"',
    r"\bwake-ups?\b": '"wakeup"',
    r"\b(?:someone|everyone|anyone|(?<!replicaof )no one)\b": '"another client", "no client"',
}
"""Regular expressions, without regard to case, and what to write instead."""

NAMES = {
    *(
        "Ear",
        "deaf_until",
        "heard",
        "Heard",
        "curious",
        "rally",
        "rouse",
        "Seat",
        "Bell",
    ),
    *(
        "shared_table",
        "loop_crowd",
        "crowd",
        "Crowd",
        "whereabouts",
        "THEIRS",
        "THERE",
        "Grip",
        "grip",
    ),
    *("_Candidate", "see_to", "take_back", "clean_up_after", "disown", "Talk", "Herald", "Mint"),
    *(
        "Errand",
        "redis_home",
        "settle_in",
        "told_at",
        "_take_in",
        "_unheard",
        "telling",
    ),
    *("Place", "told", "said", "settle", "aside", "twins", "faces", "recipe", "won"),
    *(
        "tell_next",
        "tell_two",
        "have_watched",
        "stand_in_line",
        "leave_line",
        "bury",
        "World",
        "Face",
        "refusals",
        "sealed",
    ),
}
"""Names that were replaced, also as a part of longer names.

A name in lower case is found in any case. One with capitals is found only as it is written.
"""


WHOLE_NAMES = {"meanwhile", "outlive", "win", "_look", "_Turn", "Hold"}
"""Replaced names that are plain words in longer names."""


class Allowed(NamedTuple):
    """An exception: findings in this file whose line contains this text."""

    path: str
    text: str


ALLOWED = (
    Allowed("tests/wording.py", ""),  # this list itself
    Allowed("tests/test_wording.py", ""),  # its tests
)
"""Keep it short."""

_PHRASES = {re.compile(each, re.IGNORECASE): advice for each, advice in PHRASES.items()}
_NAMES = [(each.strip("_"), f"_{each.strip('_')}_") for each in sorted(NAMES)]
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_DETAIL = re.compile(r'^ *"detail": (.*),$')
_LUA_NAME = re.compile(r"""'[^']*'|"[^"]*"|([A-Za-z_]\w*)""")
_SKIPPED = {".svg", ".pem", ".lock", ".png", ""}


class Finding(NamedTuple):
    """One phrase or name, where it is, and what to write instead."""

    path: str
    line: int
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found.strip()!r}: write {self.advice}"


def find(path: Path) -> Iterator[Finding]:
    """Find everything in one file."""
    name = str(path.relative_to(ROOT))
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for line, piece in _pieces(path, text):
        for at, found, advice in phrases_in(piece):
            yield Finding(name, min(line + at, len(lines)), found, advice)
    for part in path.relative_to(ROOT).with_suffix("").parts:
        for found, advice in names_in(part):
            yield Finding(name, 1, found, advice)
    for line, identifier in _identifiers(path, text):
        for found, advice in names_in(identifier):
            yield Finding(name, line, found, advice)


@cache
def names_in(identifier: str) -> list[tuple[str, str]]:
    """Find names and phrases in an identifier; return each with the advice."""
    words = _WORD.findall(identifier)
    exact = f"_{'_'.join(words)}_"
    found = [
        (identifier, f"the new name of {name!r}")
        for name, part in _NAMES
        if part in (exact if name != name.lower() else exact.lower())
    ]
    if identifier in WHOLE_NAMES:
        found.append((identifier, "its new name"))
    return found + [(phrase, advice) for _, phrase, advice in phrases_in(" ".join(words).lower())]


def _identifiers(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Return each identifier of Python or Lua, with the number of its line."""
    if path.suffix == ".py":
        yield from _identifiers_of_python(text)
    elif path.suffix == ".lua":
        for number, line in enumerate(text.splitlines(), 1):
            for identifier in _LUA_NAME.findall(line.partition("--")[0]):
                yield number, identifier


def _identifiers_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Return each identifier, each string that could be one, and each bytes literal."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        elif not isinstance(value, str) or not value.isidentifier():
            continue
        yield node.lineno, value  # type: ignore[attr-defined]  # a constant has a line


def phrases_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Find phrases; return the number of the line, from 0 on, the phrase, and the advice."""
    words = text.replace("\n", " ")
    for pattern, advice in _PHRASES.items():
        for match in pattern.finditer(words):
            yield text.count("\n", 0, match.start()), match[0].strip(), advice


def _pieces(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Return each piece of prose, with the number of its first line.

    Lines that belong together are one piece, so that a phrase may be broken at the end of a line.
    """
    if path.suffix == ".py":
        yield from _pieces_of_python(text)
    elif path.suffix == ".json":
        for number, line in enumerate(text.splitlines(), 1):
            if match := _DETAIL.match(line):
                yield number, match[1]
    elif path.suffix == ".lua":
        yield from _paragraphs(
            (number, line.partition("--")[2])
            for number, line in enumerate(text.splitlines(), 1)
            if "--" in line
        )
    else:
        yield from _paragraphs(enumerate(text.splitlines(), 1))


def _pieces_of_python(text: str) -> Iterator[tuple[int, str]]:
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    comments = [(t.start[0], t.string.lstrip("#")) for t in tokens if t.type == tokenize.COMMENT]
    yield from _paragraphs(comments)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield from _paragraphs(enumerate(node.value.value.splitlines(), node.lineno))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _paragraphs(
    lines: Iterator[tuple[int, str]] | enumerate[str] | list[tuple[int, str]],
) -> Iterator[tuple[int, str]]:
    """Join consecutive lines that are not empty; a line break counts as a space."""
    first, last, piece = 0, 0, ""
    for number, line in lines:
        if piece and line.strip() and number == last + 1:
            piece += "\n" + line.strip()
        else:
            if piece:
                yield first, piece
            first, piece = number, line.strip()
        last = number
    if piece:
        yield first, piece


def files(paths: list[str]) -> list[Path]:
    """Return the files of the repository, or those of the given paths."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [ROOT / line for line in sorted(set(listed.splitlines()))]
    return [path for path in found if path.is_file() and path.suffix not in _SKIPPED]


def findings(paths: list[str]) -> list[Finding]:
    """Return what was found and is no exception."""
    result = []
    for path in files(paths):
        name = str(path.relative_to(ROOT))
        lines = path.read_text(encoding="utf-8").splitlines()
        for each in sorted(set(find(path))):
            line = lines[each.line - 1] if lines else ""
            if not any(name == allowed.path and allowed.text in line for allowed in ALLOWED):
                result.append(each)
    return result


def main() -> int:
    """Print the findings, or how many each folder has."""
    parser = argparse.ArgumentParser(prog="wording", description=__doc__)
    parser.add_argument("--summary", action="store_true", help="count by folder")
    parser.add_argument("paths", nargs="*")
    given = parser.parse_args()
    found = findings(given.paths)
    if given.summary:
        for folder, number in sorted(Counter(str(Path(f.path).parent) for f in found).items()):
            print(f"{number:5} {folder}")
    else:
        for each in found:
            print(each)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
