"""The background job of a simulated client, in which its leases are renewed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from holdfast.errors import HoldfastError, NodeUnavailable
from holdfast.scripts import RENEW
from holdfast.sim.keyspace import ServerError
from holdfast.sim.world import Future
from holdfast.wire.refusals import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Job, Reply, Request
    from holdfast.sim.client import SimClient
    from holdfast.sim.world import Task

CALLS_AT_ONCE = 200
"""Calls of a background job at one moment that are enough to say that it never pauses."""


class SimBackground:
    """`holdfast.port.Background` as a task that runs while there is something to watch."""

    def __init__(self, client: SimClient) -> None:
        self._client = client
        self._roused = False
        self._resting: Future[None] | None = None
        self._task: Task | None = None
        self._called: tuple[int, int] = (-1, 0)  # when the last call began, and the how manieth

    def now(self) -> float:
        """The port's clock."""
        return self._client.now()

    def rouse(self, job: Job) -> bool:
        """Wake the task, or start it."""
        self._roused = True
        if self._resting is not None:
            self._resting.set(None)
        if self._task is None:
            self._task = self._client.machine.spawn(self._work(job), "renewer")
        return True

    async def _work(self, job: Job) -> None:
        while self._roused:
            self._roused = False
            await job.run()
            if not self._roused:
                self._client.background_nodes.drop()
        self._task = None

    async def rest(self, until: float) -> None:
        """Wait until then, or until roused."""
        if not self._roused:
            self._resting = resting = Future[None]()
            timer = self._client.machine.after(until - self.now(), lambda: resting.set(None))
            await resting
            timer.cancel()
            self._resting = None
        self._roused = False

    async def call_many(
        self, requests: Sequence[Request], timeout: float, meanwhile: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        """Send them in one go, and collect what is answered in time."""
        client = self._client
        for request in requests:
            if request[0] is RENEW:
                client.observer.renews(client, request)
        at, calls = self._called
        self._called = client.world.now, calls + 1 if at == client.world.now else 0
        if calls > CALLS_AT_ONCE:
            client.observer.busy(client)
        if client.quorum is not None:
            replies = await client.quorum.call_many(requests, timeout, meanwhile)
            await client.stall()
            return replies
        task = cast("Task", client.world.task)
        batch = client.machine.spawn(self._batch(task, requests, timeout), "batch").result
        while not batch.done:
            look: Future[None] = Future()
            timer = client.machine.after(meanwhile() - self.now(), partial(look.set, None))
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
        ask, spawn = client.requests.ask, client.machine.spawn
        answers = [
            spawn(ask(link, request, end - self.now()), "request").result for request in requests
        ]
        await client.moment(cancel=False)
        replies: list[Reply | HoldfastError] = []
        for answer in answers:
            try:
                replies.append(await answer)
            except ServerError as error:
                replies.append(refusal(str(error), link.server.name))
            except HoldfastError as error:
                replies.append(error)
                link.close()
        return replies
