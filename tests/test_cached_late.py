"""Callers that arrive after a computation has ended but before its call has returned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.waiting import PATIENCE
from test_cached import Work, cached, until_waiting

if TYPE_CHECKING:
    from kit.apis import Api
    from kit.proxy import Proxy


async def test_an_error_is_not_raised_to_later_callers(api: Api, proxy: Proxy) -> None:
    work, client = Work(api), api.connect(proxy.url, command_timeout=PATIENCE)
    function = cached(client, work)
    assert await function() == 1
    await function.invalidate()
    held = proxy.hold_reply(3)  # the release, after look and claim
    work.outcomes = [ZeroDivisionError("of the first")]
    first = api.start(function())

    async def released() -> bool:
        return held.arrived.is_set()

    await api.eventually(released)
    second = api.start(function())
    await until_waiting(api, client, 1)
    held.release()
    with pytest.raises(ZeroDivisionError):
        await first.result()
    assert await second.result() == 3
