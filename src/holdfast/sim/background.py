"""The background job of a simulated client, which renews its leases."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from holdfast.errors import HoldfastError, NodeUnavailable
from holdfast.scripts import DOWNGRADE, RENEW, RENEW_SHARED
from holdfast.sim.keyspace import ServerError
from holdfast.sim.simulation import Future
from holdfast.wire.error_replies import error_for_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Job, Reply, Request
    from holdfast.sim.client import SimClient
    from holdfast.sim.simulation import Task

CALLS_AT_ONE_TIME = 200
"""Calls without any time passing, after which the background job counts as an endless loop."""


class SimBackground:
    """`holdfast.port.Background` as a task that runs while the job has work."""

    def __init__(self, client: SimClient) -> None:
        self._client = client
        self._woken = False
        self._sleeping: Future[None] | None = None
        self._task: Task | None = None
        self._last_call: tuple[int, int] = (-1, 0)  # time, and number of calls at that time

    def now(self) -> float:
        """Return the time on the client's clock."""
        return self._client.now()

    def wake(self, job: Job) -> bool:
        """Wake the task, or start it if it does not run."""
        self._woken = True
        if self._sleeping is not None:
            self._sleeping.set(None)
        if self._task is None:
            self._task = self._client.machine.spawn(self._work(job), "renewer")
        return True

    async def _work(self, job: Job) -> None:
        while self._woken:
            self._woken = False
            await job.run()
            if not self._woken:
                self._client.background_nodes.drop()
        self._task = None

    async def sleep_until(self, until: float) -> None:
        """Wait until `until`, or until `wake` is called."""
        if not self._woken:
            self._sleeping = sleeping = Future[None]()
            timer = self._client.machine.after(until - self.now(), lambda: sleeping.set(None))
            await sleeping
            timer.cancel()
            self._sleeping = None
        self._woken = False

    async def call_many(
        self, requests: Sequence[Request], timeout: float, on_tick: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        """Send all requests at once; return their replies, or an error for each without one."""
        client = self._client
        for request in requests:
            if request[0] in {RENEW, RENEW_SHARED, DOWNGRADE}:
                client.observer.renews(client, request)
        at, calls = self._last_call
        self._last_call = client.sim.now, calls + 1 if at == client.sim.now else 0
        if calls > CALLS_AT_ONE_TIME:
            client.observer.background_busy(client)
        if client.quorum is not None:
            replies = await client.quorum.call_many(requests, timeout, on_tick)
            await client.stall()
            return replies
        task = cast("Task", client.sim.task)
        batch = client.machine.spawn(self._batch(task, requests, timeout), "batch").result
        while not batch.done:
            look: Future[None] = Future()
            timer = client.machine.after(on_tick() - self.now(), partial(look.set, None))
            batch.waiting.append(partial(look.set, None))
            if not batch.done:
                await look
            timer.cancel()
        await client.stall()
        return cast("list[Reply | HoldfastError]", await batch)

    async def _batch(
        self, task: Task, requests: Sequence[Request], timeout: float
    ) -> list[Reply | HoldfastError]:
        client, end = self._client, self.now() + timeout
        try:
            link = await client.requests.link(task, timeout)
        except NodeUnavailable as error:
            return [error] * len(requests)
        call, spawn = client.requests.call, client.machine.spawn
        futures = [
            spawn(call(link, request, end - self.now()), "request").result for request in requests
        ]
        await client.maybe_fault(cancel=False)
        replies: list[Reply | HoldfastError] = []
        for future in futures:
            try:
                replies.append(await future)
            except ServerError as error:
                replies.append(error_for_reply(str(error), link.server.name))
            except HoldfastError as error:
                replies.append(error)
                link.close()
        return replies
