"""The simulator's model of a rate behaves as real servers do."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import holdfast
from holdfast.sim.rate_model import SECOND, RateModel
from holdfast.sim.rate_turns import RATES

if TYPE_CHECKING:
    from kit.servers import Server

KEY = "holdfast:{it}:rate"


def clock(server: Server) -> int:
    seconds, microseconds = server.command("TIME")
    return int(seconds) * SECOND + int(microseconds)


def test_a_real_server_behaves_as_the_model(server: Server) -> None:
    chance = random.Random(3)  # noqa: S311 - it is a test
    exact = 0
    # The key of the others may expire before it is read.
    models = [each for each in RATES if each.span > SECOND // 10]
    models.append(RateModel(17, 86_400.0, 1000))
    with holdfast.Client(server.url) as client:
        for _ in range(400):
            model = chance.choice(models)
            rate = client.rate("it", limit=model.limit, per=model.per, burst=model.burst)
            cost = chance.randint(1, model.burst)
            full_at = clock(server) + round(model.span * chance.uniform(0.05, 1.2))
            server.command("SET", KEY, full_at)
            begun = clock(server)
            verdict = rate.try_acquire(cost)
            ended = clock(server)
            if full_at < ended:  # the clock decides, which is not known exactly
                continue
            expected = model.after(full_at, begun, cost)
            after = expected if verdict.allowed else full_at
            assert int(server.command("GET", KEY)) == after
            remaining = model.remaining(after, begun), model.remaining(after, ended)
            assert remaining[0] <= verdict.remaining <= remaining[1]
            waits = expected - model.span - ended, expected - model.span - begun
            if verdict.allowed:
                assert waits[0] <= 0
            else:
                assert max(0, waits[0]) <= round(verdict.retry_after * SECOND) <= waits[1]
            exact += 1
    assert exact > 200


def test_the_model_and_the_library_agree_about_the_time_of_each_cost() -> None:
    client = holdfast.Client("redis://127.0.0.1:1")
    for model in RATES:
        rate = client.rate("it", limit=model.limit, per=model.per, burst=model.burst)
        settings = rate._rate.settings
        assert settings.burst_us == model.span
        for cost in {1, 2, 3, 7, model.burst // 2 + 1, model.burst}:
            assert settings.time_of(cost) == model.time_of(cost)
            assert cost > model.burst or settings.time_of(cost) <= settings.burst_us
