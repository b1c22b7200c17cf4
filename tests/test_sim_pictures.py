"""Drawings of simulation runs: what they show, and that they are safe and accessible."""

from __future__ import annotations

import re
from io import StringIO
from xml.etree import ElementTree as ET

import pytest

from holdfast.sim.pictures.page import draw_page, draw_svg
from holdfast.sim.pictures.wording import overlaps
from holdfast.sim.timeline import Arrow, Bar, Lane, LaneKind, Mark, Timeline
from holdfast.sim.trace import timeline_of

pytest.importorskip("rich")

from rich.cells import cell_len
from rich.console import Console

from holdfast.sim.pictures.text import draw_text

HOSTILE = "<script>alert(\"1\" & '2')</script>\x1b[31m\x00]]>\n\u202e"


def late_writer() -> Timeline:
    """A is paused beyond its lease, B gets the lock, A wakes up and writes."""
    return Timeline(
        "A paused holder writes late",
        [
            Lane("anna", "client"),
            Lane("bert", "client"),
            Lane("redis", "server"),
            Lane("storage", "resource"),
        ],
        [
            Arrow("anna", "redis", 0, 400, "acquire, ttl 30 ms"),
            Arrow("redis", "anna", 400, 900, "granted, fence 33"),
            Arrow("bert", "redis", 3000, 3500, "acquire, ttl 30 ms"),
            Arrow("redis", "bert", 3500, 4100, "queued"),
            Arrow("anna", "redis", 7000, None, "renew"),
            Arrow("redis", "bert", 30400, 30900, "granted, fence 34"),
            Arrow("bert", "storage", 32000, 32500, "write, fence 34"),
            Arrow("anna", "storage", 48000, 48600, "write, fence 33"),
        ],
        [
            Bar("anna", 900, 48200, "held", "fence 33"),
            Bar("anna", 8000, 48000, "paused", "collecting garbage"),
            Bar("bert", 3000, 30900, "waits", "first in the queue"),
            Bar("bert", 30900, 50000, "held", "fence 34"),
            Bar("redis", 33000, 34000, "down", "restarts"),
            Bar("redis", 35000, 36000, "cut", "unplugged"),
        ],
        [
            Mark("anna", 8000, "fault", "stops for 40 ms"),
            Mark("redis", 30400, "note", "the key expires"),
            Mark("bert", 30900, "violation", "two at once"),
            Mark("storage", 32500, "accepted", "x=2"),
            Mark("storage", 48600, "refused", "33 is below 34"),
        ],
        "The fence kept the late write out.",
    )


def many_lanes() -> Timeline:
    """Eight lanes with long names, and very many messages."""
    clients = [Lane(f"a client with a long name {at}", "client") for at in range(4)]
    servers = [Lane(f"サーバー{at}", "server") for at in range(3)]
    timeline = Timeline("長い" * 60, [*clients, *servers, Lane("r", "resource")])
    for at in range(60):
        client, server = clients[at % 4].name, servers[at % 3].name
        there, back = 1000 * at, 1000 * at + 500
        timeline.arrows.append(
            Arrow(client, server, there, there + 300, f"renew {'word ' * (at % 9)}")
        )
        timeline.arrows.append(Arrow(server, client, back, back + 300, "x" * (at * 3)))
    timeline.bars.append(Bar(clients[0].name, 30_250, 30_260, "held", "fence 7"))
    timeline.marks.append(Mark(servers[0].name, 40_100, "fault", "y" * 300))
    return timeline


def shown(timeline: Timeline, width: int = 100) -> str:
    """The drawing as plain text, as a pipe receives it."""
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(draw_text(timeline, width))
    return out.getvalue()


def words(svg: str) -> str:
    return " ".join(ET.fromstring(svg).itertext())  # noqa: S314 - our own output


def classes(svg: str) -> list[str]:
    root = ET.fromstring(svg)  # noqa: S314 - the same
    return [name for part in root.iter() for name in part.get("class", "").split()]


def hostile() -> Timeline:
    return Timeline(
        HOSTILE,
        [Lane(HOSTILE, "client"), Lane("b", "client")],
        [Arrow(HOSTILE, "b", 0, 5, HOSTILE), Arrow("b", HOSTILE, 7, None, HOSTILE)],
        [
            Bar(HOSTILE, 1, 9, "held", HOSTILE),
            Bar("b", 1, 9, "held", HOSTILE),
            Bar("b", 2, 3, "cut", HOSTILE),
        ],
        [Mark(HOSTILE, 3, "fault", HOSTILE), Mark("b", 3, "violation", HOSTILE)],
        HOSTILE,
    )


def test_an_svg_is_well_formed_whatever_the_texts() -> None:
    for timeline in (late_writer(), many_lanes(), hostile(), Timeline("")):
        assert ET.fromstring(draw_svg(timeline)).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314 - our own output


def test_every_text_is_escaped() -> None:
    page = draw_page([hostile()], HOSTILE)
    for picture in (page, draw_svg(hostile())):
        assert "<script" not in picture
        assert "&lt;script&gt;" in picture
        assert not set("\x1b\x00\u202e") & set(picture)


def test_a_terminal_receives_no_control_codes_of_texts() -> None:
    assert not set("\x1b\x00\u202e") & set(shown(hostile()))


def test_every_lane_fault_violation_and_held_bar_is_in_every_picture() -> None:
    timeline = late_writer()
    for picture in (words(draw_svg(timeline)), draw_page([timeline], "page"), shown(timeline)):
        for lane in timeline.lanes:
            assert lane.name in picture
        for mark in timeline.marks:
            assert mark.text in picture
        for bar in timeline.bars:
            assert bar.text in picture
        assert timeline.title in picture
        assert timeline.verdict in picture


def test_each_kind_of_mark_and_bar_has_its_shape() -> None:
    timeline = Timeline("t", late_writer().lanes, [], late_writer().bars[:4], late_writer().marks)
    timeline.bars[1:3] = []
    drawn = classes(draw_svg(timeline))
    assert drawn.count("c0-fill") >= 3  # the name of the lane, the bar and the legend
    assert drawn.count("c1-fill") >= 2
    for kind in ("note", "fault", "accepted", "refused", "violation"):
        assert drawn.count(f"{kind}-mark") == 3  # in the drawing, its caption and the legend


def test_an_overlap_of_two_holders_is_hatched_and_described() -> None:
    timeline = late_writer()
    assert [(o.began, o.ended, o.lanes) for o in overlaps(timeline)] == [
        (30900, 48200, ("anna", "bert"))
    ]
    text = "anna and bert hold at the same time, 17.3 ms"
    svg = draw_svg(timeline)
    assert "red-edge" in classes(svg)
    for picture in (words(svg), draw_page([timeline], "page"), shown(timeline)):
        assert text in picture


def test_an_overlap_that_a_violation_reports_is_listed_once() -> None:
    timeline = late_writer()
    timeline.marks[2] = Mark("bert", 30900, "violation", "bert holds what anna holds")
    text = "Violation: bert holds what anna holds (for 17.3 ms)"
    assert text in shown(timeline, 160)
    assert "hold at the same time" not in shown(timeline)
    page = draw_page([timeline], "page")
    assert page.count(f"<td>{text} (bert)</td>") == 1
    assert "<td>anna and bert hold at the same time" not in page


def test_a_state_is_not_repeated_by_its_text() -> None:
    lanes = [Lane("a", "client"), Lane("s", "server")]
    bars = [Bar("a", 0, 9, "paused", "paused"), Bar("s", 0, 9, "down", "down, data lost")]
    text = shown(Timeline("t", lanes, bars=bars))
    assert re.search(r"a is paused$", text, re.MULTILINE)
    assert re.search(r"s is down: data lost$", text, re.MULTILINE)


def test_consecutive_holders_do_not_overlap() -> None:
    lanes = [Lane("a", "client"), Lane("b", "client")]
    bars = [Bar("a", 0, 10, "held", "fence 1"), Bar("b", 10, 20, "held", "fence 2")]
    timeline = Timeline("hand-over", lanes, bars=bars)
    assert not overlaps(timeline)
    assert "red-edge" not in classes(draw_svg(timeline))


def test_a_restarted_process_is_drawn_in_the_same_lane() -> None:
    trace = [
        (1, "crashed", "c1"),
        (2, "restarted", "c1'"),
        (3, "message", "c1'", "server'", "acquire", 4),
        (5, "holds", "c1'", 7),
        (9, "releasing", "c1'", "a token"),
    ]
    lanes: dict[str, LaneKind] = {"server": "server", "c1": "client"}
    timeline = timeline_of(trace, "", "", lanes)
    assert timeline.bars == [
        Bar("c1", 1, 2, "down", "crashed"),
        Bar("c1", 5, 9, "held", "fence 7"),
    ]
    assert timeline.arrows == [Arrow("c1", "server", 3, 4, "acquire")]


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (("slow", "c1", "from", 5_000_000), "replies slow for 5 s"),
        (("slow", "c1", "to", 200_000), "requests slow for 0.2 s"),
        (("reset", "c1", "from"), "connection reset before the reply"),
        (("half open", "c1", "to"), "connection silent"),
        (("frozen", "server", 100_000), "server hangs for 0.1 s"),
        (("down", "server", 100_000), "server down for 0.1 s"),
        (("down", "server"), "server down"),
        (("wiped", "server+", 100_000), "server down for 0.1 s, data lost"),
        (("cut off", "c1", ("to",), 300_000), "requests lost for 0.3 s"),
        (
            ("cut off", "c1'", ("to", "from"), 300_000, "n1"),
            "requests and replies of n1 lost for 0.3 s",
        ),
        (("cut off", "old", "new, which is promoted"), "old cut off from new, which is promoted"),
        (("failover", "server", "replica"), "failover from server to replica"),
        (("clock jumped", "server", -3_000_000), "the clock of server jumps by -3 s"),
        (("evicted", "server", b"holdfast:{a}"), "server evicts holdfast:{a}"),
        (("full", "server"), "server out of memory"),
        (("scripts flushed", "server"), "server drops its script cache"),
        (("cancelled", "c1", "c1.t1"), "c1: c1.t1 cancelled"),
        (("crashed", "c1"), "c1 crashes"),
        (("doubled", "c1", "release c1:2"), "c1: release c1:2 delivered twice"),
        (("refused", "resource", "Alice", 7), "Alice writes, fence 7"),
        (("event", "c1", "lost", "taken"), "event: lost, taken"),
        (("evicted by", "operator", b"hf1:c1:"), "evicts hf1:c1:"),
    ],
)
def test_the_text_of_an_event(event: tuple[object, ...], text: str) -> None:
    timeline = timeline_of([(1, *event)], "", "", {"c1": "client", "server": "server"})
    assert [mark.text for mark in timeline.marks] == [text]


def test_a_lost_message_is_shown_as_lost() -> None:
    timeline = late_writer()
    svg = draw_svg(timeline)
    assert "renew (lost)" in words(svg)
    assert classes(svg).count("cross") == 2  # in the drawing and in the legend
    assert "anna to redis: renew (lost)" in draw_page([timeline], "page")
    (line,) = (line for line in shown(timeline).splitlines() if "renew" in line)
    assert "\N{BOX DRAWINGS LIGHT DIAGONAL CROSS}" in line
    assert "renew (lost)" in line


def test_a_page_needs_no_network_and_no_script() -> None:
    page = draw_page([late_writer(), many_lanes()], "page")
    without = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://|<script|<link|@import|\bsrc=|\bhref=", without)
    assert not re.search(r"url\((?!#)", without)


def test_the_drawings_of_a_page_do_not_share_ids() -> None:
    page = draw_page([late_writer(), late_writer(), many_lanes()], "page")
    names = re.findall(r'\bid="([^"]*)"', page)
    assert len(names) == len(set(names))
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(names)


def test_a_drawing_has_a_description_for_screen_readers() -> None:
    root = ET.fromstring(draw_svg(late_writer()))  # noqa: S314 - our own output
    assert root.get("role") == "img"
    named = {part.get("id"): "".join(part.itertext()) for part in root.iter() if part.get("id")}
    title, description = (root.get("aria-labelledby") or "").split()
    assert named[title] == "A paused holder writes late"
    for text in ("anna considers itself the holder: fence 33", "Violation: two at once", "1 lost"):
        assert text in named[description]


@pytest.mark.parametrize("width", range(60, 201, 7))
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for timeline in (late_writer(), many_lanes(), hostile()):
        lines = draw_text(timeline, width).plain.splitlines()
        assert max(map(cell_len, lines)) <= width
        assert len(shown(timeline, width).splitlines()) == len(lines)


def test_a_long_list_is_shortened_but_keeps_faults_and_grants() -> None:
    text = shown(many_lanes(), 200)
    assert "more messages" in text
    assert text.count("fence 7") == 3  # its beginning, on the lane and in words, and its end
    assert text.count("y") >= 300


def test_a_jump_in_time_is_shown() -> None:
    assert "⋮ 22.4 ms later" in shown(late_writer())


def test_a_message_is_listed_twice_if_something_happened_in_between() -> None:
    text = shown(late_writer())
    assert "write, fence 33 (arrives at 48.60)" in text
    assert "write, fence 33 (sent at 48.00)" in text
    assert "acquire, ttl 30 ms (" not in text


def test_a_violation_is_shown_without_colour() -> None:
    text = shown(late_writer())
    assert "\x1b" not in text
    assert "!! Violation: two at once" in text
    assert re.search(r"▓!\s+█!", text)


def test_a_violation_is_red_with_colour() -> None:
    out = StringIO()
    console = Console(file=out, width=100, color_system="standard", force_terminal=True)
    console.print(draw_text(late_writer(), 100))
    assert re.search(r"\x1b\[1;31m!! Violation", out.getvalue())


def test_an_empty_timeline_can_be_drawn() -> None:
    for timeline in (
        Timeline(""),
        Timeline("t", [Lane("a", "client")]),
        Timeline("t", verdict="v"),
    ):
        assert "<svg" in draw_svg(timeline)
        assert "<html" in draw_page([timeline], "")
        assert shown(timeline).strip() == "" or timeline.title in shown(timeline)
    assert "<html" in draw_page([], "")


def test_a_single_moment_can_be_drawn() -> None:
    timeline = Timeline("t", [Lane("a", "client")], marks=[Mark("a", 5, "violation", "at once")])
    assert "at once" in words(draw_svg(timeline))
    assert "at once" in shown(timeline)


def test_the_same_timeline_gives_the_same_bytes() -> None:
    assert draw_svg(late_writer()) == draw_svg(late_writer())
    assert draw_page([many_lanes()], "t") == draw_page([many_lanes()], "t")
    assert draw_text(many_lanes(), 90).markup == draw_text(many_lanes(), 90).markup
