"""URLs that name several servers."""

from __future__ import annotations

import pytest

import holdfast
from holdfast import ConfigurationError
from holdfast.wire.addresses import parse_addresses


def test_a_sentinel_url_names_the_sentinels_the_service_and_how_to_reach_its_servers() -> None:
    url = "rediss+sentinel://u:p%40@a:1,b,[::1]:3/orders/2?ssl_cert_reqs=none&sentinel_password=x"
    found = parse_addresses(url)
    assert found is not None
    assert found.seeds == (("a", 1), ("b", 26379), ("::1", 3))
    assert found.service == "orders"
    assert found.url_of("c", 7) == "rediss://u:p%40@c:7/2?ssl_cert_reqs=none"
    assert found.sentinel_url_of("::1", 3) == "rediss://:x@[::1]:3?ssl_cert_reqs=none"
    plain = parse_addresses("redis+sentinel://redis/redis")
    assert plain is not None
    assert (plain.seeds, plain.service, plain.rest) == ((("redis", 26379),), "redis", "")


def test_a_cluster_url_names_some_of_its_nodes() -> None:
    found = parse_addresses("valkey+cluster://a,b:7000")
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
def test_an_invalid_url_is_refused_with_what_to_write(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"write redis\+"):
        parse_addresses(url)


def test_a_sentinel_url_without_a_service_is_refused_with_what_is_missing() -> None:
    for url in ("redis+sentinel://a,b", "redis+sentinel://a,b/", "redis+sentinel://a?db=1"):
        with pytest.raises(ConfigurationError, match="the service name is missing after the hosts"):
            parse_addresses(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://a:1,redis://b:2,redis://c:3",
        "redis://:secret@a/0, rediss://:secret@b/0",
        "redis://a redis://b redis://c",
        "redis://a,b,c",
        "a:1,b:2,c:3",
        "redis+cluster://a:1,redis+cluster://b:2",
        "redis+sentinel://a/service,redis+sentinel://b/service",
        ["redis://a,redis://b", "redis://c", "redis://d"],
    ],
)
@pytest.mark.parametrize("kind", [holdfast.Client, holdfast.AsyncClient])
def test_several_servers_in_one_string_are_refused_with_what_to_write(
    url: str | list[str], kind: type[holdfast.Client | holdfast.AsyncClient]
) -> None:
    with pytest.raises(ConfigurationError, match=r"give a list.* with spaces") as caught:
        kind(url)
    assert "secret" not in str(caught.value)


def test_a_comma_in_a_password_or_in_the_path_of_a_socket_is_no_second_server() -> None:
    assert repr(holdfast.Client("redis://:a,b@c:1")) == "<Client of redis://c:1/0>"
    assert repr(holdfast.Client("unix:///a,b.sock")) == "<Client of unix:///a,b.sock>"


@pytest.mark.parametrize("url", ["redis://a", "unix:///a.sock", "http+cluster://a"])
def test_other_urls_are_not_parsed(url: str) -> None:
    assert parse_addresses(url) is None
