"""Who holds a lock, in the words shown to people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, as read from the server just now.

    A holder that is no client of holdfast (another library on the same key) is known by `token`
    and `remaining` alone; bytes in it that are not UTF-8 are lone surrogates, as in file names.
    `since` is the server's time in seconds; `remaining` is None for a key that never expires.
    `user` is who the process runs as; `owner`, if the lock has one, is whose other holds may join.
    """

    host: str | None
    pid: int | None
    label: str | None
    since: float | None
    fence: int | None
    remaining: float | None
    thread: str | None
    token: str
    user: str | None = None
    owner: str | None = None

    def __str__(self) -> str:
        place = self.host if self.user is None else f"{self.user}@{self.host}"
        who = "another client" if self.pid is None else f"{place}, pid {self.pid}"
        if self.label:
            who += f" ({self.label})"
        if self.remaining is None:
            return f"{who}, without expiry"
        return f"{who}, for another {self.remaining:.1f} s unless renewed"
