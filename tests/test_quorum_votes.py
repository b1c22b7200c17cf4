"""What a quorum asks its nodes, when it stops waiting, and what it concludes, without a server.

Replies are written as words, one for each node. `7` is a fence, `1` a yes, `no` is 0, `absent` is
an empty reply. `o:9:1` means that `o` holds the lock for 9 ms with fence 1. `closed-5` is a
quarantine of 5 s, and `.` is no reply. At `|` the quorum must know enough, and not before; the
replies after it arrive late. After `=` comes the conclusion of the quorum.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.adapters.thread_port import run
from holdfast.core.events import Event
from holdfast.core.quorum import Quorum
from holdfast.core.rounds import Inspection, Vote
from holdfast.core.spec import TOMBSTONE_MS
from holdfast.core.token_locations import PRESENT, UNSURE
from holdfast.errors import ConfigurationError, NodeUnavailable, NoQuorum, OutcomeUnknown
from holdfast.keys import keys_of
from holdfast.port import Interrupted, Quarantined, Unconnected
from holdfast.scripts import CONFIRM, EVICT, INSPECT, RELEASE, RENEW, VOTE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import OnReply, Post, Reply, Request
    from holdfast.scripts import Script

LIMIT, THREE, FIVE = 2.0, ". . .", ". . . . ."
KEYS, TTL, SETTINGS = keys_of(b"holdfast:{a}"), "10000", "0 barge "
UNREACHABLE, UNKNOWN = NodeUnavailable("n0 is unreachable"), OutcomeUnknown("no answer")
BROKEN, BUSY = ConfigurationError("it has no scripts"), Unconnected("not connected yet")
WORDS: dict[str, Any] = {
    "away": UNREACHABLE,
    "unknown": UNKNOWN,
    "broken": BROKEN,
    "connecting": BUSY,
}
WORDS |= {"no": 0, "absent": [], "none": None, "interrupted": Interrupted("a signal")}
WORDS |= {f"closed-{n}": Quarantined("it restarted", seconds=n) for n in (3, 5, 9)}


def meaning(word: str) -> Any:
    """Return a number, a holder with its time left and its fence, or a named reply or error."""
    if ":" in word:
        holder, left, fence = word.split(":")
        return [holder.encode(), int(left), fence.encode()]
    return int(word) if word.isdigit() else WORDS.get(word, word)


def answers_in(words: str) -> dict[int, Any]:
    every = enumerate(words.replace("|", "").split())
    return {node: meaning(word) for node, word in every if word != "."}


def cases(text: str) -> pytest.MarkDecorator:
    """Run a test with the words and the result of each case, as in `7 7 | 7 = 7; 7 no = 0`."""
    rows = [row.split("=") for row in text.replace("\n", ";").split(";") if row.strip()]
    return pytest.mark.parametrize(
        ("words", "expected"), [(words.strip(), meaning(result.strip())) for words, result in rows]
    )


def to(script: Script, token: str, third: str = "0") -> Request:
    """Return a request. `third` is a hint, a fence, the lifetime of a tombstone, or a token."""
    args = {RENEW: (token, TTL, SETTINGS, "7"), EVICT: (token, TTL, SETTINGS), INSPECT: ()}
    most = (token, TTL, third, SETTINGS, "") if script is VOTE else (token, TTL, third, SETTINGS)
    return script, KEYS, args.get(script, most)


vote, renew, release = partial(to, VOTE), partial(to, RENEW), partial(to, RELEASE)
REQUESTS = {each.name: to(each, "t") for each in (RENEW, RELEASE, EVICT, INSPECT)}


class Planned:
    """A quorum, and its nodes, which reply as planned."""

    new_locations_mutex = staticmethod(nullcontext)

    def __init__(self, words: str = THREE) -> None:
        self.all = [*range(len(words.replace("|", "").split()))]
        self.names = [f"n{node}" for node in self.all]
        self.plans: list[Sequence[str]] = []
        """For each call of `ask`, the replies to each of its posts."""
        self.sent: list[tuple[float, list[tuple[list[int], Request]]]] = []
        """The time limit, the nodes and the request of each post."""
        self.on_tick: list[object] = []
        self.deliver_late: Callable[[], list[bool]]
        self.events: list[Event] = []
        self.cleaned_up: list[tuple[int | None, tuple[str, ...]]] = []
        self.due: list[Callable[[], None]] = []
        self.quorum = Quorum(self, self, self.events.append, 60.0)
        self.begin()

    async def send_all(
        self, posts: Sequence[Post], timeout: float, on_reply: OnReply, on_tick: Any = None
    ) -> None:
        self.sent.append((timeout, [(list(nodes), request) for nodes, request in posts]))
        self.on_tick.append(on_tick)
        enough, late = timeout == 0, []
        for number, words in enumerate(self.plans.pop(0)):
            before = len(words.split("|")[0].split())
            for node, answer in answers_in(words).items():
                assert node in posts[number][0], "the node was not asked"
                if node >= before:
                    late.append((number, node, answer))
                    continue
                assert not enough, "the quorum knew enough before"
                enough = on_reply(number, node, answer)
            assert enough == ("|" in words)
        self.deliver_late = lambda: [on_reply(*answer) for answer in late]

    def begin(self) -> None:
        session: Any = SimpleNamespace(
            port=None,
            cleanups=SimpleNamespace(
                schedule_request=lambda each: self.cleaned_up.append((each[1].node, each[2]))
            ),
            renewer=SimpleNamespace(call_later=lambda _, action: self.due.append(action)),
        )
        self.quorum.begin(session)
        self.where = self.quorum.locations.of

    def vote(self, *rounds: str, left: Callable[[], float] = lambda: 0.5) -> tuple[int, Vote]:
        self.plans = [[words] for words in rounds]
        return run(self.quorum.vote(vote("t"), LIMIT, left))

    def call(self, request: Request, words: str) -> Reply:
        """Return the reply, or the name of the error."""
        self.plans = [[words]]
        try:
            return run(self.quorum.call(*request, LIMIT))
        except (NoQuorum, OutcomeUnknown) as error:
            return type(error).__name__

    def call_many(self, requests: Sequence[Request], *plans: Sequence[str]) -> list[Reply]:
        self.plans = list(plans)
        replies = run(self.quorum.call_many(requests, LIMIT, lambda: 1.0))
        return [type(each).__name__ if isinstance(each, Exception) else each for each in replies]

    def withdraw(self, *words: str, wait_if_no_votes: bool) -> None:
        self.plans = [words]
        run(self.quorum.withdraw(release("t"), LIMIT, wait_if_no_votes=wait_if_no_votes))

    def record(self, token: str, *nodes: int) -> None:
        """Record that a token is on these nodes."""
        self.quorum.locations.expect(token, PRESENT)
        for node in {*self.all} - {*nodes}:
            self.quorum.locations.on_renewal(token, node, 0)

    def votes(self, words: str) -> Vote:
        votes = Vote(self.quorum, vote("t"))
        for node, answer in answers_in(words).items():
            votes.on_reply(0, node, answer)
        return votes


# Votes, and withdrawing a token that did not get the lock


@cases("""
    7 7 | 7 = 7;      7 o:9:1 7 | = 7;    away 7 7 | = 7;     o:9:1 away | 7 = 0
    no no | 7 = 0;    no away | 7 = 0;    7 7 7 | 7 7 = 7;    7 no 7 away 7 | = 7
    7 . 7 . . = 0;    7 7 no o:9:1 unknown | = 0;             away no unknown | 7 7 = 0
""")
def test_a_vote_ends_with_a_majority_or_when_none_is_left(words: str, expected: int) -> None:
    for failing in ([], [2]):
        planned = Planned(words)
        planned.quorum._failing.update(failing)
        fence, votes = planned.vote(words)
        assert fence == expected
        assert planned.sent == [(LIMIT, [(planned.all, vote("t"))])]
        counted = answers_in(words.split("|", maxsplit=1)[0])
        assert votes.yes == {node: 7 for node, answer in counted.items() if answer == 7}


@pytest.mark.parametrize("left", [0.5, 50.0])
def test_nodes_that_gave_different_fences_must_confirm_the_highest(left: float) -> None:
    planned = Planned(FIVE)
    assert planned.vote("no 7 9 8 | .", ". 9 9 9 | 9", left=lambda: left)[0] == 9
    assert planned.sent[1:] == [(min(left, LIMIT), [([1, 2, 3, 4], to(CONFIRM, "t", "9"))])]


@cases("""
    9 9 | 9 = 9;     9 11 | 11 > 11 11 | = 11;    9 11 | 12 > 12 12 | = 12
    9 no 9 | = 9;    9 away 9 | = 9;   9 . . = 0;                 no no | 9 = 0
    away unknown | 9 = 0;              no away | = 0;             9 11 | no > 11 no no | = 0
""")
def test_a_fence_is_confirmed_until_a_majority_has_it_or_none_is_possible(
    words: str, expected: int
) -> None:
    planned = Planned()
    assert planned.vote("7 9 | .", *words.split(">"))[0] == expected
    assert not planned.plans


def test_a_vote_waits_for_replies_even_if_no_time_is_left() -> None:
    planned = Planned()
    planned.plans = [["absent absent | absent"]]
    run(planned.quorum.vote(vote("t"), 0.0, lambda: 0.0))
    assert [limit > 0 for limit, _ in planned.sent] == [True]


@pytest.mark.parametrize("left", [[0.0], [-1.0], [0.5, 0.5, 0.0]])
def test_a_fence_is_abandoned_when_no_time_is_left(left: list[float]) -> None:
    planned = Planned()
    assert planned.vote(*["7 9 |", "9 11 |"][: len(left)], left=iter(left).__next__)[0] == 0
    assert not planned.plans


def test_a_token_that_was_forgotten_during_its_vote_is_confirmed_nowhere() -> None:
    planned = Planned()
    forget = planned.quorum.locations.forget
    assert planned.vote("7 9 |", "", left=lambda: forget("t") or 0.5)[0] == 0
    assert planned.sent[1][1][0][0] == []


@pytest.mark.parametrize("wait_if_no_votes", [True, False])
def test_a_withdrawal_waits_for_nodes_that_voted_and_for_others_only_if_none_did(
    wait_if_no_votes: bool,
) -> None:
    for answer in ("1", "no", "away"):
        planned = Planned(FIVE)
        planned.vote(". no 7 no unknown |")
        planned.withdraw(f"no . {answer} |", "| . . . . 1", wait_if_no_votes=wait_if_no_votes)
        unsure = [4], release("t", TOMBSTONE_MS)
        assert planned.sent[1:] == [(LIMIT, [([0, 2], release("t")), unsure])]
        assert len(planned.due) == 1, "the slow nodes are checked again later"
    planned = Planned()
    planned.vote("unknown unknown |")
    first = ". . 1 |" if wait_if_no_votes else "| . . 1"
    planned.withdraw(first, "| 1 1", wait_if_no_votes=wait_if_no_votes)
    assert planned.sent[1][0] == (LIMIT if wait_if_no_votes else 0.0)


def test_a_token_that_no_node_has_is_forgotten_when_it_is_withdrawn() -> None:
    planned = Planned()
    for token in "tuv":
        planned.record(token)
    planned.withdraw("", wait_if_no_votes=True)
    assert not planned.sent
    assert planned.call_many([renew("u"), release("v")], []) == [0, 0]
    assert [*map(planned.where, "tuv")] == [None, {}, None]


def test_a_token_leaves_the_queues_without_waiting_and_only_if_it_may_be_there() -> None:
    planned = Planned()
    run(planned.quorum.leave_queues(release("w")))
    assert not planned.sent
    planned.record("w", *planned.all)
    planned.plans = [["| 1 1 1"]]
    run(planned.quorum.leave_queues(release("w")))
    assert planned.sent == [(0.0, [(planned.all, release("w"))])]
    assert len(planned.due) == 1


# One result from many replies, batches in the background, and nodes that fail


@cases("""
    renew 7 7 | 7 = 7;          renew 7 no 9 | = 9;            renew away 7 7 | = 7
    renew no no | 7 = 0;        renew absent no | 7 = 0;       renew absent absent | 7 = absent
    renew 7 . . = OutcomeUnknown;                              renew away away no | = NoQuorum
    renew away unknown no | = OutcomeUnknown;               renew 7 away no 7 no | = OutcomeUnknown
    renew 7 no away 9 8 | = 9;                                 renew 7 no absent no | 7 = 0
    release 1 1 | 1 = 1;        release 1 no no | = 0;          release 1 absent absent | = absent
    release away 1 1 | = 1;     release 1 no 1 no 1 | = 1;     release away no away | = NoQuorum
    release away 1 away | = OutcomeUnknown;                    release away 1 1 1 | 1 = 1
    evict 1 no away | = 1;      evict no no no | = 0;          evict 1 1 1 | = 1
    evict 1 2 . = 2;            evict no away away | = NoQuorum
    evict 1 away away | = OutcomeUnknown;                      evict no away away 1 no | = 1
    inspect t:3:7 t:3:7 | . = t:3:7;                           inspect absent absent | . = absent
    inspect t:3:7 t:1:9 | . = t:1:7;                           inspect t:1:9 u:2:7 t:3:7 | = t:1:9
    inspect t:3:7 u:2:7 absent | = absent;                     inspect t:3:7 away absent | = absent
    inspect t:3:7 away unknown | = OutcomeUnknown;             inspect away t:3:7 away | = NoQuorum
    inspect t:1:9 t:2:7 u:2:7 t:3:7 | . = t:1:7;              inspect t:1:7 t:1:7 u:1:7 . . = absent
""")
def test_a_quorum_returns_one_result_as_soon_as_it_is_decided(words: str, expected: Any) -> None:
    script, _, words = words.partition(" ")
    planned = Planned(words)
    assert planned.call(REQUESTS[script], words) == expected
    assert planned.sent == [(LIMIT, [(planned.all, REQUESTS[script])])]
    left = set(planned.quorum.locations._tokens)
    assert planned.quorum.locations._releasing == left, "only tokens to clean up"


@cases("7 . 7 | = 7; no | . 7 = 0; . absent | absent = 0; . . . = 0; absent 7 absent | = absent")
def test_only_nodes_that_may_have_a_token_receive_its_renewal(words: str, expected: Any) -> None:
    planned = Planned()
    nodes = [*answers_in(words)]
    planned.record("t", *nodes)
    assert planned.call(renew("t"), words) == expected
    assert planned.sent == [(LIMIT, [(nodes, renew("t"))])]


def test_a_request_for_one_node_is_sent_only_if_the_token_may_be_there() -> None:
    planned = Planned()
    planned.record("t", 0, 1)
    tokens = [(1, "t"), (2, "t"), (1, "not ours")]
    requests = [(RELEASE, KEYS.at(node), release(token)[2]) for node, token in tokens]
    assert planned.call_many(requests, [". 1 |"]) == [0, 0, 0]
    assert [nodes for nodes, _ in planned.sent[0][1]] == [[1], [], []]
    assert planned.where("t") == {0: PRESENT}


def test_an_error_names_the_outcome_of_every_node_and_no_node_twice() -> None:
    planned = Planned(FIVE)
    planned.record("t", 0, 1, 2, 3)
    planned.plans = [["away no broken away |"]]
    with pytest.raises(
        NoQuorum, match=r"5 nodes .*\(n0: it is unreachable; n1: no; n2: it"
    ) as caught:
        run(planned.quorum.call(*renew("t"), LIMIT))
    words = [
        "it is unreachable",
        "no",
        "it has no scripts",
        "n0 is unreachable",
        "does not have it",
    ]
    assert caught.value.nodes == dict(zip(planned.names, words, strict=True))
    outcomes = planned.votes("o:9:1 7 absent").outcomes()
    assert [*outcomes.values()][:4] == ["held by another", "yes", "no", "has not replied yet"]


def test_a_release_is_repeated_where_it_failed_and_checked_later_where_it_is_slow() -> None:
    planned = Planned(FIVE)
    planned.record("t", *planned.all)
    assert planned.call(release("t"), "away 1 1 1 | 1") == 1
    assert (planned.cleaned_up, len(planned.due)) == ([(0, release("t", TOMBSTONE_MS)[2])], 1)
    planned.deliver_late()
    assert planned.where("t") == {0: UNSURE}


def test_a_batch_ends_when_all_are_decided_and_a_release_needs_replies_of_all_nodes() -> None:
    planned = Planned()
    planned.record("t")
    for token in "uvw":
        planned.record(token, *planned.all)
    requests = [*map(renew, "tabcd"), *map(release, "uvw"), to(EVICT, "e")]
    plan = ["", "7 9", "no no", "away away no", "away 7 7"]
    plan += ["1 1 1", "1 1 unknown", "no no away", "1 no 1 |"]
    renewed, ended = [0, 9, 0, "NoQuorum", 7], [1, "OutcomeUnknown", "NoQuorum", 1]
    assert planned.call_many(requests, plan) == [*renewed, *ended]
    asked = [([] if request == renew("t") else planned.all, request) for request in requests]
    assert planned.sent == [(LIMIT, asked)]
    assert (planned.where("u"), planned.where("v")) == (None, {2: PRESENT})


def test_a_request_without_a_majority_does_not_delay_its_batch() -> None:
    planned = Planned()
    replies = planned.call_many([renew("a"), renew("b")], ["connecting no 7", "7 7 | 7"])
    assert replies == ["OutcomeUnknown", 7]


def test_a_renewed_lease_is_restored_on_the_nodes_that_lack_it() -> None:
    planned = Planned(FIVE)
    planned.record("t", 0, 1, 2, 3)
    planned.record("u", *planned.all)
    plans = ["no no no", "5 5 5", "7 8 no 7 |"], ["| . . 8 . away", "| . . 8 . away"]
    assert planned.call_many([renew("v"), renew("u"), renew("t")], *plans) == [0, 5, 8]
    assert planned.sent[1:] == [(0.0, [([2, 4], vote("t", "8")), ([2, 4], to(CONFIRM, "t", "8"))])]
    assert planned.on_tick[0] is planned.on_tick[1] is not None
    assert planned.deliver_late() == [False] * 4
    assert planned.where("t") == {**dict.fromkeys(range(4), PRESENT), 2: UNSURE}
    assert planned.events == [Event("node_failed", detail="n0 is unreachable")]


def test_a_lease_is_restored_only_if_a_majority_renewed_it_and_a_node_lacks_it() -> None:
    planned = Planned()
    for token, size in zip("tuvw", (3, 3, 2, 2), strict=True):
        planned.record(token, *range(size))
    planned.call(release("w"), "")
    requests = [renew("t"), renew("u"), release("v"), renew("w")]
    planned.call_many(requests, ["7 no away", "7 7", "1 1", "7 7 |"])
    assert len(planned.sent) == 2


@cases("""
    quarantine closed-5 7 7 = none;             quarantine closed-5 closed-3 7 = closed-3
    quarantine closed-5 away no = closed-5;     quarantine closed-9 closed-3 closed-5 = closed-5
    quarantine away closed-5 away = none;       quarantine away away 7 = none
    quarantine closed-9 closed-5 closed-3 away closed-3 = closed-5
    has_too_many_failures away 7 no = 0;               has_too_many_failures away broken no = 1
    has_too_many_failures broken no away 7 no = 0
    has_too_many_failures broken no away 7 broken = 1
    is_refused_permanently away broken no = 0;        is_refused_permanently broken broken 7 = 1
    is_refused_permanently broken 7 broken away 7 = 0
    is_refused_permanently broken 7 broken away broken = 1
    was_interrupted away unknown . = 0;         was_interrupted away interrupted . = 1
    agrees_on_holder t:3:7 t:1:9 . = 1;                 agrees_on_holder absent absent . = 1
    agrees_on_holder t:3:7 u:3:7 absent = 0;            agrees_on_holder t:3:7 7 7 = 0
    agrees_on_holder no no no = 0
""")
def test_a_majority_decides_what_is_concluded_from_failures_and_holders(
    words: str, expected: Any
) -> None:
    question, _, words = words.partition(" ")
    planned = Planned(words)
    assert getattr(planned.votes(words), question)() == expected


def test_a_lock_is_held_until_no_majority_of_the_nodes_has_it() -> None:
    planned = Planned()
    inspection = Inspection(planned.quorum, REQUESTS["inspect"])
    for node, reply in answers_in("t:300:9 t:100:7 t:200:9").items():
        inspection.on_reply(0, node, reply)
    assert inspection.result() == meaning("t:200:9")


def test_a_node_that_fails_is_reported_once_and_once_when_it_is_back() -> None:
    planned = Planned()
    assert planned.call(renew("t"), "connecting interrupted connecting |") == "OutcomeUnknown"
    for words in ("away 7 7 |", "no 7 7 |", "unknown 7 7 |", "7 7 |", "7 7 |"):
        assert planned.call(renew("t"), words) == 7
    back = Event("node_back", detail="n0 is available again")
    assert planned.events == [Event("node_failed", detail="n0 is unreachable"), back]


def test_an_abandoned_cleanup_keeps_the_token_on_the_other_nodes() -> None:
    planned = Planned()
    planned.record("t", *planned.all)
    planned.quorum.forget("t", 1)
    assert set(planned.quorum.locations.of("t") or ()) == {0, 2}
    planned.quorum.forget("t", None)
    assert planned.quorum.locations.of("t") is None


def test_a_closed_or_restarted_quorum_schedules_no_cleanup_of_earlier_requests() -> None:
    planned = Planned()
    planned.quorum = Quorum(planned, planned, planned.events.append, 60.0)
    planned.quorum.note_health(2, UNREACHABLE)
    planned.begin()
    planned.record("u", *planned.all)
    assert planned.call(release("u"), "1 1 |") == 1
    planned.vote("7 7 | unknown")
    planned.quorum.locations.forget("t")
    planned.quorum.close()
    planned.quorum.note_health(0, UNREACHABLE)
    planned.due[0]()
    planned.begin()
    planned.deliver_late()
    assert (len(planned.due), planned.cleaned_up) == (1, [])
    assert planned.events == [
        Event("node_failed", detail=str(each)) for each in (UNREACHABLE, UNKNOWN)
    ]
