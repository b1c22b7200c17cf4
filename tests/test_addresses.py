"""URLs that name several servers."""

from __future__ import annotations

import pytest

from holdfast import ConfigurationError
from holdfast.wire.addresses import addresses_in


def test_a_sentinel_url_names_the_sentinels_the_service_and_how_to_reach_its_servers() -> None:
    url = "rediss+sentinel://u:p%40@a:1,b,[::1]:3/orders/2?ssl_cert_reqs=none&sentinel_password=x"
    found = addresses_in(url)
    assert found is not None
    assert found.seeds == (("a", 1), ("b", 26379), ("::1", 3))
    assert found.service == "orders"
    assert found.url_of("c", 7) == "rediss://u:p%40@c:7/2?ssl_cert_reqs=none"
    assert found.sentinel_url_of("::1", 3) == "rediss://:x@[::1]:3?ssl_cert_reqs=none"
    plain = addresses_in("redis+sentinel://redis/redis")
    assert plain is not None
    assert (plain.seeds, plain.service, plain.rest) == ((("redis", 26379),), "redis", "")


def test_a_cluster_url_names_some_of_its_nodes() -> None:
    found = addresses_in("valkey+cluster://a,b:7000")
    assert found is not None
    assert found.kind == "cluster"
    assert found.seeds == (("a", 6379), ("b", 7000))
    assert found.url_of("c", 1) == "redis://c:1"


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://a:1",
        "redis+sentinel:///service",
        "redis+sentinel://a/service/not-a-number",
        "redis+cluster://a:port",
        "redis+cluster://a/1",
        "redis+cluster://",
    ],
)
def test_what_is_wrong_with_such_a_url_is_said_with_what_to_write(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"write redis\+"):
        addresses_in(url)


@pytest.mark.parametrize("url", ["redis://a", "unix:///a.sock", "http+cluster://a"])
def test_other_urls_are_not_its_business(url: str) -> None:
    assert addresses_in(url) is None
