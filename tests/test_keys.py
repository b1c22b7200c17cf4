"""The keys of a lock. In a cluster, all of them and the client's channel are in one slot."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from holdfast.core.messages import channel_of
from holdfast.core.spec import LockSpec, describe
from holdfast.keys import is_named, lock_key_in, name_in, namespace_in, tag_of

TEXTS = st.text(st.sampled_from("ab{}:é\udcff"), min_size=1, max_size=12)
ODD = ["}", "}a", "a}b", "{}", "{}a", "{}{a}", "a{", "{", "{{a}}", "{a}{b}", "a{b}c", "}{", "}{a}"]


def lock(name: str = "a", *, key: str | None = None, owner: str | None = None) -> LockSpec:
    return describe(
        name,
        ttl=30,
        timeout=None,
        renew=True,
        max_hold=None,
        reentrant=False,
        owner=owner,
        fair=True,
        lock_delay=0,
        key=key,
        label=None,
        command_timeout=1,
    )


def assert_in_one_slot(spec: LockSpec) -> None:
    channel = channel_of("~client", spec.keys[0])
    assert len({key_slot(name) for name in (*spec.keys, channel)}) == 1, (spec.keys, channel)
    assert len(set(spec.keys)) == len(spec.keys)
    # The scripts derive the channel in the same way.
    (tag,) = re.findall(rb"{[^}]+}", spec.keys[1])[:1]
    assert channel == b"holdfast:push:~client:" + tag


@pytest.mark.parametrize("text", ODD)
def test_keys_of_a_name_with_braces_are_in_one_slot(text: str) -> None:
    assert_in_one_slot(lock(text, owner="us"))
    assert_in_one_slot(lock(key=text, owner="us"))


@settings(max_examples=200)
@given(TEXTS, TEXTS)
def test_keys_of_a_lock_are_in_one_slot_and_belong_to_no_other_lock(one: str, other: str) -> None:
    specs = [lock(one, owner="us"), lock(key=one, owner="us")]
    for spec in specs:
        assert_in_one_slot(spec)
    if one != other:
        for mine, theirs in zip(specs, [lock(other), lock(key=other)], strict=True):
            assert not set(mine.keys) & set(theirs.keys)


@pytest.mark.parametrize(
    ("given", "fence"),
    [
        ({"name": "a"}, b"holdfast:{a}:fence"),
        ({"name": "a{b}"}, b"holdfast:{a{b}}:fence"),
        ({"key": "a"}, b"holdfast:key:{a}:fence"),
        ({"key": "a{"}, b"holdfast:key:{a{}:fence"),
        ({"key": "x{a}y"}, b"holdfast:tag:x{a}y:fence"),
        ({"key": "holdfast:{a}"}, b"holdfast:{a}:fence"),
        ({"key": "a}b"}, b"holdfast:odd:{20658}:a}b:fence"),
        ({"name": "}a"}, b"holdfast:odd:{43323}:holdfast:{}a}:fence"),
        ({"key": "a key as long as{this}"}, b"holdfast:tag:a key as long as{this}:fence"),
        ({"key": "holdfast:in:shop:{a}"}, b"holdfast:in:shop:{a}:fence"),
    ],
)
def test_key_names_do_not_change(given: dict[str, str], fence: bytes) -> None:
    assert lock(**given).keys[1] == fence


@settings(max_examples=200)
@given(TEXTS)
def test_every_key_identifies_its_lock(text: str) -> None:
    for spec, name in ((lock(text, owner="us"), text), (lock(key=text, owner="us"), None)):
        own, *others = spec.keys
        assert {lock_key_in(key) for key in others} == {own}
        assert name_in(own) == name
        assert lock_key_in(own) == (own if name else None)


def test_other_keys_belong_to_no_lock() -> None:
    for key in (
        b"holdfast:restart-marker",
        b"holdfast:quarantine",
        b"holdfast:odd:{1}:a:fence",
        b"a:fence",
    ):
        assert lock_key_in(key) is None
    for key in (b"fence", b"holdfast:tag:a:fence", b"holdfast:key:{a}:once", b"holdfast:{}:other"):
        assert lock_key_in(key) == (key if key.startswith(b"holdfast:{") else None)


def test_name_and_namespace_are_read_back_from_a_key() -> None:
    for key, name, namespace in (
        (b"holdfast:{a}", "a", ""),
        (b"holdfast:{a\xff}}", "a\udcff}", ""),
        (b"holdfast:in:sh\xc3\xb6p:{a}", "a", "shöp"),
        (b"a", None, ""),
        (b"holdfast:{a}:fence", None, ""),
    ):
        assert (name_in(key), namespace_in(key)) == (name, namespace)
        assert is_named(key) is key.startswith((b"holdfast:{", b"holdfast:in:"))


@pytest.mark.parametrize(
    ("key", "tag"),
    [(b"a{b}c", b"b"), (b"a}b", b""), (b"a}{b}", b"b"), (b"{}a{b}", b""), (b"a{b", b"")],
)
def test_the_tag_of_a_key_is_the_text_in_its_first_braces(key: bytes, tag: bytes) -> None:
    assert tag_of(key) == tag
