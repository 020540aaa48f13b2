"""The dashboard with hostile records, metrics and output, and with jobs that are removed while it
shows them."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from array import array
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("starlette")

import dashboard_world
from cli_fakes import chunk
from dashboard_world import NOW, World, ask, path_of

from kinetic._core.exits import Exit
from kinetic._core.metrics import Series
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic._dashboard import charts, live, output
from kinetic._dashboard.output import OutputReader
from kinetic._dashboard.server import DashboardServer
from kinetic._store import index
from kinetic.errors import NotFound, StoreError

PATIENCE_S = 100.0

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

    points = json.loads(json.dumps(chart.points), parse_constant=refuse)
    assert len(points) == sum(map(math.isfinite, values))
    drawn = [point.split(",") for line in chart.lines for point in line.split()]
    places = [*((float(x), float(y)) for x, y in drawn), *chart.dots]
    assert len(places) == len(points)
    assert all(0 <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT for x, y in places)
    assert "nan" not in " ".join(chart.lines) + str(chart.dots)


def test_a_clock_that_was_set_back_draws_nothing_outside():
    chart = charts.draw_chart(series([1.0, 2.0, 3.0], times=[100.0, 160.0, 40.0]))
    assert [x for x, _ in chart.points] == [160.0, 320.0, 0.0]
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
    hits = output.search(world.handle(ref), 0, "first 0")
    assert [line.text for line in hits.lines] == ["first 0"]


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


# -- removals and failures -------------------------------------------------------------------------


def test_a_batch_that_was_removed_is_told_of_and_its_stream_ends(server: DashboardServer):
    status, _, body = ask(server, f"{path_of(server)}batches/grp-00000001/live")
    assert status == 200
    message = json.loads(body.removeprefix("data: "))
    assert "grp-00000001" in message["trouble"]
    assert message["end"] is True


def source(poll: Callable[[], live.Message | None], closed: threading.Event) -> live.Source:
    return live.Source(poll, 0.0, closed.set)


def collect(*sources: live.Source) -> list[Any]:
    """Return all events of a stream until it ends."""

    async def read() -> list[Any]:
        async def is_over() -> bool:
            return False

        events = live.stream_events(sources, is_over)
        return [json.loads(event.decode().removeprefix("data: ")) async for event in events]

    return asyncio.run(read())


REMOVED = NotFound("It was removed.")


def test_a_page_that_comes_back_is_told_that_its_job_was_removed(server: DashboardServer):
    """The stream of a removed job says so and ends: a browser reconnects forever after an error."""
    path = f"{path_of(server)}jobs/job-0000000f/live"
    status, _, body = ask(server, path, Accept="text/event-stream")
    assert status == 200
    message = json.loads(body.removeprefix("data: "))
    assert "no job 'job-0000000f'" in message["trouble"]
    assert message["end"] is True


def test_a_poll_that_fails_is_reported_once_and_when_it_is_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live, "_RETRY_S", 0.0)
    answers: list[Any] = [
        {"html": {"a": "1"}},
        StoreError("unplugged"),
        StoreError("unplugged"),
        OSError("broken"),
        None,
        {"n": 1, "trouble": "old"},
        {"trouble": "old"},
        {"html": {"a": "2"}},
        REMOVED,
    ]
    closed = threading.Event()

    def poll() -> live.Message | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert collect(source(poll, closed)) == [
        {"html": {"a": "1"}},
        {"trouble": "unplugged"},
        {"trouble": "broken"},
        {"trouble": ""},
        {"n": 1},
        {"trouble": "old"},
        {"html": {"a": "2"}},
        {"trouble": ""},
        {"trouble": "It was removed.", "end": True},
    ]
    assert closed.wait(PATIENCE_S)


def test_a_poll_that_hangs_holds_up_no_other_source_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(live, "SILENT_S", 0.001)
    held, closed, numbers = threading.Event(), [threading.Event(), threading.Event()], [0]

    def hang() -> None:
        assert held.wait(PATIENCE_S)
        raise REMOVED

    def read() -> live.Message:
        numbers[0] += 1
        return {"lines": [numbers[0]]}

    def release(event: Any) -> bool:
        return "has not answered for" in event.get("trouble", "")

    async def follow() -> list[Any]:
        async def is_over() -> bool:
            return False

        events = []
        sources = source(hang, closed[0]), source(read, closed[1])
        async for data in live.stream_events(sources, is_over):
            events.append(json.loads(data.decode().removeprefix("data: ")))
            if len(events) > 5 and any(map(release, events)):
                held.set()
        return events

    events = asyncio.run(follow())
    assert [event["lines"] for event in events if "lines" in event][:3] == [[1], [2], [3]]
    assert events[-1] == {"trouble": "It was removed.", "end": True}
    assert all(event.wait(PATIENCE_S) for event in closed)


def test_a_fault_of_a_source_ends_its_stream():
    def poll() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        collect(source(poll, threading.Event()))
