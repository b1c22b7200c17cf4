"""Clean-ups: one for a token on a node, however often it is asked for, and none that is forgotten.

Whoever asks for one does it while the renewer sends it, hears that it was done, or gives it up.
Stories of two are told once for every line of asking, with the whole of the other happening there.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

from holdfast.adapters.threads import run
from holdfast.core.renewer import Renewer
from holdfast.core.spec import TOMBSTONE_MS
from holdfast.errors import NodeUnavailable
from holdfast.keys import keys_of
from holdfast.scripts import RELEASE
from kit.interrupts import AtLine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.core.events import Event
    from holdfast.errors import HoldfastError
    from holdfast.port import Job, Reply, Request

REQUEST: Request = RELEASE, keys_of(b"holdfast:{a}"), ("a token", "1", TOMBSTONE_MS, "")
GIVEN_UP_AFTER = int(TOMBSTONE_MS) / 1000
AWAY = NodeUnavailable("it is away")
LINES = (f"core{os.sep}renewer", f"core{os.sep}cleanup")


class Story:
    """A renewer that is led step by step; it is its own background."""

    def __init__(self) -> None:
        self.time = 0.0
        self.sent = 0
        self.answer: Reply | HoldfastError = 1
        self.meanwhile: Callable[[], None] = lambda: None
        """What happens while the answer is outstanding."""
        self.events: list[Event] = []
        self.forgotten = 0
        self.renewer = Renewer(self, self.events.append, lambda _: False)

    def now(self) -> float:
        return self.time

    def rouse(self, job: Job) -> bool:  # noqa: ARG002 - there is only one
        return True

    async def rest(self, until: float) -> None:
        self.time = until

    async def call_many(
        self, requests: Sequence[Request], *_: object
    ) -> list[Reply | HoldfastError]:
        self.sent += len(requests)
        self.meanwhile()
        return [self.answer] * len(requests)

    def forget(self) -> None:
        self.forgotten += 1

    def ask(self, ttl: float = 0.0) -> None:
        self.renewer.clean_up("a", REQUEST, fence=7, ttl=ttl, forget=self.forget)

    def go_on(self) -> None:
        self.renewer._advance()
        run(self.renewer._work())


def test_what_is_asked_for_while_it_is_given_up_is_sent() -> None:
    for at in itertools.count(1):
        story = Story()
        story.answer = AWAY
        story.ask()
        story.go_on()
        story.time, story.answer, story.sent = GIVEN_UP_AFTER, 1, 0
        with AtLine(at, LINES, story.go_on) as line:
            story.ask()
        story.go_on()
        assert story.sent, line.struck
        assert not story.renewer._cleanups
        if line.struck is None:
            assert at > 1
            return


def test_what_is_asked_for_longer_while_it_is_done_is_seen_to_for_longer() -> None:
    longer = 10 * GIVEN_UP_AFTER
    for at in itertools.count(1):
        story = Story()
        story.ask()
        lines: list[AtLine] = []

        def ask_amid(at: int = at, story: Story = story, lines: list[AtLine] = lines) -> None:
            # The answer is taken in at some line of asking.
            item = next(iter(story.renewer._cleanups.values()))
            with AtLine(at, LINES, lambda: story.renewer._answered(item, 0.0, 1)) as line:
                story.ask(longer)
            lines.append(line)

        story.meanwhile = ask_amid
        story.go_on()
        if lines[0].struck is None:
            assert at > 1
            return
        story.meanwhile, story.answer = lambda: None, AWAY
        story.time = 2 * GIVEN_UP_AFTER
        story.go_on()
        assert story.sent > 1, lines[0].struck
        assert [each.deadline for each in story.renewer._cleanups.values()] == [longer]


def test_what_is_asked_for_after_it_was_sent_is_sent_again_by_a_closed_client_too() -> None:
    story = Story()
    story.ask()
    story.renewer.close()
    story.answer, story.meanwhile = AWAY, story.ask
    story.go_on()
    assert (story.sent, story.forgotten) == (1, 0)
    story.meanwhile, story.time = lambda: None, 1.0
    story.go_on()
    assert (story.sent, story.forgotten) == (2, 1)
    assert [(event.kind, event.fence) for event in story.events] == [("cleanup_failed", 7)]
    assert not story.renewer._cleanups
