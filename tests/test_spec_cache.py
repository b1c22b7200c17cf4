"""The cache of lock specs: `client.lock(name)` in a loop is a lookup, and the cache is bounded."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core.spec_cache import SETTINGS_MAX, SPECS_MAX

if TYPE_CHECKING:
    from holdfast.core.spec import LockSpec

NOWHERE = "redis://127.0.0.1:1"
CLIENTS = [holdfast.Client, holdfast.AsyncClient]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"ttl": 5, "timeout": 2.5, "fair": False},
    {"renew": False, "lock_delay": 3},
    {"max_hold": 60, "reentrant": True, "label": "nightly"},
    {"owner": "us", "replicas": 2},
    {"key": "a:key"},
]


def spec_of(client: Any, name: Any = "a", **settings: Any) -> LockSpec:
    spec: LockSpec = client.lock(name, **settings)._spec
    return spec


def facts(spec: LockSpec) -> dict[str, Any]:
    return {**vars(spec), "replicas in the keys": spec.keys.replicas}


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_spec_of_a_repeated_lock_is_cached(kind: Any, settings: dict[str, Any]) -> None:
    client = kind(NOWHERE)
    assert spec_of(client, **settings) is spec_of(client, **settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_new_name_with_cached_settings_gets_the_same_spec_as_without_the_cache(
    settings: dict[str, Any],
) -> None:
    used, fresh = holdfast.Client(NOWHERE), holdfast.Client(NOWHERE)
    spec_of(used, "first", **settings).renewal_keys  # noqa: B018 - as renewing it does
    assert facts(spec_of(used, "second", **settings)) == facts(spec_of(fresh, "second", **settings))
    assert (
        spec_of(used, "second", **settings).renewal_keys[0]
        == spec_of(used, "second", **settings).keys[0]
    )


@pytest.mark.parametrize("kind", CLIENTS)
def test_an_invalid_setting_is_refused_even_after_an_equal_valid_one(kind: Any) -> None:
    client = kind(NOWHERE)
    for good, bad in (
        ({"ttl": 1}, {"ttl": True}),
        ({"timeout": 0}, {"timeout": False}),
        ({"max_hold": 1}, {"max_hold": True}),
        ({"lock_delay": 0}, {"lock_delay": False}),
        ({"replicas": 1}, {"replicas": True}),
        ({"replicas": 1}, {"replicas": 1.0}),
    ):
        client.lock("a", **good)
        with pytest.raises(holdfast.ConfigurationError, match=next(iter(bad))):
            client.lock("a", **bad)
    with pytest.raises(holdfast.ConfigurationError, match="name"):
        client.lock(b"a")


def test_an_unhashable_setting_is_validated() -> None:
    client: Any = holdfast.Client(NOWHERE)
    for bad in ({"ttl": [30]}, {"label": ["nightly"]}, {"name": ["a"]}):
        with pytest.raises(holdfast.ConfigurationError, match=next(iter(bad))):
            client.lock(**{"name": "a", **bad})
    assert spec_of(client, renew=[1]).renew is True


def test_a_name_of_a_str_subclass_is_the_same_lock() -> None:
    class Name(str, Enum):  # noqa: UP042 - of code for Python 3.10
        A = "a"

    client = holdfast.Client(NOWHERE)
    for name in (Name.A, "a", Name.A):
        assert type(client.lock(name).name) is str
        assert client.lock(name).name == "a"
        assert spec_of(client, name).keys[0] == b"holdfast:{a}"


def test_the_cache_of_specs_is_bounded() -> None:
    client = holdfast.Client(NOWHERE)
    for number in range(2 * SPECS_MAX):
        client.lock(f"invoice:{number}")
    for number in range(2 * SETTINGS_MAX):
        client.lock("invoice", label=f"request {number}")
    assert client._specs.describe.cache_info().currsize == SPECS_MAX
    assert client._specs._template.cache_info().currsize == SETTINGS_MAX
