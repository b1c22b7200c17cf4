"""The settings of a cached function, the names of its values, and their format on the server."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

import holdfast
from holdfast.core.value import (
    CacheEntry,
    CacheSpec,
    StoredValue,
    describe_cache,
    is_due,
    read_stored,
)
from holdfast.scripts import ACQUIRE, CLAIM

PLAIN: dict[str, Any] = {
    "ttl": 10,
    "stale": None,
    "early": 0,
    "lock_ttl": 30,
    "timeout": None,
    "command_timeout": 2.0,
    "quorum": False,
}


def spec_of(**given: Any) -> CacheSpec:
    return describe_cache(**{**PLAIN, **given})


def wanted(name: str = "a", **given: Any) -> CacheEntry:
    async def compute() -> None: ...

    made = CacheEntry(spec_of(**given), name, compute, repr_of, bytes)
    assert (made.compute, made.dumps, made.loads) == (compute, repr_of, bytes)
    return made


def repr_of(value: object) -> bytes:
    return repr(value).encode()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quorum": True}, "a cache needs one server"),
        ({"ttl": 0}, "ttl=0: give seconds from 0.01 to "),
        ({"ttl": "5"}, "ttl='5': give seconds"),
        ({"lock_ttl": 0.4}, "lock_ttl=0.4: give seconds from 0.5 to "),
        ({"lock_ttl": None}, "lock_ttl=None: give seconds"),
        ({"timeout": -1}, "timeout=-1: give seconds"),
        ({"stale": True}, "stale=True: give a number, 0 or above, or None"),
        ({"stale": False}, "stale=False: give a number, 0 or above, or None"),
        ({"stale": ""}, "stale='': give a number"),
        ({"stale": "5"}, "stale='5': give a number, 0 or above, or None"),
        ({"stale": -0.001}, "stale=-0.001: give a number, 0 or above"),
        ({"stale": math.inf}, "stale=inf: give a number, 0 or above"),
        ({"early": True}, "early=True: give a number, 0 or above, or None"),
        ({"early": "5"}, "early='5': give a number, 0 or above, or None"),
        ({"early": -0.001}, "early=-0.001: give a number, 0 or above"),
        ({"early": math.inf}, "early=inf: give a number, 0 or above"),
    ],
)
def test_an_invalid_setting_of_a_cached_function_is_refused(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(holdfast.ConfigurationError) as caught:
        spec_of(**given)
    assert str(caught.value).startswith(message)
    assert caught.value.lock == ""


def test_values_derived_from_the_settings_of_a_cached_function() -> None:
    minutes, second = timedelta(minutes=2), timedelta(seconds=1)
    for given, expected in (
        ({}, (10, 0.0, 0.0, "10000", "0", b"holdfast:value:")),
        ({"stale": 0, "early": None}, (10, 0.0, 0.0, "10000", "0", b"holdfast:value:")),
        ({"stale": 2.5, "early": 1.5}, (10, 2.5, 1.5, "12500", "2500", b"holdfast:value:")),
        ({"ttl": minutes, "stale": second}, (120, 1, 0, "121000", "1000", b"holdfast:value:")),
        ({"namespace": "shop"}, (10, 0.0, 0.0, "10000", "0", b"holdfast:value:shop:")),
    ):
        spec = spec_of(**given)
        kept = spec.ttl, spec.stale, spec.early, spec.life_ms, spec.stale_ms, spec.value_prefix
        assert kept == expected
        assert spec.command_timeout == 2.0


def test_the_lock_of_a_value_is_held_for_half_of_lock_ttl() -> None:
    lock = spec_of(
        lock_ttl=timedelta(seconds=30), timeout=timedelta(seconds=5), namespace="shop"
    ).lock
    assert (lock.ttl, lock.ttl_ms, lock.timeout, lock.command_timeout) == (15.0, "15000", 5, 2.0)
    assert (lock.renew, lock.reentrant, lock.fair, lock.settings) == (True, False, True, "")
    assert (lock.max_hold, lock.longest_ttl, lock.lock_delay) == (math.inf, math.inf, 0)
    assert (lock.label, lock.suffix, lock.prefix) == ("cached", "cached", b"holdfast:in:shop:")
    assert spec_of(lock_ttl=0.5).lock.ttl == 0.25
    assert spec_of().lock.timeout is None


def test_a_value_and_its_lock_have_keys_with_the_same_hash_tag() -> None:
    for namespace, prefix, value in (
        ("", b"holdfast:", b"holdfast:value:"),
        ("shop", b"holdfast:in:shop:", b"holdfast:value:shop:"),
    ):
        one = wanted("a%{b}", namespace=namespace)
        lock, tag = one.lock(), b"{a%25%7Bb%7D}"
        assert one.keys.names == (value + tag,)
        begin = prefix + tag + b":cache"
        assert lock.keys.names == (begin, begin + b":fence", begin + b":queue", value + tag)
        assert (lock.name, lock.acquire_script, lock.extra_args) == ("a%{b}", ACQUIRE, ())
        claim = one.lock(CLAIM, "7")
        assert (claim.keys, claim.acquire_script, claim.extra_args) == (lock.keys, CLAIM, ("7",))


def test_a_long_name_is_shortened_to_its_beginning_and_a_digest() -> None:
    fits, longer = (
        wanted(name).keys[0][len("holdfast:value:") :] for name in ("x" * 300, "x" * 301)
    )
    assert fits == b"{" + b"x" * 300 + b"}"
    assert len(longer) == 302
    assert longer[:237] == b"{" + b"x" * 236
    assert longer[237:] != b"x" * 64 + b"}"
    assert wanted("x" * 302).keys[0] != wanted("x" * 301).keys[0]
    assert wanted("\udcff").keys[0] == b"holdfast:value:{\xff}"


def test_a_stored_value_is_read_with_its_fence_and_time() -> None:
    assert read_stored([]) is None
    assert read_stored([b"7 1500 250\na\nb", 4000]) == StoredValue(7, 2.5, 0.25, b"a\nb")
    assert read_stored([b"7 1500 250\n", 500]) == StoredValue(7, -1.0, 0.25, b"")
    for foreign in (b"", b"7", b"7 1500\na", b"7 1500 250 1\na", b"a b c\nd"):
        assert read_stored([foreign, 4000]) is None


@pytest.mark.parametrize(
    ("left", "cost", "early", "jitter", "due"),
    [
        (0.0, 1.0, 0.0, 0.5, True),
        (-1.0, 1.0, 1.0, 0.5, True),
        (0.001, 1.0, 0.0, 0.999, False),
        (1.0, 1.0, 1.0, 0.0, True),  # always refreshed once less than its cost is left
        (1.001, 1.0, 1.0, 0.0, False),
        (1 + math.log(2), 1.0, 1.0, 0.5001, True),
        (1 + math.log(2), 1.0, 1.0, 0.4999, False),
        (1 + 2 * math.log(2), 1.0, 2.0, 0.5001, True),
        (1 + 2 * math.log(2), 1.0, 2.0, 0.4999, False),
        (5.0, 1.0, 1.0, 1 - 1e-9, True),  # never in the first half of its ttl
        (5.001, 1.0, 1.0, 1 - 1e-9, False),
        (7.0, 7.0, 1.0, 0.9, True),  # unless its cost exceeds half of its ttl
        (7.001, 7.0, 1.0, 0.9, False),
    ],
)
def test_costlier_values_are_refreshed_earlier(
    left: float, cost: float, early: float, jitter: float, due: bool
) -> None:
    assert is_due(StoredValue(1, left, cost, b""), spec_of(early=early), jitter) is due
