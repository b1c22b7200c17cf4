"""The settings of a lock: their bounds, the errors for wrong ones, and the values derived from
them."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

import holdfast
from holdfast.core.kind import EXCLUSIVE
from holdfast.core.spec import (
    check_ttl,
    checked_longest_ttl,
    delay_in,
    describe,
    settings_of,
    to_ms,
    ttl_of,
    validity_of,
)
from holdfast.core.spec_cache import SpecCache
from holdfast.core.time_budget import TimeBudget
from holdfast.keys import Keys, checked_namespace
from holdfast.scripts import ACQUIRE
from kit.lock_settings import PLAIN

YEAR = 365 * 86_400.0
IN_ORDER = ["ttl", "timeout", "renew", "max_hold", "reentrant", "owner", "fair", "lock_delay"]
IN_ORDER += ["replicas", "key", "label"]
NAMED = "lock 'a': "

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"name": b"a"}, "", "name=b'a': give a string"),
    ({"name": ""}, "", "the name is empty"),
    ({"name": "é" * 512 + "x"}, "é" * 40, f"lock '{'é' * 40}': the name has 1025 bytes, and at"),
    ({"name": "\ud800"}, "", "the name is not text"),
    ({"key": 7}, "", "key=7: give a string"),
    ({"key": ""}, "", "the key is empty"),
    ({"key": "x" * 1025}, "x" * 40, f"lock '{'x' * 40}': the key has 1025 bytes, and at most 1024"),
    ({"key": "\ud800"}, "", "the key is not text"),
    ({"ttl": 0.0099}, "a", "ttl=0.0099: give seconds from 0.01 to 31536000,"),
    ({"ttl": YEAR + 1}, "a", "ttl=31536001.0: give seconds"),
    ({"ttl": "30"}, "a", "ttl='30': give seconds"),
    ({"ttl": True}, "a", "ttl=True: give seconds"),
    ({"ttl": math.nan}, "a", "ttl=nan: give seconds"),
    ({"ttl": 31, "longest_ttl": 30}, "a", "ttl=31 exceeds longest_ttl=30 of this client"),
    ({"timeout": -0.001}, "a", "timeout=-0.001: give seconds"),
    ({"timeout": math.inf}, "a", "timeout=inf: give seconds"),
    ({"timeout": "5"}, "a", "timeout='5': give seconds"),
    ({"timeout": False}, "a", "timeout=False: give seconds"),
    ({"max_hold": 0}, "a", "max_hold=0: give seconds above 0"),
    ({"max_hold": math.inf}, "a", "max_hold=inf: give seconds"),
    ({"max_hold": "5"}, "a", "max_hold='5': give seconds"),
    ({"max_hold": True}, "a", "max_hold=True: give seconds"),
    ({"max_hold": 5, "renew": False}, "a", "max_hold needs renew=True"),
    ({"lock_delay": -0.001}, "a", "lock_delay=-0.001: give seconds"),
    ({"lock_delay": YEAR + 1}, "a", "lock_delay=31536001.0: give seconds"),
    ({"lock_delay": None}, "a", "lock_delay=None: give seconds"),
    ({"replicas": -1}, "a", "replicas=-1: give the number of replicas"),
    ({"replicas": 1001}, "a", "replicas=1001: give the number"),
    ({"replicas": 1.0}, "a", "replicas=1.0: give the number"),
    ({"label": 5}, "a", "label: give a string of at most 200 characters"),
    ({"label": "x" * 201}, "a", "label: give a string of at most 200 characters"),
    ({"label": "\ud800"}, "", "the label is not text"),
    ({"owner": 5}, "a", "owner: give a string of at most 200 characters"),
    ({"owner": "\ud800"}, "", "the owner is not text"),
    ({"owner": "us", "reentrant": True}, "a", "an owner may acquire it in any thread or task"),
    ({"owner": "us", "quorum": True}, "a", "an owner needs a single server"),
    ({"replicas": 1, "quorum": True}, "a", "a quorum uses no replicas"),
    ({"min_validity": -0.001}, "a", "min_validity=-0.001: give seconds below the ttl of 30"),
    ({"min_validity": validity_of(30)}, "a", "min_validity=29.69"),
    ({"min_validity": "1"}, "a", "min_validity='1': give seconds"),
]

FINE: list[dict[str, Any]] = [
    {"name": "é" * 512},
    {"name": "\udcff"},
    {"key": "x" * 1024},
    {"ttl": 0.01},
    {"ttl": YEAR},
    {"ttl": timedelta(seconds=1)},
    {"ttl": 30, "longest_ttl": 30},
    {"timeout": 0},
    {"timeout": 1e300},
    {"max_hold": 0.001},
    {"lock_delay": YEAR},
    {"replicas": 1000},
    {"label": ""},
    {"label": "é" * 200},
    {"owner": "x" * 200},
    {"reentrant": True},
    {"renew": False},
    {"min_validity": 0},
    {"min_validity": 29.69},
    {"quorum": True, "reentrant": True},
]


@pytest.mark.parametrize(("given", "lock", "message"), WRONG)
def test_the_error_for_a_wrong_setting_names_its_value_and_the_lock(
    given: dict[str, Any], lock: str, message: str
) -> None:
    with pytest.raises(holdfast.ConfigurationError) as caught:
        describe(**{"name": "a", **PLAIN, **given})
    assert str(caught.value).startswith(NAMED * (lock == "a") + message)
    assert caught.value.lock == lock


@pytest.mark.parametrize("given", FINE, ids=str)
def test_a_setting_at_its_bound_is_accepted(given: dict[str, Any]) -> None:
    describe(**{"name": "a", **PLAIN, **given})


def test_the_error_for_a_ttl_above_longest_ttl_names_the_needed_value() -> None:
    with pytest.raises(holdfast.ConfigurationError, match=r"longest_ttl=30 .*longest_ttl=31, or"):
        check_ttl(31, lock="a", longest=30.0)
    with pytest.raises(holdfast.ConfigurationError, match=r"^lock 'b': pause=1: .* from 2 to "):
        check_ttl(1, lock="b", least=2, name="pause")


def test_derived_values_follow_from_the_settings_of_a_lock() -> None:
    plain: dict[str, Any] = {
        "name": "a",
        "ttl": 30.0,
        "timeout": None,
        "renew": True,
        "max_hold": math.inf,
        "reentrant": False,
        "owner": None,
        "fair": True,
        "lock_delay": 0.0,
        "replicas": 0,
        "label": None,
        "prefix": b"holdfast:",
        "keys": Keys((b"holdfast:{a}", b"holdfast:{a}:fence", b"holdfast:{a}:queue")),
        "suffix": "",
        "settings": "",
        "ttl_ms": "30000",
        "validity": pytest.approx(29.699),
        "usable": pytest.approx(29.699),
        "renew_after": pytest.approx(29.699 / 3),
        "first_due": pytest.approx(29.699 / 3),
        "command_timeout": 2.0,
        "longest_ttl": math.inf,
        "is_shared": False,
        "acquire_script": ACQUIRE,
        "extra_args": (),
        "kind": EXCLUSIVE,
        "weight": 0,
        "limit": 0,
    }
    in_shop = Keys(tuple(key.replace(b":", b":in:shop:", 1) for key in plain["keys"]))
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"ttl": timedelta(minutes=1)}, _of_ttl(60.0, 2.0)),
        ({"ttl": 4}, _of_ttl(4.0, 1.0)),
        ({"ttl": 4, "quorum": True, "fair": False}, {**_of_ttl(4.0, 0.4), **_barge()}),
        ({"ttl": 0.0101}, _of_ttl(0.0101, 0.0101 / 4)),
        ({"timeout": 5}, {"timeout": 5}),
        ({"timeout": timedelta(seconds=5)}, {"timeout": 5.0}),
        ({"renew": 0}, {"renew": False, "first_due": pytest.approx(29.699)}),
        ({"max_hold": 5}, {"max_hold": 5.0, "first_due": 5}),
        ({"max_hold": 500}, {"max_hold": 500.0}),
        ({"reentrant": 1}, {"reentrant": True}),
        ({"fair": 0}, {"fair": False, "settings": "0 barge "}),
        (
            {"lock_delay": timedelta(seconds=1.5)},
            {"lock_delay": 1.5, "suffix": ":+1500", "settings": "1500 fair "},
        ),
        (
            {"lock_delay": 1.5, "quorum": True},
            {"lock_delay": 1.5, "suffix": ":+1500", "settings": "1500 barge "},
        ),
        (
            {"owner": "u:s", "label": "x:y", "lock_delay": 1},
            {
                "owner": "u:s",
                "label": "x:y",
                "lock_delay": 1.0,
                "keys": Keys((*plain["keys"], b"holdfast:{a}:holds")),
                "suffix": "x%3Ay:+1000:&u%3As",
                "settings": "1000 fair &u%3As",
                "is_shared": True,
            },
        ),
        ({"replicas": 2}, {"replicas": 2, "keys": replace(plain["keys"], replicas=2)}),
        ({"longest_ttl": 60.0}, {"longest_ttl": 60.0, "settings": "0 fair+guard "}),
        (
            {"longest_ttl": 60.0, "quorum": True},
            {"longest_ttl": 60.0, "settings": "0 barge "},
        ),
        ({"min_validity": 9.699}, {"usable": pytest.approx(20.0)}),
        (
            {"key": "k"},
            {"keys": Keys((b"k", b"holdfast:key:{k}:fence", b"holdfast:key:{k}:queue"))},
        ),
        ({"namespace": "shop"}, {"prefix": b"holdfast:in:shop:", "keys": in_shop}),
    ]
    for given, differs in cases:
        spec = describe(**{"name": "a", **PLAIN, **given})
        found = vars(spec)
        assert found == {**plain, **differs}, given
        assert {key: type(value) for key, value in found.items() if isinstance(value, bool)} == {
            "renew": bool,
            "reentrant": bool,
            "fair": bool,
            "is_shared": bool,
        }
        assert spec.keys.replicas == spec.replicas


def _of_ttl(ttl: float, command_timeout: float) -> dict[str, Any]:
    validity = ttl * 0.99 - 0.001
    return {
        "ttl": ttl,
        "ttl_ms": str(math.ceil(ttl * 1000)),
        "validity": pytest.approx(validity),
        "usable": pytest.approx(validity),
        "renew_after": pytest.approx(validity / 3),
        "first_due": pytest.approx(validity / 3),
        "command_timeout": pytest.approx(command_timeout),
    }


def _barge() -> dict[str, Any]:
    return {"fair": False, "settings": "0 barge "}


def test_renewing_needs_only_the_keys_that_exist_while_the_lock_is_held() -> None:
    plain = describe("a", **PLAIN, replicas=2)
    assert plain.renewal_keys.names == plain.keys[:2]
    assert plain.renewal_keys.replicas == 2
    owned = describe("a", **{**PLAIN, "owner": "us"})
    assert owned.renewal_keys is owned.keys


def test_a_lock_with_another_name_has_its_keys_and_the_same_settings() -> None:
    cases: list[dict[str, Any]] = [{}, {"owner": "us", "namespace": "shop"}, {"replicas": 2}]
    for given in cases:
        first = describe(**{"name": "a", **PLAIN, **given})
        first.renewal_keys  # noqa: B018 - as renewing it does
        other, expected = first.with_name("b{}"), describe(**{"name": "b{}", **PLAIN, **given})
        assert vars(other) == vars(expected)
        assert other.keys.replicas == expected.keys.replicas
        assert other.renewal_keys[0] == other.keys[0]
        with pytest.raises(holdfast.ConfigurationError, match="the name is empty") as caught:
            first.with_name("")
        assert caught.value.lock == ""


def test_a_caller_returns_in_time_even_if_no_server_replies() -> None:
    spec = describe("a", **PLAIN)  # with a command timeout of 2 s
    slow = describe("a", **{**PLAIN, "command_timeout": 0.05})
    assert TimeBudget.begin(spec, None, 100.0).end == math.inf
    for timeout, end, slow_end in (
        (0, 102.0, 100.05),
        (0.05, 100.25, 100.1),
        (0.1, 100.25, 100.15),
        (0.15, 100.25, 100.2),
        (0.2, 100.3, 100.25),
        (5.0, 105.1, 105.05),
    ):
        assert TimeBudget.begin(spec, timeout, 100.0).end == pytest.approx(end)
        assert TimeBudget.begin(slow, timeout, 100.0).end == pytest.approx(slow_end)


def test_unusual_settings_are_encoded_for_the_scripts() -> None:
    for delay_ms, group, fair, guarded, written in (
        (0, "", True, False, ""),
        (5, "", True, False, "5 fair "),
        (0, "&us", True, False, "0 fair &us"),
        (0, "", False, False, "0 barge "),
        (0, "", True, True, "0 fair+guard "),
        (7, "&us", False, True, "7 barge+guard &us"),
    ):
        assert settings_of(delay_ms, group, fair=fair, guarded=guarded) == written
        assert delay_in(written) == delay_ms
    assert settings_of(0, "") == ""


def test_ttl_and_validity_are_converted_into_each_other() -> None:
    for ttl in (0.01, 1.0, 30.0):
        assert validity_of(ttl) == pytest.approx(ttl * 0.99 - 0.001)
        assert ttl_of(validity_of(ttl)) == pytest.approx(ttl)
    assert [to_ms(seconds) for seconds in (0, 0.0101, 1, 1.0001)] == ["0", "11", "1000", "1001"]


def test_a_namespace_is_short_and_printable_without_colons_and_braces() -> None:
    assert checked_namespace(None) == ""
    for good in ("a", "shop.production", "é" * 100):
        assert checked_namespace(good) == good
    for bad in ("", "x" * 101, "a:b", "a{", "}", "a\n", 7, b"a"):
        with pytest.raises(holdfast.ConfigurationError) as caught:
            checked_namespace(bad)
        assert str(caught.value).startswith(
            f"namespace={bad!r} is not valid: give 1 to 100 printable"
        )
        assert caught.value.lock == ""


def test_longest_ttl_must_be_a_valid_ttl() -> None:
    for good, seconds in ((1, 1.0), (0.001, 0.001), (YEAR, YEAR), (timedelta(seconds=2), 2.0)):
        assert checked_longest_ttl(good) == seconds
        assert type(checked_longest_ttl(good)) is float
    for bad in (0, -1, YEAR + 1, "5", None, math.nan, True):
        with pytest.raises(holdfast.ConfigurationError, match=r"^longest_ttl=.* up to 31536000,"):
            checked_longest_ttl(bad)  # type: ignore[arg-type]


def test_every_setting_of_a_client_reaches_the_lock() -> None:
    of_client: dict[str, Any] = {
        "command_timeout": 1.5,
        "longest_ttl": 60.0,
        "min_validity": 2,
        "namespace": "shop",
    }
    given = {**PLAIN, "ttl": 8, "timeout": 3, "max_hold": 60, "owner": "us", "fair": False}
    given |= {"lock_delay": 1, "label": "nightly", "replicas": 2}
    del given["command_timeout"]
    quorum = {"owner": None, "reentrant": True, "replicas": 0, "key": "k", "renew": True}
    for settings, several in ((given, False), ({**given, **quorum}, True)):
        specs = SpecCache(**of_client, quorum=several)
        described = describe("a", **settings, **of_client, quorum=several)
        arguments = "a", *(settings[each] for each in IN_ORDER)
        assert vars(specs.describe_uncached(*arguments)) == vars(described)
        assert vars(specs.describe(*arguments)) == vars(described)
        assert specs.describe(*arguments) is specs.describe(*arguments)


def test_a_new_name_with_known_settings_uses_the_cached_spec() -> None:
    client = holdfast.Client("redis://127.0.0.1:1")
    specs = client._specs
    for number in range(5):
        assert client.lock(f"a{number}", ttl=7).ttl == 7
    assert specs._template.cache_info().misses == 1
    assert client.lock("b", ttl=7, key="k")._spec.keys[0] == b"k"
    assert specs._template.cache_info().misses == 1, "a key does not follow from the name"
    assert client.lock("a1", ttl=7)._spec is client.lock("a1", ttl=7)._spec
