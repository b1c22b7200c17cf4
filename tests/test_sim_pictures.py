"""What the pictures of a simulated story promise to whoever looks at them."""

from __future__ import annotations

import re
from io import StringIO
from xml.etree import ElementTree as ET

import pytest

from holdfast.sim.pictures.page import draw_page, draw_svg
from holdfast.sim.pictures.wording import overlaps
from holdfast.sim.telling import timeline_of
from holdfast.sim.timeline import Arrow, Bar, Lane, LaneKind, Mark, Timeline

pytest.importorskip("rich")

from rich.cells import cell_len
from rich.console import Console

from holdfast.sim.pictures.text import draw_text

EVIL = "<script>alert(\"1\" & '2')</script>\x1b[31m\x00]]>\n\u202e"


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
            Bar("bert", 3000, 30900, "waits", "first in line"),
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


def crowded() -> Timeline:
    """Eight lanes with long names, and more messages than anybody reads."""
    clients = [Lane(f"a client with a long name {at}", "client") for at in range(4)]
    servers = [Lane(f"サーバー{at}", "server") for at in range(3)]
    story = Timeline("長い" * 60, [*clients, *servers, Lane("r", "resource")])
    for at in range(60):
        client, server = clients[at % 4].name, servers[at % 3].name
        there, back = 1000 * at, 1000 * at + 500
        story.arrows.append(
            Arrow(client, server, there, there + 300, f"renew {'word ' * (at % 9)}")
        )
        story.arrows.append(Arrow(server, client, back, back + 300, "x" * (at * 3)))
    story.bars.append(Bar(clients[0].name, 30_250, 30_260, "held", "fence 7"))
    story.marks.append(Mark(servers[0].name, 40_100, "fault", "y" * 300))
    return story


def shown(timeline: Timeline, width: int = 100) -> str:
    """What a pipe gets to see."""
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(draw_text(timeline, width))
    return out.getvalue()


def words(svg: str) -> str:
    return " ".join(ET.fromstring(svg).itertext())  # noqa: S314 - we wrote it ourselves


def classes(svg: str) -> list[str]:
    root = ET.fromstring(svg)  # noqa: S314 - the same
    return [name for part in root.iter() for name in part.get("class", "").split()]


def evil() -> Timeline:
    return Timeline(
        EVIL,
        [Lane(EVIL, "client"), Lane("b", "client")],
        [Arrow(EVIL, "b", 0, 5, EVIL), Arrow("b", EVIL, 7, None, EVIL)],
        [Bar(EVIL, 1, 9, "held", EVIL), Bar("b", 1, 9, "held", EVIL), Bar("b", 2, 3, "cut", EVIL)],
        [Mark(EVIL, 3, "fault", EVIL), Mark("b", 3, "violation", EVIL)],
        EVIL,
    )


def test_a_svg_is_well_formed_whatever_the_texts() -> None:
    for story in (late_writer(), crowded(), evil(), Timeline("")):
        assert ET.fromstring(draw_svg(story)).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314 - ours


def test_every_text_is_escaped() -> None:
    page = draw_page([evil()], EVIL)
    for picture in (page, draw_svg(evil())):
        assert "<script" not in picture
        assert "&lt;script&gt;" in picture
        assert not set("\x1b\x00\u202e") & set(picture)


def test_a_terminal_is_sent_no_control_codes_of_others() -> None:
    assert not set("\x1b\x00\u202e") & set(shown(evil()))


def test_every_lane_fault_violation_and_held_bar_is_in_every_picture() -> None:
    story = late_writer()
    for picture in (words(draw_svg(story)), draw_page([story], "page"), shown(story)):
        for lane in story.lanes:
            assert lane.name in picture
        for mark in story.marks:
            assert mark.text in picture
        for bar in story.bars:
            assert bar.text in picture
        assert story.title in picture
        assert story.verdict in picture


def test_marks_and_bars_are_drawn_each_in_its_own_shape() -> None:
    story = Timeline("t", late_writer().lanes, [], late_writer().bars[:4], late_writer().marks)
    story.bars[1:3] = []
    drawn = classes(draw_svg(story))
    assert drawn.count("c0-fill") >= 3  # the lane's name, the bar, the legend
    assert drawn.count("c1-fill") >= 2
    for kind in ("note", "fault", "accepted", "refused", "violation"):
        assert drawn.count(f"{kind}-mark") == 3  # in the picture, its caption and the legend


def test_two_who_hold_at_the_same_time_are_hatched_and_told_in_words() -> None:
    story = late_writer()
    assert [(o.began, o.ended, o.lanes) for o in overlaps(story)] == [
        (30900, 48200, ("anna", "bert"))
    ]
    told = "anna and bert hold at the same time, 17.3 ms"
    svg = draw_svg(story)
    assert "red-edge" in classes(svg)
    for picture in (words(svg), draw_page([story], "page"), shown(story)):
        assert told in picture


def test_one_after_the_other_is_no_overlap() -> None:
    lanes = [Lane("a", "client"), Lane("b", "client")]
    bars = [Bar("a", 0, 10, "held", "fence 1"), Bar("b", 10, 20, "held", "fence 2")]
    story = Timeline("hand-off", lanes, bars=bars)
    assert not overlaps(story)
    assert "red-edge" not in classes(draw_svg(story))


def test_who_takes_anothers_place_is_drawn_in_it() -> None:
    trace = [
        (1, "crashed", "c1"),
        (2, "restarted", "c1'"),
        (3, "message", "c1'", "server'", "acquire", 4),
        (5, "believes", "c1'", 7),
        (9, "through", "c1'", "a token"),
    ]
    lanes: dict[str, LaneKind] = {"server": "server", "c1": "client"}
    told = timeline_of(trace, "", "", lanes)
    assert told.bars == [
        Bar("c1", 1, 2, "down", "crashed"),
        Bar("c1", 5, 9, "held", "fence 7"),
    ]
    assert told.arrows == [Arrow("c1", "server", 3, 4, "acquire")]


def test_a_lost_message_is_shown_as_lost() -> None:
    story = late_writer()
    svg = draw_svg(story)
    assert "renew (lost)" in words(svg)
    assert classes(svg).count("cross") == 2  # in the picture and in the legend
    assert "anna to redis: renew (lost on the way)" in draw_page([story], "page")
    (line,) = (line for line in shown(story).splitlines() if "renew" in line)
    assert "\N{BOX DRAWINGS LIGHT DIAGONAL CROSS}" in line
    assert "renew (lost)" in line


def test_a_page_needs_no_network_and_no_script() -> None:
    page = draw_page([late_writer(), crowded()], "page")
    without = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://|<script|<link|@import|\bsrc=|\bhref=", without)
    assert not re.search(r"url\((?!#)", without)


def test_the_pictures_on_a_page_do_not_share_names() -> None:
    page = draw_page([late_writer(), late_writer(), crowded()], "page")
    names = re.findall(r'\bid="([^"]*)"', page)
    assert len(names) == len(set(names))
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(names)


def test_who_cannot_see_is_told_the_story() -> None:
    root = ET.fromstring(draw_svg(late_writer()))  # noqa: S314 - ours
    assert root.get("role") == "img"
    named = {part.get("id"): "".join(part.itertext()) for part in root.iter() if part.get("id")}
    title, description = (root.get("aria-labelledby") or "").split()
    assert named[title] == "A paused holder writes late"
    for told in ("anna believes to hold: fence 33", "Violation: two at once", "1 lost"):
        assert told in named[description]


@pytest.mark.parametrize("width", range(60, 201, 7))
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for story in (late_writer(), crowded(), evil()):
        lines = draw_text(story, width).plain.splitlines()
        assert max(map(cell_len, lines)) <= width
        assert len(shown(story, width).splitlines()) == len(lines)


def test_a_long_list_is_squeezed_but_never_a_fault_or_a_change_of_holding() -> None:
    text = shown(crowded(), 200)
    assert "more messages" in text
    assert text.count("fence 7") == 3  # where it begins, on the lane and in words, and its end
    assert text.count("y") >= 300


def test_a_jump_in_time_is_shown() -> None:
    assert "⋮ 22.4 ms later" in shown(late_writer())


def test_a_message_is_told_twice_if_something_happened_on_its_way() -> None:
    text = shown(late_writer())
    assert "write, fence 33 (arrives at 48.60)" in text
    assert "write, fence 33 (sent at 48.00)" in text
    assert "acquire, ttl 30 ms (" not in text


def test_without_colour_a_violation_is_still_told() -> None:
    text = shown(late_writer())
    assert "\x1b" not in text
    assert "!! Violation: two at once" in text
    assert re.search(r"▓!\s+█!", text)


def test_with_colour_a_violation_is_red() -> None:
    out = StringIO()
    console = Console(file=out, width=100, color_system="standard", force_terminal=True)
    console.print(draw_text(late_writer(), 100))
    assert re.search(r"\x1b\[1;31m!! Violation", out.getvalue())


def test_an_empty_timeline_can_be_drawn() -> None:
    for story in (Timeline(""), Timeline("t", [Lane("a", "client")]), Timeline("t", verdict="v")):
        assert "<svg" in draw_svg(story)
        assert "<html" in draw_page([story], "")
        assert shown(story).strip() == "" or story.title in shown(story)
    assert "<html" in draw_page([], "")


def test_a_single_moment_can_be_drawn() -> None:
    story = Timeline("t", [Lane("a", "client")], marks=[Mark("a", 5, "violation", "at once")])
    assert "at once" in words(draw_svg(story))
    assert "at once" in shown(story)


def test_the_same_timeline_gives_the_same_bytes() -> None:
    assert draw_svg(late_writer()) == draw_svg(late_writer())
    assert draw_page([crowded()], "t") == draw_page([crowded()], "t")
    assert draw_text(crowded(), 90).markup == draw_text(crowded(), 90).markup
