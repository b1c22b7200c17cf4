"""Survivors that may survive: each with the reason why no check has to notice it.

A mutant is named by its file, its function ('' in scripts) and the lines that it changes, as
`make mutation` prints them.
"""

from __future__ import annotations

ACCEPTED: dict[tuple[str, str, str], str] = {}
