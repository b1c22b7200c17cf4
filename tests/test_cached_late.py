"""Callers of a cached function that come when its computation has ended, and its call has not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.waiting import PATIENCE
from test_cached import Work, cached, until_waiting

if TYPE_CHECKING:
    from kit.faces import Face
    from kit.proxy import Proxy


async def test_an_error_is_not_raised_to_those_who_call_after_it(face: Face, proxy: Proxy) -> None:
    work, client = Work(face), face.connect(proxy.url, command_timeout=PATIENCE)
    function = cached(client, work)
    assert await function() == 1
    await function.invalidate()
    held = proxy.hold_reply(3)  # after looking and claiming: that of the release
    work.outcomes = [ZeroDivisionError("of the first")]
    first = face.start(function())

    async def released() -> bool:
        return held.arrived.is_set()

    await face.eventually(released)
    second = face.start(function())
    await until_waiting(face, client, 1)
    held.release()
    with pytest.raises(ZeroDivisionError):
        await first.result()
    assert await second.result() == 3
