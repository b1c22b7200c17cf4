"""Writing SVG and HTML, and how wide a text will be, about."""

from __future__ import annotations

import unicodedata
from html import escape

from holdfast.sim.pictures.wording import printable


def escaped(text: str) -> str:
    """Write a text so that it is nothing but text."""
    return escape(printable(text))


def num(number: float) -> str:
    """Write a number as short as it may be."""
    return f"{round(number, 1):g}"


def element(name: str, *inside: str, **attributes: str | float) -> str:
    """Write an element; `inside` is markup, attributes are escaped."""
    written = "".join(
        f" {key if key == 'viewBox' else key.rstrip('_').replace('_', '-')}="
        f'"{num(value) if isinstance(value, (int, float)) else escaped(value)}"'
        for key, value in attributes.items()
    )
    if not inside and name in {"circle", "line", "path", "rect"}:
        return f"<{name}{written}/>"
    return f"<{name}{written}>{''.join(inside)}</{name}>"


def text_at(x: float, y: float, words: str, class_: str, **attributes: str | float) -> str:
    """Write a text at a place."""
    return element("text", escaped(words), x=x, y=y, class_=class_, **attributes)


def definitions(ident: str) -> list[str]:
    """Write the hatchings, by the names that a picture refers to."""
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
    """Say how wide a text is, about."""
    return size * sum(map(_letter_width, text))


def _letter_width(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.0
    if letter in _NARROW:
        return 0.37
    return 0.74 if letter.isupper() or letter in "mw" else 0.59


def cut_to(text: str, room: float, size: float) -> str:
    """Shorten a text that has no room."""
    if width_of(text, size) <= room:
        return text
    while text and width_of(text, size) > room - size:
        text = text[:-1]
    return f"{text.rstrip()}…"


def wrapped(text: str, room: float, size: float) -> list[str]:
    """Break a text into lines; a word longer than a line is broken too."""
    lines: list[str] = []
    for word in printable(text).split():
        if lines and width_of(f"{lines[-1]} {word}", size) <= room:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for letter in word:
            if width_of(lines[-1] + letter, size) > room:
                lines.append("")
            lines[-1] += letter
    return lines
