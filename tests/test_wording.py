"""The wording check: which phrases and names it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from wording import find, names_in, phrases_in

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "sentence",
    [
        "who waits sends nothing",
        "Whoever asks is served.",
        "a PING a second a client",
        "one connection a thread",
        "its client is told of that",
        "as the server says so",
        "a waiter that hears it",
        "it learns of the loss",
        "the caller must learn the outcome",
        "the lock expired, also before the reply arrived",
        "replayed, and also with its fix removed",
        "kept for so long",
        "so many replicas have it",
        "also if it fails",
        "it asks anew",
        "tries again and\nagain",
        "what mends it",
        "the background sees to it",
        "it gives the lock back",
        "before its first sending",
        "two may believe in it",
        "nobody gets a lock",
        "a thread of its own",
        "a connection of ours",
        "the story of a test",
        "in a simulated world",
        "the next in line",
        "on both faces",
        "a waiting client asks",
        "waiters ask in turn",
        "instead of asking the server",
        "the node is away",
        "the key goes away",
        "the attempt goes on",
        "refused for good",
        "the lock is given again",
        "the grant is handed back",
        "over and over",
        "the client notices it",
        "the message says what to do",
        "someone else has it",
        "the lease is handed off",
        "a hand-off to another process",
        "a clean-up in the background",
    ],
)
def test_the_wording_check_finds_the_phrases_of_the_style_guide(sentence: str) -> None:
    assert list(phrases_in(sentence))


@pytest.mark.parametrize(
    "sentence",
    [
        "The error names the lock.",
        "REPLICAOF NO ONE",
        "the hand-over to the next waiter",
        "a cleanup cleans up what is left",
        "as long as the server keeps it",
        "The holder, who may be paused, is notified.",
        "once a client has used it",
        "Who holds the lock?",
        "the first line of the script",
    ],
)
def test_the_wording_check_accepts_plain_sentences(sentence: str) -> None:
    assert not list(phrases_in(sentence))


@pytest.mark.parametrize(
    "name",
    [
        "asked_again",
        "AskedAgain",
        "_settle_waits",
        "LEFT_TO_WIN_OR_WON",
        "BlockingEar",
        "is_handed_back",
        "permanent_refusals_of_nodes",
        "sealed_replies",
        "win",
        "_look",
        "_Turn",
        "Hold",
        "_hand_off",
    ],
)
def test_the_wording_check_finds_replaced_words_in_identifiers(name: str) -> None:
    assert names_in(name)


@pytest.mark.parametrize(
    "name",
    [
        "place",
        "there",
        "resettled",
        "wonder",
        "early",
        "outlives",
        "Turn",
        "look",
        "window",
        "hold",
    ],
)
def test_the_wording_check_accepts_plain_identifiers(name: str) -> None:
    assert not names_in(name)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.json", '{\n  "detail": "somebody got the lock",\n}\n'),
        ("a.lua", "local told = 1\n"),
        ("a.lua", "-- the waiter is told\n"),
        ("a.py", "ids = ['goes away']\n"),
        ("a.py", "ids = ['told_at']\n"),
        ("a.py", "value = b'somebody'\n"),
        ("a.py", "value = b'goes away: \\xff'\n"),
        ("was_handed_back.py", ""),
    ],
)
def test_the_wording_check_reads_texts_of_every_kind(
    file: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wording.ROOT", tmp_path)
    (tmp_path / file).write_text(text)
    assert list(find(tmp_path / file))
