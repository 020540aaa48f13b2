"""The dashboard and what it must not be led astray by: records, metrics and output that are odd on
purpose, and what is removed while it is looked at.

In: stores of jobs that nobody runs. Out: pages, charts, lines.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

import dashboard_world
from cli_fakes import chunk
from dashboard_world import NOW, World, ask, path_of

from kinetic._core.exits import Exit
from kinetic._core.metric_series import Series
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic._dashboard import charts, live, output
from kinetic._dashboard.output import OutputReader
from kinetic._dashboard.server import DashboardServer
from kinetic._store import index
from kinetic._store.local import LocalStore
from kinetic.errors import NotFound, StoreError

world, server = dashboard_world.world, dashboard_world.server


# -- charts ----------------------------------------------------------------------------------------


def series(values: list[float], times: list[float] | None = None) -> Series:
    n = len(values)
    steps = range(n) if times is None else [-1] * n
    columns = array("q", steps), array("d", times or [1.0] * n), array("d", values)
    return Series("loss", 0, *columns, array("q", [1] * n))


@pytest.mark.parametrize(
    "values",
    [
        [1e308, -1e308, 1.0],
        [1.79e308],
        [-1.79e308, 1.79e308],
        [math.nan],
        [math.inf, 1.0, -math.inf],
        [5e-324, 1e-323],
        [0.0, 0.0],
    ],
)
def test_every_number_has_a_place_in_its_chart(values: list[float]):
    chart = charts.draw_chart(series(values))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON for a browser")

    points = json.loads(chart.points, parse_constant=refuse)
    assert len(points) == sum(map(math.isfinite, values))
    places = [(x, y) for x, y, _ in points]
    assert all(0 <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT for x, y in places)
    assert "nan" not in " ".join(chart.lines) + str(chart.dots)


def test_a_clock_that_was_set_back_draws_nothing_outside():
    chart = charts.draw_chart(series([1.0, 2.0, 3.0], times=[100.0, 160.0, 40.0]))
    assert [x for x, _, _ in json.loads(chart.points)] == [160.0, 320.0, 0.0]
    assert chart.until == "2m00s"


# -- output ----------------------------------------------------------------------------------------


def test_of_a_flood_of_lines_a_page_gets_as_many_as_it_keeps(world: World):
    ref = world.add()
    count = output.MOST_LINES * 20
    text = "".join(f"{number}\n" for number in range(count)).encode()
    world.backend.output[ref.job_id] = [chunk(b"first "), chunk(text + b"open")]
    lines, rest = OutputReader(world.handle(ref), 0).read()
    assert [line.text for line in lines] == [
        str(number) for number in range(count - output.MOST_LINES, count)
    ]
    assert rest == "open"
    found = output.search(world.handle(ref), 0, "first 0")
    assert [line.text for line in found.lines] == ["first 0"]


# -- records ---------------------------------------------------------------------------------------


def test_text_that_is_no_text_is_shown_all_the_same(server: DashboardServer, world: World):
    ref = world.add(display_name="a\ud800b")
    reports = (
        HostReport(0, Exit.STOPPED, detail="half \ud800"),
        HostReport(1, Exit.RAISED, detail="\x1b[2J\u202e<b>bold</b> \ud800"),
    )
    outcome = Outcome(
        Verdict.FAILED, blamed=(1,), reports=reports, reason="why \ud800", ended_at=NOW
    )
    index.write_outcome(world.store, ref.job_id, outcome)
    for path in ("", f"jobs/{ref.job_id}", "rows"):
        status, _, body = ask(server, path_of(server) + path)
        assert status == 200
        assert "\x1b" not in body
        assert "\u202e" not in body
    assert "&lt;b&gt;bold" in ask(server, f"{path_of(server)}jobs/{ref.job_id}")[2]


# -- what is removed, what fails -------------------------------------------------------------------


def test_a_batch_that_was_removed_is_told_of_and_its_stream_ends(server: DashboardServer):
    status, _, body = ask(server, f"{path_of(server)}batches/grp-00000001/live")
    assert status == 200
    message = json.loads(body.removeprefix("data: "))
    assert "grp-00000001" in message["trouble"]
    assert message["end"] is True


class ScriptedFeed:
    """A feed that finds what a test says, and notes when it is let go of."""

    def __init__(self, look: Callable[[], live.Message | None], *files: Path) -> None:
        self._look = look
        self._files = files
        self.told: list[bool] = []
        self.closed = threading.Event()

    def look(self, *, is_told: bool) -> live.Seen:
        self.told.append(is_told)
        return live.Seen(self._look(), self._files, rest_s=0.0)

    def close(self) -> None:
        self.closed.set()


def collect(*feeds: live.Feed) -> list[Any]:
    """All that a stream says until it ends."""

    async def read() -> list[Any]:
        async def is_over() -> bool:
            return False

        messages = live.send_messages(feeds, is_over)
        return [json.loads(each.decode().removeprefix("data: ")) async for each in messages]

    return asyncio.run(read())


def test_a_page_that_comes_back_is_told_that_its_job_was_removed(server: DashboardServer):
    """A browser shows nothing of an answer to a stream but events, and asks forever."""
    path = f"{path_of(server)}jobs/job-0000000f/live"
    status, _, body = ask(server, path, Accept="text/event-stream")
    assert status == 200
    message = json.loads(body.removeprefix("data: "))
    assert "no job 'job-0000000f'" in message["trouble"]
    assert message["end"] is True


def test_a_look_that_fails_is_told_of_once_and_when_it_is_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live, "_AGAIN_S", 0.001)
    found: list[Any] = [
        {"html": {"a": "1"}},
        StoreError("unplugged"),
        StoreError("unplugged"),
        OSError("broken"),
        None,
        {"html": {"a": "2"}},
        NotFound("It was removed."),
    ]

    def look() -> live.Message | None:
        each = found.pop(0)
        if isinstance(each, Exception):
            raise each
        return each

    assert collect(ScriptedFeed(look)) == [
        {"html": {"a": "1"}},
        {"trouble": "unplugged"},
        {"trouble": "broken"},
        {"trouble": ""},
        {"html": {"a": "2"}},
        {"trouble": "It was removed.", "end": True},
    ]


def test_what_is_in_the_way_is_told_of_until_it_is_over():
    looks = iter([live.Seen({"n": 1}, trouble="unplugged"), live.Seen(None, trouble="unplugged")])

    class Troubled(ScriptedFeed):
        def look(self, *, is_told: bool) -> live.Seen:
            if (seen := next(looks, None)) is None:
                raise GONE
            return seen

    found = collect(Troubled(lambda: None))
    assert found == [{"n": 1, "trouble": "unplugged"}, {"trouble": str(GONE), "end": True}]


GONE = NotFound("It was removed.")


def test_a_look_that_does_not_come_back_holds_up_no_other_feed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live, "SILENT_S", 0.001)
    held, numbers = threading.Event(), itertools.count()

    def hang() -> None:
        held.wait()
        raise GONE

    def read() -> live.Message:
        if (number := next(numbers)) == 3:
            held.set()
        return {"lines": [number]}

    feeds = ScriptedFeed(hang), ScriptedFeed(read)
    found = collect(*feeds)
    assert [each["lines"] for each in found if "lines" in each][:3] == [[0], [1], [2]]
    assert any("has not answered for" in each.get("trouble", "") for each in found)
    assert all(each.closed.wait(60) for each in feeds)


def test_silence_is_told_of_until_the_look_comes_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live, "SILENT_S", 0.001)
    held = threading.Event()

    def hang() -> None:
        if len(slow.told) > 1:
            raise GONE
        held.wait()

    def wait_for_silence() -> None:
        if len(other.told) == 3:
            held.set()

    slow, other = ScriptedFeed(hang), ScriptedFeed(wait_for_silence)
    troubles = [each["trouble"] for each in collect(slow, other)]
    assert "has not answered for" in troubles[0]
    assert "" in troubles


def append(folder: Path) -> None:
    with Path(folder, "log.idx").open("a") as file:
        file.write("more")


def put(folder: Path, *, if_absent: bool = False) -> None:
    LocalStore(folder.parent).put(f"{folder.name}/outcome.json", b"{}", if_absent=if_absent)


@pytest.mark.parametrize(
    ("watched", "write"),
    [
        ("job/log.idx", append),
        ("job", append),
        ("job", put),
        ("job", partial(put, if_absent=True)),
    ],
    ids=["a file", "in a folder", "put", "put if absent"],
)
def test_a_write_to_one_of_its_files_is_reason_to_look(
    tmp_path: Path, watched: str, write: Callable[[Path], None]
):
    folder, written = tmp_path / "job", tmp_path / watched
    folder.mkdir()
    Path(folder, "log.idx").touch()

    def look() -> live.Message | None:
        if len(feed.told) == 3:
            write(folder)
        if len(feed.told) == 4:
            raise GONE
        return None

    feed = ScriptedFeed(look, written)
    bell = live.Bell()
    is_watched, _ = bell.watch([written])
    bell.close()
    if not is_watched:
        pytest.skip("the system does not tell of written files")
    collect(feed)
    # Of what was written before the first look, nothing has told.
    assert feed.told == [False, True, False, True]
    assert feed.closed.wait(60)
