"""Tokens: how the value of a lock's key is made, and what is read from it."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from holdfast.core.token import (
    TokenFactory,
    TokenInfo,
    client_in,
    encode,
    has_permits,
    holder_ms_left,
    is_holdfast_token,
    parse_token,
    permits_suffix,
    read_holder,
    suffix_of,
)

TOKEN = b"hf1:c:1:ann@web:7:Main:nightly"


def test_a_token_contains_its_client_and_actor_and_is_unique() -> None:
    factory = TokenFactory("c", "a@n:n", "web@1", 7)
    assert factory.client == "c"
    assert factory.new_token("Main", "") == "hf1:c:1:a%40n%3An@web%401:7:Main:"
    assert factory.new_token("Main", "x:&us") == "hf1:c:2:a%40n%3An@web%401:7:Main:x:&us"
    assert factory.new_token("a:b", "") == "hf1:c:3:a%40n%3An@web%401:7:a%3Ab:"


def test_the_encoded_names_of_actors_are_bounded() -> None:
    factory = TokenFactory("c", "ann", "web", 7)
    for number in range(1000):
        factory.new_token(f"Thread-{number}", "")
    assert len(factory._actors) == 1000
    factory.new_token("Thread-0", "")
    assert len(factory._actors) == 1000
    assert factory.new_token("one more", "").endswith(":7:one more:")
    assert len(factory._actors) == 1


@pytest.mark.parametrize(
    ("label", "delay_ms", "owner_suffix", "suffix"),
    [
        (None, 0, "", ""),
        ("", 0, "", ""),
        ("a:b%é", 0, "", "a%3Ab%25%C3%A9"),
        ("a", 5, "", "a:+5"),
        ("a", 0, "&us", "a:&us"),
        (None, 5, "&us", ":+5:&us"),
    ],
)
def test_a_token_ends_with_label_delay_and_owner(
    label: str | None, delay_ms: int, owner_suffix: str, suffix: str
) -> None:
    assert suffix_of(label, delay_ms, owner_suffix) == suffix
    party = parse_token(TokenFactory("c", "ann", "web", 7).new_token("Main", suffix).encode())
    assert party is not None
    owner = owner_suffix[1:] or None
    assert party == TokenInfo("ann", "web", 7, "Main", label or None, owner, delay_ms)


def test_parts_of_a_token_with_special_characters_are_read_back() -> None:
    for text in ("a:b", "a@b", "é%", "+5", "&us", "\udcff", " -_.!~*'()[]@/+=,<>#"):
        encoded = encode(text)
        assert ":" not in encoded
        drawn = TokenFactory("c", text, text, 7).new_token(text, suffix_of(text, 0, "&" + encoded))
        assert parse_token(drawn.encode()) == TokenInfo(text, text, 7, text, text, text, 0)
    assert encode(" -_.!~*'()[]@/+=,<>#") == " -_.!~*'()[]@/+=,<>#"


@pytest.mark.parametrize(
    ("token", "party"),
    [
        (TOKEN, TokenInfo("ann", "web", 7, "Main", "nightly", None, 0)),
        (TOKEN + b":+250", TokenInfo("ann", "web", 7, "Main", "nightly", None, 250)),
        (TOKEN + b":&us", TokenInfo("ann", "web", 7, "Main", "nightly", "us", 0)),
        (TOKEN + b":&", TokenInfo("ann", "web", 7, "Main", "nightly", "", 0)),
        (TOKEN + b":+250:&us", TokenInfo("ann", "web", 7, "Main", "nightly", "us", 250)),
        (b"hf1:c:1:@web:7:Main:", TokenInfo("", "web", 7, "Main", None, None, 0)),
        (b"hf1:c:1:web:7:Main:", TokenInfo(None, "web", 7, "Main", None, None, 0)),
        (
            b"hf1:c:1:web:" + b"9" * 19 + b":M:",
            TokenInfo(None, "web", 10**19 - 1, "M", None, None, 0),
        ),
        (b"hf1:c:1:web:" + b"9" * 20 + b":M:", None),
        (TOKEN + b":+" + b"9" * 20, None),
        (TOKEN + b":&us:+250", None),
        (TOKEN + b":+", None),
        (TOKEN + b":+x", None),
        (TOKEN + b":x", None),
        (TOKEN + b":-250", None),
        (TOKEN + b":+250:-250", None),
        (b"hf1:c:1:a@b@c:7:Main:", TokenInfo("a@b", "c", 7, "Main", None, None, 0)),
        (b"hf1:c:1:web:7\n:Main:", None),
        (b"hf1:c:1:web:7:\n:", TokenInfo(None, "web", 7, "\n", None, None, 0)),
        (TOKEN + b":", None),
        (b"hf1:c:1:ann@web:x:Main:nightly", None),
        (b"hf1:c:1:ann@web:7:Main", None),
        (b"hf2:c:1:ann@web:7:Main:nightly", None),
        (b"", None),
        (b"\xff\xfe", None),
    ],
)
def test_only_tokens_of_holdfast_contain_a_party(token: bytes, party: TokenInfo | None) -> None:
    assert parse_token(token) == party


def test_a_token_contains_its_client() -> None:
    assert is_holdfast_token(TOKEN)
    assert not is_holdfast_token(b"hf10:c:1")
    assert client_in("hf1:~c:1:ann@web:7:Main:") == "~c"


def test_the_remaining_time_of_a_holder_excludes_the_lock_delay() -> None:
    for token, left_ms, share in (
        (TOKEN, 300, 300),
        (TOKEN, 0, 0),
        (TOKEN + b":+250", 300, 50),
        (TOKEN + b":+250", 251, 1),
        (TOKEN + b":+250", 250, 0),
        (TOKEN + b":+250", 0, 0),
        (TOKEN + b":+250", -1, -1),
        (b"of another library", 300, 300),
        (b"of another library", -1, -1),
    ):
        assert holder_ms_left(token, left_ms) == share, (token, left_ms)


def test_a_holder_is_read_from_its_token_expiry_and_fence() -> None:
    whole = TOKEN + b":+250:&us"
    assert astuple(read_holder(whole, 1750, b"1700000000000000")) == (
        *("web", 7, "nightly", 1_700_000_000.0, 1_700_000_000_000_000, 1.5, "Main"),
        *(whole.decode(), "ann", "us", None, None),
    )
    assert astuple(read_holder(TOKEN, 0)) == (
        *("web", 7, "nightly", None, None, 0.0, "Main", TOKEN.decode(), "ann", None),
        *(None, None),
    )
    assert read_holder(TOKEN, -1).remaining is None
    foreign = read_holder(b"\xff", 1500, b"17")
    nothing = None, None, None, None
    assert astuple(foreign) == (None, None, None, None, None, 1.5, None, "\udcff", *nothing)
    permits = read_holder(TOKEN + b":$2/4", 1500)
    assert (permits.weight, permits.limit, permits.exclusive) == (2, 4, False)
    assert read_holder(TOKEN + b":$4/4", 1500).exclusive
    assert read_holder(TOKEN, 1500).exclusive


@pytest.mark.parametrize("label", ["$1/2", ":$1/2", "x$"])
def test_no_label_or_owner_looks_like_permits(label: str) -> None:
    assert not has_permits(f"hf1:c:1:me@here:1:main:{suffix_of(label, 0, '')}")
    assert not has_permits(f"hf1:c:1:me@here:1:main:{suffix_of('', 0, '&' + encode(label))}")
    assert has_permits(f"hf1:c:1:me@here:1:main:{suffix_of(label, 0, '')}{permits_suffix(1, 2)}")
    assert read_holder(b"\xff", -1).remaining is None
