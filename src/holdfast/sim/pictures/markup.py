"""Writes SVG and HTML elements, and estimates the width of text."""

from __future__ import annotations

import unicodedata
from html import escape

from holdfast.sim.pictures.wording import printable


def escaped(text: str) -> str:
    """Escape a text for SVG and HTML."""
    return escape(printable(text))


def num(number: float) -> str:
    """Format a number with at most one decimal."""
    return f"{round(number, 1):g}"


def element(name: str, *inside: str, **attributes: str | float) -> str:
    """Return an element; `inside` is markup, attributes are escaped."""
    written = "".join(
        f" {key if key == 'viewBox' else key.rstrip('_').replace('_', '-')}="
        f'"{num(value) if isinstance(value, (int, float)) else escaped(value)}"'
        for key, value in attributes.items()
    )
    if not inside and name in {"circle", "line", "path", "rect"}:
        return f"<{name}{written}/>"
    return f"<{name}{written}>{''.join(inside)}</{name}>"


def text_at(x: float, y: float, words: str, class_: str, **attributes: str | float) -> str:
    """Return a text element at a position."""
    return element("text", escaped(words), x=x, y=y, class_=class_, **attributes)


def definitions(ident: str) -> list[str]:
    """Return the definitions of the hatch patterns, whose ids begin with `ident`."""
    return [
        element(
            "defs",
            _hatch(f"{ident}-idle", 7, "hatch"),
            _hatch(f"{ident}-red", 9, "red-hatch"),
        )
    ]


def _hatch(ident: str, step: int, class_: str) -> str:
    line = element("line", x1=0, y1=0, x2=0, y2=step, class_=class_)
    return element(
        "pattern",
        line,
        id=ident,
        width=step,
        height=step,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )


_NARROW = frozenset("fijlrt.,:;'|!()[] ")


def width_of(text: str, size: float) -> float:
    """Return the approximate width of a text."""
    return size * sum(map(_letter_width, text))


def _letter_width(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.0
    if letter in _NARROW:
        return 0.37
    return 0.74 if letter.isupper() or letter in "mw" else 0.59


def cut_to(text: str, space: float, size: float) -> str:
    """Shorten a text to the available width."""
    if width_of(text, size) <= space:
        return text
    while text and width_of(text, size) > space - size:
        text = text[:-1]
    return f"{text.rstrip()}…"


def wrapped(text: str, space: float, size: float) -> list[str]:
    """Break a text into lines; a word that is longer than a line is split."""
    lines: list[str] = []
    for word in printable(text).split():
        if lines and width_of(f"{lines[-1]} {word}", size) <= space:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for letter in word:
            if width_of(lines[-1] + letter, size) > space:
                lines.append("")
            lines[-1] += letter
    return lines
