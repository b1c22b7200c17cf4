"""What is written in a lock's key: how it is made, and what is read from it."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from holdfast.core.token import (
    Mint,
    Party,
    client_in,
    encode,
    holders_share,
    is_ours,
    read_holder,
    read_party,
    suffix_of,
)

TOKEN = b"hf1:c:1:ann@web:7:Main:nightly"


def test_a_token_names_its_client_and_its_place_and_is_drawn_once() -> None:
    mint = Mint("c", "a@n:n", "web@1", 7)
    assert mint.client == "c"
    assert mint.draw("Main", "") == "hf1:c:1:a%40n%3An@web%401:7:Main:"
    assert mint.draw("Main", "x:&us") == "hf1:c:2:a%40n%3An@web%401:7:Main:x:&us"
    assert mint.draw("a:b", "") == "hf1:c:3:a%40n%3An@web%401:7:a%3Ab:"


def test_the_encoded_names_of_actors_are_bounded() -> None:
    mint = Mint("c", "ann", "web", 7)
    for number in range(1000):
        mint.draw(f"Thread-{number}", "")
    assert len(mint._actors) == 1000
    mint.draw("Thread-0", "")
    assert len(mint._actors) == 1000
    assert mint.draw("one more", "").endswith(":7:one more:")
    assert len(mint._actors) == 1


@pytest.mark.parametrize(
    ("label", "delay_ms", "group", "suffix"),
    [
        (None, 0, "", ""),
        ("", 0, "", ""),
        ("a:b%é", 0, "", "a%3Ab%25%C3%A9"),
        ("a", 5, "", "a:+5"),
        ("a", 0, "&us", "a:&us"),
        (None, 5, "&us", ":+5:&us"),
    ],
)
def test_label_delay_and_owner_end_a_token(
    label: str | None, delay_ms: int, group: str, suffix: str
) -> None:
    assert suffix_of(label, delay_ms, group) == suffix
    party = read_party(Mint("c", "ann", "web", 7).draw("Main", suffix).encode())
    assert party is not None
    owner = group[1:] or None
    assert party == Party("ann", "web", 7, "Main", label or None, owner, delay_ms)


def test_whatever_a_part_of_a_token_is_it_is_read_as_it_was() -> None:
    for text in ("a:b", "a@b", "é%", "+5", "&us", "\udcff", " -_.!~*'()[]@/+=,<>#"):
        encoded = encode(text)
        assert ":" not in encoded
        drawn = Mint("c", text, text, 7).draw(text, suffix_of(text, 0, "&" + encoded))
        assert read_party(drawn.encode()) == Party(text, text, 7, text, text, text, 0)
    assert encode(" -_.!~*'()[]@/+=,<>#") == " -_.!~*'()[]@/+=,<>#"


@pytest.mark.parametrize(
    ("token", "party"),
    [
        (TOKEN, Party("ann", "web", 7, "Main", "nightly", None, 0)),
        (TOKEN + b":+250", Party("ann", "web", 7, "Main", "nightly", None, 250)),
        (TOKEN + b":&us", Party("ann", "web", 7, "Main", "nightly", "us", 0)),
        (TOKEN + b":&", Party("ann", "web", 7, "Main", "nightly", "", 0)),
        (TOKEN + b":+250:&us", Party("ann", "web", 7, "Main", "nightly", "us", 250)),
        (b"hf1:c:1:@web:7:Main:", Party("", "web", 7, "Main", None, None, 0)),
        (b"hf1:c:1:web:7:Main:", Party(None, "web", 7, "Main", None, None, 0)),
        (b"hf1:c:1:web:" + b"9" * 19 + b":M:", Party(None, "web", 10**19 - 1, "M", None, None, 0)),
        (b"hf1:c:1:web:" + b"9" * 20 + b":M:", None),
        (TOKEN + b":+" + b"9" * 20, None),
        (TOKEN + b":&us:+250", None),
        (TOKEN + b":+", None),
        (TOKEN + b":+x", None),
        (TOKEN + b":x", None),
        (TOKEN + b":-250", None),
        (TOKEN + b":+250:-250", None),
        (b"hf1:c:1:a@b@c:7:Main:", Party("a@b", "c", 7, "Main", None, None, 0)),
        (b"hf1:c:1:web:7\n:Main:", None),
        (b"hf1:c:1:web:7:\n:", Party(None, "web", 7, "\n", None, None, 0)),
        (TOKEN + b":", None),
        (b"hf1:c:1:ann@web:x:Main:nightly", None),
        (b"hf1:c:1:ann@web:7:Main", None),
        (b"hf2:c:1:ann@web:7:Main:nightly", None),
        (b"", None),
        (b"\xff\xfe", None),
    ],
)
def test_only_tokens_of_ours_say_who_drew_them(token: bytes, party: Party | None) -> None:
    assert read_party(token) == party


def test_a_token_says_which_client_hands_the_lock_over() -> None:
    assert is_ours(TOKEN)
    assert not is_ours(b"hf10:c:1")
    assert client_in("hf1:~c:1:ann@web:7:Main:") == "~c"


def test_the_lock_delay_is_not_the_holders() -> None:
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
        assert holders_share(token, left_ms) == share, (token, left_ms)


def test_a_holder_is_what_its_token_its_key_and_the_last_fence_say() -> None:
    whole = TOKEN + b":+250:&us"
    assert astuple(read_holder(whole, 1750, b"1700000000000000")) == (
        *("web", 7, "nightly", 1_700_000_000.0, 1_700_000_000_000_000, 1.5, "Main"),
        *(whole.decode(), "ann", "us"),
    )
    assert astuple(read_holder(TOKEN, 0)) == (
        *("web", 7, "nightly", None, None, 0.0, "Main", TOKEN.decode(), "ann", None),
    )
    assert read_holder(TOKEN, -1).remaining is None
    foreign = read_holder(b"\xff", 1500, b"17")
    assert astuple(foreign) == (None, None, None, None, None, 1.5, None, "\udcff", None, None)
    assert read_holder(b"\xff", -1).remaining is None
